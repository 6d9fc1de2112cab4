"""What the models and the pipeline allow a job."""

from __future__ import annotations

from dataclasses import dataclass

#: Tree rows sent and live at once; bounds every stage's KV rows beyond the context.
TREE_ROWS = 1536


@dataclass(frozen=True, slots=True)
class Limits:
    """What the models and the pipeline allow; ``context`` in tokens, prompt and output together.

    ``middles``: models between the drafter and the target. ``hidden``: the drafter wants hidden
    rows; ``others``: whether the further ones do that a strategy may choose instead.
    """

    stages: int
    context: int
    vocabulary: int
    eos: frozenset[int]
    tree_rows: int = TREE_ROWS
    stall_seconds: float = 120.0  # a job without an answer for so long has failed
    middles: int = 0
    hidden: bool = False
    others: tuple[bool, ...] = ()

    @property
    def drafters(self) -> tuple[bool, ...]:
        """Of every drafter, the first one's own, whether it wants hidden rows."""
        return (self.hidden, *self.others)
