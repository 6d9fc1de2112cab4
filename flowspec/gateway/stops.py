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
        #: The stop string that was found; None: none was.
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What may be passed on now that ``text`` has arrived; nothing after a stop string."""
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [
            (at + len(stop), -len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop)) >= 0
        ]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[: end - len(self.found)]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

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
