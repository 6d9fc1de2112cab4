"""What the worker processes share: arguments, logs, signals, lease, one line on failure."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import NoReturn

from flowspec import __version__, observe
from flowspec.core.protocol.lease import ROW_SECONDS, TERMS
from flowspec.core.protocol.machine import Machine
from flowspec.errors import (
    BrokerError,
    BrokerFull,
    BrokerUnreachable,
    ClusterError,
    ConfigError,
    LeaseLost,
    line_of,
    naming_what_is_missing,
)
from flowspec.model.weights.precision import DTYPES
from flowspec.observe import note
from flowspec.rehearse.devices.setup import EMULATED, Emulation
from flowspec.rehearse.emulated_link import EmulatedLink
from flowspec.rehearse.emulator import EmulatedWorker
from flowspec.roles.lease import LOADING, STATE, Lease, has_ended
from flowspec.roles.text_process import TextProcess
from flowspec.roles.worker import Naming, Performer, Worker
from flowspec.transport.base import Control, Link, setup_of
from flowspec.transport.connections.connection import DEFAULT_URL
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.wire.codec import VERSION
from flowspec.transport.wire.keys import Keys

#: How long a worker waits for the pipeline's record, and when it says that it does, seconds.
RECORD_SECONDS = 60.0
_PATIENT_SECONDS = 2.0
#: How long it waits, where a record stands and no scheduler is there, for one that starts too.
_OLDER_SECONDS = 10.0
#: How long a worker that has lost the broker tries to join again, seconds, and between two tries.
JOIN_SECONDS = 120.0
_JOIN_LOOK_SECONDS = 0.2
#: Whoever has served for less has not joined, and how long it waits before it joins again, seconds.
_STEADY_SECONDS = 10.0
_AGAIN_SECONDS = 2.0
#: How long a worker that drains lets its jobs go on, seconds: what still runs is put back. And how
#: long it takes until a scheduler has seen that it drains.
DRAIN_SECONDS = 30.0
_SEEN_SECONDS = 1.5
#: How long it waits for the lease of one that has ended here, longer than any lease lasts, seconds.
_OUTLASTED_SECONDS = TERMS.longest_ms / 1000 + 1.0
#: The states of a worker that serves, lets its jobs end, or joins again.
READY = "ready"
DRAINING = "draining"
JOINING = "joining"
#: The state of a spare before it serves, and the interval between its looks at the roles, seconds.
SPARE = "spare"
_SPARE_LOOK_SECONDS = 0.5
#: The version of the messages in the pipeline's record, and that of records without one.
WIRE = "wire"
_UNNAMED_WIRE = 9
#: Begins to serve a role: what it yields serves under a lease, until the worker is to stop.
Begin = Callable[[], AbstractContextManager[Callable[[Lease], None]]]


def parser(role: str) -> argparse.ArgumentParser:
    """A parser with the arguments of every worker."""
    arguments = argparse.ArgumentParser(prog=f"python -m workers.{role}")
    arguments.add_argument(
        "--redis-url", help=f"broker (default: FLOWSPEC_REDIS_URL, else {DEFAULT_URL})"
    )
    return arguments


def add_placing(arguments: argparse.ArgumentParser) -> None:
    """Add the flags that a worker with a model has, beside those of ``parser``."""
    arguments.add_argument(
        "--dtype", help=f"precision: {', '.join(DTYPES)} (default: as the record says)"
    )
    arguments.add_argument(
        "--device", help="auto, cpu, cuda, cuda:N or mps (default: as the record says)"
    )


class Facts:
    """What a worker's lease tells; it grows while the worker starts."""

    def __init__(self) -> None:
        self._known: dict[str, object] = {}
        self._sources: list[Callable[[], dict[str, object]]] = []

    def begin(self, source: Callable[[], dict[str, object]]) -> None:
        """Ask ``source`` from now on, and no longer those before it; what is known stays."""
        self._sources = [source]

    def __call__(self) -> dict[str, object]:
        found = dict(self._known)
        for source in self._sources:
            found |= source()
        return found

    def know(self, facts: Mapping[str, object]) -> None:
        """Add what does not change any more."""
        self._known |= facts

    def ask(self, source: Callable[[], dict[str, object]]) -> None:
        """Ask ``source`` for more, every time."""
        self._sources.append(source)


