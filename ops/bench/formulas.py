"""Each system's own formula in the unit of ``ops.bench.systems``, at a measured acceptance.

The other systems have no formula in their papers: the cost of a FlowSpec round depends on where in
the tree each verdict falls, and pruned_pp ends a round wherever its tree ends.
"""

from __future__ import annotations

from typing import Protocol

from flowspec.strategies import build
from flowspec.strategies.chain import Chain
from flowspec.strategies.expected_tbt import expected_tbt
from flowspec.strategies.pipespec import PipeSpec
from flowspec.strategies.speculative import Speculative
from flowspec.strategies.static_tree import StaticTree
from ops.bench.closed_forms import pipeline_token_seconds, pipespec_tokens


class RunCounts(Protocol):
    """Counts over runs: ``tokens`` after the first, ``rounds`` including each run's first."""

    tokens: float
    rounds: float


def predicted(strategy: str, stages: int, measured: RunCounts, draft_pass: float) -> float | None:
    """Steps between tokens; None for a system without a formula.

    ``draft_pass``: a drafter pass, in steps.
    """
    name = strategy.partition(":")[0]
    made = build(strategy, stages)
    # The initial fill costs as much as a miss, and the last token's miss costs nothing, so the
    # formulas' acceptance is the share of tokens that did not start a round.
    per_round = measured.tokens / measured.rounds
    hit = 1 - 1 / per_round
    match name:
        case "autoregressive":
            return pipeline_token_seconds([1.0] * stages, [0.0] * stages)
        case "pipedec" | "pipedec_head" | "specpipe":
            # The missed token itself takes one of the refill's n steps; n - 1 remain.
            return expected_tbt([1.0] * stages, hit, refill=stages - 1)
        case "naive_pp":
            return (7 * draft_pass + 2 * stages) / per_round
        case "static_tree" if isinstance(made, StaticTree):
            return (len(made.params.branching) * draft_pass + stages) / per_round
        case "speculative" if isinstance(made, Speculative):
            return ((made.params.lookahead - 1) * draft_pass + stages) / per_round
        case "chain" if isinstance(made, Chain):
            return _chain(hit, made.params.window, stages)
        case "pipespec" if isinstance(made, PipeSpec):
            window = min(made.params.window - 1, int(stages / draft_pass))
            return stages / pipespec_tokens(hit, window)
    return None


def _chain(hit: float, window: int, stages: int) -> float:
    """A round is the fill and one step per window that its tokens reach.

    The number of tokens per round has a geometric distribution.
    """
    if hit == 0:
        return float(stages)
    return (stages + hit / (1 - hit**window)) * (1 - hit)
