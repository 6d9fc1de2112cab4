"""What a finished job reports, derived from counters alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowspec.core.protocol.messages import Meter


def repeated_4grams(tokens: Sequence[int]) -> float:
    """Share of the output's 4-grams that occurred before in it; loops flatter every drafter."""
    grams = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@dataclass(slots=True)
class Tally:
    """Counters a session keeps. Times in seconds on the driver's clock; ``None``: not reached."""

    submitted_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    rounds: int = 0
    segments: int = 0
    choices: int = 0  # target tokens chosen during decode
    hits: int = 0  # of those, how many had a node in the tree
    draft_passes: int = 0
    draft_seconds: float = 0.0
    lossy: str = ""  # the mode, if the text may differ from the target's own

    @property
    def decoding(self) -> float:
        """Seconds from the first token to the last one so far; 0: there are no two."""
        return (self.last_token_at or 0.0) - (self.first_token_at or 0.0)

    def count(self, tokens: int, hits: int, now: float) -> None:
        """A verdict gave ``tokens`` tokens, ``hits`` of them in the tree; the first of a job is
        prefill's.
        """
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self.choices += tokens
            self.hits += hits

    def stats(
        self, output: Sequence[int], meters: Mapping[int, Meter], stages: int
    ) -> dict[str, object]:
        """The ``stats`` object of a result.

        ``tokens_per_second`` is decode only: tokens after the first over the time after the
        first. A step is one mean pass of the slowest stage; ``steps`` is the decode time in
        steps. ``rows`` are summed over the stages. Values that need a stage which did not report
        are None.
        """
        meters = {stage: meter for stage, meter in meters.items() if stage <= stages}
        tokens = len(output)
        decode = (self.last_token_at or 0.0) - (self.first_token_at or 0.0) if tokens else 0.0
        passes = [meter.busy_seconds / meter.passes for meter in meters.values() if meter.passes]
        steps = decode / max(passes) if passes and max(passes) > 0 else None
        complete = len(meters) == stages
        return {
            "tokens": tokens,
            "ttft_seconds": _since(self.first_token_at, self.submitted_at),
            "decode_seconds": decode,
            "tokens_per_second": _ratio(tokens - 1, decode),
            "rounds": self.rounds,
            "segments": self.segments,
            "steps": steps,
            "tokens_per_step": _ratio(tokens - 1, steps),
            "tokens_per_round": _ratio(tokens - 1, self.rounds),
            "hit_rate": _ratio(self.hits, self.choices),
            "rows": {
                fate: sum(getattr(meter, fate) for meter in meters.values()) if complete else None
                for fate in ("useful", "wasted", "void")
            },
            "stage_busy": [
                _ratio(meters[stage].busy_seconds, decode) if stage in meters else None
                for stage in range(1, stages + 1)
            ],
            "stage_passes": [
                meters[stage].passes if stage in meters else None for stage in range(1, stages + 1)
            ],
            "draft_passes": self.draft_passes,
            "draft_seconds": self.draft_seconds,
            "repeated_4grams": repeated_4grams(output),
            **({"lossy": self.lossy} if self.lossy else {}),
        }


def unmeasured(output: Sequence[int], stages: int) -> dict[str, object]:
    """The ``stats`` of a job ended from outside: what follows from its output; the rest is None."""
    known = Tally(0.0).stats(output, {}, stages)
    lists = {name: value for name, value in known.items() if isinstance(value, list)}
    rows = {"rows": dict.fromkeys(("useful", "wasted", "void"))}
    kept = {"tokens": len(output), "repeated_4grams": repeated_4grams(output)}
    return {**dict.fromkeys(known), **lists, **rows, **kept}


def _since(end: float | None, start: float) -> float | None:
    return None if end is None else end - start


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None
