"""The engineering bar: the time between tokens over what each system's own formula gives.

    python -m ops.bench.engineering [--profiles a,b] [--stages N] [--strategies a,b,...]
                                    [--source slm] [--temperature 0] [--tokens 48] [--per-kind 1]
                                    [--timeline] [--emulate [--stretch X] [--count 2]]

A formula's inputs are the run's own: c, mean seconds of a pass, by stage; l, of a message of
rows over a link, by link, 0 (draft worker to stage 1) to N (back); d, of a pass of the drafter;
R, tokens a round, and so the hit share h = 1 - 1/R (the fill at a run's beginning costs what a
miss costs). ``way`` is the sum of all c and l; ``pace`` the longest time a pass takes or a
message keeps its link; ``step`` = max(d, c + l); D, passes for a round's first tree. s: how many
segments behind the first of its round the last one judged lies, a round.

| system | seconds a round | source (sections of algorithms.md) | |---|---|---| | autoregressive
| way | PipeDec, 3.7 | | naive_pp | D d + way + (segments - 1) pace | FlowSpec, 6 | | pruned_pp |
D d + way + s pace | FlowSpec, 2.6, 6 | | flowspec | D d + way + s max(pace, d e); e: passes of
the drafter a segment behind the first | FlowSpec, 2.5, 2.11 | | pipedec, pipedec_head | (N + R -
1) step: step (1 + (1 - h) (N - 1)) a token | PipeDec, 3.7, 3.3 | | specpipe, auto | way + (R -
1) step: step + (1 - h) (way - step) a token | SpecPipe, 4.3, 9.22 | | pipespec | R way / E(h,
window); window: what is drafted during way | PipeSpec, 5.2 | | speculative, static_tree | D d +
way | PipeSpec, 5.3; SpecInfer, 6 | | chain | way + h / (1 - h^w) max(pace, w d): a step for each
window of w the tokens reach | PipeInfer, 6 |

The last formula and the layered ones take it that a hit is in the next segment. Where the hit
subtree has no rows there, its next ones come behind a gap (partial starvation, 3.3, 4.1), which
they leave out: ``gaps counted`` has s, as counted, in the place of R - 1 and of the windows
expected. No chain has a middle model. The simulation charges no software; with equal costs an
emulated run is the same, event by event, so ``over free`` is charged emulated over simulated.
What an emulated run's stats do not tell, links and s, is taken from the simulated run of the
same texts. ``--timeline``: where the time went in cells above 1.10, on the path of each
verdict's segment. Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from flowspec.cli.bench import strategies_of
from flowspec.core.protocol.messages import DRAFT, stage_node
from flowspec.emulation.profile import Profile
from flowspec.emulation.profiles import load, names
from flowspec.errors import FlowSpecError
from flowspec.model.directory import default_pair
from flowspec.strategies import EXACT, build
from flowspec.testbed.emulate import OVERTAKEN_SHARE, EmulatedCluster, probe
from flowspec.testbed.naming import drafter_of
from flowspec.testbed.simulate import Ran
from ops.bench.closed_forms import pipedec_step, pipeline_token_seconds, pipespec_tokens
from ops.bench.systems import show
from ops.bench.trace import CommittedStep, Trace, TraceBench

#: The time between tokens over the formula's, at most.
BAR = 1.10


@dataclass(frozen=True)
class MeasuredRun:
    """What runs of one system came to: means in seconds, ``seconds`` of a token after each run's
    first.

    ``passes`` by stage; ``links`` over link 0 to N, of which a message ``kept`` it to itself;
    ``draft``: a pass of the drafter. ``tokens``, ``segments``, ``drafts`` and ``steps`` (s) are
    counts a round.
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
        """Of ``runs``; ``traces`` are of the simulated runs of the same texts."""
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
        senders = (DRAFT, *map(stage_node, stages))
        kept = [
            sum(t.kept[node] for t in traces) / sum(t.messages[node] for t in traces)
            for node in senders
        ]
        return cls(
            decode / tokens,
            tuple(passes),
            tuple(traces[0].profile.link.latency + one for one in kept),
            tuple(kept),
            sum(one["draft_seconds"] for one in stats) / max(1, drafts),
            tokens / rounds,
            sum(one["segments"] for one in stats) / rounds,
            drafts / rounds,
            sum(trace.steps() for trace in traces) / sum(trace.rounds for trace in traces),
        )

    @property
    def hit(self) -> float:
        """Share of tokens that did not begin a round."""
        return 1 - 1 / self.tokens

    @property
    def way(self) -> float:
        """Once through the pipeline and back."""
        return pipeline_token_seconds((0.0, *self.passes), self.links)

    @property
    def pace(self) -> float:
        """Between two segments that follow each other closely."""
        return max(*self.passes, *self.kept)

    @property
    def step(self) -> float:
        """A timestep that hits: the drafter's or the slowest group's, its transfer included."""
        return pipedec_step(self.draft, self.passes, self.links[1:])


