"""Stop strings: text is held back while it may begin one, and cut where the first one ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes a growing text on, without the first stop string in it and what follows.

    The first is the one that is complete first, and of several that end there the longest. So the
    result does not depend on the pieces in which the text comes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._passed = 0
        #: Where the stop string that was found ends, in the whole text; None: none was.
        self.end: int | None = None

    def push(self, text: str) -> str:
        """What may be passed on now that ``text`` has arrived; nothing after a stop string."""
        if self.end is not None:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, begin = min(ends)
            self._held = ""
            self.end = self._passed + end
            return text[:begin]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        passed = text[: len(text) - held]
        self._held = text[len(passed) :]
        self._passed += len(passed)
        return passed

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins, without all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
