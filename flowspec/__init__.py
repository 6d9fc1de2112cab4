"""FlowSpec: one large language model over several small machines, single requests answered fast."""

from importlib import import_module
from typing import TYPE_CHECKING

from flowspec.errors import FlowSpecError, JobError, JobFailed, JobTimeout

if TYPE_CHECKING:
    from flowspec.async_client import AsyncClient, AsyncJob
    from flowspec.client import Client, Job
    from flowspec.results import Chunk, Result, Stats

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "Chunk",
    "Client",
    "FlowSpecError",
    "Job",
    "JobError",
    "JobFailed",
    "JobTimeout",
    "Result",
    "Stats",
    "__version__",
]
__version__ = "0.1.0"

_HOMES = {
    "AsyncClient": "flowspec.async_client",
    "AsyncJob": "flowspec.async_client",
    "Chunk": "flowspec.results",
    "Client": "flowspec.client",
    "Job": "flowspec.client",
    "Result": "flowspec.results",
    "Stats": "flowspec.results",
}


def __getattr__(name: str) -> object:
    # On first use: the clients need Redis, and simulations do not.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