def _first(m: MeasuredRun, drafts: int) -> float:
    return drafts * m.draft + m.way


def _flowspec(m: MeasuredRun, made: Any) -> float:
    first = made.params.loops + 1
    later = (m.drafts - first) / m.steps if m.steps else 0.0
    return _first(m, first) + m.steps * max(m.pace, later * m.draft)


def _pipespec(m: MeasuredRun, made: Any) -> float:
    return (
        m.tokens * m.way / pipespec_tokens(m.hit, min(made.params.window - 1, int(m.way / m.draft)))
    )


#: Seconds a round, from what was measured and the strategy.
FORMULAS: dict[str, Callable[[MeasuredRun, Any], float]] = {
    "autoregressive": lambda m, made: m.way,
    "naive_pp": lambda m, made: _first(m, made.params.loops + 1) + (m.segments - 1) * m.pace,
    "pruned_pp": lambda m, made: _first(m, made.params.loops + 1) + m.steps * m.pace,
    "flowspec": _flowspec,
    "pipedec": lambda m, made: (len(m.passes) + m.steps) * m.step,
    "pipedec_head": lambda m, made: (len(m.passes) + m.steps) * m.step,
    "specpipe": lambda m, made: m.way + m.steps * m.step,
    "pipespec": _pipespec,
    "speculative": lambda m, made: _first(m, made.params.lookahead - 1),
    "static_tree": lambda m, made: _first(m, len(made.params.branching)),
    "chain": lambda m, made: m.way + m.steps * max(m.pace, made.params.window * m.draft),
    "auto": lambda m, made: m.way + m.steps * m.step,
}
#: Those whose own formula knows no gaps.
GAPLESS = ("pipedec", "pipedec_head", "specpipe", "chain", "auto")


def predicted(strategy: str, m: MeasuredRun, *, gaps: bool = False) -> float:
    """Seconds a token by the formula of ``strategy``; ``gaps``: count them where it leaves them
    out.
    """
    name = strategy.partition(":")[0]
    made = build(strategy, len(m.passes))
    if name in GAPLESS and not gaps:
        window = getattr(made.params, "window", 1) if name == "chain" else 1  # type: ignore[attr-defined]
        m = replace(m, steps=m.tokens - 1 if window == 1 else m.hit / (1 - m.hit**window))
    return FORMULAS[name](m, made) / m.tokens


# ---- where the time goes -------------------------------------------------------------------------


def path(trace: Trace, verdict: CommittedStep) -> Iterator[tuple[str, float]]:
    """What the segment of ``verdict`` spent its time on and since when, the last first."""
    nodes = sorted((node for node in trace.kept if node != DRAFT), key=lambda node: -int(node[1:]))
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
    """What the timesteps up to ``verdict`` waited for and since when, the last first: each for what
    ended last.
    """
    for end, begin in pairwise(sorted((at for at in trace.ends if at <= verdict.at), reverse=True)):
        last = max(
            (span for span in trace.spans if begin < span.end <= end), key=lambda span: span.end
        )
        when = "the last timestep" if end == verdict.at else "earlier timesteps"
        yield "word that all are done", last.end
        yield f"{'the drafter' if last.node == DRAFT else 'passes'} in {when}", last.start
        yield "links", begin


