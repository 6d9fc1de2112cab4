"""FlowSpec: one large language model over several small machines, single requests answered fast."""

from flowspec.client import Chunk, Client, Job, Result
from flowspec.errors import FlowSpecError

__all__ = ["Chunk", "Client", "FlowSpecError", "Job", "Result", "__version__"]
__version__ = "0.1.0"
