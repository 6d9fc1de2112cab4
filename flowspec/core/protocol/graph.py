"""The task graph: counts down dependencies and says what may start. Rules live with its callers.

Edges are data, given by the call that creates a task. A dependency may be named before it
exists; it counts as open until some call completes it. ``lua/graph.lua`` is the same structure
on the broker and passes the same tests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flowspec.core.protocol.messages import Task


@dataclass(slots=True)
class TaskGraph:
    """The tasks of one job."""

    done: set[str] = field(default_factory=set)
    _known: set[str] = field(default_factory=set)
    _waiting: dict[str, Task] = field(default_factory=dict)
    _open: dict[str, int] = field(default_factory=dict)  # task -> dependencies not complete
    _dependents: dict[str, list[str]] = field(default_factory=dict)

    def apply(self, completed: Iterable[str] = (), created: Iterable[Task] = ()) -> list[Task]:
        """Create tasks, then complete others; the tasks whose envelopes may go, in order.

        Doing either twice is harmless: a caller that lost the answer may ask again.
        """
        ready: list[Task] = []
        for task in created:
            self._create(task, ready)
        for name in completed:
            self._complete(name, ready)
        return ready

    def knows(self, name: str) -> bool:
        """Whether a task of that name was created before."""
        return name in self._known

    def _create(self, task: Task, ready: list[Task]) -> None:
        if task.name in self._known:
            return
        self._known.add(task.name)
        missing = [name for name in dict.fromkeys(task.after) if name not in self.done]
        if not missing:
            self._release(task, ready)
            return
        self._waiting[task.name] = task
        self._open[task.name] = len(missing)
        for name in missing:
            self._dependents.setdefault(name, []).append(task.name)

    def _release(self, task: Task, ready: list[Task]) -> None:
        if task.envelope is not None:
            ready.append(task)
        else:
            self._complete(task.name, ready)

    def _complete(self, name: str, ready: list[Task]) -> None:
        pending = [name]
        for task in pending:
            if task in self.done:
                continue
            self.done.add(task)
            for dependent in self._dependents.pop(task, ()):
                self._open[dependent] -= 1
                if self._open[dependent]:
                    continue
                del self._open[dependent]
                waiting = self._waiting.pop(dependent)
                if waiting.envelope is not None:
                    ready.append(waiting)
                else:
                    pending.append(dependent)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of the tasks that wait for others."""
        return tuple(self._waiting)
