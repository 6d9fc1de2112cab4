"""What the jobs of one pipeline leave for those after them."""

from __future__ import annotations

from typing import TypeVar, cast

T = TypeVar("T")


class History:
    """One object of every kind that asked for one; it lives as long as its draft worker.

    The core does not know the kinds: whoever learns something across jobs recalls a class of its
    own, which is made without arguments the first time.
    """

    def __init__(self) -> None:
        self._kept: dict[type, object] = {}

    def recall(self, kind: type[T]) -> T:
        """The pipeline's ``kind``; an empty one for its first job."""
        if kind not in self._kept:
            self._kept[kind] = kind()
        return cast(T, self._kept[kind])
