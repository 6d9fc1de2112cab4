"""A verify stage: computes segments against its KV rows, applies prunes, forwards the live rows.

The log is drained before every pass, so all prunes that have arrived are applied. A pass takes one
waiting segment of every run (``waiting`` says which), drops the dead rows and computes the rest. A
stage never waits for a prune and does not depend on the strategy.

    message    run unknown         run open                          run failed       run ended
    Open       open it, if it is   (duplicate) ignore                ignore           ignore
               this holder's
    Segment    keep for its Open   wait for a pass                   ignore           ignore
    Prune      keep for its Open   drop rows before the next pass    ignore           ignore
    Retain     keep for its Open   keep rows                         ignore           ignore
    Close      keep for its Open   keep rows, report, free, end      report, free     ignore
    Revoke     end earlier runs    free and end earlier runs of its job

Every run is kept under its ``RunKey``: a message of an earlier epoch belongs to an ended run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowspec.core.protocol.addresses import (
    DRAFT,
    GRAPH,
    Address,
    middle_address,
    stage_address,
)
from flowspec.core.protocol.holders import NO_LEASE, names
from flowspec.core.protocol.machine import (
    Allocate,
    Complete,
    Compute,
    Discard,
    Done,
    Evict,
    Input,
    Keep,
    Output,
    PassRows,
    Poll,
    Received,
    Refused,
    Release,
    Send,
)
from flowspec.core.protocol.messages import (
    MOST_REASON,
    Answer,
    Close,
    Envelope,
    Fault,
    Message,
    Open,
    PrefixLost,
    Prune,
    Retain,
    Revoke,
    Segment,
    StageReport,
)
from flowspec.core.protocol.work import Choice, Kept, Part, Pass, PassDone, WorkFailed
from flowspec.core.run.ended import EndedRuns
from flowspec.core.run.key import RunKey
from flowspec.core.stage.early import EarlyMessages
from flowspec.core.stage.next_pass import WaitingSegments, is_of_prompt
from flowspec.core.stage.prompt_turns import PromptTurns
from flowspec.core.stage.stage_run import Slowest, StageRun, onward, rows_of
from flowspec.errors import GapError, ProtocolError, StateError

#: Most runs open at once, and most segments that wait: more than any draft worker opens or sends.
MOST_RUNS = 1024
MOST_WAITING = 1 << 16


@dataclass(slots=True)
class _Computing:
    """A part of the current pass, and its segment."""

    segment: Segment
    part: Part


@dataclass(slots=True)
class _Computed:
    """A segment after its pass: its rows, their choices, and its slowest pass so far.

    ``part``: its number in the pass; None: an emptied segment, of which no rows were computed.
    """

    segment: Segment
    choice: Choice
    slowest: Slowest
    part: int | None


class StageMachine:
    """Verify stage ``stage`` of ``stages``, or middle model ``middle``.

    A middle model reports as stage ``stages + middle``. ``generation``: under which it holds its
    role; runs that were assigned to another holder are as if they had ended.
    """

    def __init__(
        self, stage: int, stages: int, *, middle: int = 0, generation: int = NO_LEASE
    ) -> None:
        self.address = middle_address(middle) if middle else stage_address(stage)
        self.stage = stages + middle if middle else stage
        self.last = bool(middle) or stage == stages
        self._generation = generation
        self._next: Address = DRAFT if self.last else stage_address(stage + 1)
        self._runs: dict[RunKey, StageRun] = {}
        self._early = EarlyMessages()
        self._ended = EndedRuns()
        self._waiting = WaitingSegments()
        self._kept: dict[RunKey, int] = {}  # rows that are kept for later runs
        self._computing: tuple[_Computing, ...] = ()  # the parts of the current pass
        self._started_at = 0.0
        self._prompt_turns = PromptTurns()

    @property
    def runnable(self) -> bool:
        return bool(self._waiting) and not self._computing

    continuing = False
    deadline = None

    @property
    def open_runs(self) -> tuple[RunKey, ...]:
        """Runs whose rows this stage holds."""
        return tuple(self._runs)

    def returns_hidden(self, run: RunKey) -> bool:
        """Whether the answers to ``run`` carry hidden rows."""
        known = self._runs.get(run)
        return known is not None and known.opened.returns.hidden

    @property
    def idle(self) -> bool:
        return not self._runs

    def serves(self, message: Message) -> bool:
        """See ``Machine``."""
        return not isinstance(message, Open) or names(
            message.generations, self.stage, self._generation
        )

    def step(self, event: Input, now: float) -> Sequence[Output]:
        match event:
            case Received(envelopes):
                self._early.drop_old(now)
                return [output for envelope in envelopes for output in self._receive(envelope, now)]
            case Poll():
                return self._start_pass(now) if self.runnable else []
            case Done(result) if self._computing:
                return self._end_pass(result, now)
            case Refused():
                return self._refused(event)
            case _:
                raise StateError(f"stage {self.stage} cannot take {type(event).__name__} now")

    # ---- messages --------------------------------------------------------------------------------

    def _receive(self, envelope: Envelope, now: float) -> list[Output]:
        message = envelope.message
        if isinstance(message, Revoke):
            return self._end_before(message.run)
        if message.run in self._ended:
            return []
        if isinstance(message, Open):
            return self._open(envelope, message, now)
        run = self._runs.get(message.run)
        if run is None:
            self._early.keep(envelope, now)
            return []
        if run.failed:
            return self._close(run, message) if isinstance(message, Close) else []
        try:
            is_new = run.seen.accept(envelope.sender, envelope.seq)
            return self._take(run, message) if is_new else []
        except ProtocolError as error:
            return self._fail(run, str(error))

    def _open(self, envelope: Envelope, message: Open, now: float) -> list[Output]:
        if message.run in self._runs:
            return []
        outputs = self._end_before(message.run) if message.run.epoch > 1 else []
        if not self.serves(message):
            self._forget(message.run)
            # What has come for it beside the log is dropped with its rows.
            return [*outputs, Release(message.run)]
        if len(self._runs) >= MOST_RUNS:
            self._forget(message.run)
            reason = f"stage {self.stage} has {MOST_RUNS} open runs already"
            fault = Envelope(self.address, 1, Fault(message.run, reason))
            return [*outputs, Release(message.run), Send(DRAFT, fault)]
        held = self._held(message)
        run = StageRun(self.stage, message, last=self.last, held=held)
        self._runs[message.run] = run
        outputs.append(_allocation(message, held))
        if run.lacks_prefix:
            outputs.append(self._send(run, DRAFT, PrefixLost(message.run, self.stage)))
        try:
            run.seen.accept(envelope.sender, envelope.seq)
        except GapError as error:
            return [*outputs, *self._fail(run, str(error))]
        for early in self._early.take(message.run):
            outputs += self._receive(early, now)
        return outputs

    def _held(self, message: Open) -> int:
        """Rows that the run begins with: all that it should, or none."""
        prefix = message.prefix
        if prefix is None or self._kept.get(prefix.run, 0) < prefix.rows:
            return 0
        return prefix.rows

    def _take(self, run: StageRun, message: Message) -> list[Output]:
        match message:
            case Segment():
                if len(self._waiting) >= MOST_WAITING:
                    raise StateError(f"{MOST_WAITING} segments wait at stage {self.stage} already")
                self._waiting.add(message)
                return []
            case Prune():
                run.prune(message)
                return []
            case Retain():
                return self._keep(message, run.share(message.keep))
            case Close():
                return self._close(run, message)
            case _:
                raise StateError(
                    f"stage {self.stage} got a {type(message).__name__}, which no stage takes"
                )

    def _close(self, run: StageRun, message: Close) -> list[Output]:
        key = run.opened.run
        kept = self._keep(message, run.keep(message.keep)) if message.keep else []
        report = StageReport(key, self.stage, run.close(self._waiting.rows(key)))
        return [*kept, self._send(run, DRAFT, report), *self._end(key)]

    def _keep(self, message: Close | Retain, rows: Kept | None) -> list[Output]:
        """Keep ``rows``, if all are here, and drop those of runs that are kept no longer."""
        gone = [key for key in self._kept if key not in message.kept]
        for key in gone:
            del self._kept[key]
        outputs: list[Output] = [Evict(key) for key in gone]
        if rows is not None:
            self._kept[message.run] = message.keep
            outputs.append(Keep(message.run, (rows,)))
        return outputs

    def _fail(self, run: StageRun, reason: str) -> list[Output]:
        run.failed = True
        return [self._send(run, DRAFT, Fault(run.opened.run, reason[:MOST_REASON]))]

    def _refused(self, event: Refused) -> list[Output]:
        if event.is_keep:
            kept = self._kept.pop(event.run, 0)
            return [Evict(event.run)] if kept else []
        run = self._runs.get(event.run)
        if run is None or run.failed:
            return []
        return self._end(event.run) if event.stale else self._fail(run, event.reason)

    def _end_before(self, run: RunKey) -> list[Output]:
        """End all runs of the job that are earlier than ``run``."""
        earlier = [key for key in self._runs if key.job == run.job and key.epoch < run.epoch]
        outputs = [output for key in earlier for output in self._end(key)]
        outputs += self._end(RunKey(run.job, run.epoch - 1))
        return outputs

    def _end(self, run: RunKey) -> list[Output]:
        """Drop ``run``; later messages for it are ignored."""
        self._forget(run)
        if self._runs.pop(run, None) is None:
            return []
        self._waiting.drop(run)
        return [Release(run)]

    def _forget(self, run: RunKey) -> None:
        self._ended.add(run)
        self._early.drop(self._ended)

    # ---- passes ----------------------------------------------------------------------------------

    def _start_pass(self, now: float) -> list[Output]:
        void = [segment for segment in self._waiting.firsts() if self._is_void(segment)]
        if void:
            # They must not take the place of their runs' next segments in the pass. It begins in a
            # step of its own, since another run's place in it is not in a run's recording.
            self._waiting.remove(void)
            return [output for segment in void for output in self._begin_part(segment, [])]
        outputs: list[Output] = []
        computing: list[_Computing] = []
        for segment in self._waiting.take(prompts=self._prompt_turns.is_due):
            outputs += self._begin_part(segment, computing)
        if not computing:
            return outputs
        self._computing = tuple(computing)
        self._started_at = now
        return [*outputs, Compute(Pass(tuple(known.part for known in computing)))]

    def _is_void(self, segment: Segment) -> bool:
        """Whether no row of ``segment``, its run's first, is to be computed."""
        run = self._runs[segment.run]
        return run.failed or run.is_void(segment)

    def _begin_part(self, segment: Segment, computing: list[_Computing]) -> list[Output]:
        """Append the part for the live rows of ``segment`` to ``computing``, if it has any."""
        run = self._runs[segment.run]
        if run.failed:
            return [Discard(segment.run, segment.segment)]
        if run.begins_anew(segment):
            run.begin_anew()
            return [_allocation(run.opened, 0), *self._begin_part(segment, computing)]
        if run.lacks_prefix:
            return [Discard(segment.run, segment.segment)]
        kept = run.live_part(segment)
        left = rows_of(segment, kept)
        if not kept:
            emptied = _Computed(left, Choice(), Slowest(left.seconds, left.rows), part=None)
            return [Discard(segment.run, segment.segment), *self._forward(run, emptied)]
        try:
            part = run.begin_pass(left, kept)
        except ProtocolError as error:
            return [*self._fail(run, str(error)), Discard(segment.run, segment.segment)]
        computing.append(_Computing(left, part))
        return []

    def _end_pass(self, result: object, now: float) -> list[Output]:
        computing = self._computing
        self._computing = ()
        rows = sum(len(known.part.ids) for known in computing)
        rows += result.others if isinstance(result, PassDone) else 0
        own = Slowest(now - self._started_at, rows)
        with_prompt = any(is_of_prompt(known.segment) for known in computing)
        self._prompt_turns.note(own.seconds, with_prompt=with_prompt)
        outputs: list[Output] = []
        for at, known in enumerate(computing):
            run = self._runs.get(known.segment.run)
            if run is None or run.failed:
                continue
            outcome = result.choices[at] if isinstance(result, PassDone) else result
            if not isinstance(outcome, Choice):
                why = "the executor returned an unexpected result"
                if isinstance(outcome, WorkFailed):
                    why = outcome.reason
                outputs += self._fail(run, f"stage {self.stage} could not compute: {why}")
                continue
            segment = known.segment
            run.end_pass(segment.ids, own.seconds)
            slowest = max(Slowest(segment.seconds, segment.rows), own)
            outputs += self._forward(run, _Computed(segment, outcome, slowest, part=at))
        return outputs

    def _forward(self, run: StageRun, computed: _Computed) -> list[Output]:
        """Forward the live rows of a computed (or emptied) segment, and complete its task."""
        segment = computed.segment
        live = run.still_live(segment.ids)
        if self.last:
            message, rows = self._answer(run, computed, live)
        else:
            message, rows = self._pass_on(computed, live)
        done = (segment.task,) if segment.task else ()
        if message is None:
            return [Complete(segment.run, done)] if done else []
        if not segment.route:
            envelope = Envelope(self.address, run.sent.next(self._next), message)
            return [Send(self._next, envelope, rows, completes=done)]
        hop = segment.route[0]
        return [Send(self._next, Envelope(GRAPH, 0, message), rows, hop.task, hop.after, done)]

    def _pass_on(
        self, computed: _Computed, live: list[int]
    ) -> tuple[Message | None, PassRows | None]:
        if not live and not computed.segment.marker:
            return None, None
        rows = None
        if computed.part is not None and live:
            rows = PassRows(computed.part, tuple(live))
        return onward(computed.segment, live, computed.slowest), rows

    def _answer(
        self, run: StageRun, computed: _Computed, live: list[int]
    ) -> tuple[Message | None, PassRows | None]:
        segment = computed.segment
        choice = computed.choice
        skipped = len(segment.ids) - len(choice.tokens)  # leading rows without a choice
        kept = [at for at in live if at >= skipped]
        if not kept and not segment.marker:
            return None, None
        answer = Answer(
            run=segment.run,
            segment=segment.segment,
            ids=tuple(segment.ids[at] for at in kept),
            tokens=tuple(choice.tokens[at - skipped] for at in kept),
            top=tuple(choice.top[at - skipped] for at in kept) if choice.top else (),
            seconds=computed.slowest.seconds,
            rows=computed.slowest.rows,
        )
        if not run.opened.returns.hidden or computed.part is None:
            return answer, None
        return answer, PassRows(computed.part, tuple(kept))

    def _send(self, run: StageRun, to: Address, message: Message) -> Send:
        return Send(to, Envelope(self.address, run.sent.next(to), message))


def _allocation(opened: Open, held: int) -> Allocate:
    """Room for the run, with the first ``held`` rows of the run that it begins with."""
    room = Allocate(opened.run, opened.capacity, opened.sampling, opened.returns)
    if not held or opened.prefix is None:
        return room
    return replace(room, source=opened.prefix.run, held=(held,))