def waits(trace: Trace) -> Iterator[tuple[CommittedStep, dict[str, float]]]:
    """Every verdict after the first, and what the seconds since the one before were spent on."""
    for before, verdict in pairwise(trace.verdicts):
        parts: dict[str, float] = defaultdict(float)
        now = verdict.at
        for what, since in timesteps(trace, verdict) if verdict.timed else path(trace, verdict):
            since = min(now, max(since, before.at))
            parts[what] += now - since
            now = since
        # What is left the segment had not been sent.
        drafts = (span for span in trace.spans if span.node == DRAFT)
        drafted = sum(max(0.0, min(span.end, now) - max(span.start, before.at)) for span in drafts)
        parts["waiting for the drafter"] += drafted
        parts["held back at the draft worker"] += now - before.at - drafted
        yield verdict, parts


def timeline(traces: Sequence[Trace]) -> list[str]:
    """Markdown: where a token's time went, after a hit, after a miss, and over all."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    tokens = [0, 0]
    for verdict, parts in (wait for trace in traces for wait in waits(trace)):
        tokens[verdict.planted] += verdict.tokens
        for part, seconds in (*parts.items(), ("all", sum(parts.values()))):
            spent[part][verdict.planted] += seconds
    lines = [
        f"| | after a hit ({tokens[0]}), ms | after a miss ({tokens[1]}), ms | a token, ms |",
        "|---|---|---|---|",
    ]
    for part, (hit, miss) in sorted(spent.items(), key=lambda item: sum(item[1])):
        each = (hit / max(1, tokens[0]), miss / max(1, tokens[1]), (hit + miss) / sum(tokens))
        if each[2] > 1e-9:
            lines.append(f"| {part} | {' | '.join(f'{seconds * 1e3:.2f}' for seconds in each)} |")
    return lines


# ---- the table -----------------------------------------------------------------------------------


def cells(strategy: str, m: MeasuredRun) -> list[str]:
    """Measured milliseconds, over the formula, over that with gaps."""
    gaps = (
        f"{m.seconds / predicted(strategy, m, gaps=True):.3f}"
        if strategy.partition(":")[0] in GAPLESS
        else "-"
    )
    return [f"{m.seconds * 1e3:.2f}", f"{m.seconds / predicted(strategy, m):.3f}", gaps]


def row(
    bench: TraceBench, strategy: str, profile: Profile, stages: int, cluster: EmulatedCluster | None
) -> tuple[list[str], list[str]]:
    """The table's row, and the timeline if it is above the bar."""
    runs, traces = bench.run(strategy, profile, stages)
    m = MeasuredRun.of(runs, traces)
    found = [
        profile.name,
        str(stages),
        strategy,
        f"{predicted(strategy, m) * 1e3:.2f}",
        *cells(strategy, m),
    ]
    worst = m.seconds / predicted(strategy, m)
    if cluster is not None:
        try:
            done = cluster.run_all(bench.texts, strategy)
        except FlowSpecError as error:
            return [*found, str(error)], []
        ours = MeasuredRun.of(done.runs, traces)
        share = done.counts.overtaken / max(1, done.counts.inputs)
        mark = " (refused)" if share > OVERTAKEN_SHARE else ""
        found += [*cells(strategy, ours), f"{ours.seconds / m.seconds:.3f}", f"{share:.2%}{mark}"]
        worst = max(worst, ours.seconds / predicted(strategy, ours))
    title = f"\n{strategy}, {profile.name}, {stages} stages: {worst:.3f} of its formula\n"
    return found, [title, *timeline(traces)] if worst > BAR else []


def rows(
    bench: TraceBench,
    strategies: Sequence[str],
    profile: Profile,
    stages: int,
    stretch: float | None,
) -> list[str]:
    """One profile's rows, each shown as it comes; the timelines. ``stretch``: of the emulation;
    None: there is none, 0: from a probe.
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--profiles", default=",".join(names()))
    parser.add_argument(
        "--stages", type=int, default=0, help="0: every count a profile is meant for"
    )
    parser.add_argument(
        "--strategies", default=",".join(EXACT), help="separated by spaces or commas"
    )
    parser.add_argument("--source", default="slm")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--per-kind", type=int, default=1)
    parser.add_argument("--count", type=int, default=0, help="prompts at most; 0: all")
    parser.add_argument("--timeline", action="store_true", help=f"of every cell above {BAR:g}")
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
