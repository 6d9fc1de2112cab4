"""FlowSpec: one large language model over several small machines, single requests answered fast."""

from typing import TYPE_CHECKING

from flowspec.errors import FlowSpecError

if TYPE_CHECKING:
    from flowspec.client import Chunk, Client, Job, Result

__all__ = ["Chunk", "Client", "FlowSpecError", "Job", "Result", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # On first use: the client needs Redis, and simulations do not.
    if name in ("Chunk", "Client", "Job", "Result"):
        from flowspec import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
