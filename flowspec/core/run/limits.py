"""The limits that the models and the pipeline set for a job."""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.errors import ConfigError

#: Most tree rows sent and live at once; bounds each stage's KV rows beyond the context.
TREE_ROWS = 1536
#: Most rows that a pipeline keeps for other jobs unless it is told otherwise, whatever its context.
MOST_KEPT_ROWS = 4096
#: How a stage stores KV rows: a range for every job, or blocks of one pool (``model.rows.paged``).
CONTIGUOUS = "contiguous"
PAGED = "paged"
STORES = (CONTIGUOUS, PAGED)
#: KV rows of a block of a stage's pool (``model.rows.block_pool``).
BLOCK_ROWS = 32


def in_blocks(rows: int) -> int:
    """``rows`` rounded up to whole blocks."""
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def check_store(store: str) -> str:
    """``store``; ConfigError unless it is one of STORES."""
    if store not in STORES:
        raise ConfigError(f"is {store!r}; expected {' or '.join(STORES)}", "kv")
    return store


def default_kept_rows(context: int) -> int:
    """Rows of jobs that a pipeline keeps for others, if they have up to ``context`` tokens."""
    return min(2 * context, MOST_KEPT_ROWS)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits and sizes of a pipeline; ``context``: most tokens of prompt and output together.

    ``middles``: number of models between the drafter and the target. ``hidden``: whether the first
    drafter needs hidden rows. ``others``: the same for each further drafter that a strategy may
    choose. ``levels``: per drafter, the positions that a block drafter proposes for in one pass, 0
    for other drafters; empty: there is no block drafter. ``kept_rows``: most rows of jobs that
    are kept for others.
    """

    stages: int
    context: int
    vocabulary: int
    eos: frozenset[int]
    tree_rows: int = TREE_ROWS
    stall_seconds: float = 120.0  # a job without an answer for this long fails
    middles: int = 0
    hidden: bool = False
    others: tuple[bool, ...] = ()
    levels: tuple[int, ...] = ()
    kept_rows: int = 0

    @property
    def drafters(self) -> tuple[bool, ...]:
        """Per drafter, the first one included: whether it needs hidden rows."""
        return (self.hidden, *self.others)
