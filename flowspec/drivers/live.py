"""The loop of a worker process: read, step, write, compute.

One write and one blocking read a hop. What a machine asks for is carried out here; what the broker
refuses goes back to the machine. Time is the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from flowspec.broker.base import CommitText, Link, Op, PutRows, Record
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import (
    Accepted,
    Allocate,
    Commit,
    Discard,
    Done,
    Finish,
    Input,
    Learn,
    Machine,
    Output,
    Poll,
    Received,
    Refused,
    Release,
    Run,
    Send,
    Tick,
    Work,
    WorkFailed,
    WorkResult,
)
from flowspec.core.protocol.messages import Answer, Segment
from flowspec.drivers.record import Recorder
from flowspec.errors import FlowSpecError
from flowspec.model.base import RowArray
from flowspec.observe import logger

#: Longest wait for something to read before the stop flag is looked at, seconds.
IDLE_SECONDS = 0.5

Clock = Callable[[], float]


class Performer(Protocol):
    """What a role does with its machine's wishes."""

    def compute(self, work: Work, link: Link) -> WorkResult:
        """Carry out ``work``; errors of the user's making come back as WorkFailed."""
        ...

    def allocate(self, output: Allocate) -> None: ...

    def learn(self, output: Learn, link: Link) -> None:
        """Give the drafter the hidden rows that came with an answer."""
        ...

    def release(self, job: str) -> None: ...

    def rows(self, part: int, offsets: Sequence[int]) -> RowArray:
        """Rows of the pass computed last."""
        ...

    def text(self, commit: Commit) -> str:
        """The text of a commit's tokens, as far as it is certain."""
        ...


