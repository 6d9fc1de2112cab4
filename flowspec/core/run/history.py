"""State that the jobs of one pipeline pass on to later jobs."""

from __future__ import annotations

from typing import TypeVar, cast

T = TypeVar("T")


class History:
    """One object per class, kept for the lifetime of the draft worker.

    The core does not know the classes: code that learns across jobs gets the object of a class of
    its own, which is instantiated without arguments the first time.
    """

    def __init__(self) -> None:
        self._kept: dict[type, object] = {}

    def get(self, kind: type[T]) -> T:
        """The pipeline's object of class ``kind``; a new one at the first call."""
        if kind not in self._kept:
            self._kept[kind] = kind()
        return cast(T, self._kept[kind])
