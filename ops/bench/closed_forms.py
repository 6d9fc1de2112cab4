"""The papers' formulas: score of a tree node, seconds per token and timestep, tokens per window.

Shares and rates are plain numbers between 0 and 1, times seconds. Every function raises
ConfigError for a value outside its range. All of them are in docs/algorithms.md#closed-forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowspec.errors import ConfigError
from flowspec.strategies.expected_tbt import (
    check_all_seconds,
    check_at_least_0,
    check_fraction,
    check_seconds,
)


def cumulative_score(log_probabilities: Sequence[float]) -> float:
    """Score of a tree node: the sum of the draft's log-probabilities on its path; the root's is 0.

    Correctly rounded, so that a node never scores above its parent. Source: EAGLE-2, used by
    FlowSpec.
    """
    for value in log_probabilities:
        if not value <= 0:
            raise ConfigError(f"a log-probability is {value}; expected 0 or less")
    return math.fsum(log_probabilities)


def pipeline_token_seconds(
    compute_seconds: Sequence[float], transfer_seconds: Sequence[float]
) -> float:
    """Seconds per token without speculation: the sum of all groups' compute and transfer times.

    Source: PipeDec's latency model.
    """
    return math.fsum(_groups(compute_seconds, transfer_seconds))


def pipedec_step(
    draft_seconds: float,
    compute_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    extra: float = 0.0,
) -> float:
    """Seconds per timestep with a hit, and so per token: the drafter's or the slowest group's.

    ``compute_seconds`` and ``transfer_seconds``: one entry per group, for a single row. ``extra``:
    the additional cost of a whole layer of rows relative to one row (the paper's delta). Source:
    PipeDec.
    """
    check_seconds("draft_seconds", draft_seconds)
    check_at_least_0("extra", extra)
    return max(draft_seconds, (1 + extra) * max(_groups(compute_seconds, transfer_seconds)))


def speculative_tokens(acceptance: float, window: int) -> float:
    """Expected tokens per verification of ``window`` drafts, correction or bonus token included.

    ``(1 - a^(g+1)) / (1 - a)``, summed term by term, so that a = 1 gives the limit g + 1. Above 1
    for every a > 0 and g > 0, the premise of PipeSpec's theorem. Source: PipeSpec.
    """
    _drafts(acceptance, window)
    return math.fsum(acceptance**power for power in range(window + 1))


def speculative_speedup(acceptance: float, window: int, draft_speed: float) -> float:
    """Speedup of alternating drafting and verification over the target decoding alone.

    ``draft_speed``: draft steps in the time of one target step (the paper's c). Source: PipeSpec.
    """
    if not 0 < draft_speed < math.inf:
        raise ConfigError(f"draft_speed is {draft_speed}; expected more than 0")
    return speculative_tokens(acceptance, window) / (window / draft_speed + 1)


def verification_share(acceptance: float, window: int) -> float:
    """Long-run share of a PipeSpec model's steps that verify drafts; the others add one token.

    The fixed point ``a / (1 + a - a^(g+1))`` of ``r' = r * a^(g+1) + (1 - r) * a``: a step
    verifies if the previous verification accepted all drafts, or if the token added in the
    previous step was the draft's. Source: PipeSpec.
    """
    _drafts(acceptance, window)
    return acceptance / (1 + acceptance - acceptance ** (window + 1))


def pipespec_tokens(acceptance: float, window: int) -> float:
    """Expected tokens per step of a PipeSpec model, and so its speedup over decoding alone.

    ``(1 - r) * 1 + r * speculative_tokens``; above 1 for 0 < a < 1 and g > 0 (the paper's
    theorem). The window is fixed, and a verification of any length costs one step. Source:
    PipeSpec.
    """
    share = verification_share(acceptance, window)
    return 1 - share + share * speculative_tokens(acceptance, window)


def pipespec_limit(acceptance: float, window: int) -> float:
    """The limit of ``pipespec_tokens`` as the acceptance approaches 1 and every step verifies.

    Source: PipeSpec.
    """
    return speculative_tokens(acceptance, window)


def _drafts(acceptance: float, window: int) -> None:
    check_fraction("acceptance", acceptance)
    if window < 0:
        raise ConfigError(f"window is {window}; expected 0 or more")


def _groups(compute_seconds: Sequence[float], transfer_seconds: Sequence[float]) -> list[float]:
    check_all_seconds("compute_seconds", compute_seconds)
    check_all_seconds("transfer_seconds", transfer_seconds)
    if len(compute_seconds) != len(transfer_seconds):
        raise ConfigError(
            f"{len(compute_seconds)} compute times but {len(transfer_seconds)} transfer times; "
            "expected one per group"
        )
    return [
        compute + transfer
        for compute, transfer in zip(compute_seconds, transfer_seconds, strict=True)
    ]
