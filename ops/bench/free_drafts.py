"""What a chain of free drafts gains, from the seconds of a pass by its number of rows.

A round drafts ``length`` tokens and checks them in one pass of ``length + 1`` rows, which commits
the right ones before the first wrong one, and one token of the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence


def expected_tokens(rate: float, length: int) -> float:
    """Tokens of a round whose drafts are right independently at ``rate``: 1 + p + ... + p^k."""
    return sum(rate**right for right in range(length + 1))


def rounds(right: Sequence[bool], length: int) -> int:
    """Rounds until ``len(right)`` tokens are committed, whose drafts are right as given."""
    at = 0
    count = 0
    while at < len(right):
        accepted = 0
        while accepted < length and at + accepted < len(right) and right[at + accepted]:
            accepted += 1
        at += accepted + 1
        count += 1
    return count


def best_length(
    seconds: Mapping[int, float],
    tokens: Callable[[int], float],
    lengths: Sequence[int],
    draft_seconds: float = 0.0,
) -> tuple[int, float]:
    """The fastest of ``lengths``, and its seconds a token.

    ``seconds``: of a pass, by rows. ``tokens``: of a round, by length. ``draft_seconds``: of
    drafting one token.
    """
    times = {
        length: (seconds[length + 1] + length * draft_seconds) / tokens(length)
        for length in lengths
    }
    best = min(times, key=lambda length: times[length])
    return best, times[best]