class Process:
    """A worker process: its broker, and whether a signal has asked it to stop."""

    def __init__(self, url: str | None) -> None:
        self.url = url or os.environ.get("FLOWSPEC_REDIS_URL") or DEFAULT_URL
        self.keys = Keys()
        self.state = LOADING
        self._setup = ""  # digest of the record this worker was built from
        self._stopped = False
        self._drains_since: float | None = None
        self._said_it_drains = False
        self.has_served = False  # under any lease
        self._served_at = 0.0  # since when under the lease that it has taken last; 0: not yet
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        """SIGTERM lets the jobs of a serving worker end; any other signal, or a second one, not."""
        if number == signal.SIGTERM and self.state == READY and self._drains_since is None:
            self._drains_since = time.monotonic()
            self.state = DRAINING
        else:
            self._stopped = True

    @property
    def stopped(self) -> bool:
        """Whether a signal has asked the process to stop."""
        return self._stopped

    def built_for(self, record: Mapping[str, str]) -> None:
        """Note that this worker is built for the pipeline of ``record``.

        ClusterError if the scheduler that wrote it sends other messages.
        """
        if _wire_of(record) != VERSION:
            raise ClusterError(
                f"the pipeline's messages are of version {_wire_of(record)}, those of FlowSpec "
                f"{__version__} here of version {VERSION}; install the same on all machines"
            )
        self._setup = setup_of(record)

    def ready(self, what: str) -> None:
        """Be ready, and say so: ``what`` is served."""
        self.state = READY
        note(f"ready: {what}")

    def control(self) -> RedisControl:
        """A connection for control; BrokerUnreachable if there is no broker."""
        return RedisControl(self.url, self.keys)

    def pipeline_record(self, control: Control) -> dict[str, str]:
        """Wait for the pipeline's record, which a scheduler writes; ClusterError after a while.

        One that stands there already may be of an earlier pipeline, until its scheduler has come.
        """
        began = seen = time.monotonic()  # when a scheduler was seen last
        said = False
        earlier = control.pipeline()
        while not self._stopped:
            scheduler = control.claims().get("scheduler")  # before the record, which it writes
            record = control.pipeline()
            if scheduler is None:
                stands = time.monotonic() > seen + _OLDER_SECONDS
            else:
                seen = time.monotonic()
                # While it loads it computes the digests of a large model's weights.
                loads = scheduler.facts.get(STATE) == LOADING
                stands = not (loads or has_ended(scheduler.token))
            # One of other messages, whose scheduler is not here, is an earlier version's.
            readable = scheduler is not None or _wire_of(record) == VERSION
            if record and readable and (stands or record != earlier):
                self.built_for(record)
                return record
            if not said and time.monotonic() > began + _PATIENT_SECONDS:
                said = True
                note("waits for the pipeline's record, which `python -m workers.scheduler` writes")
            if time.monotonic() > seen + RECORD_SECONDS:
                raise ClusterError(
                    f"pipeline {self.keys.pipeline} has no record after {RECORD_SECONDS:g} s; "
                    "start its scheduler with `python -m workers.scheduler`"
                )
            time.sleep(0.1)
        raise SystemExit(0)

    @contextmanager
    def leased(self, role: str, facts: Callable[[], dict[str, object]]) -> Iterator[Lease]:
        """Hold the lease on ``role``, over a connection of its own. LeaseLost if it is lost."""
        with closing(self.control()) as control:
            lease = Lease(
                control,
                role,
                lambda: {STATE: self.state, "setup": self._setup, **facts()},
                on_hung=lambda reason: _give_up(role, reason),
            )
            leaves = False
            self._outlast(role, control)
            lease.take()
            try:
                yield lease
                if lease.lost:
                    raise LeaseLost(lease.lost)
                leaves = True
            except (BrokerUnreachable, BrokerFull):
                lease.by_broker = True
                raise
            finally:
                # A lost broker is not the loss of a worker, which its jobs may be to blame for.
                lease.release(leaves=leaves or lease.by_broker)

    def _outlast(self, role: str, control: Control) -> None:
        """Wait for the lease on ``role`` of a process that has ended here to run out."""
        deadline = time.monotonic() + _OUTLASTED_SECONDS
        said = False
        while time.monotonic() < deadline:
            claim = control.claims().get(role)
            if claim is None or not has_ended(claim.token):
                return
            if not said:
                said = True
                note(f"{role} was held by a process that has ended: waits for its lease")
            if self._stopped:
                raise SystemExit(0)
            time.sleep(_JOIN_LOOK_SECONDS)

    def free_role(self, roles: Iterable[str]) -> str | None:
        """Wait until one of ``roles`` has no holder at two looks; None: a signal asks to stop.

        The pipeline's own workers, which are only starting, come first that way. But from one that
        is started again for a role that was served, and still loads, the role is taken.
        """
        wanted = tuple(roles)
        here = {"host": socket.gethostname(), "pid": os.getpid(), "version": __version__}
        known = {"roles": wanted, **here}
        before: set[str] = set()
        ready: set[str] = set()
        while not self._stopped:
            time.sleep(_SPARE_LOOK_SECONDS)
            try:
                with closing(self.control()) as control:
                    with suppress(BrokerError):  # who is not listed serves all the same
                        control.note_spare(known)
                    held = control.claims()
                    served = "scheduler" in held
                    for role in wanted:
                        state = held[role].facts.get(STATE) if role in held else ""
                        if state == READY:
                            ready.add(role)
                        elif state == LOADING and role in ready:
                            control.release(role, held[role].token)
                            return role
            except BrokerError:
                before = set()
                continue
            free = {role for role in wanted if role not in held}
            found = [role for role in wanted if role in free & before]
            if found and served:
                return found[0]
            before = free
        return None

    def serve(self, role: str, facts: Facts, begin: Begin, *, writes_record: bool = False) -> None:
        """Serve ``role`` until a signal asks to stop, under one lease after another.

        A lost lease or broker is not the end: the worker drops its rows, keeps its weights, and
        takes the role again. ClaimError if another worker has it then. ``writes_record``: it needs
        no record of the pipeline, as it writes it.
        """
        before: Lease | None = None  # which the broker may still hold for this process
        lost_at: float | None = None
        while True:
            self._served_at = 0.0
            try:
                with begin() as serving, self._held(role, facts, before) as lease:
                    before = lease
                    serving(lease)
                return
            except (LeaseLost, BrokerError) as lost:
                if self._stopped or self.state == DRAINING:
                    return
                if not self.has_served:
                    raise
                now = time.monotonic()
                again_at = now
                if lost_at is None or (self._served_at and now - self._served_at > _STEADY_SECONDS):
                    lost_at = now
                elif now - lost_at > JOIN_SECONDS:
                    raise  # from a broker that answers, and takes no writes or refuses some
                else:
                    again_at = now + _AGAIN_SECONDS
                self.state = JOINING
                note(f"{lost}; joins again")
                self._wait_for_pipeline(again_at, needs_record=not writes_record)

    @contextmanager
    def _held(self, role: str, facts: Facts, before: Lease | None) -> Iterator[Lease]:
        """Hold ``role``; what this process' lease ``before`` holds of it is given back first."""
        if before is not None:
            with closing(self.control()) as control:
                control.release(role, before.token, leaves=before.by_broker)
        with self.leased(role, facts) as lease:
            yield lease

    def _wait_for_pipeline(self, after: float, *, needs_record: bool) -> None:
        """Wait until the broker is there, and the pipeline's record; a bounded time.

        And until ``after`` on the monotonic clock.

        ClusterError if the pipeline has been set up anew: this worker was built for another one.
        """
        deadline = time.monotonic() + JOIN_SECONDS
        while not self._stopped:
            time.sleep(_JOIN_LOOK_SECONDS)
            if time.monotonic() < after:
                continue
            try:
                with closing(self.control()) as control:
                    record = control.pipeline()
            except BrokerError:
                if time.monotonic() > deadline:
                    raise
                continue
            if not needs_record:
                return
            if record and setup_of(record) != self._setup:
                raise ClusterError("the pipeline was set up anew; start this worker again")
            if record:
                return
            if time.monotonic() > deadline:
                raise ClusterError(f"the pipeline has no record after {JOIN_SECONDS:g} s")

    def stop(self, lease: Lease, worker: Worker | None = None) -> Callable[[], bool]:
        """Whether the worker under ``lease`` is to stop; if it drains, once its jobs have ended."""
        self.has_served = True
        self._served_at = time.monotonic()
        return lambda: self._stopped or bool(lease.lost) or self._is_drained(worker)

    def _is_drained(self, worker: Worker | None) -> bool:
        """Whether a worker that was asked to drain has nothing more to do, or has had its time."""
        if self._drains_since is None:
            return False
        seconds = time.monotonic() - self._drains_since
        # A job may have been assigned before the scheduler has seen that this worker drains.
        idle = worker is None or (worker.idle and seconds > _SEEN_SECONDS)
        if not (idle or self._said_it_drains):
            self._said_it_drains = True
            note(
                f"asked to end: jobs that run here have {DRAIN_SECONDS:g} s, then they are put back"
            )
        return idle or seconds > DRAIN_SECONDS


