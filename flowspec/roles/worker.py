"""The loop of a worker process: read, step, write, compute.

One write and one blocking read per hop. The loop performs the machine's outputs and returns the
broker's refusals to it as inputs. Time is the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from flowspec.core.protocol.bundles import Bundle, bundled, unbundled
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.lease import HUNG_SECONDS, ROW_SECONDS, Doing, most_of_pass
from flowspec.core.protocol.machine import (
    Allocate,
    Commit,
    Compute,
    Discard,
    Done,
    Evict,
    Finish,
    Granted,
    Input,
    Keep,
    Learn,
    Machine,
    OpenJob,
    Output,
    Poll,
    Received,
    Refused,
    Release,
    Send,
    Tick,
)
from flowspec.core.protocol.messages import Answer, Segment
from flowspec.core.protocol.refusals import refusal
from flowspec.core.protocol.work import (
    EncodeFailed,
    Encoding,
    Work,
    WorkFailed,
    WorkResult,
    rows_of,
)
from flowspec.core.run.key import RunKey
from flowspec.errors import FlowSpecError, JobError, StateError
from flowspec.model.base import RowArray, reason_of
from flowspec.observe import logger
from flowspec.roles.lease import RENEWAL_SECONDS
from flowspec.roles.record import Recorder
from flowspec.roles.text_process import TextProcess
from flowspec.transport.base import CommitText, Link, Op, PutRows, ReadResult, Record

#: Longest read before the stop flag is checked, seconds.
IDLE_SECONDS = 0.5
#: How long the loop waits for a prompt's ids at once, and longest read while they are awaited.
_ENCODING_SECONDS = 0.005

Clock = Callable[[], float]
#: What is told of a job's stats, with names that machines do not know.
Naming = Callable[[Mapping[str, object]], dict[str, object]]


class Performer(Protocol):
    """Performs the outputs of a role's machine."""

    def compute(self, work: Work, link: Link) -> WorkResult:
        """Carry out ``work``; an exception becomes WorkFailed."""
        ...

    def allocate(self, output: Allocate) -> None: ...

    def keep(self, output: Keep) -> None:
        """Keep rows of a run that ends; an exception is a refusal."""
        ...

    def evict(self, run: RunKey) -> None:
        """Free a run's kept rows."""
        ...

    def learn(self, output: Learn, link: Link) -> None:
        """Give the drafter the hidden rows that came with an answer."""
        ...

    def release(self, run: RunKey) -> None: ...

    def drop(self) -> None:
        """Free the rows of all runs, and all that is kept: the worker begins anew."""
        ...

    def rows(self, part: int, offsets: Sequence[int]) -> RowArray:
        """Rows of the last pass."""
        ...

    def written(self, commit: Commit) -> CommitText:
        """A commit with the text of its tokens; once per commit, in order."""
        ...


