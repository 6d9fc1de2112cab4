"""The tables of ``real_speed``: times a token of both sides by stages and latency, and parts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ops.bench.free_drafts import best_length, expected_tokens, rounds

PLAIN = "autoregressive"
DRAFTED = ("flowspec", "auto")


@dataclass(slots=True)
class Ours:
    """Our runs in one precision, with so many stages and one latency; times in seconds a token.

    ``times``: by strategy. ``passes``: of plain decoding, what all stages' passes take. ``cpu``: of
    plain decoding, CPU seconds by process.
    """

    times: dict[str, list[float]] = field(default_factory=dict)
    passes: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def of(self, strategy: str) -> float:
        """The mean seconds a token of a drafted strategy; the median of plain decoding."""
        middle = statistics.median if strategy == PLAIN else statistics.fmean
        return middle(self.times[strategy])


@dataclass(frozen=True, slots=True)
class Drafts:
    """Free drafts, right at ``rate``: ``right`` says of every draw which are, token by token.

    ``seconds``: what drafting one token takes.
    """

    rate: float
    right: Sequence[Sequence[bool]]
    seconds: float = 0.0

    def best(self, passes: Mapping[int, float]) -> tuple[int, float]:
        """The best draft length, and its expected seconds a token, from seconds by rows."""
        return best_length(
            passes,
            lambda length: expected_tokens(self.rate, length),
            _lengths(passes),
            self.seconds,
        )

    def best_drawn(self, passes: Mapping[int, float]) -> tuple[int, float]:
        """The same on these draws instead of in expectation."""
        tokens = sum(map(len, self.right))
        return best_length(
            passes,
            lambda length: tokens / sum(rounds(draw, length) for draw in self.right),
            _lengths(passes),
            self.seconds,
        )


def _lengths(passes: Mapping[int, float]) -> list[int]:
    """Draft lengths whose passes are known."""
    return [rows - 1 for rows in passes if rows > 1]


@dataclass(frozen=True, slots=True)
class Linked:
    """``stages`` behind links of ``latency`` milliseconds each way; 0 stages: one process."""

    stages: int
    latency: float

    @property
    def cells(self) -> str:
        return f"{self.stages or 'whole'} | {self.latency:g} ms"


Theirs = Mapping[Linked, Sequence[Mapping[int, float]]]


def merged(runs: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Seconds by rows: the median over runs."""
    return {rows: statistics.median(run[rows] for run in runs) for rows in runs[0]}


def plain_table(
    ours: Mapping[tuple[str, Linked], Ours], theirs: Theirs, dtypes: Sequence[str]
) -> Iterator[str]:
    """Plain decoding in 4 bits: llama.cpp, each of our precisions, and our time over theirs."""
    names = [f"{dtype} | over llama.cpp" for dtype in dtypes]
    yield f"| stages | each way | llama.cpp Q4_0, ms a token | {' | '.join(names)} |"
    yield "|---" * (3 + 2 * len(dtypes)) + "|"
    for place, runs in theirs.items():
        base = merged(runs)[1]
        found = [ours[dtype, Linked(place.stages or 1, place.latency)] for dtype in dtypes]
        cells = [f"{ms(one.of(PLAIN))} | {one.of(PLAIN) / base:.2f}" for one in found]
        yield f"| {place.cells} | {ms(base)} | {' | '.join(cells)} |"


def drafted_table(
    ours: Mapping[tuple[str, Linked], Ours],
    theirs: Theirs,
    dtypes: Sequence[str],
    drafts: Drafts,
) -> Iterator[str]:
    """With drafts in 4 bits: llama.cpp's best length, our strategies, and its time over auto's.

    The ratio is with the same draws on both sides.
    """
    names = [f"{dtype}, {how}" for dtype in dtypes for how in DRAFTED]
    over = [f"llama.cpp over auto, {dtype}" for dtype in dtypes]
    heads = ("stages", "each way", "llama.cpp, expected", "llama.cpp, these draws", *names, *over)
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for place, runs in theirs.items():
        length, expected = drafts.best(merged(runs))
        drawn_length, best = drafts.best_drawn(merged(runs))
        found = [ours[dtype, Linked(place.stages or 1, place.latency)] for dtype in dtypes]
        times = [ms(one.of(how)) for one in found for how in DRAFTED]
        ratios = [f"{best / one.of('auto'):.2f}" for one in found]
        theirs_cells = (
            f"{ms(expected)}, k = {length}",
            f"{ms(best)}, k = {drawn_length}",
        )
        yield f"| {place.cells} | {' | '.join((*theirs_cells, *times, *ratios))} |"


def whole_table(
    ours: Mapping[tuple[str, Linked], Ours], library: float, dtype: str
) -> Iterator[str]:
    """Our strategies in 16 bits beside the library's ``generate`` (seconds a token)."""
    names = (PLAIN, *DRAFTED)
    yield f"| stages | each way | {' | '.join(names)} | autoregressive over `generate` |"
    yield "|---" * (3 + len(names)) + "|"
    for (precision, place), found in ours.items():
        if precision == dtype:
            times = " | ".join(ms(found.of(how)) for how in names)
            yield f"| {place.cells} | {times} | {found.of(PLAIN) / library:.2f} |"


def passes_table(theirs: Theirs) -> Iterator[str]:
    """Milliseconds of llama.cpp's passes by rows."""
    (first, *_) = theirs.values()
    rows = sorted(first[0])
    yield f"| stages | each way | {' | '.join(f'{many}' for many in rows)} |"
    yield "|---" * (2 + len(rows)) + "|"
    for place, runs in theirs.items():
        found = merged(runs)
        yield f"| {place.cells} | {' | '.join(ms(found[many]) for many in rows)} |"


def software_table(ours: Mapping[tuple[str, Linked], Ours]) -> Iterator[str]:
    """Of a token of plain decoding: passes and the rest, and CPU time by kind of process."""
    kinds = ("verify", "draft", "broker")
    yield (
        "| precision | stages | each way | token, ms | in passes | outside passes | "
        f"{' | '.join(f'CPU of {kind}' for kind in kinds)} |"
    )
    yield "|---" * (6 + len(kinds)) + "|"
    for (dtype, place), found in ours.items():
        token = found.of(PLAIN)
        passes = statistics.median(found.passes)
        cpu = [
            sum(
                statistics.median(times)
                for role, times in found.cpu.items()
                if role.partition("-")[0] == kind
            )
            for kind in kinds
        ]
        times = (token, passes, token - passes, *cpu)
        yield f"| {dtype} | {place.cells} | {' | '.join(map(ms, times))} |"


def ms(seconds: float) -> str:
    """Milliseconds with one decimal."""
    return f"{seconds * 1e3:.1f}"
