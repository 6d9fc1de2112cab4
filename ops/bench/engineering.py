"""Time between tokens relative to each system's own formula.

    python -m ops.bench.engineering [--profiles a,b] [--stages N] [--strategies a,b,...]
                                    [--source slm] [--temperature 0] [--tokens 48] [--per-kind 1]
                                    [--timeline] [--emulate [--stretch X] [--count 2]]

The formulas, in seconds per round, are the table in docs/algorithms.md#closed-forms. Their inputs
are measured in the run: mean seconds of a pass, by stage; of a message of rows, by its way from 0
(draft worker to stage 1) to N (back); of a drafter pass; tokens per round R, which gives the hit
share 1 - 1/R (the initial fill costs as much as a miss); s, the number of segments between the
first and the last one judged in a round.

The formulas of chain and of the layered systems assume that a hit is in the next segment. If the
hit subtree has no rows there, its next rows follow after a gap (partial starvation,
docs/algorithms.md#layers), which the formulas ignore: ``gaps counted`` replaces R - 1, or the
expected number of windows, by the counted s. No chain has a middle model. The simulation charges no
software, and with equal costs an emulated run has the same events, so ``over free`` is emulated
with software charged relative to simulated. Links and s, which the stats of an emulated run lack,
are those of the simulated run of the same texts. ``--timeline``: where the time went in cells above
1.10, along the path of each verdict's segment. Prints Markdown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from flowspec.cli.bench import strategies_of
from flowspec.core.protocol.addresses import DRAFT, stage_address
from flowspec.emulation.profile import Profile
from flowspec.emulation.profiles import load, names
from flowspec.errors import FlowSpecError
from flowspec.model.directory import default_pair
from flowspec.strategies import EXACT, build
from flowspec.testbed.naming import drafter_of
from flowspec.testbed.simulate import Ran
from ops.bench.closed_forms import pipedec_step, pipeline_token_seconds, pipespec_tokens
from ops.bench.emulate import OVERTAKEN_SHARE, EmulatedCluster, probe
from ops.bench.systems import show
from ops.bench.trace import CommittedStep, Trace, TraceBench
from ops.parser import Parser

#: Upper bound of the time between tokens relative to the formula's.
BAR = 1.10


@dataclass(frozen=True)
class MeasuredRun:
    """Means over the runs of one system. Times are in seconds.

    ``seconds``: per token after each run's first. ``passes``: of a pass, by stage. ``links``: of a
    message, by its way from 0 to N; ``kept``: the part during which it occupied a link. ``draft``:
    of a drafter pass. ``tokens``, ``segments``, ``drafts`` and ``steps`` (s) are counts per round.
    """

    seconds: float
    passes: tuple[float, ...]
    links: tuple[float, ...]
    kept: tuple[float, ...]
    draft: float
    tokens: float
    segments: float
    drafts: float
    steps: float

    @classmethod
    def of(cls, runs: Sequence[Ran], traces: Sequence[Trace]) -> MeasuredRun:
        """Measure ``runs``; ``traces`` are of the simulated runs of the same texts."""
        stats = [run.stats for run in runs]
        rounds, drafts = (sum(one[name] for one in stats) for name in ("rounds", "draft_passes"))
        tokens = sum(one["tokens"] - 1 for one in stats)
        decode = sum(one["decode_seconds"] for one in stats)
        stages = range(1, len(stats[0]["stage_passes"]) + 1)
        passes = [
            sum(one["stage_busy"][k - 1] * one["decode_seconds"] for one in stats)
            / sum(one["stage_passes"][k - 1] for one in stats)
            for k in stages
        ]
        senders = (DRAFT, *map(stage_address, stages))
        sent = [sum(t.messages[node] for t in traces) for node in senders]
        kept = [
            sum(t.kept[node] for t in traces) / count
            for node, count in zip(senders, sent, strict=True)
        ]
        links = [
            sum(t.travelled[node] for t in traces) / count
            for node, count in zip(senders, sent, strict=True)
        ]
        return cls(
            decode / tokens,
            tuple(passes),
            tuple(links),
            tuple(kept),
            sum(one["draft_seconds"] for one in stats) / max(1, drafts),
            tokens / rounds,
            sum(one["segments"] for one in stats) / rounds,
            drafts / rounds,
            sum(trace.steps() for trace in traces) / sum(trace.rounds for trace in traces),
        )

    @property
    def hit(self) -> float:
        """Share of tokens that did not start a round."""
        return 1 - 1 / self.tokens

    @property
    def traversal(self) -> float:
        """Seconds once through the pipeline and back."""
        return pipeline_token_seconds((0.0, *self.passes), self.links)

    @property
    def interval(self) -> float:
        """Least seconds between two consecutive segments."""
        return max(*self.passes, *self.kept)

    @property
    def step(self) -> float:
        """Seconds of a timestep with a hit: the drafter's, or the slowest group's with transfer."""
        return pipedec_step(self.draft, self.passes, self.links[1:])


def _first(m: MeasuredRun, drafts: int) -> float:
    return drafts * m.draft + m.traversal


def _flowspec(m: MeasuredRun, made: Any) -> float:
    first = made.params.loops + 1
    later = (m.drafts - first) / m.steps if m.steps else 0.0
    return _first(m, first) + m.steps * max(m.interval, later * m.draft)


def _pipespec(m: MeasuredRun, made: Any) -> float:
    return (
        m.tokens
        * m.traversal
        / pipespec_tokens(m.hit, min(made.params.window - 1, int(m.traversal / m.draft)))
    )


#: Seconds per round as a function of the measurements and the strategy.
FORMULAS: dict[str, Callable[[MeasuredRun, Any], float]] = {
    "autoregressive": lambda m, made: m.traversal,
    "naive_pp": lambda m, made: _first(m, made.params.loops + 1) + (m.segments - 1) * m.interval,
    "pruned_pp": lambda m, made: _first(m, made.params.loops + 1) + m.steps * m.interval,
    "flowspec": _flowspec,
    "pipedec": lambda m, made: (len(m.passes) + m.steps) * m.step,
    "pipedec_head": lambda m, made: (len(m.passes) + m.steps) * m.step,
    "specpipe": lambda m, made: m.traversal + m.steps * m.step,
    "pipespec": _pipespec,
    "speculative": lambda m, made: _first(m, made.params.lookahead - 1),
    "static_tree": lambda m, made: _first(m, len(made.params.branching)),
    "chain": lambda m, made: m.traversal + m.steps * max(m.interval, made.params.window * m.draft),
    "auto": lambda m, made: m.traversal + m.steps * m.step,
}
#: Systems whose formula ignores gaps.
GAPLESS = ("pipedec", "pipedec_head", "specpipe", "chain", "auto")


def predicted(strategy: str, m: MeasuredRun, *, gaps: bool = False) -> float | None:
    """Seconds per token by the formula of ``strategy``; None: it has none.

    ``gaps``: count gaps that the formula ignores.
    """
    name = strategy.partition(":")[0]
    if name not in FORMULAS:
        return None
    made = build(strategy, len(m.passes))
    if name in GAPLESS and not gaps:
        window = getattr(made.params, "window", 1) if name == "chain" else 1  # type: ignore[attr-defined]
        m = replace(m, steps=m.tokens - 1 if window == 1 else m.hit / (1 - m.hit**window))
    return FORMULAS[name](m, made) / m.tokens


# ---- where the time goes -------------------------------------------------------------------------


def path(trace: Trace, verdict: CommittedStep) -> Iterator[tuple[str, float]]:
    """Phases of the segment of ``verdict``, last first, each with its start."""
    nodes = sorted((node for node in trace.kept if node != DRAFT), key=lambda node: -node.number)
    passes = {
        span.node: span
        for span in trace.spans
        if span.segment == verdict.segment and span.node != DRAFT
    }
    for node in nodes:
        own = passes[node]
        arrived = trace.arrived[node, verdict.segment]
        yield "links", own.end
        yield (
            "a pass of the last stage" if node == nodes[0] else "passes of earlier stages",
            own.start,
        )
        for span in reversed(trace.spans):
            if span.node == node and arrived < span.end <= own.start:
                fate = "pruned" if trace.useful.isdisjoint(span.ids) else "committed"
                yield f"queued behind rows that were {fate}", max(span.start, arrived)
    yield "links", trace.sent[verdict.segment][0]


def timesteps(trace: Trace, verdict: CommittedStep) -> Iterator[tuple[str, float]]:
    """Phases of the timesteps up to ``verdict``, last first, each with its start.

    A timestep waits for the pass that ends last.
    """
    for end, begin in pairwise(sorted((at for at in trace.ends if at <= verdict.at), reverse=True)):
        last = max(
            (span for span in trace.spans if begin < span.end <= end), key=lambda span: span.end
        )
        when = "the last timestep" if end == verdict.at else "earlier timesteps"
        yield "completion messages", last.end
        yield f"{'the drafter' if last.node == DRAFT else 'passes'} in {when}", last.start
        yield "links", begin


def waits(trace: Trace) -> Iterator[tuple[CommittedStep, dict[str, float]]]:
    """Every verdict after the first, with the seconds since the previous one by phase."""
    for before, verdict in pairwise(trace.verdicts):
        parts: dict[str, float] = defaultdict(float)
        now = verdict.at
        for what, since in timesteps(trace, verdict) if verdict.timed else path(trace, verdict):
            since = min(now, max(since, before.at))
            parts[what] += now - since
            now = since
        # In the remaining time the segment had not been sent.
        drafts = (span for span in trace.spans if span.node == DRAFT)
        drafted = sum(max(0.0, min(span.end, now) - max(span.start, before.at)) for span in drafts)
        parts["waiting for the drafter"] += drafted
        parts["held back at the draft worker"] += now - before.at - drafted
        yield verdict, parts


def timeline(traces: Sequence[Trace]) -> list[str]:
    """Markdown table of the time per token by phase: after a hit, after a miss, over all."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    tokens = [0, 0]
    for verdict, parts in (wait for trace in traces for wait in waits(trace)):
        tokens[verdict.planted] += verdict.tokens
        for part, seconds in (*parts.items(), ("all", sum(parts.values()))):
            spent[part][verdict.planted] += seconds
    lines = [
        f"| | after a hit ({tokens[0]}), ms | after a miss ({tokens[1]}), ms | per token, ms |",
        "|---|---|---|---|",
    ]
    for part, (hit, miss) in sorted(spent.items(), key=lambda item: sum(item[1])):
        each = (hit / max(1, tokens[0]), miss / max(1, tokens[1]), (hit + miss) / sum(tokens))
        if each[2] > 1e-9:
            lines.append(f"| {part} | {' | '.join(f'{seconds * 1e3:.2f}' for seconds in each)} |")
    return lines


