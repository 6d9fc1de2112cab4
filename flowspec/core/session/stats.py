"""The ``stats`` of a finished job, computed from counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from flowspec.core.protocol.messages import Meter
from flowspec.core.run.share import RunShare

#: Most changes of a run's share that are recorded.
MOST_SHARES = 100


def repeated_4grams(tokens: Sequence[int]) -> float:
    """The share of the output's 4-grams that repeat an earlier one.

    Repetitive text raises every drafter's acceptance, so a comparison must show this figure.
    """
    grams = [tuple(tokens[at : at + 4]) for at in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@dataclass(slots=True)
class Tally:
    """A session's counters. Times are in seconds on the driver's clock; None: not reached.

    ``submitted_at``: when the job was submitted, possibly before this clock's first reading.
    ``started_at``: when the prompt was sent to the stages. ``rounds``: new roots that T lacked.
    ``choices``: target tokens chosen during decode; ``hits``: those that had a node in the tree.
    ``cached``: rows of the prompt that were kept of an earlier job. ``lossy``: the mode, if the
    text may differ from the target's own. ``shares``: changes of what the run may use beside
    others, the first ``MOST_SHARES`` of them. ``resumed``: output tokens of earlier runs of the
    job, the first of which came ``resumed_first_seconds`` after its submission.
    """

    submitted_at: float
    started_at: float
    queued_seconds: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None
    rounds: int = 0
    segments: int = 0
    choices: int = 0
    hits: int = 0
    draft_passes: int = 0
    draft_seconds: float = 0.0
    cached: int = 0
    lossy: str = ""
    shares: list[dict[str, int]] = field(default_factory=list)
    resumed: int = 0
    resumed_first_seconds: float = 0.0

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the latest; 0 with fewer than two tokens."""
        return (self.last_token_at or 0.0) - (self.first_token_at or 0.0)

    @property
    def all_seconds(self) -> float:
        """``decode_seconds`` over all runs of the job, with the pauses between them."""
        if not self.resumed or self.last_token_at is None:
            return self.decode_seconds
        return self.last_token_at - self.submitted_at - self.resumed_first_seconds

    def count(self, tokens: int, hits: int, now: float) -> None:
        """Count a verdict's ``tokens``, of which ``hits`` were in the tree.

        The first verdict of a job ends its prefill and is not counted as decode.
        """
        self.last_token_at = now
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self.choices += tokens
            self.hits += hits

    def note_share(self, share: RunShare) -> None:
        """Note a change of what the run may use beside others."""
        if len(self.shares) < MOST_SHARES:
            self.shares.append({"tokens": self.choices, **asdict(share)})

    def stats(
        self, output: Sequence[int], meters: Mapping[int, Meter], stages: int
    ) -> dict[str, object]:
        """The ``stats`` object of a result.

        ``ttft_seconds`` is the time from submission to the first token; ``queue_seconds`` the part
        of it before the job was assigned. ``tokens_per_second`` is decode only: the tokens after
        the first per second after the first. A step is one mean pass of the slowest stage;
        ``steps`` is the decode time in steps. ``rows`` are summed over the stages. A value that
        needs a stage which did not report is None. Of a job that was resumed ``decode_seconds`` and
        ``tokens_per_second`` are over all runs, other rates are those of its last one.
        """
        meters = {stage: meter for stage, meter in meters.items() if stage <= stages}
        tokens = len(output)
        decoded = tokens - self.resumed - 1
        ttft = _since(self.first_token_at, self.submitted_at)
        decode, whole = (self.decode_seconds, self.all_seconds) if tokens else (0.0, 0.0)
        passes = [meter.busy_seconds / meter.passes for meter in meters.values() if meter.passes]
        steps = decode / max(passes) if passes and max(passes) > 0 else None
        return {
            "tokens": tokens,
            "cached_tokens": self.cached,
            "queue_seconds": self.queued_seconds,
            "ttft_seconds": self.resumed_first_seconds if self.resumed else ttft,
            "decode_seconds": whole,
            "tokens_per_second": _ratio(tokens - 1, whole),
            "rounds": self.rounds,
            "segments": self.segments,
            "steps": steps,
            "tokens_per_step": _ratio(decoded, steps),
            "tokens_per_round": _ratio(decoded, self.rounds),
            "hit_rate": _ratio(self.hits, self.choices),
            "rows": _rows_by_fate(meters, complete=len(meters) == stages),
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
            **({"shares": self.shares} if self.shares else {}),
            **({"lossy": self.lossy} if self.lossy else {}),
            **({"resumed_tokens": self.resumed} if self.resumed else {}),
        }


def unmeasured(output: Sequence[int], stages: int) -> dict[str, object]:
    """The ``stats`` of a job that its draft worker did not end: None, but for the output's own."""
    known = Tally(0.0, 0.0).stats(output, {}, stages)
    lists = {name: value for name, value in known.items() if isinstance(value, list)}
    rows = {"rows": dict.fromkeys(_FATES)}
    kept = {"tokens": len(output), "repeated_4grams": repeated_4grams(output)}
    return {**dict.fromkeys(known), **lists, **rows, **kept}


_FATES = ("useful", "wasted", "void")


def _rows_by_fate(meters: Mapping[int, Meter], *, complete: bool) -> dict[str, int | None]:
    if not complete:
        return dict.fromkeys(_FATES)
    return {fate: sum(getattr(meter, fate) for meter in meters.values()) for fate in _FATES}


def _since(end: float | None, start: float) -> float | None:
    return None if end is None else end - start


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None
