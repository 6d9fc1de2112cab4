"""A comparison at one latency: settings chosen on tuning prompts, measured on others; its page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from flowspec.rehearse.compare.report import estimate_text
from ops.peer.contest import Runs, Sides, run, word
from ops.peer.prompts import PeerPrompt


@dataclass(frozen=True, slots=True)
class Taken:
    """Both phases: ``tuned``, runs of all ``sides``; ``measured``, runs of the ``finalists``."""

    sides: Sides
    tuned: Runs
    finalists: Sides
    measured: Runs


def take(
    sides: Sides,
    tuning: Sequence[PeerPrompt],
    measuring: Sequence[PeerPrompt],
    *,
    finalists: int,
    repeats: int,
    tell: Callable[[str], None] = lambda line: None,
) -> Taken:
    """Run all settings on ``tuning`` once, the fastest of either side on ``measuring``."""
    tuned = run(sides, tuning, 1, lambda line: tell(f"tuning, {line}"))
    chosen = sides.only(
        tuned.ranked(sides.ours)[:finalists], tuned.ranked(sides.theirs)[:finalists]
    )
    measured = run(chosen, measuring, repeats, lambda line: tell(f"measuring, {line}"))
    return Taken(sides, tuned, chosen, measured)


def page(taken: Taken) -> Iterator[str]:
    """Three tables as Markdown, of settings, finalists and their ratios, and the best of either."""
    yield from _settings(taken)
    yield ""
    yield from _finalists(taken)
    yield ""
    yield from _ratios(taken)
    measured = taken.measured
    ours, theirs = (
        measured.ranked(taken.finalists.ours)[0],
        measured.ranked(taken.finalists.theirs)[0],
    )
    ratio = measured.ratio(ours, theirs)
    phases = (taken.tuned, measured)
    yield (
        f"\nBest of ours against best of theirs: {ours} against {theirs}, {estimate_text(ratio)}: "
        f"{word(ratio)}. Same text: {_same(taken.sides.ours, *phases)} runs of ours, "
        f"{_same(taken.sides.theirs, *phases)} of theirs."
    )


def _settings(taken: Taken) -> Iterator[str]:
    tuned = taken.tuned
    yield from _head("ours, on tuning prompts", "ms per token", "theirs", "ms per token")
    for one, other in zip(
        tuned.ranked(taken.sides.ours), tuned.ranked(taken.sides.theirs), strict=True
    ):
        yield _row(one, _mean(tuned, one), other, _mean(tuned, other))


def _finalists(taken: Taken) -> Iterator[str]:
    measured = taken.measured
    yield from _head("finalist, on measuring prompts", "ms per token", "least to most", "same text")
    for side in (taken.finalists.ours, taken.finalists.theirs):
        for name in measured.ranked(side):
            times = [seconds * 1e3 for seconds in measured.medians(name)]
            span = f"{min(times):.2f} to {max(times):.2f}"
            yield _row(name, _mean(measured, name), span, _same([name], measured))


def _ratios(taken: Taken) -> Iterator[str]:
    measured = taken.measured
    yield from _head("ours", "theirs", "their time over ours (95%)", "ours is")
    for one in measured.ranked(taken.finalists.ours):
        for other in measured.ranked(taken.finalists.theirs):
            ratio = measured.ratio(one, other)
            yield _row(one, other, estimate_text(ratio), word(ratio))


def _head(*columns: str) -> Iterator[str]:
    yield _row(*columns)
    yield "|---" * len(columns) + "|"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _mean(runs: Runs, system: str) -> str:
    return f"{runs.mean(system) * 1e3:.2f}"


def _same(systems: Iterable[str], *phases: Runs) -> str:
    """How many runs of ``systems`` gave the target's own text, of how many, in ``phases``."""
    found = [same for system in systems for runs in phases for same in runs.same.get(system, [])]
    return f"{sum(found)}/{len(found)}"