def _wire_of(record: Mapping[str, str]) -> int:
    """The version of the messages in the pipeline of ``record``."""
    wire = record.get(WIRE, str(_UNNAMED_WIRE))
    return int(wire) if wire.isdecimal() else 0


def _give_up(role: str, reason: str) -> NoReturn:
    """End the process of a worker whose loop hangs: its own thread cannot end it."""
    sys.stderr.write(f"flowspec {role.partition('-')[0]}: {reason}\n")
    sys.stderr.flush()
    os._exit(1)


def run(main: Callable[[], None], role: str) -> None:
    """Run a worker's ``main``: an expected error is one line on stderr and status 1."""
    # One torch thread per process; torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is under way is cleared away
    try:
        observe.configure()
        with naming_what_is_missing():
            main()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        said = line_of(error)
        if said is None:
            raise
        silent = isinstance(error, BrokerUnreachable) and error.silent
        hint = "; name it by --redis-url or FLOWSPEC_REDIS_URL" if silent else ""
        sys.stderr.write(f"flowspec {role}: {said}{hint}\n")
        sys.exit(1)


def make_worker(
    record: Mapping[str, str],
    machine: Machine,
    link: Link,
    role: Performer,
    lease: Lease,
    *,
    header: str = "",
    model_seconds: Callable[[], float] | None = None,
    texts: TextProcess | None = None,
    naming: Naming = dict,
    row_seconds: float = ROW_SECONDS,
) -> Worker:
    """The loop of a worker process under ``lease``, on an emulated device if ``record`` names one.

    ``model_seconds``: see ``rehearse.emulator``; ``texts``, ``naming``, ``row_seconds``:
    ``roles.worker``. An emulated device encodes itself.
    """
    gc.collect()
    # A collection over a loaded model's objects takes 0.2 s, which would delay a token.
    gc.freeze()
    worker: Worker
    if isinstance(link, EmulatedLink):
        worker = EmulatedWorker(
            machine,
            link,
            role,
            Emulation.read(record[EMULATED]),
            header=header,
            model_seconds=model_seconds,
            check_lease=lease.check,
            naming=naming,
        )
    else:
        worker = Worker(
            machine,
            link,
            role,
            header=header,
            check_lease=lease.check,
            texts=texts,
            naming=naming,
            row_seconds=row_seconds,
        )
    lease.doing = worker.doing
    return worker


def stage_number(text: str, stages: int | None = None) -> int:
    """``--stage`` as a number from 1 to ``stages``, if they are known; ConfigError otherwise."""
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise ConfigError(f"--stage is {text}; expected the number of a stage, 1 or more")
    if stages is not None and number > stages:
        raise ConfigError(f"stage {text} is not in the pipeline; its stages are 1 to {stages}")
    return number
