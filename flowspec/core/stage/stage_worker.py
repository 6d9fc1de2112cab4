"""A verify stage: computes segments against its KV rows, applies prunes, forwards what is left.

Theory of operation. The log is drained before every pass, so all prunes known by then have been
applied; a pass takes the first waiting segment (of each of up to ``parts_per_pass`` jobs), drops
its dead rows and computes the rest. Nobody waits for a prune. A stage knows no strategy.

    message    job unknown         job open                          job failed
    Open       open it             (duplicate) ignore                ignore
    Segment    keep for its Open   wait for a pass                   ignore
    Prune      keep for its Open   edit the slots                    ignore
    Close      ignore              report, free, forget              report, free, forget
    Revoke     ignore              free, forget                      free, forget
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.protocol.machine import (
    Allocate,
    Choice,
    Complete,
    Discard,
    Done,
    Input,
    Output,
    Part,
    Pass,
    PassDone,
    Poll,
    Received,
    Refused,
    Release,
    Rows,
    Run,
    Send,
    WorkFailed,
)
from flowspec.core.protocol.messages import (
    DRAFT,
    GRAPH,
    Answer,
    Close,
    Envelope,
    Fault,
    Message,
    Open,
    Prune,
    Revoke,
    Segment,
    StageReport,
    middle_node,
    stage_node,
)
from flowspec.core.stage.stage_run import StageJob, onward, rows_of
from flowspec.errors import GapError, ProtocolError, StateError

#: Messages kept for jobs whose Open has not arrived; more than this are dropped, and then missed as
#: gaps.
EARLY_MESSAGES = 1024
#: Ended jobs remembered, so that their late messages are not mistaken for early ones.
ENDED_JOBS = 1024


@dataclass(slots=True)
class _RunningPart:
    """One part of the pass that is being computed, with the segment it came from."""

    segment: Segment
    part: Part


class StageMachine:
    """Verify stage ``stage`` of ``stages``, or middle model ``middle``, which reports as a stage
    behind the last.
    """

    def __init__(
        self, stage: int, stages: int, *, middle: int = 0, parts_per_pass: int = 1
    ) -> None:
        self.name = middle_node(middle) if middle else stage_node(stage)
        self.stage = stages + middle if middle else stage
        self.last = bool(middle) or stage == stages
        self._next = DRAFT if self.last else stage_node(stage + 1)
        self._parts_per_pass = parts_per_pass
        self._jobs: dict[str, StageJob] = {}
        self._queue: deque[Segment] = deque()
        self._running: list[_RunningPart] = []
        self._started_at = 0.0
        self._early: dict[str, list[Envelope]] = {}
        self._ended: dict[str, int] = {}  # job -> highest epoch that ended here

    @property
    def runnable(self) -> bool:
        return bool(self._queue) and not self._running

    continuing = False
    deadline = None

    @property
    def open_jobs(self) -> tuple[str, ...]:
        """Jobs whose rows this stage holds."""
        return tuple(self._jobs)

    def step(self, event: Input, now: float) -> Sequence[Output]:
        match event:
            case Received(envelopes):
                return [output for envelope in envelopes for output in self._receive(envelope)]
            case Poll():
                return self._start_pass(now) if self.runnable else []
            case Done(result) if self._running:
                return self._end_pass(result, now)
            case Refused():
                return self._refused(event)
            case _:
                raise StateError(f"stage {self.stage} cannot take {type(event).__name__} now")

    # ---- messages --------------------------------------------------------------------------------

    def _receive(self, envelope: Envelope) -> list[Output]:
        message = envelope.message
        if isinstance(message, Revoke):
            return self._drop(message.job, message.epoch - 1)
        job = self._jobs.get(message.job)
        if isinstance(message, Open):
            return self._open(envelope, message)
        if job is None or message.epoch > job.opened.epoch:
            self._keep_early(envelope)
            return []
        if message.epoch < job.opened.epoch:
            return []
        if job.failed:
            return self._close(job) if isinstance(message, Close) else []
        try:
            return (
                self._take(job, envelope) if job.seen.accept(envelope.sender, envelope.seq) else []
            )
        except ProtocolError as error:
            return self._fail(job, str(error))

    def _open(self, envelope: Envelope, message: Open) -> list[Output]:
        if message.epoch <= self._ended.get(message.job, -1) or message.job in self._jobs:
            return []
        job = StageJob(self.stage, message, last=self.last)
        self._jobs[message.job] = job
        allocate = Allocate(
            message.job, message.epoch, message.capacity, message.sampling, message.returns
        )
        outputs: list[Output] = [allocate]
        try:
            job.seen.accept(envelope.sender, envelope.seq)
        except GapError as error:
            return [*outputs, *self._fail(job, str(error))]
        for early in self._early.pop(message.job, []):
            outputs += self._receive(early)
        return outputs

    def _keep_early(self, envelope: Envelope) -> None:
        message = envelope.message
        if message.epoch <= self._ended.get(message.job, -1):
            return
        if sum(map(len, self._early.values())) < EARLY_MESSAGES:
            self._early.setdefault(message.job, []).append(envelope)

    def _take(self, job: StageJob, envelope: Envelope) -> list[Output]:
        match envelope.message:
            case Close():
                return self._close(job)
            case Segment() as segment:
                self._queue.append(segment)
                return []
            case Prune() as prune:
                job.prune(prune)
                return []
            case other:
                raise StateError(
                    f"stage {self.stage} got a {type(other).__name__}, which no stage takes"
                )

    def _close(self, job: StageJob) -> list[Output]:
        name = job.opened.job
        epoch = job.opened.epoch
        queued = sum(len(segment.ids) for segment in self._queue if segment.job == name)
        report = StageReport(name, epoch, self.stage, job.close(queued))
        return [self._send(job, DRAFT, report), *self._drop(name, epoch)]

    def _fail(self, job: StageJob, reason: str) -> list[Output]:
        job.failed = True
        fault = Fault(job.opened.job, job.opened.epoch, self.name, reason)
        return [self._send(job, DRAFT, fault)]

    def _refused(self, event: Refused) -> list[Output]:
        job = self._jobs.get(event.job)
        if job is None or job.opened.epoch != event.epoch or job.failed:
            return []
        return self._drop(event.job, event.epoch) if event.stale else self._fail(job, event.reason)

    def _drop(self, name: str, epoch: int) -> list[Output]:
        """Forget ``name`` if its epoch is at most ``epoch``."""
        self._ended[name] = max(epoch, self._ended.get(name, -1))
        while len(self._ended) > ENDED_JOBS:
            del self._ended[next(iter(self._ended))]
        self._early.pop(name, None)
        job = self._jobs.get(name)
        if job is None or job.opened.epoch > epoch:
            return []
        del self._jobs[name]
        self._queue = deque(segment for segment in self._queue if segment.job != name)
        return [Release(name)]

    def _start_pass(self, now: float) -> list[Output]:
        """Look at the first waiting segment of up to ``parts_per_pass`` jobs, and at no more: what
        a job's segments meet then does not depend on the other jobs, so that it can be replayed
        alone.
        """
        outputs: list[Output] = []
        later: deque[Segment] = deque()
        seen: set[str] = set()
        while self._queue and len(seen) < self._parts_per_pass:
            segment = self._queue.popleft()
            if segment.job in seen:
                later.append(segment)
                continue
            seen.add(segment.job)
            job = self._jobs[segment.job]
            running = None if job.failed else self._plan(job, segment, outputs)
            if running is not None:
                self._running.append(running)
            elif job.failed:
                outputs.append(Discard(segment.job, segment.segment))
        self._queue.extendleft(reversed(later))
        if self._running:
            self._started_at = now
            outputs.append(Run(Pass(tuple(running.part for running in self._running))))
        return outputs

    def _plan(self, job: StageJob, segment: Segment, outputs: list[Output]) -> _RunningPart | None:
        """The part for what is left of ``segment``; None, with what follows from it,
        if nothing is.
        """
        kept = job.left_of(segment)
        left = rows_of(segment, kept)
        if not kept:
            outputs.append(Discard(segment.job, segment.segment))
            outputs += self._forward(job, left, left.seconds, Choice(), None)
            return None
        try:
            return _RunningPart(left, job.plan(left, kept))
        except ProtocolError as error:
            outputs += self._fail(job, str(error))
            return None

    def _end_pass(self, result: object, now: float) -> list[Output]:
        running = self._running
        self._running = []
        outputs: list[Output] = []
        rows = sum(len(entry.part.ids) for entry in running)
        seconds = now - self._started_at
        for at, entry in enumerate(running):
            job = self._jobs.get(entry.segment.job)
            if job is None or job.opened.epoch != entry.segment.epoch or job.failed:
                continue
            if not isinstance(result, PassDone):
                why = (
                    result.reason
                    if isinstance(result, WorkFailed)
                    else "the executor gave a strange answer"
                )
                outputs += self._fail(job, f"stage {self.stage} could not compute: {why}")
                continue
            job.computed(entry.segment.ids, seconds * len(entry.part.ids) / rows)
            slowest = max(seconds, entry.segment.seconds)
            outputs += self._forward(job, entry.segment, slowest, result.choices[at], at)
        return outputs

    def _forward(
        self, job: StageJob, segment: Segment, seconds: float, choice: Choice, part: int | None
    ) -> list[Output]:
        """Send on what is still live of a computed (or emptied) segment, and complete its task."""
        live = job.still_live(segment.ids)
        if self.last:
            message, rows = self._answer(job, segment, seconds, choice, live, part)
        else:
            message, rows = self._pass_on(segment, seconds, live, part)
        done = (segment.task,) if segment.task else ()
        if message is None:
            return [Complete(segment.job, segment.epoch, done)] if done else []
        if not segment.route:
            envelope = Envelope(self.name, job.sent.next(self._next), message)
            return [Send(self._next, envelope, rows, completes=done)]
        hop = segment.route[0]
        return [Send(self._next, Envelope(GRAPH, 0, message), rows, hop.task, hop.after, done)]

    def _pass_on(
        self, segment: Segment, seconds: float, live: list[int], part: int | None
    ) -> tuple[Message | None, Rows | None]:
        if not live and not segment.marker:
            return None, None
        rows = Rows(part, tuple(live)) if part is not None and live else None
        return onward(segment, live, seconds), rows

    def _answer(
        self,
        job: StageJob,
        segment: Segment,
        seconds: float,
        choice: Choice,
        live: list[int],
        part: int | None,
    ) -> tuple[Message | None, Rows | None]:
        skipped = len(segment.ids) - len(choice.tokens)
        kept = [at for at in live if at >= skipped]
        if not kept and not segment.marker:
            return None, None
        at = [offset - skipped for offset in kept]
        result = Answer(
            segment.job,
            segment.epoch,
            segment.segment,
            tuple(segment.ids[offset] for offset in kept),
            tuple(choice.tokens[i] for i in at),
            tuple(choice.logprobs[i] for i in at) if choice.logprobs else (),
            tuple(choice.top[i] for i in at) if choice.top else (),
            seconds,
        )
        rows = Rows(part, tuple(kept)) if job.opened.returns.hidden and part is not None else None
        return result, rows

    def _send(self, job: StageJob, to: str, message: Message) -> Send:
        return Send(to, Envelope(self.name, job.sent.next(to), message))
