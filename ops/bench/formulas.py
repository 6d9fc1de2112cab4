"""What each system's own formula gives in the unit of ``ops.bench.systems``, at a measured
acceptance.

Systems without one here have none in their papers: what a FlowSpec round costs depends on where
in the tree each verdict falls, and pruned_pp ends a round wherever its tree does.
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
    """Counts of some runs: ``tokens`` after the first, ``rounds`` with the one each run begins
    with.
    """

    tokens: float
    rounds: float


def predicted(strategy: str, stages: int, measured: RunCounts, draft_pass: float) -> float | None:
    """Steps between tokens; None for a system without a formula. ``draft_pass``: a drafter's pass,
    in steps.
    """
    name = strategy.partition(":")[0]
    made = build(strategy, stages)
    # The fill at a run's beginning costs what a miss costs, and the last token's miss costs
    # nothing: so the share of tokens that did not begin a round is the acceptance the formulas
    # want.
    per_round = measured.tokens / measured.rounds
    hit = 1 - 1 / per_round
    match name:
        case "autoregressive":
            return pipeline_token_seconds([1.0] * stages, [0.0] * stages)
        case "pipedec" | "pipedec_head" | "specpipe":
            # The missed token itself takes a step of those the refill takes: n - 1 more (9.22).
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
    """A round is the fill, and a step for each window its tokens reach; tokens per round are
    geometric.
    """
    if hit == 0:
        return float(stages)
    return (stages + hit / (1 - hit**window)) * (1 - hit)