# ---- the table -----------------------------------------------------------------------------------


def cells(strategy: str, m: MeasuredRun) -> list[str]:
    """Measured milliseconds; relative to the formula; relative to the formula with gaps."""
    gaps = None
    if strategy.partition(":")[0] in GAPLESS:
        gaps = predicted(strategy, m, gaps=True)
    return [f"{m.seconds * 1e3:.2f}", _relative(m, predicted(strategy, m)), _relative(m, gaps)]


def _relative(m: MeasuredRun, formula: float | None) -> str:
    return "-" if formula is None else f"{m.seconds / formula:.3f}"


def row(
    bench: TraceBench, strategy: str, profile: Profile, stages: int, cluster: EmulatedCluster | None
) -> tuple[list[str], list[str]]:
    """A row of the table, and its timeline if it exceeds the bar."""
    runs, traces = bench.run(strategy, profile, stages)
    m = MeasuredRun.of(runs, traces)
    formula = predicted(strategy, m)
    found = [
        profile.name,
        str(stages),
        strategy,
        "-" if formula is None else f"{formula * 1e3:.2f}",
        *cells(strategy, m),
    ]
    measured = [m]
    if cluster is not None:
        try:
            done = cluster.run_all(bench.texts, strategy)
        except FlowSpecError as error:
            return [*found, str(error)], []
        ours = MeasuredRun.of(done.runs, traces)
        share = done.counts.overtaken / max(1, done.counts.inputs)
        mark = " (refused)" if share > OVERTAKEN_SHARE else ""
        found += [*cells(strategy, ours), f"{ours.seconds / m.seconds:.3f}", f"{share:.2%}{mark}"]
        measured.append(ours)
    formulas = [(one.seconds, predicted(strategy, one)) for one in measured]
    worst = max((seconds / one for seconds, one in formulas if one is not None), default=0.0)
    title = f"\n{strategy}, {profile.name}, {stages} stages: {worst:.3f} of its formula\n"
    return found, [title, *timeline(traces)] if worst > BAR else []


