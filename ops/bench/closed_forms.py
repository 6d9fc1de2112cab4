"""The papers' formulas: what a tree node, a level's width, a timestep and a window are worth.

Shares and rates are plain numbers between 0 and 1, times seconds. Every function raises
ConfigError for a value outside its range. Numbers in brackets are sections of ``algorithms.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowspec.errors import ConfigError
from flowspec.strategies.expected_tbt import (
    check_all_seconds,
    check_at_least_0,
    check_seconds,
    check_share,
)


def cumulative_score(log_probabilities: Sequence[float]) -> float:
    """Score of a tree node: the sum of the draft's log-probabilities on its path; the root's is 0.

    Correctly rounded, so a node never scores above its parent. Source: EAGLE-2, used by FlowSpec
    (2.3).
    """
    for value in log_probabilities:
        if not value <= 0:
            raise ConfigError(f"a log-probability is {value}; expected 0 or less")
    return math.fsum(log_probabilities)


def pipeline_token_seconds(
    compute_seconds: Sequence[float], transfer_seconds: Sequence[float]
) -> float:
    """Seconds a token takes without speculation: every group's compute and transfer, one after
    another.

    Source: PipeDec's latency model (3.7).
    """
    return math.fsum(_groups(compute_seconds, transfer_seconds))


def pipedec_step(
    draft_seconds: float,
    compute_seconds: Sequence[float],
    transfer_seconds: Sequence[float],
    extra: float = 0.0,
) -> float:
    """Seconds of a timestep that hits, and so of a token: the drafter's or the slowest group's.

    ``compute_seconds`` and ``transfer_seconds``: one entry a group, for a single row. ``extra``:
    the part by which a whole layer of rows costs more than one row (the paper's delta). Source:
    PipeDec (3.7).
    """
    check_seconds("draft_seconds", draft_seconds)
    check_at_least_0("extra", extra)
    return max(draft_seconds, (1 + extra) * max(_groups(compute_seconds, transfer_seconds)))


def speculative_tokens(acceptance: float, window: int) -> float:
    """Expected tokens of one verification of ``window`` drafts, the correction or bonus included.

    ``(1 - a^(g+1)) / (1 - a)``, summed term by term so that a = 1 gives its limit g + 1. It is
    above 1 for every a > 0 and g > 0: PipeSpec's theorem rests on that. Source: PipeSpec (5.2).
    """
    _drafts(acceptance, window)
    return math.fsum(acceptance**power for power in range(window + 1))


def speculative_speedup(acceptance: float, window: int, draft_speed: float) -> float:
    """Speed of drafting and verifying in turn, in multiples of the target decoding alone.

    ``draft_speed``: draft steps in the time of one target step (the paper's c). Source: PipeSpec
    (5.2).
    """
    if not 0 < draft_speed < math.inf:
        raise ConfigError(f"draft_speed is {draft_speed}; expected more than 0")
    return speculative_tokens(acceptance, window) / (window / draft_speed + 1)


def verification_share(acceptance: float, window: int) -> float:
    """The share of a PipeSpec model's steps that verify drafts, in the long run; the others add one
    token.

    The fixed point ``a / (1 + a - a^(g+1))`` of ``r' = r * a^(g+1) + (1 - r) * a``: a step
    verifies if the verification before it accepted all, or the token added before it was the
    draft's. Source: PipeSpec (5.2).
    """
    _drafts(acceptance, window)
    return acceptance / (1 + acceptance - acceptance ** (window + 1))


def pipespec_tokens(acceptance: float, window: int) -> float:
    """Expected tokens a step of a PipeSpec model, and so its speed in multiples of decoding alone.

    ``(1 - r) * 1 + r * speculative_tokens``; above 1 for 0 < a < 1 and g > 0 (the paper's
    theorem). The window is held fixed and a verification costs one step whatever its length.
    Source: PipeSpec (5.2).
    """
    share = verification_share(acceptance, window)
    return 1 - share + share * speculative_tokens(acceptance, window)


def pipespec_limit(acceptance: float, window: int) -> float:
    """What ``pipespec_tokens`` tends to as the acceptance nears 1, when every step verifies.

    Source: PipeSpec (5.2).
    """
    return speculative_tokens(acceptance, window)


def _drafts(acceptance: float, window: int) -> None:
    check_share("acceptance", acceptance)
    if window < 0:
        raise ConfigError(f"window is {window}; expected 0 or more")


def _groups(compute_seconds: Sequence[float], transfer_seconds: Sequence[float]) -> list[float]:
    check_all_seconds("compute_seconds", compute_seconds)
    check_all_seconds("transfer_seconds", transfer_seconds)
    if len(compute_seconds) != len(transfer_seconds):
        raise ConfigError(
            f"{len(compute_seconds)} compute times but {len(transfer_seconds)} transfer times; "
            "expected one a group"
        )
    return [
        compute + transfer
        for compute, transfer in zip(compute_seconds, transfer_seconds, strict=True)
    ]
