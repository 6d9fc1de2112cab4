"""A worker on an emulated device: real work and real messages in nominal time.

A worker computes its passes; a result takes effect at the nominal time that the profile gives. A
message carries a stamp: the box where it is next, and when. Its sender charges the links out of its
own box, the receiver the one from the broker's box (``Departures``, ``Arrivals``).

Events (results, messages, polls) are processed in the order of their nominal times, at one moment
results before messages before polls as in the simulation. An event waits until wall time has
reached its nominal time: if the machine keeps up, all earlier messages have arrived by then.

Two counters show whether it keeps up. An input is *overtaken* if an event at a later moment, which
the input could have changed, was processed before it; without such inputs, a run that charges no
software equals the simulation event by event. An input that is only *late* on the wall clock has
changed nothing.

Software is charged as it runs: a device's host is one thread, so its CPU time advances the nominal
clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Protocol

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address
from flowspec.core.protocol.bundles import Bundle
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import (
    Complete,
    Done,
    Input,
    Machine,
    Poll,
    Received,
    Send,
    Tick,
)
from flowspec.core.protocol.messages import Envelope, Message, Segment, StageReport
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.protocol.work import DraftPass, Pass, Work, WorkResult
from flowspec.core.run.key import RunKey
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.rehearse.devices.arrivals import Arrivals, Parcel
from flowspec.rehearse.devices.departures import Departures
from flowspec.rehearse.devices.links import DirectedLinks
from flowspec.rehearse.devices.setup import Emulation
from flowspec.roles.worker import IDLE_SECONDS, Naming, Performer, Worker
from flowspec.transport.base import CommitText, Link, Op

#: Order of the events of one moment.
_RESULT, _CARRY_ON, _MESSAGE, _POLL, _TICK = range(5)
#: Messages from outside arrive at multiples of this, nominal seconds: round costs add up exactly.
_GRID = 2.0**-10
#: Shorter waits sleep instead of reading, and longer ones end ``_EARLY`` before time, seconds: the
#: broker counts in milliseconds, and its reads time out up to one of its ticks late.
_SHORT_WAIT = 0.005
_EARLY = 0.004
#: Nominal times closer than this are one moment, seconds.
_MOMENT = 1e-9
#: Weight of the newest write in the running mean of the cost of a write.
_NEWEST = 0.1


class StampedLink(Link, Protocol):
    """A link that sends stamps with what it writes; ``emulated_link.EmulatedLink`` is one."""

    def write(self, ops: Sequence[Op], stamps: Sequence[Stamp | None] | None = None) -> list[Code]:
        """As ``Link.write``. ``stamps``: one per operation.

        Those of messages, commits and completions go with what these deliver.
        """
        ...


class _Key(NamedTuple):
    """When an event happens, nominal seconds, and its order among the events of one moment."""

    at: float
    kind: int


class _Entry(NamedTuple):
    at: float  # when it enters its last link
    order: int
    parcel: Parcel


class _Incoming(NamedTuple):
    at: float
    order: int
    entry: tuple[Envelope, ...]
    software: float  # CPU seconds of reading it


class EmulatedWorker(Worker):
    """A ``Worker`` on the device that ``emulation`` describes.

    ``model_seconds``: CPU seconds that the executor has spent in the model itself so far; the rest
    of its passes (masks, moving KV rows, choosing tokens) is software. None: whole passes are
    emulated.
    """

    _link: StampedLink

    def __init__(
        self,
        machine: Machine,
        link: StampedLink,
        performer: Performer,
        emulation: Emulation,
        *,
        header: str = "",
        model_seconds: Callable[[], float] | None = None,
        check_lease: Callable[[], None] = lambda: None,
        naming: Naming = dict,
    ) -> None:
        super().__init__(
            machine,
            link,
            performer,
            clock=lambda: self._now,
            header=header,
            check_lease=check_lease,
            naming=naming,
        )
        self._emulation = emulation
        self._model_seconds = model_seconds
        profile = emulation.profile
        links = DirectedLinks(lambda *_: profile.link.latency, self._occupied)
        self._departures = Departures(profile.way, link.address, links)
        hop = profile.hop if emulation.free_software else 0.0
        self._arrivals = Arrivals(link.address, links, hop)
        self._entering: list[_Entry] = []  # read, and not yet in their last links
        self._now = 0.0  # the host's nominal clock
        self._inbox: list[_Incoming] = []
        self._order = itertools.count()
        # When the device is done, and its result.
        self._running: tuple[float, WorkResult] | None = None
        self._seen_to = 0.0  # wall time up to which all messages are in the inbox
        self._marked = 0.0  # CPU clock at the last charge
        self._write_seconds = 0.0  # mean CPU time of a write
        self._last = _Key(0.0, _RESULT)
        self._last_act = 0.0
        self._last_start = 0.0
        self.inputs = self.late = self.overtaken = 0
        self.latest = 0.0  # greatest lateness of an input, wall seconds
        self.software_seconds = 0.0  # nominal

    def facts(self) -> dict[str, object]:
        """As ``Worker``'s in nominal seconds, with counts of late inputs and CPU seconds."""
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

    def cycle(self) -> None:
        """Process the next event if its time has come; else read until then."""
        while self._entering and self._emulation.wall(self._entering[0].at) <= self._seen_to:
            self._enter(heapq.heappop(self._entering).parcel)
        key = self._next()
        if key is not None and self._emulation.wall(key.at) <= self._seen_to:
            self._happen(key)
            return
        moments = [] if key is None else [key.at]
        moments += [entry.at for entry in self._entering[:1]]
        due = min(map(self._emulation.wall, moments), default=math.inf)
        self._read(min(IDLE_SECONDS, due - time.monotonic()))

    def _next(self) -> _Key | None:
        keys = []
        if self._running is not None:
            keys.append(_Key(self._running[0], _RESULT))
        if self._inbox:
            keys.append(_Key(self._inbox[0].at, _MESSAGE))
        if self._machine.runnable and self._running is None:  # the device does one thing at a time
            keys.append(_Key(self._now, _CARRY_ON if self._machine.continuing else _POLL))
        if self._machine.deadline is not None:
            keys.append(_Key(max(self._machine.deadline, self._now), _TICK))
        return min(keys, default=None)

    def _read(self, seconds: float) -> None:
        """Put the messages that arrive within ``seconds`` into the inbox."""
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
            # The next read returns what was written while this empty reply was on its way.
            self._seen_to = began
            return
        software = 0.0 if self._emulation.free_software else time.thread_time() - marked
        stamps = delivery.stamps or (None,) * len(delivery.envelopes)
        now = time.monotonic()
        for entry, stamp in _entries(delivery.envelopes, stamps):
            if stamp is None:
                self._take_in(self._from_outside(now), entry, software)
            else:
                self._expect(Parcel(stamp, entry, software))
            software = 0.0
        self._seen_to = began if waited == 0.0 else self._seen_to

    def _expect(self, parcel: Parcel) -> None:
        self._arrivals.expect(parcel)
        if self._arrivals.is_here(parcel):
            self._enter(parcel)
        else:
            entry = _Entry(parcel.stamp.at, next(self._order), parcel)
            heapq.heappush(self._entering, entry)

    def _enter(self, parcel: Parcel) -> None:
        """Let a message take its last link."""
        for at, known in self._arrivals.enter(parcel):
            self._take_in(at, known.entry, known.software)

    def _take_in(self, at: float, entry: tuple[Envelope, ...], software: float) -> None:
        self._count(at, entry[0].message, time.monotonic())
        heapq.heappush(self._inbox, _Incoming(at, next(self._order), entry, software))

    def _occupied(self, _source: Address, to: Address, envelope: Envelope) -> float:
        hidden = self._returns_hidden(envelope.message.run)
        return self._emulation.profile.transfer_seconds(to, envelope, hidden=hidden)

    def _returns_hidden(self, run: RunKey) -> bool:
        """Whether the last stage sends hidden rows with its answers to ``run``."""
        machine = self._machine
        if isinstance(machine, DraftMachine):
            session = machine.sessions.get(run)
            return session is not None and session.returns.hidden
        return isinstance(machine, StageMachine) and machine.returns_hidden(run)

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
        """Whether an event that this input could have changed was processed at a later moment."""
        at += _MOMENT
        if isinstance(message, StageReport):
            return False  # reports are only counted
        if self._link.address == DRAFT:
            return at < self._last.at
        if isinstance(message, Segment):
            # A segment that waits for the device has no effect before the device is free.
            waits = self._running is not None or self._last.kind == _RESULT
            return at < (self._last_start if waits else self._last.at)
        return at < self._last_act  # a stage's messages commute with each other

    def _happen(self, key: _Key) -> None:
        """Process the event of ``key`` and its immediate consequences."""
        self._marked = time.thread_time()
        self._now = max(self._now, key.at)
        self._last = key
        event: Input
        if key.kind == _MESSAGE:
            incoming = heapq.heappop(self._inbox)
            self._now += incoming.software
            self.software_seconds += incoming.software
            event = Received(incoming.entry)
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
        """Add the CPU time since the last charge to the nominal clock; the seconds added."""
        marked = self._marked
        self._marked = time.thread_time()
        if self._emulation.free_software:
            return 0.0
        spent = self._marked - marked
        self._now += spent
        self.software_seconds += spent
        return spent

    def _put(self, ops: Sequence[Op]) -> list[Code]:
        self._wait_for_lease()
        self._charge()
        charged = not self._emulation.free_software
        at = self._now + (self._write_seconds + self._emulation.hop if charged else 0.0)
        codes = self._link.write(ops, [self._stamp(op, at) for op in ops])
        spent = self._charge()
        self._write_seconds += (spent - self._write_seconds) * (
            _NEWEST if self._write_seconds else 1.0
        )
        if any(_may_come_back(op, self._link.address) for op in ops):
            self._seen_to = 0.0
        return codes

    def _stamp(self, op: Op, at: float) -> Stamp | None:
        match op:
            case Send() | Bundle() | Complete():
                return self._departures.stamp(op, at)
            case CommitText(commit):
                return self._departures.stamp(commit, at)
            case _:
                return None

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
            elif not isinstance(work, Pass | DraftPass):
                software = spent
        seconds = self._emulation.work_seconds(self._link.address, work)
        self.busy_seconds += seconds
        self.software_seconds += software
        self._last_start = self._last.at
        self._running = (self._now + seconds + software, result)
        return []


def _entries(
    envelopes: Sequence[Envelope], stamps: Sequence[Stamp | None]
) -> Iterator[tuple[tuple[Envelope, ...], Stamp | None]]:
    """What was read, by entry: the messages of a bundle together."""
    pairs = list(zip(envelopes, stamps, strict=True))
    keys = (envelope.bundle or -at for at, envelope in enumerate(envelopes, start=1))
    for _, entry in groupby(zip(keys, pairs, strict=True), key=itemgetter(0)):
        found = [pair for _, pair in entry]
        yield tuple(envelope for envelope, _ in found), found[0][1]


def _may_come_back(op: Op, node: Address) -> bool:
    """Whether ``op`` can put an entry into the log of ``node``, its writer, at once."""
    match op:
        case Send(to=to, completes=completes, task=task):
            return to == node or bool(completes or task)
        case CommitText(commit):
            return bool(commit.completes)
        case _:
            return isinstance(op, Complete)