class Worker:
    """Drives ``machine`` over ``link``.

    ``header``: first line of recordings, for the one worker that writes it. ``check_lease``: called
    before every write; it waits for a late lease and raises LeaseLost for a lost one. ``texts``:
    encodes prompts beside the loop; None: the performer does, in the loop. ``naming``: of the stats
    of jobs that end. ``row_seconds``: that a lone row takes, for the first pass.
    """

    def __init__(
        self,
        machine: Machine,
        link: Link,
        performer: Performer,
        *,
        clock: Clock = time.monotonic,
        header: str = "",
        check_lease: Callable[[], None] = lambda: None,
        texts: TextProcess | None = None,
        naming: Naming = dict,
        row_seconds: float = ROW_SECONDS,
    ) -> None:
        self._check_lease = check_lease
        self._naming = naming
        self._texts = texts
        self._machine = machine
        self._link = link
        self._performer = performer
        self._clock = clock
        self._log = logger(node=str(link.address))
        self._recorder = Recorder(link.address, self._record, header, machine.serves)
        self._records: list[Record] = []
        self.refused = 0  # malformed entries
        self.passes = 0
        self.busy_seconds = 0.0
        self._longest = 0.0  # seconds of the longest pass
        self._row_seconds = row_seconds
        self._doing = Doing()

    def run(self, stop: Callable[[], bool]) -> None:
        """Run until ``stop()`` is true; BrokerUnreachable if the broker stays unreachable."""
        while not stop():
            self._begin(HUNG_SECONDS)
            self.cycle()

    def facts(self) -> dict[str, object]:
        """Counters of this worker; ``at`` is its clock, for rates between two reports."""
        counters = {
            "passes": self.passes,
            "busy_seconds": round(self.busy_seconds, 4),
            "refused": self.refused,
        }
        return {"at": round(self._clock(), 3), **counters}

    @property
    def idle(self) -> bool:
        """Whether it has no run."""
        return self._machine.idle

    def doing(self) -> Doing:
        """What the loop does now; for another thread, which looks whether it hangs."""
        return self._doing

    def _begin(self, most: float) -> None:
        """The next thing begins, which may take ``most`` seconds."""
        self._doing = Doing(self._doing.number + 1, most)

    def cycle(self) -> None:
        """Read once, process what arrived, and do one piece of work if there is any."""
        delivery = self._link.read(self._read_timeout())
        for reason in delivery.refused:
            self.refused += 1
            self._log.warning("entry refused", reason=reason, refused=self.refused)
        for late in self._late_refusals(delivery):
            self._step(late)
        if delivery.envelopes:
            self._step(Received(delivery.envelopes))
        encoded = self._texts.result() if self._texts is not None else None
        if encoded is not None:
            self._step(Done(encoded))
        deadline = self._machine.deadline
        if deadline is not None and self._clock() >= deadline:
            self._step(Tick())
        worked = False
        while self._machine.runnable and not worked:
            worked = self._step(Poll())

    def _late_refusals(self, delivery: ReadResult) -> list[Refused]:
        """What has become of earlier writes."""
        known = [self._refusal(op, code) for op, code in delivery.unwritten]
        return [*filter(None, known)]

    def _read_timeout(self) -> float:
        """How long the next read may block, seconds."""
        if self._machine.runnable:
            return 0.0
        encodes = self._texts is not None and self._texts.busy
        longest = _ENCODING_SECONDS if encodes else IDLE_SECONDS
        deadline = self._machine.deadline
        return longest if deadline is None else max(0.0, min(longest, deadline - self._clock()))

    def _step(self, event: Input) -> bool:
        """Feed ``event`` and the inputs that follow from it; return whether work was done.

        Nothing is read while work is done: a prune that arrives meanwhile is applied to the next
        pass, not to the rows that this one sends.
        """
        worked = False
        pending: list[Input] = [event]
        while pending:
            event = pending.pop(0)
            now = self._clock()
            outputs = list(self._machine.step(event, now))
            self._recorder.step(now, event, outputs)
            if self._records or any(not isinstance(output, Compute) for output in outputs):
                pending += self._write(outputs)
            for output in outputs:
                if isinstance(output, Compute):
                    pending += self._start(output.work)
                    worked = True
        return worked

    def _start(self, work: Work) -> list[Input]:
        """Start ``work`` and return the inputs that follow at once."""
        if self._texts is None or not isinstance(work, Encoding):
            return [Done(self._compute(work))]
        self._texts.begin(work)
        result = self._texts.result(_ENCODING_SECONDS)
        return [Done(result)] if result is not None else []

    # ---- performing ------------------------------------------------------------------------------

    def _write(self, outputs: Sequence[Output]) -> list[Input]:
        """Perform all outputs but ``Compute``; return the broker's refusals as inputs."""
        # A step's record is written before its effects, so that their reader finds it.
        refusals: dict[RunKey, Refused] = {}
        ops = list[Op](self._records)
        self._records = []
        # What the stages wait for is sent before the drafter gets its rows.
        learnt = [output for output in outputs if isinstance(output, Learn)]
        for output in outputs:
            if not isinstance(output, Learn):
                ops += self._performed(output, refusals)
        entries = bundled(ops, _run_of)
        codes = self._put(entries) if entries else []
        for op, code in zip(unbundled(entries), codes, strict=True):
            _note(refusals, self._refusal(op, code))
        for output in learnt:
            self._performed(output, refusals)
        for output in outputs:
            if isinstance(output, Finish | Release):
                self._end(output.run)
        return list(refusals.values())

    def _performed(self, output: Output, refusals: dict[RunKey, Refused]) -> list[Op]:
        """What is to be written for ``output``; nothing, and its run is refused, if that fails."""
        try:
            return self._ops(output)
        except Exception as error:
            if not isinstance(output, Send | Commit | Allocate | Keep | Learn):
                raise
            self._log.error("output failed", kind=type(output).__name__, exc_info=True)
            run = _run_of(output)
            reason = f"{self._link.address}: {_one_line(error)}"
            is_commit, is_keep = isinstance(output, Commit), isinstance(output, Keep)
            _note(refusals, Refused(run, False, reason, is_commit, is_keep))
            return []

    def _put(self, ops: Sequence[Op]) -> list[Code]:
        self._wait_for_lease()
        return self._link.write(ops)

    def _wait_for_lease(self) -> None:
        self._begin(RENEWAL_SECONDS + HUNG_SECONDS)
        self._check_lease()
        self._begin(HUNG_SECONDS)

    def _ops(self, output: Output) -> list[Op]:
        match output:
            case Send():
                return [*self._row_ops(output), output]
            case Commit():
                return [self._performer.written(output)]
            case Finish():
                return [replace(output, stats=self._naming(output.stats))]
            case Allocate():
                self._performer.allocate(output)
                return []
            case Keep():
                self._performer.keep(output)
                return []
            case Evict(run):
                self._performer.evict(run)
                return []
            case Discard(run, segment):
                self._link.drop_rows(run, segment)
                return []
            case Learn():
                self._performer.learn(output, self._link)
                return []
            case Compute() | Release() | Granted():
                return []
            case _:
                return [output]

    def _row_ops(self, output: Send) -> list[Op]:
        message = output.envelope.message
        if output.rows is None or not isinstance(message, Segment | Answer):
            return []
        rows = self._performer.rows(output.rows.part, output.rows.offsets)
        return [PutRows(output.to, message.run, message.segment, rows)]

    def _refusal(self, op: Op, code: Code) -> Refused | None:
        """The input for a refused ``op``; None: not refused, or a recorded line or a Finish."""
        if code is Code.OK or isinstance(op, Record | Finish):
            return None
        refused = refusal(_run_of(op), _what(op), code, is_commit=isinstance(op, CommitText))
        if refused is not None:
            run = refused.run
            self._log.info(
                "write refused", job=run.job, epoch=run.epoch, what=_what(op), code=code.name
            )
        return refused

    def _compute(self, work: Work) -> WorkResult:
        began = self._clock()
        wall = time.monotonic()
        self._begin(most_of_pass(self._longest, rows_of(work), self._row_seconds))
        try:
            result = self._performer.compute(work, self._link)
        except FlowSpecError as error:
            result = _failed(work, error)
        except Exception as error:  # noqa: BLE001 - a failing executor ends its job, never the worker
            self._log.error("work failed", exc_info=True)
            result = _failed(work, error)
        self._begin(HUNG_SECONDS)
        self._longest = max(self._longest, time.monotonic() - wall)
        self.passes += 1
        self.busy_seconds += self._clock() - began
        return result

    def _end(self, run: RunKey) -> None:
        self._performer.release(run)
        self._link.forget(run)
        self._recorder.forget(run)

    def _record(self, run: RunKey, line: str) -> None:
        self._records.append(Record(run, line))


def _note(refusals: dict[RunKey, Refused], refused: Refused | None) -> None:
    """Add ``refused``: of a run's refusals its commit's counts, or else the first."""
    if refused is not None and (refused.is_commit or refused.run not in refusals):
        refusals[refused.run] = refused


def _failed(work: Work, error: Exception) -> WorkResult:
    if isinstance(work, Encoding):
        return EncodeFailed(reason_of(error), refused=isinstance(error, JobError))
    return WorkFailed(reason_of(error))


def _run_of(op: Output | Op) -> RunKey:
    """The run of an operation that concerns one."""
    match op:
        case Send(envelope=envelope):
            return envelope.message.run
        case CommitText(commit):
            return commit.run
        case Compute() | Bundle():
            raise StateError(f"{type(op).__name__} is no operation on one run")
        case _:
            return op.run


def _what(op: Op) -> str:
    """The name of a refused operation in a message to the user."""
    match op:
        case Send(to=to):
            return f"a message to {to}"
        case CommitText():
            return "a commit"
        case PutRows(to=to):
            return f"rows for {to}"
        case OpenJob():
            return "the prompt"
        case _:
            return "a task's completion"


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
