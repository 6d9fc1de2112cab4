"""PipeDec's transfer scheduler: a node takes part in one transfer at a time.

Source: PipeDec (arXiv 2504.04104 v1), Algorithms 2 and 3; ``algorithms.md`` 3.5. A central
record says which nodes are busy and lists the transfers that wait. Whenever one is asked for or
ends, the list is scanned from the oldest on and every transfer starts whose two ends are free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flowspec.errors import StateError

#: Transfers that ended and are still known by name.
REMEMBERED = 1024


class Ends(NamedTuple):
    """The two nodes of a transfer."""

    source: str
    target: str


class Transfers:
    """The transfers among ``nodes``. Tasks are named by the caller; transfers between the same two
    nodes in the same direction start in the order they were asked for.

    ``remembered``: of the transfers that ended, so many of the last are known still. A word
    about one that comes again must come before so many more have ended: later its name is that
    of no transfer, and free.
    """

    def __init__(self, nodes: Iterable[str], remembered: int = REMEMBERED) -> None:
        self._busy = dict.fromkeys(nodes, False)
        self._waiting: dict[str, Ends] = {}
        self._under_way: dict[str, Ends] = {}
        self._done: dict[str, Ends] = {}  # in the order they ended
        self._remembered = remembered

    def request(self, task: str, source: str, target: str) -> list[str]:
        """Ask for a transfer; the tasks that start now, oldest first. Asking again is harmless
        while it is remembered; after that it is asking for a new one.

        StateError: a node nobody named, one node as both ends, or a known task with other ends.
        """
        ends = Ends(source, target)
        for node in ends:
            if node not in self._busy:
                raise StateError(
                    f"transfer {task} names the unknown node {node}; known: {', '.join(self._busy)}"
                )
        if source == target:
            raise StateError(f"transfer {task} has {source} as both ends; expected two nodes")
        known = self._waiting.get(task) or self._under_way.get(task) or self._done.get(task)
        if known is not None and known != ends:
            raise StateError(
                f"transfer {task} is from {source} to {target}, but was from {known[0]} to "
                f"{known[1]}"
            )
        if known is None:
            self._waiting[task] = ends
        return self._dispatch()

    def complete(self, task: str) -> list[str]:
        """A transfer ended; the tasks that start now, oldest first. Completing again is harmless
        while it is remembered.

        StateError: a task nobody asked for or nobody remembers, or one that did not start yet.
        """
        if task in self._done:
            return []
        if task not in self._under_way:
            state = "did not start yet" if task in self._waiting else "is not known"
            raise StateError(f"transfer {task} is said to be complete but {state}")
        self._done[task] = ends = self._under_way.pop(task)
        if len(self._done) > self._remembered:
            del self._done[next(iter(self._done))]
        for node in ends:
            self._busy[node] = False
        return self._dispatch()

    def _dispatch(self) -> list[str]:
        started = []
        for task, ends in self._waiting.items():
            if not any(self._busy[node] for node in ends):
                self._busy.update(dict.fromkeys(ends, True))
                self._under_way[task] = ends
                started.append(task)
        for task in started:
            del self._waiting[task]
        return started

    @property
    def waiting(self) -> dict[str, Ends]:
        """The transfers that did not start yet, oldest first."""
        return dict(self._waiting)

    @property
    def under_way(self) -> dict[str, Ends]:
        """The transfers that started and did not end."""
        return dict(self._under_way)
