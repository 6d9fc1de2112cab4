"""The drafter's own speed, and how much of drafting hides behind verification.

    python -m ops.bench.drafting [--sources draft,head,ngram,draft+ngram] [--nodes 1,8,32,64] [--context 256]
                                 [--repeats 7] [--profile jetson-7b] [--strategies a,b,...] [--tokens 48]

First table, real time of this machine, one torch thread: a step that drafts for ``nodes`` nodes of one level.
*recomputed*: a pass a node over its whole path, nothing kept; *a pass a node*: KV kept, one row a pass; *one
pass*: KV kept, all nodes of the level together, what FlowSpec does. Repeats take turns, medians count.

Second table, simulated on a profile with the first source's real acceptance: passes and rows of the drafter a
committed token, prefill left out, and the share of drafting time during which some stage computed. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from flowspec.core.experience import Experience
from flowspec.core.machine import Commit, Done, Draft, Input, Output, Part, Pass, Received, Run, Send
from flowspec.core.messages import DRAFT, Result, Returns, Segment, Synced
from flowspec.core.profile import Profile
from flowspec.core.sampling import Sampling
from flowspec.core.stats import repeated_4grams
from flowspec.model.base import DraftExecutor
from flowspec.model.directory import default_pair, open_directory
from flowspec.model.sources import load_sources
from flowspec.strategies import EXACT, build
from flowspec.testbed.memo import MemoDrafter
from flowspec.testbed.profiles import load
from flowspec.testbed.simulate import Ran, profile_costs, simulate
from flowspec.testbed.texts import texts
from ops.bench.report import machine_line
from ops.bench.simulated import PROMPTS
from ops.bench.systems import chosen_prompts, show

#: Continuations asked of every node: PipeDec's and SpecPipe's children.
WIDTH = 16
#: From this share of repeated 4-grams on a text counts as a loop.
LOOP = 0.3


class Span(NamedTuple):
    """A pass of ``node`` over the rows ``ids`` of ``segment``, seconds."""

    node: str
    segment: int
    ids: tuple[int, ...]
    start: float
    end: float


class Verdict(NamedTuple):
    """A commit of ``tokens`` at ``at``, brought about by the answer to ``segment``, or by the end of a timestep
    if ``timed``; ``planted``: its root was not in the tree, so the pipeline had been refilled."""

    at: float
    tokens: int
    segment: int
    timed: bool
    planted: bool


class Trace:
    """A simulation's tap: what the machines of one job with ``prompt`` rows did on ``profile``.

    ``messages``, ``kept``: by sender, how many carried tree rows, and seconds they held its link. ``sent``: by segment,
    when, and in which round. ``arrived``: by node and segment. ``ends``: of timesteps.
    """

    def __init__(self, profile: Profile, prompt: int, *, hidden: bool = False) -> None:
        self.profile = profile
        self.messages: Counter[str] = Counter()
        self.kept: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self.sent: dict[int, tuple[float, int]] = {}
        self.arrived: dict[tuple[str, int], float] = {}
        self.ends: list[float] = []
        self.verdicts: list[Verdict] = []
        self.useful: set[int] = set()  # ids of rows that were accepted
        self._prompt, self._hidden, self._answered = prompt, hidden, 0
        self._running: dict[str, tuple[int, tuple[int, ...], float]] = {}

    @property
    def rounds(self) -> int:
        """How many there were."""
        return len({number for _, number in self.sent.values()} - {0})

    def steps(self) -> int:
        """How many segments behind the first of its round lies the last one judged, over all rounds."""
        last = {self.sent[verdict.segment][1]: verdict.segment for verdict in self.verdicts}
        first = {number: segment for segment, (_, number) in sorted(self.sent.items(), reverse=True)}
        return sum(segment - first[number] for number, segment in last.items() if number)

    def __call__(self, node: str, now: float, event: Input, outputs: Sequence[Output]) -> None:
        timed = False
        if isinstance(event, Received):
            for message in (envelope.message for envelope in event.envelopes):
                if isinstance(message, Segment | Result):
                    self.arrived[node, message.segment] = now
                if node == DRAFT and isinstance(message, Result):
                    self._answered = max(message.segment, self._answered)
                elif node == DRAFT and isinstance(message, Synced):
                    timed = True
                    self.ends.append(now)
        elif isinstance(event, Done) and node in self._running:
            self.spans.append(Span(node, *self._running.pop(node), now))
        for output in outputs:
            match output:
                case Run(Pass((part, *_)) | Draft(part)):
                    self._running[node] = (part.segment, part.ids, now)
                case Send():
                    self._send(node, now, output)
                case Commit():
                    self._commit(now, output, timed)

    def _send(self, node: str, now: float, output: Send) -> None:
        message = output.envelope.message
        if isinstance(message, Segment | Result):
            if node == DRAFT and isinstance(message, Segment):
                self.sent[message.segment] = (now, message.round)
            if self.sent[message.segment][1]:
                self.messages[node] += 1
                self.kept[node] += self.profile.transfer_seconds(output.to, output.envelope, hidden=self._hidden)

    def _commit(self, now: float, output: Commit, timed: bool) -> None:
        self.useful.update(getattr(output.prunes[0].message, "accepted", ()))
        number, judged = self.sent[self._answered][1], {self.sent[one.segment][1] for one in self.verdicts}
        self.verdicts.append(Verdict(now, len(output.tokens), self._answered, timed, number not in judged))
        if not number:
            self.ends.append(now)

    def drafting(self) -> dict[str, float]:
        """Of the drafter after the first token, the prompt's rows left out: ``passes``, ``rows``, ``seconds``,
        and of these ``hidden``, during which some stage computed."""
        drafts = [span for span in self.spans if span.node == DRAFT and span.start >= self.verdicts[0].at]
        hidden = last = 0.0
        for busy in sorted((span for span in self.spans if span.node != DRAFT), key=lambda span: span.start):
            start, last = max(busy.start, last), max(busy.end, last)
            hidden += sum(max(0.0, min(span.end, busy.end) - max(span.start, start)) for span in drafts)
        rows = sum(node >= self._prompt - 1 for span in drafts for node in span.ids)
        seconds = sum(span.end - span.start for span in drafts)
        return {"passes": len(drafts), "rows": rows, "seconds": seconds, "hidden": hidden}


class Bench:
    """The target's texts to some prompts, loops left out, and one remembering drafter, by its profile name.

    ``count``: texts at most, 0: all.
    """

    def __init__(self, source: str, tokens: int, per_kind: int, temperature: float = 0.0, count: int = 0) -> None:
        self.source, self.target = source, open_directory(default_pair()[0])
        self.drafter = MemoDrafter(load_sources(source.replace("slm", "draft"), self.target))
        prompts, hidden = chosen_prompts(PROMPTS, per_kind), self.drafter.wants_hidden
        said = texts(prompts, [Sampling(temperature)], tokens, self.target, hidden=hidden)
        kept = [text for text in said if repeated_4grams(text.output) < LOOP]
        self.texts = kept[: count or None]
        repeated = sum(repeated_4grams(text.output) for text in self.texts) / max(1, len(self.texts))
        self.line = (
            f"{len(self.texts)} prompts, {tokens} tokens, T = {temperature:g}, drafts by {source}; repeated 4-grams "
            f"{repeated:.0%}, {len(said) - len(kept)} loops left out\n"
        )

    def run(self, strategy: str, profile: Profile, stages: int) -> tuple[list[Ran], list[Trace]]:
        """All texts one after another, simulated, and what the machines did."""
        hidden = self.drafter.wants_hidden and build(strategy, stages).width > 0
        costs = profile_costs(profile, stages, self.source, hidden=hidden)
        runs, traces, known = [], [], Experience()
        for text in self.texts:
            traces.append(Trace(profile, len(text.prompt), hidden=hidden))
            runs.append(simulate(text, strategy, stages, self.target, self.drafter, costs, None, traces[-1], known))
        return runs, traces


class Level:
    """A context of random tokens, and the ``nodes`` children of its last one, to draft for."""

    def __init__(self, drafter: DraftExecutor, vocabulary: int, hidden: int, context: int, nodes: int) -> None:
        drawn = np.random.default_rng(1)
        self._drafter, self._context, self._nodes = drafter, context, nodes
        self._tokens = drawn.integers(3, vocabulary, context + nodes).tolist()
        self._features = drawn.standard_normal((context, hidden), np.float32)
        self._open("kept")
        self._pass("kept", 0, 0, range(context), range(-1, context - 1), ())

    def recomputed(self) -> float:
        """Seconds of a pass a node over its whole path; making room for it is not counted."""
        seconds, context = 0.0, self._context
        for node in range(context, context + self._nodes):
            self._open("fresh")
            seconds += self._pass("fresh", 0, 0, (*range(context), node), range(-1, context), (context,))
            self._drafter.release("fresh")
        return seconds

    def one_by_one(self) -> float:
        """Seconds of a pass a node over its own row."""
        return sum(self._below(at, 1) for at in range(self._nodes))

    def together(self) -> float:
        """Seconds of one pass over all nodes."""
        return self._below(0, self._nodes)

    def _open(self, job: str) -> None:
        self._drafter.allocate(job, self._context + self._nodes + 1, Sampling(), Returns())
        if self._drafter.wants_hidden:
            self._drafter.learn(job, range(self._context), self._features)

    def _below(self, first: int, count: int) -> float:
        context = self._context
        ids = range(context + first, context + first + count)
        return self._pass("kept", context, first, ids, (context - 1,) * count, tuple(range(count)))

    def _pass(
        self, job: str, context: int, held: int, ids: Sequence[int], above: Sequence[int], answers: tuple[int, ...]
    ) -> float:
        """Seconds of a pass over ``ids``, children of ``above``, behind ``context`` rows and ``held`` of the level."""
        part = Part(
            job=job, epoch=0, segment=-1, ids=tuple(ids), positions=tuple(min(node, self._context) for node in ids),
            tokens=tuple(self._tokens[node] for node in ids), offsets=(), context=context, held=context + held,
            moves=None, parents=(*(-1,) * held, *(max(-1, parent - context) for parent in above)), answers=answers,
        )  # fmt: skip
        work = Draft(part, WIDTH, parents=tuple(above))
        began = time.perf_counter()
        self._drafter.run(work)
        return time.perf_counter() - began


def step_seconds(level: Level, repeats: int) -> list[float]:
    """Medians of a step recomputed, a pass a node and in one pass, which take turns; the first turn is warm-up."""
    ways = (level.recomputed, level.one_by_one, level.together)
    taken = [[way() for way in ways] for _ in range(repeats + 1)][1:]
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def speed_table(sources: Sequence[str], nodes: Sequence[int], context: int, repeats: int) -> None:
    """The first table."""
    import torch

    torch.set_num_threads(1)
    target = open_directory(default_pair()[0])
    show(f"{machine_line()}; a context of {context} tokens, {WIDTH} continuations a node\n")
    show(
        "| source | nodes | recomputed, ms | a pass a node, ms | one pass, ms | first over last |\n" + "|---" * 6 + "|"
    )
    for source in sources:
        drafter = load_sources(source, target)
        for count in nodes:
            level = Level(drafter, target.vocabulary, target.hidden_size, context, count)
            seconds = step_seconds(level, repeats)
            cells = " | ".join(f"{one * 1e3:.2f}" for one in seconds)
            show(f"| {source} | {count} | {cells} | {seconds[0] / seconds[-1]:.1f} |")


def hidden_table(bench: Bench, profile: Profile, strategies: Sequence[str]) -> None:
    """The second table, at the profile's own stage count; strategies that draft nothing are left out."""
    show(f"\n{profile.name}, {profile.stages[0]} stages, simulated: {bench.line}")
    show("| strategy | passes a token | rows a token | drafting, ms a token | of that hidden |\n" + "|---" * 5 + "|")
    for strategy in strategies:
        runs, traces = bench.run(strategy, profile, profile.stages[0])
        tokens, sums = sum(run.stats["tokens"] - 1 for run in runs), Counter[str]()
        for trace in traces:
            sums.update(trace.drafting())
        if sums["passes"]:
            passes, rows, seconds = (sums[what] / tokens for what in ("passes", "rows", "seconds"))
            hidden = sums["hidden"] / sums["seconds"]
            show(f"| {strategy} | {passes:.2f} | {rows:.1f} | {seconds * 1e3:.1f} | {hidden:.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sources", default="draft,head,ngram,draft+ngram")
    parser.add_argument("--nodes", default="1,8,32,64")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", default="jetson-7b")
    parser.add_argument("--strategies", default=",".join(EXACT), help="separated by spaces or commas")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--per-kind", type=int, default=1)
    given = parser.parse_args()
    strategies = given.strategies.split() if " " in given.strategies else given.strategies.split(",")
    sources = given.sources.split(",")
    speed_table(sources, list(map(int, given.nodes.split(","))), given.context, given.repeats)
    bench = Bench(sources[0].replace("draft", "slm"), given.tokens, given.per_kind)
    hidden_table(bench, load(given.profile), strategies)


if __name__ == "__main__":
    main()
