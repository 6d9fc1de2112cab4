"""The draft worker's machine: jobs come in, sessions run, finished jobs are reported.

    message   job unknown                     job running                job closing
    Submit    start it (encode, then open)    (duplicate) ignore         ignore
    Result    ignore                          answer, judge, go on       ignore
    Report    ignore                          ignore                     count; all in: finish
    Fault     ignore                          close the stages, finish   ignore
    Revoke    ignore                          forget                     forget
    Synced    ignore                          end a timestep              ignore

One executor serves all sessions: encoding first, then drafting, sessions in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flowspec.core.drafting.drafting import DRAFT_TREE_ROWS
from flowspec.core.job.session import Session
from flowspec.core.job.strategy import Strategy
from flowspec.core.protocol.machine import (
    Accepted,
    Allocate,
    Done,
    Draft,
    DraftDone,
    Encode,
    EncodeDone,
    Finish,
    Input,
    Learn,
    Output,
    Poll,
    Received,
    Refused,
    Release,
    Run,
    Tick,
    WorkFailed,
)
from flowspec.core.protocol.messages import (
    Answer,
    Envelope,
    Fault,
    Meter,
    Revoke,
    StageReport,
    Submit,
    Synced,
    stage_node,
)
from flowspec.core.run.history import History
from flowspec.core.run.limits import Limits
from flowspec.core.run.spec import JobSpec, parse
from flowspec.errors import ConfigError, JobError, ProtocolError, StateError

#: How long a finished job waits for the stages' reports before it ends without them, seconds.
REPORT_SECONDS = 2.0
Build = Callable[[str, int], Strategy]


@dataclass(slots=True)
class _Running:
    session: Session
    meters: dict[int, Meter] = field(default_factory=dict)
    closing_since: float | None = None


@dataclass(frozen=True, slots=True)
class _Encoding:
    submit: Submit
    spec: JobSpec


class DraftMachine:
    """``build(spec, stages)`` makes the strategy a job names; it raises ConfigError for a bad name.

    ``history``: what was found out on this pipeline before; it is added to.
    """

    def __init__(self, limits: Limits, build: Build, history: History | None = None) -> None:
        self._limits = limits
        self._history = history if history is not None else History()
        self._build = build
        self._jobs: dict[str, _Running] = {}
        self._encoding: dict[str, _Encoding] = {}
        self._last_stage = stage_node(limits.stages)
        self._working: Draft | Encode | None = None
        self._started_at = 0.0

    @property
    def sessions(self) -> dict[str, Session]:
        """The running sessions by job."""
        return {job: running.session for job, running in self._jobs.items()}

    @property
    def runnable(self) -> bool:
        drafting = (
            job.session.drafting.has_work
            for job in self._jobs.values()
            if job.closing_since is None
        )
        return self._working is None and (bool(self._encoding) or any(drafting))

    @property
    def continuing(self) -> bool:
        return self._working is None and any(
            job.session.drafting.continuing for job in self._jobs.values()
        )

    @property
    def deadline(self) -> float | None:
        return min((self._due(running) for running in self._jobs.values()), default=None)

    def _due(self, running: _Running) -> float:
        if running.closing_since is not None:
            return running.closing_since + REPORT_SECONDS
        return running.session.progress_at + running.session.patience

    def step(self, event: Input, now: float) -> Sequence[Output]:
        match event:
            case Received(envelopes):
                return [output for envelope in envelopes for output in self._receive(envelope, now)]
            case Poll():
                return self._start_work(now) if self.runnable else []
            case Done(result) if self._working is not None:
                return self._end_work(result, now)
            case Tick():
                return self._tick(now)
            case Refused():
                return self._refused(event)
            case _:
                raise StateError(f"the draft worker cannot take {type(event).__name__} now")

    # ---- messages --------------------------------------------------------------------------------

    def _receive(self, envelope: Envelope, now: float) -> list[Output]:
        message = envelope.message
        if isinstance(message, Submit):
            return self._submit(message, now)
        running = self._jobs.get(message.job)
        if isinstance(message, Revoke):
            encoding = self._encoding.pop(message.job, None)
            if encoding is not None:
                return [Release(message.job)]
            if running is None or running.session.epoch >= message.epoch:
                return []
            del self._jobs[message.job]
            return [Release(message.job)]
        if running is None or message.epoch != running.session.epoch:
            return []
        session = running.session
        try:
            if not session.seen.accept(envelope.sender, envelope.seq):
                return []
            match message:
                case Answer(tokens=tokens):
                    if any(not 0 <= token < self._limits.vocabulary for token in tokens):
                        raise ProtocolError("an answer names a token outside the vocabulary")
                    session.answer(envelope.sender, message, now)
                case Synced():
                    session.synced(message, now)
                case StageReport(stage=stage, meter=meter):
                    running.meters[stage] = meter
                case Fault(reason=reason):
                    return self._fail(running, reason)
        except (ProtocolError, JobError) as error:
            return self._fail(running, str(error))
        return [*self._learn(session, envelope), *self._collect(running, now)]

    def _learn(self, session: Session, envelope: Envelope) -> list[Output]:
        """Hidden rows that came with an answer go to the drafter before it works again."""
        message = envelope.message
        if (
            not session.returns.hidden
            or not isinstance(message, Answer)
            or envelope.sender != self._last_stage
        ):
            return []
        return (
            [Learn(message.job, message.epoch, message.segment, message.ids)] if message.ids else []
        )

    def _collect(self, running: _Running, now: float) -> list[Output]:
        session = running.session
        outputs = session.out.take()
        if session.closing and running.closing_since is None:
            running.closing_since = now
        if running.closing_since is not None and len(running.meters) == session.workers:
            outputs += self._finish(running, session.closing, "")
        return outputs

    # ---- beginning -------------------------------------------------------------------------------

    def _submit(self, message: Submit, now: float) -> list[Output]:
        if message.job in self._jobs or message.job in self._encoding:
            return []
        try:
            spec = parse(dict(message.fields))
            self._build(spec.strategy, self._limits.stages)
        except ConfigError as error:
            return [_refused(message, str(error))]
        if spec.prompt_ids is not None:
            return self._start(message, spec, spec.prompt_ids, now)
        self._encoding[message.job] = _Encoding(message, spec)
        return []

    def _start(
        self, message: Submit, spec: JobSpec, prompt: tuple[int, ...], now: float
    ) -> list[Output]:
        limits = self._limits
        if not prompt:
            return [_refused(message, "the prompt has no tokens; give it some text")]
        if len(prompt) >= limits.context:
            reason = (
                f"the prompt has {len(prompt)} tokens; "
                f"the model's context is {limits.context}: shorten it"
            )
            return [_refused(message, reason)]
        if max(prompt) >= limits.vocabulary:
            reason = (
                f"prompt_ids has token {max(prompt)}; "
                f"the model's vocabulary ends at {limits.vocabulary - 1}"
            )
            return [_refused(message, reason)]
        strategy = self._build(spec.strategy, limits.stages)
        # A recording has this job alone, so what it chose must follow from itself.
        history = History() if spec.record else self._history
        session = Session(message.job, message.epoch, spec, prompt, limits, strategy, now, history)
        running = self._jobs[message.job] = _Running(session)
        capacity = len(prompt) + session.budget + DRAFT_TREE_ROWS
        return [
            Accepted(message.job, message.epoch, prompt, spec.strategy),
            Allocate(message.job, message.epoch, capacity, spec.sampling, session.returns),
            *self._collect(running, now),
        ]

    # ---- work ------------------------------------------------------------------------------------

    def _start_work(self, now: float) -> list[Output]:
        work = self._next_work()
        if work is None:
            return []
        self._working = work
        self._started_at = now
        return [Run(work)]

    def _next_work(self) -> Draft | Encode | None:
        for encoding in self._encoding.values():
            return Encode(encoding.submit.job, encoding.spec.prompt or "", encoding.spec.raw)
        for job, running in self._jobs.items():
            session = running.session
            if running.closing_since is None and session.drafting.has_work:
                self._jobs[job] = self._jobs.pop(job)  # its turn is over: others first next time
                session.tally.draft_passes += 1
                return session.drafting.next_work(session.tree)
        return None

    def _end_work(self, result: object, now: float) -> list[Output]:
        work = self._working
        self._working = None
        if isinstance(work, Encode):
            encoding = self._encoding.pop(work.job, None)
            if encoding is None:
                return []
            if isinstance(result, EncodeDone):
                return self._start(encoding.submit, encoding.spec, result.ids, now)
            return [_refused(encoding.submit, _why(result))]
        running = self._jobs.get(work.part.job) if work else None
        if running is None:
            return []
        session = running.session
        session.tally.draft_seconds += now - self._started_at
        if not isinstance(result, DraftDone):
            return self._fail(running, f"the draft model could not compute: {_why(result)}")
        try:
            session.progress_at = now  # a slow drafter is no lost message
            session.drafting.done(result, session.tree, now - self._started_at)
            session.settle(now)
        except (ProtocolError, JobError) as error:
            return self._fail(running, str(error))
        return self._collect(running, now)

    # ---- ending ----------------------------------------------------------------------------------

    def _tick(self, now: float) -> list[Output]:
        outputs: list[Output] = []
        for running in list(self._jobs.values()):
            if now < self._due(running):
                continue
            if running.closing_since is not None:
                outputs += self._finish(running, running.session.closing, "")
            else:
                waited = running.session.patience
                outputs += self._fail(
                    running, f"no answer from the pipeline for {waited:g} s: a message was lost"
                )
        return outputs

    def _refused(self, event: Refused) -> list[Output]:
        running = self._jobs.get(event.job)
        if running is None or running.session.epoch != event.epoch:
            return []
        if not event.stale:
            return self._fail(running, event.reason)
        del self._jobs[event.job]
        return [Release(event.job)]

    def _fail(self, running: _Running, reason: str) -> list[Output]:
        """End the job with an error. What was committed before stays in its output."""
        session = running.session
        if session.job not in self._jobs:
            return []
        if not session.closing:
            session.close_stages()
        return self._finish(running, "error", reason)

    def _finish(self, running: _Running, reason: str, error: str) -> list[Output]:
        session = running.session
        del self._jobs[session.job]
        stats = session.tally.stats(session.output, running.meters, self._limits.stages)
        if session.strategy.decisions:
            stats["decisions"] = session.strategy.decisions
        outputs = session.out.take()
        return [
            *outputs,
            Finish(session.job, session.epoch, reason, error, stats),
            Release(session.job),
        ]


def _refused(message: Submit, reason: str) -> Finish:
    return Finish(message.job, message.epoch, "error", reason, {})


def _why(result: object) -> str:
    return result.reason if isinstance(result, WorkFailed) else "the executor gave a strange answer"
