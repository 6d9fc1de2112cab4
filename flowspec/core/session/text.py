"""A run's text: the prompt and the tokens committed so far."""

from __future__ import annotations

from collections.abc import Sequence


class RunText:
    """``prompt``, then ``output``, which grows to at most ``budget`` tokens.

    ``committed``: output that an earlier run of the job has committed.
    """

    def __init__(self, prompt: Sequence[int], budget: int, committed: Sequence[int] = ()) -> None:
        self.prompt = tuple(prompt)
        self.budget = budget
        self.output = list(committed)

    @property
    def prefix(self) -> tuple[int, ...]:
        """All tokens so far."""
        return (*self.prompt, *self.output)

    @property
    def context(self) -> int:
        """Length of the context: all tokens but the last, which is the root."""
        return len(self.prompt) + len(self.output) - 1

    @property
    def left(self) -> int:
        """The number of tokens that may still be committed."""
        return self.budget - len(self.output)
