"""When a stage's pass may have rows of a prompt, beside runs that decode.

Where rows cost nothing, a prompt's chunk shares the passes of those runs. Where a pass with a chunk
takes much longer than one without (4-bit weights whose second row costs four times the first), a
prompt of many chunks would give all of them such passes, one after another. So it gets a share of
the time, as long as others wait.
"""

from __future__ import annotations

#: The share of a stage's time that passes with prompt rows get while other runs wait.
PROMPT_SHARE = 0.7
#: How many times as long as a pass without prompt rows one with them takes, to be rationed.
DEAR = 1.5


class PromptTurns:
    """Whether prompts have used up their share of a stage's time, from its passes so far."""

    def __init__(self) -> None:
        self._decoding_seconds = 0.0  # the last pass without prompt rows
        self._owed = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the next pass may have prompt rows, although others wait."""
        return self._owed <= 0

    def note(self, seconds: float, *, with_prompt: bool) -> None:
        """A pass took ``seconds``."""
        if not with_prompt:
            self._decoding_seconds = seconds
            self._owed -= seconds
        elif 0 < self._decoding_seconds * DEAR < seconds:
            self._owed = seconds * (1 / PROMPT_SHARE - 1)