class Worker:
    """Drives ``machine`` over ``link`` until told to stop.

    ``header``: first line of recordings, given to the one worker that writes it.
    """

    def __init__(
        self,
        machine: Machine,
        link: Link,
        performer: Performer,
        *,
        clock: Clock = time.monotonic,
        header: str = "",
    ) -> None:
        self._machine = machine
        self._link = link
        self._performer = performer
        self._clock = clock
        self._log = logger(node=link.node)
        self._recorder = Recorder(link.node, self._record, header)
        self._records: list[Record] = []
        self.refused = 0  # malformed entries
        self.passes = 0
        self.busy_seconds = 0.0

    def run(self, stop: Callable[[], bool]) -> None:
        """Go on until ``stop()``; raises BrokerUnreachable when the broker is lost for good."""
        while not stop():
            self.turn()

    def facts(self) -> dict[str, object]:
        """What others may know of this worker; ``at`` is its own clock, to take rates from two
        reports.
        """
        counters = {
            "passes": self.passes,
            "busy_seconds": round(self.busy_seconds, 4),
            "refused": self.refused,
        }
        return {"at": round(self._clock(), 3), **counters}

    def turn(self) -> None:
        """Read once, take in what came, and do one piece of work if there is some."""
        delivery = self._link.read(self._patience())
        for reason in delivery.refused:
            self.refused += 1
            self._log.warning("entry refused", reason=reason, refused=self.refused)
        if delivery.envelopes:
            self._step(Received(delivery.envelopes))
        deadline = self._machine.deadline
        if deadline is not None and self._clock() >= deadline:
            self._step(Tick())
        worked = False
        while self._machine.runnable and not worked:
            worked = self._step(Poll())

    def _patience(self) -> float:
        """How long the next read may wait."""
        if self._machine.runnable:
            return 0.0
        deadline = self._machine.deadline
        return (
            IDLE_SECONDS
            if deadline is None
            else max(0.0, min(IDLE_SECONDS, deadline - self._clock()))
        )

    def _step(self, event: Input) -> bool:
        """Feed ``event`` and what follows from it; whether work was done."""
        worked = False
        pending: list[Input] = [event]
        while pending:
            event = pending.pop(0)
            now = self._clock()
            outputs = list(self._machine.step(event, now))
            self._recorder.step(now, event, outputs)
            if self._records or any(not isinstance(output, Run) for output in outputs):
                pending += self._write(outputs)
            for output in outputs:
                if isinstance(output, Run):
                    pending += self._start(output.work)
                    worked = True
        return worked

    def _start(self, work: Work) -> list[Input]:
        """Begin ``work``; what the machine is told at once."""
        return [Done(self._compute(work))]

    # ---- performing ------------------------------------------------------------------------------

    def _write(self, outputs: Sequence[Output]) -> list[Input]:
        """Carry out all but computing; what the broker refused, as inputs for the machine."""
        # A step's record goes before its effects: who sees the effects can read the record.
        refusals: dict[str, Refused] = {}
        ops = list[Op](self._records)
        self._records = []
        for output in outputs:
            try:
                ops += self._ops(output)
            except Exception as error:
                if not isinstance(output, Send | Commit | Allocate | Learn):
                    raise
                self._log.error("output failed", kind=type(output).__name__, exc_info=True)
                about = output.envelope.message if isinstance(output, Send) else output
                refusals[about.job] = Refused(
                    about.job, about.epoch, False, f"{self._link.node}: {_one_line(error)}"
                )
        codes = self._put(ops) if ops else []
        for op, code in zip(ops, codes, strict=True):
            refusal = self._refusal(op, code) if code is not Code.OK else None
            if refusal is not None:
                refusals.setdefault(refusal.job, refusal)
        for output in outputs:
            if isinstance(output, Finish | Release):
                self._end(output.job)
        return list(refusals.values())

    def _put(self, ops: Sequence[Op]) -> list[Code]:
        return self._link.write(ops)

    def _ops(self, output: Output) -> list[Op]:
        match output:
            case Send():
                return [*self._row_ops(output), output]
            case Commit():
                return [CommitText(output, self._performer.text(output))]
            case Allocate():
                self._performer.allocate(output)
                return []
            case Discard(job, segment):
                self._link.drop_rows(job, segment)
                return []
            case Learn():
                self._performer.learn(output, self._link)
                return []
            case Run() | Release():
                return []
            case _:
                return [output]

    def _row_ops(self, output: Send) -> list[Op]:
        message = output.envelope.message
        if output.rows is None or not isinstance(message, Segment | Answer):
            return []
        rows = self._performer.rows(output.rows.part, output.rows.offsets)
        return [PutRows(output.to, message.job, message.epoch, message.segment, rows)]

    def _refusal(self, op: Op, code: Code) -> Refused | None:
        if code is Code.DUP or isinstance(op, Finish):
            return None
        match op:
            case Send(to=to, envelope=envelope):
                job = envelope.message.job
                epoch = envelope.message.epoch
                what = f"a message to {to}"
            case CommitText(commit):
                job = commit.job
                epoch = commit.epoch
                what = "a commit"
            case PutRows(to, job, epoch):
                what = f"rows for {to}"
            case Accepted(job, epoch):
                what = "the prompt"
            case Record():
                return None
            case _:
                job = op.job
                epoch = op.epoch
                what = "a task's completion"
        self._log.info("write refused", job=job, epoch=epoch, what=what, code=code.name)
        reason = "a stream is at its cap: a reader has stopped or is too slow"
        if code is Code.GAP:
            reason = "something written before it is missing"
        return Refused(job, epoch, code is Code.STALE, f"the broker refused {what}: {reason}")

    def _compute(self, work: Work) -> WorkResult:
        began = self._clock()
        try:
            result = self._performer.compute(work, self._link)
        except FlowSpecError as error:
            result = WorkFailed(str(error))
        except Exception as error:  # noqa: BLE001 - a failing executor ends its job, never the worker
            self._log.error("work failed", exc_info=True)
            result = WorkFailed(_one_line(error))
        self.passes += 1
        self.busy_seconds += self._clock() - began
        return result

    def _end(self, job: str) -> None:
        self._performer.release(job)
        self._link.forget(job)
        self._recorder.forget(job)

    def _record(self, job: str, line: str) -> None:
        self._records.append(Record(job, line))


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
