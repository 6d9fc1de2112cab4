"""The input that tells a machine that the broker refused its write."""

from __future__ import annotations

from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import Refused
from flowspec.core.run.key import RunKey

_REASONS = {
    Code.GAP: "its number does not follow what was written before it",
    Code.FULL: "a stream is at its cap: a reader has stopped or is too slow",
    Code.STALE: "the run is over",
}


def refusal(run: RunKey, what: str, code: Code, *, is_commit: bool = False) -> Refused | None:
    """The input after a write of ``what`` that returned ``code``; None: not refused (OK, DUP)."""
    if code in (Code.OK, Code.DUP):
        return None
    reason = f"the broker refused {what}: {_REASONS[code]}"
    return Refused(run, code is Code.STALE, reason, is_commit)
