"""A worker on an emulated device: real work and real messages, nominal time.

Theory of operation. A worker does its real pass; its result counts from the nominal time the
profile says on. Messages carry the nominal time they left, the receiver adds their link's.
Events (a result, a message, a poll) are taken in the order of their nominal times, results
before messages before polls as in the simulation, and none before wall time has passed its own:
by then what should have come first is here, if the machine keeps up. Whether it did is counted:
an input is *overtaken* if something was done at a later nominal moment that it might have
changed; without such inputs a run that charges no software is the simulation's, event by event.
An input that is merely *late* on the wall clock has changed nothing. Software is charged as it
runs: a device's host is one thread, so its CPU time moves the nominal clock on.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flowspec.broker.base import CommitText, Link, Op
from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import (
    Complete,
    Done,
    Draft,
    Input,
    Machine,
    Pass,
    Poll,
    Received,
    Send,
    Tick,
    Work,
    WorkResult,
)
from flowspec.core.protocol.messages import DRAFT, Envelope, Message, Segment, StageReport
from flowspec.drivers.live import IDLE_SECONDS, Performer, Worker
from flowspec.emulation.arrivals import Arrivals
from flowspec.emulation.setup import Emulation

#: What comes first among events of one moment.
_RESULT, _CARRY_ON, _MESSAGE, _POLL, _TICK = range(5)
#: Messages from outside come at multiples of this, nominal seconds: sums of round costs stay exact.
_GRID = 2.0**-10
#: Waits shorter than this are slept, and longer ones end by so much early, seconds: the broker
#: counts in milliseconds, and what waits there for nothing is told up to one of its ticks too late.
_SHORT_WAIT = 0.005
_EARLY = 0.004
#: Nominal times closer than this are one moment, seconds.
_MOMENT = 1e-9
#: Share of the newest write in the running mean of what a write costs.
_NEWEST = 0.1


class _Key(NamedTuple):
    """When an event happens, nominal seconds, and its place among those of one moment."""

    at: float
    kind: int


class _Incoming(NamedTuple):
    at: float
    order: int
    envelope: Envelope
    software: float  # CPU seconds of reading it


class EmulatedWorker(Worker):
    """As ``Worker``, on the device ``emulation`` says.

    ``model_seconds``: CPU seconds the executor has spent in the model itself so far; the rest of
    its passes (masks, moving KV rows, choosing tokens) is software. Without it the whole of a
    pass is emulated.
    """

    def __init__(
        self,
        machine: Machine,
        link: Link,
        performer: Performer,
        emulation: Emulation,
        *,
        header: str = "",
        model_seconds: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(machine, link, performer, clock=lambda: self._now, header=header)
        self._emulation = emulation
        self._model_seconds = model_seconds
        self._arrivals = Arrivals(emulation.profile, link.node, hidden=self._returns_hidden)
        self._now = 0.0  # the host's nominal clock
        self._inbox: list[_Incoming] = []
        self._order = itertools.count()
        self._running: tuple[float, WorkResult] | None = (
            None  # when the device is done, and what comes of it
        )
        self._seen_to = 0.0  # wall time up to which all messages are in the inbox
        self._marked = 0.0  # CPU clock at the last charge
        self._write_seconds = 0.0  # mean CPU time of a write
        self._last = _Key(0.0, _RESULT)
        self._last_act = 0.0
        self._last_start = 0.0
        self.inputs = self.late = self.overtaken = 0
        self.latest = 0.0  # wall seconds the latest input was behind
        self.software_seconds = 0.0  # nominal

    def facts(self) -> dict[str, object]:
        """Busy seconds, software and ``at`` are nominal; inputs by lateness, and this process's CPU
        seconds.
        """
        lateness = {
            "inputs": self.inputs,
            "late": self.late,
            "overtaken": self.overtaken,
            "latest": self.latest,
        }
        spent = {"software_seconds": self.software_seconds, "cpu_seconds": time.process_time()}
        return {
            **super().facts(),
            "at": self._emulation.nominal(time.monotonic()),
            **lateness,
            **spent,
        }

    # ---- events ----------------------------------------------------------------------------------

    def turn(self) -> None:
        """Wait for the next event's time, or for something to read, or do the event."""
        key = self._next()
        due = math.inf if key is None else self._emulation.wall(key.at)
        if key is not None and due <= self._seen_to:
            self._happen(key)
        else:
            self._read(min(IDLE_SECONDS, due - time.monotonic()))

    def _next(self) -> _Key | None:
        keys = []
        if self._running is not None:
            keys.append(_Key(self._running[0], _RESULT))
        if self._inbox:
            keys.append(_Key(self._inbox[0].at, _MESSAGE))
        if self._machine.runnable:
            keys.append(_Key(self._now, _CARRY_ON if self._machine.continuing else _POLL))
        if self._machine.deadline is not None:
            keys.append(_Key(max(self._machine.deadline, self._now), _TICK))
        return min(keys, default=None)

    def _read(self, seconds: float) -> None:
        """Take in what comes within ``seconds``."""
        if 0 < seconds < _SHORT_WAIT:
            time.sleep(seconds)
        began = time.monotonic()
        marked = time.thread_time()
        waited = seconds - _EARLY if seconds >= _SHORT_WAIT else 0.0
        delivery = self._link.read(waited)
        for reason in delivery.refused:
            self.refused += 1
            self._log.warning("entry refused", reason=reason, refused=self.refused)
        if not delivery.envelopes:
            # What was written while an empty answer was on its way is in the next one.
            self._seen_to = began
            return
        software = 0.0 if self._emulation.free_software else time.thread_time() - marked
        stamps = delivery.stamps or (None,) * len(delivery.envelopes)
        now = time.monotonic()
        for envelope, stamp in zip(delivery.envelopes, stamps, strict=True):
            at = self._from_outside(now) if stamp is None else self._arrivals.at(stamp, envelope)
            self._count(at, envelope.message, now)
            heapq.heappush(self._inbox, _Incoming(at, next(self._order), envelope, software))
            software = 0.0
        self._seen_to = began if waited == 0.0 else self._seen_to

    def _returns_hidden(self, job: str) -> bool:
        """Whether the last stage sends hidden rows with its answers to ``job``: not every strategy
        asks for them.
        """
        session = (
            self._machine.sessions.get(job) if isinstance(self._machine, DraftMachine) else None
        )
        return session is not None and session.returns.hidden

    def _from_outside(self, wall: float) -> float:
        nominal = max(self._emulation.nominal(wall), self._now, self._last.at)
        return math.ceil(nominal / _GRID) * _GRID

    def _count(self, at: float, message: Message, wall: float) -> None:
        behind = wall - self._emulation.wall(at)
        self.inputs += 1
        self.late += behind > 0
        self.latest = max(self.latest, behind)
        self.overtaken += self._overtaken(at, message)

    def _overtaken(self, at: float, message: Message) -> bool:
        """Whether something was done at a later moment that this input might have changed."""
        at += _MOMENT
        if isinstance(message, StageReport):
            return False  # they are only counted
        if self._link.node == DRAFT:
            return at < self._last.at
        if isinstance(message, Segment):
            # What waits for the device does not matter to it before it is free.
            waits = self._running is not None or self._last.kind == _RESULT
            return at < (self._last_start if waits else self._last.at)
        return at < self._last_act  # a stage's messages commute with each other

    def _happen(self, key: _Key) -> None:
        """Do the event of ``key``, and what follows from it at once."""
        self._marked = time.thread_time()
        self._now = max(self._now, key.at)
        self._last = key
        event: Input
        if key.kind == _MESSAGE:
            incoming = heapq.heappop(self._inbox)
            self._now += incoming.software
            self.software_seconds += incoming.software
            event = Received((incoming.envelope,))
        else:
            self._last_act = key.at
            event = self._act(key.kind)
        self._step(event)
        self._charge()

    def _act(self, kind: int) -> Input:
        if kind == _RESULT:
            assert self._running is not None
            (_, result) = self._running
            self._running = None
            return Done(result)
        return Tick() if kind == _TICK else Poll()

    # ---- software and device ---------------------------------------------------------------------

    def _charge(self) -> float:
        """Put the CPU time since the last charge on the clock; how much it was."""
        marked = self._marked
        self._marked = time.thread_time()
        if self._emulation.free_software:
            return 0.0
        spent = self._marked - marked
        self._now += spent
        self.software_seconds += spent
        return spent

    def _put(self, ops: Sequence[Op]) -> list[Code]:
        self._charge()
        charged = not self._emulation.free_software
        codes = self._link.write(
            ops, self._now + (self._write_seconds + self._emulation.hop if charged else 0.0)
        )
        spent = self._charge()
        self._write_seconds += (spent - self._write_seconds) * (
            _NEWEST if self._write_seconds else 1.0
        )
        if any(_may_come_back(op, self._link.node) for op in ops):
            self._seen_to = 0.0
        return codes

    def _start(self, work: Work) -> list[Input]:
        self._charge()
        before = self._model_seconds() if self._model_seconds is not None else 0.0
        result = self._compute(work)
        spent = time.thread_time() - self._marked
        self._marked = time.thread_time()
        software = 0.0
        if not self._emulation.free_software:
            if self._model_seconds is not None:
                software = spent - (self._model_seconds() - before)
            elif not isinstance(work, Pass | Draft):
                software = spent
        seconds = self._emulation.work_seconds(self._link.node, work)
        self.busy_seconds += seconds
        self.software_seconds += software
        self._last_start = self._last.at
        self._running = (self._now + seconds + software, result)
        return []


def _may_come_back(op: Op, node: str) -> bool:
    """Whether ``op`` can put something into the log of ``node``, its writer, at once."""
    match op:
        case Send(to=to, completes=completes, task=task):
            return to == node or bool(completes or task)
        case CommitText(commit):
            return bool(commit.completes)
        case _:
            return isinstance(op, Complete)