def rows(
    bench: TraceBench,
    strategies: Sequence[str],
    profile: Profile,
    stages: int,
    stretch: float | None,
) -> list[str]:
    """Print one profile's rows as they are measured; return the timelines.

    ``stretch``: of the emulation; 0: from a probe; None: no emulation.
    """
    lines: list[str] = []
    with ExitStack() as stack:
        cluster = None
        if stretch is not None:
            of = {"models": (default_pair()[0], drafter_of(bench.source)), "source": bench.source}
            stretch = stretch or probe(bench.texts[0], "specpipe", profile, stages, **of)  # type: ignore[arg-type]
            cluster = stack.enter_context(EmulatedCluster(profile, stages, stretch=stretch, **of))  # type: ignore[arg-type]
            lines.append(f"\n{profile.name}, {stages} stages: stretch {stretch:g}")
        for strategy in strategies:
            found, more = row(bench, strategy, profile, stages, cluster)
            show(f"| {' | '.join(found)} |")
            lines += more
    return lines


def main() -> None:
    parser = Parser()
    parser.add_argument("--profiles", default=",".join(names()))
    parser.add_argument("--stages", type=int, default=0, help="0: every stage count of the profile")
    parser.add_argument(
        "--strategies", default=",".join(EXACT), help="separated by spaces or commas"
    )
    parser.add_argument("--source", default="slm")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--per-kind", type=int, default=1)
    parser.add_argument("--count", type=int, default=0, help="prompts at most; 0: all")
    parser.add_argument("--timeline", action="store_true", help=f"for every cell above {BAR:g}")
    parser.add_argument(
        "--emulate", action="store_true", help="real workers on emulated devices, software charged"
    )
    parser.add_argument(
        "--stretch", type=float, default=0.0, help="of the emulation; 0: from a probe"
    )
    given = parser.parse_args()
    strategies = strategies_of([given.strategies])
    bench = TraceBench(given.source, given.tokens, given.per_kind, given.temperature, given.count)
    columns = [
        "profile",
        "stages",
        "strategy",
        "formula, ms",
        "simulated, ms",
        "over formula",
        "gaps counted",
    ]
    if given.emulate:
        columns += ["emulated, ms", "over formula", "gaps counted", "over free", "overtaken"]
    show(f"{bench.line}\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    stretch = given.stretch if given.emulate else None
    lines = []
    for profile in map(load, given.profiles.split(",")):
        for stages in [given.stages] if given.stages else profile.stages:
            lines += rows(bench, strategies, profile, stages, stretch)
    show("\n".join(lines if given.timeline else [line for line in lines if "stretch" in line]))


if __name__ == "__main__":
    main()
