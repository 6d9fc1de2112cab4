"""Traces of simulated runs, and a bench that records them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from flowspec.core.job.stats import repeated_4grams
from flowspec.core.protocol.addresses import DRAFT, Address
from flowspec.core.protocol.machine import Commit, Compute, Done, Input, Output, Received, Send
from flowspec.core.protocol.messages import Answer, Segment, Synced
from flowspec.core.protocol.work import Draft, DraftPass, Pass
from flowspec.core.run.history import History
from flowspec.core.run.sampling import Sampling
from flowspec.emulation.profile import Profile
from flowspec.model.directory import default_pair, open_directory
from flowspec.model.sources import load_sources
from flowspec.strategies import build
from flowspec.testbed.grid import LOOP
from flowspec.testbed.memo import MemoDrafter
from flowspec.testbed.naming import canonical, drafter_of
from flowspec.testbed.simulate import Ran, profile_costs, returns_hidden, simulate
from flowspec.testbed.texts import texts
from ops.bench.simulated import PROMPTS
from ops.bench.systems import chosen_prompts


class BusySpan(NamedTuple):
    """A pass of ``node`` over the rows ``ids`` of ``segment``, seconds."""

    node: Address
    segment: int
    ids: tuple[int, ...]
    start: float
    end: float


class CommittedStep(NamedTuple):
    """A commit of ``tokens`` tokens at ``at``, caused by the answer to ``segment``.

    ``timed``: caused by the end of a timestep. ``planted``: its root was not in the tree, so the
    pipeline had been refilled.
    """

    at: float
    tokens: int
    segment: int
    timed: bool
    planted: bool


class Trace:
    """A simulation's tap: events of one job with ``prompt`` prompt rows on ``profile``.

    ``messages``: by sender, the number that carried tree rows; ``kept``: seconds they occupied a
    link; ``travelled``: seconds on all links of their ways. ``sent``: by segment, time and round.
    ``arrived``: time by node and segment. ``ends``: times of the ends of timesteps. ``useful``: ids
    of accepted rows.
    """

    def __init__(self, profile: Profile, prompt: int, *, hidden: bool = False) -> None:
        self.profile = profile
        self.messages: Counter[Address] = Counter()
        self.kept: dict[Address, float] = defaultdict(float)
        self.travelled: dict[Address, float] = defaultdict(float)
        self.spans: list[BusySpan] = []
        self.sent: dict[int, tuple[float, int]] = {}
        self.arrived: dict[tuple[Address, int], float] = {}
        self.ends: list[float] = []
        self.verdicts: list[CommittedStep] = []
        self.useful: set[int] = set()
        self._prompt = prompt
        self._hidden = hidden
        self._answered = 0
        self._running: dict[Address, tuple[int, tuple[int, ...], float]] = {}

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len({number for _, number in self.sent.values()} - {0})

    def steps(self) -> int:
        """Segments between the first and the last one judged in a round, summed over rounds."""
        last = {self.sent[verdict.segment][1]: verdict.segment for verdict in self.verdicts}
        first = {
            number: segment for segment, (_, number) in sorted(self.sent.items(), reverse=True)
        }
        return sum(segment - first[number] for number, segment in last.items() if number)

    def __call__(self, node: Address, now: float, event: Input, outputs: Sequence[Output]) -> None:
        timed = False
        if isinstance(event, Received):
            timed = self._receive(node, now, event)
        elif isinstance(event, Done) and node in self._running:
            self.spans.append(BusySpan(node, *self._running.pop(node), now))
        for output in outputs:
            match output:
                case Compute(Pass((part, *_)) | DraftPass((Draft(part), *_))):
                    self._running[node] = (part.segment, part.ids, now)
                case Send():
                    self._send(node, now, output)
                case Commit():
                    self._commit(now, output, timed)

    def _receive(self, node: Address, now: float, event: Received) -> bool:
        """Note what arrived at ``node``; whether the draft worker got the end of a timestep."""
        timed = False
        for message in (envelope.message for envelope in event.envelopes):
            if isinstance(message, Segment | Answer):
                self.arrived[node, message.segment] = now
            if node == DRAFT and isinstance(message, Answer):
                self._answered = max(message.segment, self._answered)
            elif node == DRAFT and isinstance(message, Synced):
                timed = True
                self.ends.append(now)
        return timed

    def _send(self, node: Address, now: float, output: Send) -> None:
        message = output.envelope.message
        if isinstance(message, Segment | Answer):
            if node == DRAFT and isinstance(message, Segment):
                self.sent[message.segment] = (now, message.round)
            if self.sent[message.segment][1]:
                self.messages[node] += 1
                profile = self.profile
                seconds = profile.transfer_seconds(output.to, output.envelope, hidden=self._hidden)
                self.kept[node] += seconds
                links = len(profile.way.route(node, output)) - 1
                self.travelled[node] += links * (profile.link.latency + seconds)

    def _commit(self, now: float, output: Commit, timed: bool) -> None:
        self.useful.update(getattr(output.prunes[0].message, "accepted", ()))
        number = self.sent[self._answered][1]
        judged = {self.sent[one.segment][1] for one in self.verdicts}
        self.verdicts.append(
            CommittedStep(now, len(output.tokens), self._answered, timed, number not in judged)
        )
        if not number:
            self.ends.append(now)

    def drafting(self) -> dict[str, float]:
        """The drafter's ``passes``, ``rows``, ``seconds`` and ``hidden`` after the first token.

        The prompt's rows are left out. ``hidden``: seconds during which a stage computed.
        """
        drafts = [
            span for span in self.spans if span.node == DRAFT and span.start >= self.verdicts[0].at
        ]
        hidden = 0.0
        last = 0.0
        for busy in sorted(
            (span for span in self.spans if span.node != DRAFT), key=lambda span: span.start
        ):
            start = max(busy.start, last)
            last = max(busy.end, last)
            hidden += sum(
                max(0.0, min(span.end, busy.end) - max(span.start, start)) for span in drafts
            )
        rows = sum(node >= self._prompt - 1 for span in drafts for node in span.ids)
        seconds = sum(span.end - span.start for span in drafts)
        return {"passes": len(drafts), "rows": rows, "seconds": seconds, "hidden": hidden}


class TraceBench:
    """The target's texts for some prompts, without loops, and a memoizing drafter.

    ``source``: the drafter's name in profiles. ``count``: maximum number of texts; 0: all.
    """

    def __init__(
        self, source: str, tokens: int, per_kind: int, temperature: float = 0.0, count: int = 0
    ) -> None:
        self.source = canonical(source)
        self.target = open_directory(default_pair()[0])
        self.drafter = load_sources(drafter_of(source), self.target, MemoDrafter)
        prompts = chosen_prompts(PROMPTS, per_kind)
        hidden = self.drafter.wants_hidden
        said = texts(prompts, [Sampling(temperature)], tokens, self.target, hidden=hidden)
        kept = [text for text in said if repeated_4grams(text.output) < LOOP]
        self.texts = kept[: count or None]
        repeated = sum(repeated_4grams(text.output) for text in self.texts) / max(
            1, len(self.texts)
        )
        self.line = (
            f"{len(self.texts)} prompts, {tokens} tokens, T = {temperature:g}, drafts by "
            f"{self.source}; "
            f"repeated 4-grams {repeated:.0%}, {len(said) - len(kept)} loops left out\n"
        )

    def run(self, strategy: str, profile: Profile, stages: int) -> tuple[list[Ran], list[Trace]]:
        """Simulate all texts one after another; their results and traces."""
        hidden = returns_hidden(self.drafter, build(strategy, stages))
        costs = profile_costs(profile, stages, self.source, hidden=hidden)
        runs = []
        traces = []
        known = History()
        for text in self.texts:
            traces.append(Trace(profile, len(text.prompt), hidden=hidden))
            runs.append(
                simulate(
                    text,
                    strategy,
                    stages,
                    self.target,
                    self.drafter,
                    costs,
                    None,
                    traces[-1],
                    known,
                )
            )
        return runs, traces
