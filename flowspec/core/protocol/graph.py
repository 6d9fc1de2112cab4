"""The task graph of one run: it counts open dependencies and releases tasks that have none.

It orders what a barrier orders, and nothing else: the hops of PipeDec's timesteps with their joins,
and the hops of FlowSpec's lockstep. Logs and sequence numbers order the rest. The call that creates
a task names its dependencies; the graph does not interpret them. A dependency may be named before
it exists; it is open until a call completes it. ``lua/include/graph.lua`` is
the same structure on the broker and passes the same tests. Source: docs/algorithms.md#task-graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.messages import Envelope
from flowspec.core.protocol.stamps import Stamp, later


@dataclass(frozen=True, slots=True)
class Task:
    """A message that waits: ``envelope`` goes to ``to`` once every task in ``after`` is complete.

    Whoever does what the message asks for completes the task.
    """

    name: str
    after: tuple[str, ...]
    to: Address
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class Released:
    """A task whose envelope is to be delivered.

    ``stamp``: the latest of its creation's and its dependencies' stamps.
    """

    task: Task
    stamp: Stamp | None


class TaskGraph:
    """The tasks of one run."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._done: dict[str, Stamp | None] = {}
        self._waiting: dict[str, Task] = {}
        self._open: dict[str, int] = {}  # waiting task -> dependencies that are not complete
        self._latest: dict[str, Stamp | None] = {}  # waiting task -> the latest stamp so far
        self._dependents: dict[str, list[str]] = {}

    def apply(
        self,
        completed: Iterable[str] = (),
        created: Iterable[Task] = (),
        stamp: Stamp | None = None,
    ) -> list[Released]:
        """Create tasks, then complete others, all at ``stamp``; the tasks released, in order.

        Idempotent, so a caller that lost the reply may repeat the call.
        """
        released: list[Released] = []
        for task in created:
            self._create(task, stamp, released)
        for name in completed:
            self._complete(name, stamp, released)
        return released

    def knows(self, name: str) -> bool:
        """Whether the task ``name`` has been created."""
        return name in self._known

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of the tasks that wait for others."""
        return tuple(self._waiting)

    def _create(self, task: Task, stamp: Stamp | None, released: list[Released]) -> None:
        if task.name in self._known:
            return
        self._known.add(task.name)
        missing = []
        latest = stamp
        for name in task.after:
            if name in self._done:
                latest = later(self._done[name], latest)
            else:
                missing.append(name)
        if missing:
            self._waiting[task.name] = task
            self._open[task.name] = len(missing)
            self._latest[task.name] = latest
            for name in missing:
                self._dependents.setdefault(name, []).append(task.name)
        else:
            released.append(Released(task, latest))

    def _complete(self, name: str, stamp: Stamp | None, released: list[Released]) -> None:
        if name in self._done:
            return
        self._done[name] = stamp
        for dependent in self._dependents.pop(name, ()):
            latest = self._latest[dependent] = later(self._latest[dependent], stamp)
            self._open[dependent] -= 1
            if not self._open[dependent]:
                released.append(Released(self._take_waiting(dependent), latest))

    def _take_waiting(self, name: str) -> Task:
        del self._open[name]
        del self._latest[name]
        return self._waiting.pop(name)
