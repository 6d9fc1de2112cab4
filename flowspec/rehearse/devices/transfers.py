"""PipeDec's transfer scheduler: a node takes part in one transfer at a time.

Source: PipeDec (arXiv 2504.04104 v1), Algorithms 2 and 3; docs/algorithms.md#transfers. A central
record holds the busy nodes and the waiting transfers. Each request and each completion scans the
waiting transfers, oldest first, and starts those whose two ends are free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flowspec.core.protocol.addresses import Address
from flowspec.errors import StateError

#: Ended transfers that are still known by name.
REMEMBERED = 1024


class Ends(NamedTuple):
    """The two nodes of a transfer."""

    source: Address
    target: Address


class Transfers:
    """The transfers among ``nodes``, named by the caller.

    Transfers between the same two nodes in the same direction start in the order they were
    requested. ``remembered``: number of ended transfers that are still known. A repeated request
    or completion is recognised only while its transfer is known; later the name is free.
    """

    def __init__(self, nodes: Iterable[Address], remembered: int = REMEMBERED) -> None:
        self._busy = dict.fromkeys(nodes, False)
        self._waiting: dict[str, Ends] = {}
        self._under_way: dict[str, Ends] = {}
        self._done: dict[str, Ends] = {}  # in the order they ended
        self._remembered = remembered

    def request(self, task: str, source: Address, target: Address) -> list[str]:
        """Request a transfer; return the tasks that start now, oldest first.

        A repeated request has no effect while the transfer is remembered; later it requests a new
        one. StateError: an unknown node, one node as both ends, or a known task with other ends.
        """
        ends = Ends(source, target)
        for node in ends:
            if node not in self._busy:
                known_nodes = ", ".join(map(str, self._busy))
                raise StateError(
                    f"transfer {task} names the unknown node {node}; known: {known_nodes}"
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
        """End a transfer; return the tasks that start now, oldest first.

        A repeated completion has no effect while the transfer is remembered. StateError: an unknown
        task, or one that has not started.
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
        """The transfers that have not started, oldest first."""
        return dict(self._waiting)

    @property
    def under_way(self) -> dict[str, Ends]:
        """The transfers that have started and not ended."""
        return dict(self._under_way)
