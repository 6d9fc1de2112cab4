"""The draft worker's machine: submitted jobs come in, sessions run, finished jobs are reported.

    message       run unknown      run known
    Submit        start it, if     (duplicate) ignore
                  it is this holder's
    Revoke        -                drop earlier runs of the job
    any other     ignore           what ``lifecycle.TAKES`` says of the run's state

A job's newer run replaces its older ones; their late messages carry a key that is unknown here. One
executor serves all runs: one pass of the drafter for all that wait for it, and beside the passes
one prompt at a time is encoded.

When runs begin: ``admission``. How those that run share the pipeline: ``load``. How they end:
``draft_runs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flowspec.core.job.admission import StartRules
from flowspec.core.job.draft_run import DraftRun
from flowspec.core.job.draft_runs import DraftRuns, rejected
from flowspec.core.job.load import Governor
from flowspec.core.protocol.addresses import Address, stage_address
from flowspec.core.protocol.bundles import MOST_ROWS
from flowspec.core.protocol.causes import FAILED, FULL, REFUSED
from flowspec.core.protocol.holders import NO_LEASE, names
from flowspec.core.protocol.machine import (
    Compute,
    Done,
    Granted,
    Input,
    Keep,
    Learn,
    OpenJob,
    Output,
    Poll,
    Received,
    Refused,
    Tick,
)
from flowspec.core.protocol.messages import (
    Answer,
    Envelope,
    Fault,
    Message,
    PrefixLost,
    Revoke,
    StageReport,
    Submit,
    Synced,
)
from flowspec.core.protocol.work import (
    Draft,
    DraftDone,
    DraftPass,
    DraftPassDone,
    Encode,
    Encoded,
    EncodeDone,
    EncodeFailed,
    EncodeTurns,
    Encoding,
    WorkFailed,
)
from flowspec.core.run.history import History
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.run.logprobs import asked_pairs, check_pairs
from flowspec.core.run.share import RunShare
from flowspec.core.run.spec import JobSpec, parse
from flowspec.core.session.lifecycle import Event, State
from flowspec.core.session.session import Session
from flowspec.core.session.stats import Tally
from flowspec.core.session.strategy import Strategy
from flowspec.errors import ConfigError, JobError, ProtocolError, StateError

#: Most jobs here at once, those that wait included: more than a scheduler assigns.
MOST_RUNS = 1024
Build = Callable[[str, int], Strategy]


class DraftMachine:
    """Sessions by run, and the one executor they share.

    ``build(strategy, stages)`` makes a job's strategy from its text, or raises ConfigError.
    ``history``: what earlier jobs of this pipeline measured; updated in place. ``governor``: shares
    the pipeline among the jobs. ``most_rows``: of all runs at a stage, KV rows; 0: no limit.
    ``generation``: under which it holds its role; runs assigned to another holder are ignored.
    ``row_unit``: stages have room for rows by so many at a time.
    """

    def __init__(
        self,
        limits: Limits,
        build: Build,
        history: History | None = None,
        governor: Governor | None = None,
        most_rows: int = 0,
        generation: int = NO_LEASE,
        row_unit: int = 1,
    ) -> None:
        self._generation = generation
        self._limits = limits
        self._build = build
        self._history = history if history is not None else History()
        self._runs = DraftRuns(limits)
        self._last_stage = stage_address(limits.stages)
        self._governor = governor if governor is not None else Governor(limits.stages)
        self._admission = StartRules(limits, most_rows, row_unit)
        self._working: DraftPass | None = None
        self._encoding: Encoding | None = None
        self._started_at = 0.0

    @property
    def sessions(self) -> dict[RunKey, Session]:
        """The running sessions."""
        return {key: run.session for key, run in self._runs.items() if run.session is not None}

    @property
    def runnable(self) -> bool:
        return self._working is None and (
            self._next_to_encode is not None
            or any(map(_has_to_draft, self._runs.values()))
            or self._admission.next_to_begin(self._runs) is not None
        )

    @property
    def continuing(self) -> bool:
        sessions = (run.drafting_session for run in self._runs.values())
        return self._working is None and any(
            session.drafting.continuing for session in sessions if session is not None
        )

    @property
    def deadline(self) -> float | None:
        due = (run.due for run in self._runs.values())
        return min((at for at in due if at is not None), default=None)

    @property
    def idle(self) -> bool:
        return not self._runs

    def serves(self, message: Message) -> bool:
        """See ``Machine``."""
        return not isinstance(message, Submit) or names(message.generations, 0, self._generation)

    def step(self, event: Input, now: float) -> Sequence[Output]:
        return [*self._take_input(event, now), *self._grant()]

    def _take_input(self, event: Input, now: float) -> list[Output]:
        match event:
            case Received(envelopes):
                return [output for envelope in envelopes for output in self._receive(envelope, now)]
            case Poll():
                return self._start_work(now)
            case Done(EncodeDone() | EncodeFailed() as found) if self._encoding is not None:
                return self._end_encoding(self._encoding, found, now)
            case Done(result) if self._working is not None:
                return self._end_pass(self._working, result, now)
            case Tick():
                return self._runs.end_overdue(now)
            case Refused():
                return self._refused(event)
            case Granted(run, share):
                return self._take_share(run, share)
            case _:
                raise StateError(f"the draft worker cannot take {type(event).__name__} now")

    # ---- messages --------------------------------------------------------------------------------

    def _receive(self, envelope: Envelope, now: float) -> list[Output]:
        message = envelope.message
        if isinstance(message, Submit):
            return self._submit(message, now)
        if isinstance(message, Revoke):
            return self._runs.drop_before(message.run)
        run = self._runs.get(message.run)
        if run is None:
            return []
        try:
            is_new = run.seen.accept(envelope.sender, envelope.seq)
            if not is_new or not run.lifecycle.takes(message):
                return []
            return self._take(run, envelope.sender, message, now)
        except (ProtocolError, JobError) as error:
            return self._runs.fail(run, str(error))

    def _take(self, run: DraftRun, sender: Address, message: Message, now: float) -> list[Output]:
        session = run.session
        assert session is not None  # no state without one takes a message
        learn: list[Output] = []
        match message:
            case Answer():
                is_targets = sender == self._last_stage
                if not is_targets:
                    message = self._of_middle(message)
                self._check_tokens(message)
                if is_targets and run.spec.logprobs is not None:
                    self._check_logprobs(message, run.spec.logprobs)
                if is_targets:
                    self._governor.note(message)  # middle models have passes of their own
                session.take_answer(sender, message, now)
                if session.returns.hidden and is_targets and message.ids:
                    # The drafter gets an answer's hidden rows before its next pass.
                    learn = [Learn(message.run, message.segment, message.ids)]
            case Synced():
                session.take_join(now)
            case StageReport():
                run.meters[message.stage] = message.meter
            case PrefixLost():
                session.lose_prefix(now)
            case Fault():
                return self._runs.fail(run, message.reason)
        return [*learn, *self._collect(run, now)]

    def _check_tokens(self, answer: Answer) -> None:
        if any(not 0 <= token < self._limits.vocabulary for token in answer.tokens):
            raise ProtocolError("an answer names a token outside the vocabulary")

    def _of_middle(self, answer: Answer) -> Answer:
        """``answer`` of a middle model, whose vocabulary may be padded beyond the target's."""
        most = self._limits.vocabulary
        if max(answer.tokens, default=0) < most:
            return answer
        return replace(answer, tokens=tuple(t if t < most else 0 for t in answer.tokens))

    def _check_logprobs(self, answer: Answer, logprobs: int) -> None:
        vocabulary = self._limits.vocabulary
        check_pairs(answer.tokens, answer.top, asked_pairs(logprobs), vocabulary)

    def _collect(self, run: DraftRun, now: float) -> list[Output]:
        """What the session has to send, and the job's end if all stages have reported."""
        session = run.session
        assert session is not None
        outputs = [*session.outbox.take(), *self._runs.evict()]
        drafts = session.take_drafts_to_share()
        if drafts:
            outputs.append(Keep(run.key, drafts))
        if run.lifecycle.state is State.CLOSING:
            if run.closing_since is None:
                run.closing_since = now
            if len(run.meters) == session.workers:
                outputs += self._runs.end(run, session, Event.REPORTED)
        return outputs

    # ---- shares ----------------------------------------------------------------------------------

    def _grant(self) -> list[Output]:
        """Tell the runs what they may use from now on, where that has changed."""
        decoding = {key: run.drafts for key, run in self._runs.items() if run.is_decoding}
        return [
            output
            for run, share in self._governor.changes(decoding).items()
            for output in self._take_share(run, share)
        ]

    def _take_share(self, key: RunKey, share: RunShare) -> list[Output]:
        run = self._runs.get(key)
        if run is None or run.session is None:
            return []
        run.session.take_share(share)
        return [Granted(key, share)]

    # ---- beginning -------------------------------------------------------------------------------

    def _submit(self, message: Submit, now: float) -> list[Output]:
        if message.run in self._runs or message.run in self._runs.ended:
            return []
        outputs = self._runs.drop_before(message.run)
        if not self.serves(message):
            self._runs.ended.add(message.run)
            return outputs
        if len(self._runs) >= MOST_RUNS:
            full = f"the draft worker has {MOST_RUNS} jobs already; submit the job again later"
            return [*outputs, rejected(message, full, FULL)]
        try:
            spec = parse(dict(message.fields))
            strategy = self._build(spec.strategy, self._limits.stages)
            _check_lossless(spec, strategy)
        except ConfigError as error:
            return [*outputs, rejected(message, str(error), REFUSED)]
        run = DraftRun(message, spec, now, strategy.pacing.has_barrier)
        chained = strategy.uses_middles and self._limits.middles > 0
        run.reuses = spec.reuse and not (spec.record or spec.tokenize or chained)
        run.drafts = strategy.draft_width > 0
        others = list(self._runs.values())
        self._runs[message.run] = run
        # A chat template may say the date, so a job that goes on has the prompt it was opened with.
        prompt = message.earlier.prompt_ids if message.earlier is not None else spec.prompt_ids
        if prompt is None:
            run.waits = self._admission.has_to_wait(run, others)
            return outputs
        return [*outputs, *self._take_prompt(run, prompt, now)]

    def _take_prompt(self, run: DraftRun, prompt: tuple[int, ...], now: float) -> list[Output]:
        """Begin ``run``, whose prompt has the ids ``prompt``, or let it wait."""
        run.prompt = prompt
        wrong, cause = self._admission.what_is_wrong_with(run, prompt)
        if wrong:
            return self._runs.reject(run, wrong, cause)
        others = [one for one in self._runs.values() if one is not run]
        run.waits = self._admission.has_to_wait(run, others)
        return [] if run.waits else self._start_or_await(run, prompt, now)

    def _begin(self, run: DraftRun, now: float) -> list[Output]:
        """Begin ``run``; nothing to put out if its prompt is to be encoded, or rows awaited."""
        run.waits = False
        return [] if run.prompt is None else self._start_or_await(run, run.prompt, now)

    def _start_or_await(self, run: DraftRun, prompt: tuple[int, ...], now: float) -> list[Output]:
        worth_awaiting = self._admission.worth_awaiting
        run.awaits = worth_awaiting(run, prompt, self._runs) if run.reuses else None
        return [] if run.awaits else self._start(run, prompt, now)

    def _start(self, run: DraftRun, prompt: tuple[int, ...], now: float) -> list[Output]:
        if run.spec.tokenize:
            return self._runs.end_encoded(run, prompt)
        run.lifecycle.fire(Event.ENCODED)
        strategy = self._build(run.spec.strategy, self._limits.stages)
        queued = run.submit.queued_seconds
        tally = Tally(run.submitted_at - queued, now, queued, lossy=strategy.lossy)
        earlier = run.submit.earlier
        if earlier is not None and earlier.committed:
            tally.resumed = len(earlier.output)
            tally.resumed_first_seconds = earlier.first_token_seconds
        # A recording contains one job, so its choices must not depend on earlier ones.
        history = History() if run.spec.record else self._history
        keeps = run.spec.reuse and not run.spec.record
        session = Session(
            run.key,
            run.spec,
            prompt,
            self._limits,
            strategy,
            run.lifecycle,
            tally,
            history,
            committed=earlier.committed if earlier is not None else (),
            prefixes=self._runs.prefixes if keeps else None,
            generations=run.submit.generations,
        )
        run.session = session
        session.start()
        return [
            OpenJob(run.key, prompt, run.spec.strategy),
            session.drafter_allocation,
            *self._collect(run, now),
        ]

    # ---- work ------------------------------------------------------------------------------------

    def _start_work(self, now: float) -> list[Output]:
        waiting = self._admission.next_to_begin(self._runs)
        begun = self._begin(waiting, now) if waiting is not None else []
        if begun:
            return begun  # and no work, which would depend on the other runs
        if self._working is not None:
            return []
        to_encode = self._next_to_encode
        if to_encode is not None:
            self._encoding = _encoding(to_encode)
            return [Compute(self._encoding)]
        drafts = self._next_drafts()
        if not drafts:
            return []
        self._working = DraftPass(tuple(drafts))
        self._started_at = now
        return [Compute(self._working)]

    @property
    def _next_to_encode(self) -> DraftRun | None:
        """The first of the runs whose prompts are to be encoded, if none is just now."""
        if self._encoding is not None:
            return None
        return next((run for run in self._runs.values() if run.is_to_encode), None)

    def _next_drafts(self) -> list[Draft]:
        """The drafts of the next pass: of all sessions that wait, up to ``MOST_ROWS`` rows.

        One of each, and the first whatever its size; who was left out is first the next time.
        """
        drafts: list[Draft] = []
        rows = 0
        for key, run in list(self._runs.items()):
            session = run.drafting_session
            if session is None or not session.drafting.has_work:
                continue
            rows += session.drafting.waiting_rows
            if drafts and rows > MOST_ROWS:
                break
            self._runs[key] = self._runs.pop(key)  # to the end of the queue
            draft = session.start_draft()
            drafts += [draft] if draft is not None else []
        return drafts

    def _end_encoding(self, work: Encoding, result: Encoded, now: float) -> list[Output]:
        self._encoding = None
        run = self._runs.get(work.run)
        if run is None:
            return []
        if isinstance(result, EncodeDone):
            return self._take_prompt(run, result.ids, now)
        return self._runs.reject(run, result.reason, REFUSED if result.refused else FAILED)

    def _end_pass(self, work: DraftPass, result: object, now: float) -> list[Output]:
        self._working = None
        seconds = now - self._started_at
        outputs: list[Output] = []
        for at, draft in enumerate(work.drafts):
            run = self._runs.get(draft.part.run)
            if run is not None:
                found = result.results[at] if isinstance(result, DraftPassDone) else result
                outputs += self._end_draft(run, found, seconds, now)
        return outputs

    def _end_draft(self, run: DraftRun, result: object, seconds: float, now: float) -> list[Output]:
        """Give ``run`` its proposals from a pass of ``seconds``."""
        assert run.session is not None
        run.session.tally.draft_seconds += seconds
        if not isinstance(result, DraftDone):
            return self._runs.fail(run, f"the draft model could not compute: {_why(result)}")
        try:
            run.session.take_draft(result, seconds, now)
        except (ProtocolError, JobError) as error:
            return self._runs.fail(run, str(error))
        return self._collect(run, now)

    # ---- refusals --------------------------------------------------------------------------------

    def _refused(self, event: Refused) -> list[Output]:
        if event.is_keep:
            self._runs.prefixes.drop(event.run)
            return self._runs.evict()
        run = self._runs.get(event.run)
        if run is None:
            return []
        if event.stale:
            return self._runs.drop(run)
        cause = Event.UNCOMMITTED if event.is_commit else Event.FAILED
        return self._runs.fail(run, event.reason, cause)


def _check_lossless(spec: JobSpec, strategy: Strategy) -> None:
    """JobError if the job asks for log-probabilities and its tokens may not be the target's."""
    if spec.logprobs is not None and strategy.lossy:
        raise JobError(
            f"the strategy {spec.strategy} returns no log-probabilities, as its tokens may not be "
            "the target's own; name another one, or leave out logprobs"
        )


def _encoding(run: DraftRun) -> Encoding:
    """The work of turning the run's prompt into ids."""
    if run.spec.messages is not None:
        return EncodeTurns(run.key, run.spec.messages)
    return Encode(run.key, run.spec.prompt or "", run.spec.raw)


def _has_to_draft(run: DraftRun) -> bool:
    return run.drafting_session is not None and run.drafting_session.drafting.has_work


def _why(result: object) -> str:
    return (
        result.reason
        if isinstance(result, WorkFailed)
        else "the executor returned an unexpected result"
    )
