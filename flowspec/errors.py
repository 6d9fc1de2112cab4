"""Every error FlowSpec raises on purpose, as one tree.

    FlowSpecError
    ├── ConfigError            a value the user gave is wrong
    │   ├── ModelError         a model directory cannot be used
    │   ├── NotInstalled       a package is missing that models need
    │   └── JobError           a job's fields or prompt cannot be served
    ├── ProtocolError          a rule of the wire was broken
    │   ├── WireError          bytes that are not a message (truncated, oversized, wrong type)
    │   ├── GapError           a message or its rows are missing
    │   └── StateError         an input that a machine cannot take in its state
    ├── BrokerError            the broker cannot be used
    │   ├── BrokerUnreachable  no connection, a lost one, or a refused password
    │   ├── BrokerFull         the broker takes no writes: its memory or disk is full
    │   ├── ClientClosed       a client is used after it was closed
    │   └── WaitsEnded         the program itself has ended its waits
    ├── ClusterError           a worker process could not start, or died
    │   ├── ClaimError         another worker already holds the lease on the role
    │   └── LeaseLost          the lease on the role is lost; the worker may take it again
    ├── JobFailed              a job ended with an error; the message is the one in its output
    ├── JobTimeout             a job has not ended in the time its caller waits; it goes on
    └── ReplayMismatch         a recording and the machines disagree

The text of an error is one line for the user: what was wrong, what was expected, what to do.
"""

import errno
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Packages of the extra ``worker``: a machine that only submits jobs needs none of them.
WORKER_PACKAGES = frozenset(
    {"gguf", "jinja2", "safetensors", "tokenizers", "torch", "transformers"}
)
#: What errors of libraries say when memory is short, and how much of one is repeated, characters.
_OF_MEMORY = ("t allocate memory", "out of memory")
_SAID = 160


class FlowSpecError(Exception):
    """Root of all errors raised on purpose.

    What to do, if the text says so, stands after its last semicolon.
    """

    @property
    def found(self) -> str:
        """The text without what to do."""
        return str(self).rpartition("; ")[0] or str(self)

    @property
    def remedy(self) -> str:
        """What to do; empty: the text does not say."""
        before, _, after = str(self).rpartition("; ")
        return after if before else ""


class ConfigError(FlowSpecError):
    """A value the user gave is wrong.

    ``of``: the name of that value, with which the text then begins. Who gave it under another name,
    such as a flag, says that one before ``said``.
    """

    def __init__(self, said: str, of: str = "") -> None:
        super().__init__(f"{of} {said}" if of else said)
        self.said = said
        self.of = of


class NotInstalled(ConfigError):
    """A package is missing that only a machine with models needs."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"the package {package} is not installed, which a machine that runs models needs; "
            f"install it with `{installs('flowspec[worker]')}`"
        )


def installs(requirement: str) -> str:
    """The command that adds a package to the environment that this process runs in."""
    return shlex.join([sys.executable, "-m", "pip", "install", requirement])


@contextmanager
def naming_what_is_missing() -> Iterator[None]:
    """NotInstalled for a package of the extra ``worker`` that the body cannot import."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in WORKER_PACKAGES:
            raise
        raise NotInstalled(error.name) from None


def unusable(error: OSError) -> str:
    """One line for an error of the system; a place that it names may be one that a user named."""
    said = error.strerror or str(error)
    if error.filename is None:
        return said
    where = os.fsdecode(error.filename)
    return f"{where} cannot be used: {said}; choose another place, or give this user access"


def line_of(error: Exception) -> str | None:
    """The line for a user whose command ends by ``error``; None: it is a defect of FlowSpec."""
    if isinstance(error, FlowSpecError):
        return str(error)
    if _is_of_memory(error):
        return _no_memory(error)
    return unusable(error) if isinstance(error, OSError) else None


def _is_of_memory(error: Exception) -> bool:
    """Whether ``error``, of the system or a library, says that memory is short."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    of_library = isinstance(error, RuntimeError | ImportError)
    return isinstance(error, MemoryError) or (
        of_library and any(text in str(error) for text in _OF_MEMORY)
    )


def _no_memory(error: Exception) -> str:
    """The line for an error of memory, with the beginning of what it says itself."""
    said = (str(error).splitlines() or [""])[0][:_SAID]
    return (
        f"there is too little memory, or a limit on it{f' ({said})' if said else ''}; take a "
        "smaller --dtype or --context, more stages, or a machine with more"
    )


class ModelError(ConfigError):
    """A model directory cannot be used."""


class JobError(ConfigError):
    """A job's fields or prompt cannot be served."""


class ProtocolError(FlowSpecError):
    """A rule of the wire was broken."""


class WireError(ProtocolError):
    """Bytes that are not a message: truncated, oversized, of an unknown or forbidden type."""


class GapError(ProtocolError):
    """A message, or the rows a message names, are missing."""


class StateError(ProtocolError):
    """An input that a machine cannot take in its state, from a peer or from its own driver."""


class BrokerError(FlowSpecError):
    """The broker cannot be used.

    ``code``: of the server's answer, ``WRONGTYPE`` for example; empty if it is not an answer.
    ``silent``: the address of a server that did not answer, without its password; else empty.
    """

    code = ""
    silent = ""


class WaitsEnded(BrokerError):
    """The program has ended its own waits for output."""


class BrokerUnreachable(BrokerError):
    """No connection to the broker, a lost one, or a refused password."""


class BrokerFull(BrokerError):
    """The broker takes no writes: its memory or disk is full, or it lacks replicas."""


class ClientClosed(BrokerError):
    """A client is used after it was closed."""


class ClusterError(FlowSpecError):
    """A worker process could not start, or died."""


class ClaimError(ClusterError):
    """Another worker already holds the lease on the role."""


class LeaseLost(ClusterError):
    """The lease on the role is lost; the worker may take it again, under a new generation."""


class JobFailed(FlowSpecError):
    """A job ended with an error; the message is the one in the job's output.

    ``cause``: ``refused`` (the job cannot be served), ``too_long`` (its prompt does not fit the
    model's context), ``full`` (the queue is), ``lost`` (a worker
    was), ``job_lost`` (the broker has it no more), ``late`` (it did not begin within its
    ``wait_seconds``) or ``failed``.
    """

    def __init__(self, text: str, cause: str = "failed") -> None:
        super().__init__(text)
        self.cause = cause


class JobTimeout(FlowSpecError, TimeoutError):
    """A job has not ended in the time that its caller waits for it; the job goes on."""


class ReplayMismatch(FlowSpecError):
    """A recording and the machines disagree; the message names the first difference."""
