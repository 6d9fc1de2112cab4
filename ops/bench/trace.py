"""What the machines of a simulated run did, and the runs that are looked at so."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from flowspec.core.job.stats import repeated_4grams
from flowspec.core.protocol.machine import (
    Commit,
    Done,
    Draft,
    Input,
    Output,
    Pass,
    Received,
    Run,
    Send,
)
from flowspec.core.protocol.messages import DRAFT, Answer, Segment, Synced
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

    node: str
    segment: int
    ids: tuple[int, ...]
    start: float
    end: float


class CommittedStep(NamedTuple):
    """A commit of ``tokens`` at ``at``, brought about by the answer to ``segment``, or by the end
    of a timestep if ``timed``; ``planted``: its root was not in the tree, so the pipeline had
    been refilled.
    """

    at: float
    tokens: int
    segment: int
    timed: bool
    planted: bool


class Trace:
    """A simulation's tap: what the machines of one job with ``prompt`` rows did on ``profile``.

    ``messages``, ``kept``: by sender, how many carried tree rows, and seconds they held its
    link. ``sent``: by segment, when, and in which round. ``arrived``: by node and segment.
    ``ends``: of timesteps.
    """

    def __init__(self, profile: Profile, prompt: int, *, hidden: bool = False) -> None:
        self.profile = profile
        self.messages: Counter[str] = Counter()
        self.kept: dict[str, float] = defaultdict(float)
        self.spans: list[BusySpan] = []
        self.sent: dict[int, tuple[float, int]] = {}
        self.arrived: dict[tuple[str, int], float] = {}
        self.ends: list[float] = []
        self.verdicts: list[CommittedStep] = []
        self.useful: set[int] = set()  # ids of rows that were accepted
        self._prompt = prompt
        self._hidden = hidden
        self._answered = 0
        self._running: dict[str, tuple[int, tuple[int, ...], float]] = {}

    @property
    def rounds(self) -> int:
        """How many there were."""
        return len({number for _, number in self.sent.values()} - {0})

    def steps(self) -> int:
        """How many segments behind the first of its round lies the last one judged, over all
        rounds.
        """
        last = {self.sent[verdict.segment][1]: verdict.segment for verdict in self.verdicts}
        first = {
            number: segment for segment, (_, number) in sorted(self.sent.items(), reverse=True)
        }
        return sum(segment - first[number] for number, segment in last.items() if number)

    def __call__(self, node: str, now: float, event: Input, outputs: Sequence[Output]) -> None:
        timed = False
        if isinstance(event, Received):
            for message in (envelope.message for envelope in event.envelopes):
                if isinstance(message, Segment | Answer):
                    self.arrived[node, message.segment] = now
                if node == DRAFT and isinstance(message, Answer):
                    self._answered = max(message.segment, self._answered)
                elif node == DRAFT and isinstance(message, Synced):
                    timed = True
                    self.ends.append(now)
        elif isinstance(event, Done) and node in self._running:
            self.spans.append(BusySpan(node, *self._running.pop(node), now))
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
        if isinstance(message, Segment | Answer):
            if node == DRAFT and isinstance(message, Segment):
                self.sent[message.segment] = (now, message.round)
            if self.sent[message.segment][1]:
                self.messages[node] += 1
                self.kept[node] += self.profile.transfer_seconds(
                    output.to, output.envelope, hidden=self._hidden
                )

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
        """Of the drafter after the first token, the prompt's rows left out: ``passes``, ``rows``,
        ``seconds``, and of these ``hidden``, during which some stage computed.
        """
        drafts = [
            span for span in self.spans if span.node == DRAFT and span.start >= self.verdicts[0].at
        ]
        hidden = last = 0.0
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
    """The target's texts to some prompts, loops left out, and remembering drafters, by their
    profile name.

    ``count``: texts at most, 0: all.
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
        """All texts one after another, simulated, and what the machines did."""
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
