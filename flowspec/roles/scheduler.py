"""The scheduler: admits submissions, assigns jobs, and ends the jobs whose workers are lost.

Each change is one script, which checks again what the decision was made from: a scheduler that was
paused decides by what it knew before. This loop only decides when to call it. The scheduler owns
the epochs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from flowspec.core.job.queue_order import QueueOrder
from flowspec.core.protocol.addresses import Role
from flowspec.core.protocol.causes import LATE, LOST, NOT_BEGUN
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder
from flowspec.core.run.key import may_be_id
from flowspec.core.run.spec import CANCEL, parse
from flowspec.errors import BrokerError, BrokerFull, ConfigError, StateError
from flowspec.observe import logger
from flowspec.strategies import build
from flowspec.transport.base import (
    Claim,
    Control,
    Intake,
    command_of,
    roles_of,
    setup_of,
    workers_of,
)
from flowspec.transport.connections.answers import WRONG_TYPE

#: Longest interval between two checks of the workers, seconds.
WATCH_SECONDS = 0.25
#: How long workers may be missing before waiting jobs are ended, seconds.
INCOMPLETE_SECONDS = 60.0
#: How long after its lease has expired a worker may still renew it and keep its jobs, seconds.
LATE_SECONDS = 2.0
#: Tries to cancel a job; it can be assigned only once, so a second try finds no further change.
_CANCEL_TRIES = 3
#: How many times a job that has lost a worker begins again: three attempts in all.
MOST_AGAIN = 2

#: Interval between two looks at jobs that nobody follows, and how long they may stay so, seconds:
#: a client whose broker was away says a little later that it is there.
FOLLOWED_LOOK_SECONDS = 2.5
UNFOLLOWED_SECONDS = 8.0
#: Interval between two looks at the broker's policy for a full memory, seconds.
EVICTION_LOOK_SECONDS = 30.0
#: Interval between two tries whether the broker takes writes, seconds.
WRITES_LOOK_SECONDS = 5.0
#: Most time between two turns that counts as waiting, seconds: not a pause of the scheduler.
_LONGEST_TURN = 1.0

Claims = Mapping[str, Claim]


class TurnClock:
    """Seconds that the scheduler has watched: a pause of its own does not count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.now = 0.0
        self._ticked_at: float | None = None

    def tick(self) -> None:
        """A turn begins."""
        at = self._clock()
        if self._ticked_at is not None:
            self.now += min(at - self._ticked_at, _LONGEST_TURN)
        self._ticked_at = at


class Scheduler:
    """Serves one pipeline of ``stages`` verify stages, at most ``most_running`` jobs at a time.

    ``most_waiting``: jobs in the queue (None: QUEUE_CAP); one more is refused. ``generation``:
    under which it holds its role; None: without a lease. ``clock`` gives seconds.
    """

    def __init__(
        self,
        control: Control,
        stages: int,
        *,
        most_running: int = 1,
        incomplete_seconds: float = INCOMPLETE_SECONDS,
        late_seconds: float = LATE_SECONDS,
        generation: int | None = None,
        most_waiting: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self._stages = stages
        record = self._record = control.pipeline()
        self._setup = setup_of(record)
        self._workers = dict(zip(roles_of(record), workers_of(record), strict=True))
        self._most_running = most_running
        self._most_waiting = most_waiting
        self._incomplete_seconds = incomplete_seconds
        self._late_seconds = late_seconds
        self._generation = generation
        self._clock = TurnClock(clock)
        self._absent_since: dict[str, float] = {}  # roles whose lease has expired
        self._incomplete_since: float | None = None
        self._queue = QueueOrder(self._fields)
        self._placed: set[str] = set()  # jobs that waited or ran at the last turn
        self._admitted: SimpleQueue[str] = SimpleQueue()
        self._log = logger(role="scheduler")
        self._intake_error: BrokerError | None = None
        self._wrote_at = -WRITES_LOOK_SECONDS
        #: Why the broker takes no writes, one line; empty: it does.
        self.full = ""
        self._eviction_looked_at = 0.0
        self._followed_looked_at = -FOLLOWED_LOOK_SECONDS
        self._unfollowed_since: dict[str, float] = {}

    def check_eviction(self) -> None:
        """ConfigError if the broker, once it is full, deletes jobs and leases."""
        if policy := self._control.eviction():
            raise ConfigError(
                f"the broker's maxmemory-policy is {policy}, by which it deletes jobs and leases "
                "once it is full; set `maxmemory-policy noeviction` in its configuration"
            )

    def run(self, stop: Callable[[], bool]) -> None:
        """Run until ``stop()`` is true; BrokerUnreachable if the broker stays unreachable.

        One that takes no writes is waited for: what was read is read again.
        """
        self._control.join_intake()
        intake = threading.Thread(target=self._take_in, args=(stop,), name="intake", daemon=True)
        intake.start()
        while not stop():
            try:
                self.turn()
            except BrokerFull as full:
                self._log.warning("broker takes no writes", reason=str(full))
            if self._intake_error is not None:
                raise self._intake_error
            self._control.wait_for_change(WATCH_SECONDS)

    def turn(self) -> None:
        """Look once: check the workers and the jobs, and delete keys of a wrong type."""
        try:
            self._serve()
        except BrokerError as error:
            if error.code != WRONG_TYPE or not self._control.drop_mistyped():
                raise
        else:
            self._control.drop_mistyped()

    def _serve(self) -> None:
        """End jobs that lost a worker; if all are ready, assign jobs."""
        self._clock.tick()
        self._look_at_eviction()
        self._keep_record()
        claims = self._control.claims()
        running = self._control.running()
        self._take_back(claims, running)
        self._end_unfollowed()
        queued = self._control.queued()
        self._keep_places({*queued, *running})
        self._look_at_queue(queued)
        missing = self._missing(claims)
        if missing:
            self._end_waiting([role for role in missing if not self._is_loading(claims, role)])
            return
        self._incomplete_since = None
        for job in self._queue.in_turn:
            holders = {role: claims[role].generation for role in self._workers}
            try:
                code = self._control.assign(job, self._most_running, holders, self._generation)
            except StateError as error:
                self._queue.drop(job)
                self._revoke(job, str(error))
                continue
            if code is Code.STALE and not self._control.job(job):
                self._end_unrecorded(job)
                continue
            if code is not Code.OK:
                break
            self._queue.drop(job)
            self._log.info("job assigned", job=job)

    def _look_at_eviction(self) -> None:
        """Say now and then that the broker's policy was changed meanwhile; jobs go on."""
        if self._clock.now - self._eviction_looked_at < EVICTION_LOOK_SECONDS:
            return
        self._eviction_looked_at = self._clock.now
        if policy := self._control.eviction():
            self._log.warning("broker evicts", policy=policy)

    def _keep_record(self) -> None:
        """Write the pipeline's record again if it is gone or changed: workers are known by it."""
        if self._control.pipeline() == self._record:
            return
        if self._control.set_pipeline(self._record, self._generation) is Code.OK:
            self._log.warning("record written again")

    def _keep_places(self, placed: set[str]) -> None:
        """Put the jobs back that are not among ``placed`` any more, but have not ended.

        The queue, or the set of running jobs, was deleted meanwhile.
        """
        while not self._admitted.empty():
            self._placed.add(self._admitted.get())
        for job in sorted(self._placed - placed, key=lambda job: (len(job), job)):  # oldest first
            code = self._control.place(job)
            if code is Code.OK:
                self._log.warning("job placed again", job=job)
            if code is not Code.STALE:
                placed.add(job)
        self._placed = placed

    def _look_at_queue(self, queued: Sequence[str]) -> None:
        """Learn which jobs wait; end those that have not begun in time."""
        now = self._clock.now
        self._queue.look(queued, now)
        for job in self._queue.overdue(now):
            self._queue.drop(job)
            self._revoke(job, NOT_BEGUN, LATE)

    def _fields(self, job: str) -> dict[str, str]:
        """The fields that ``job`` was submitted with; none: it has ended.

        Without ``wait_seconds`` if it had begun before.
        """
        known = self._control.job(job)
        fields = {name[2:]: value for name, value in known.items() if name.startswith("f:")}
        if int(known.get("epoch", "0")):
            fields.pop("wait_seconds", None)
        return fields

    # ---- intake ----------------------------------------------------------------------------------

    def _take_in(self, stop: Callable[[], bool]) -> None:
        try:
            while not stop():
                try:
                    self._look_at_writes()
                    for intake in self._control.read_intake(1.0):
                        self.take(intake)
                except BrokerFull as full:
                    self.full = str(full)
                    self._log.warning("broker takes no writes", reason=self.full)
        except BrokerError as error:
            self._intake_error = error
        except Exception as error:  # noqa: BLE001 - a scheduler that reads no submissions must not look alive
            reason = f"reading submissions failed: {type(error).__name__}: {error}"
            self._intake_error = BrokerError(reason)

    def _look_at_writes(self) -> None:
        now = time.monotonic()
        if self.full or now - self._wrote_at >= WRITES_LOOK_SECONDS:
            self._control.check_writes()
            self._wrote_at = now
            self.full = ""

    def take(self, intake: Intake) -> None:
        """Admit a submission; if that fails unexpectedly, refuse it and continue."""
        try:
            self.admit(intake)
        except BrokerError:
            raise
        except Exception as error:  # noqa: BLE001 - a submission must not end the service
            self._log.error("submission failed", job=intake.job, exc_info=True)
            self._control.admit(
                intake.job, {}, f"the job could not be read: {type(error).__name__}"
            )
            self._control.acknowledge([intake.job])

    def admit(self, intake: Intake) -> None:
        """Handle one submission; idempotent."""
        if intake.fields.keys() == {CANCEL}:
            self._cancel(intake.fields[CANCEL])
        else:
            error = intake.error or self._fault_of(intake.fields)
            # Of a refused job nothing is used: a key of any length would name one of the broker's.
            fields = {} if error else intake.fields
            code = self._control.admit(intake.job, fields, error, most=self._most_waiting)
            self._admitted.put(intake.job)
            self._log.info("job admitted", job=intake.job, code=code.name, refused=bool(error))
        self._control.acknowledge([intake.job])

    def _cancel(self, job: str) -> None:
        if not may_be_id(job):
            self._log.warning("cancel ignored", characters=len(job))
            return
        code = Code.STALE
        for _ in range(_CANCEL_TRIES):
            code = self._control.revoke(job, "cancelled")
            if code is not Code.STALE:  # STALE: it has just been assigned
                break
        self._log.info("job cancelled", job=job, code=code.name)

    def _fault_of(self, fields: Mapping[str, str]) -> str:
        """Why a submission cannot be served, one line; empty if it can."""
        try:
            build(parse(fields).strategy, self._stages)
        except ConfigError as error:
            return str(error)
        return ""

    # ---- workers ---------------------------------------------------------------------------------

    def _missing(self, claims: Claims) -> list[str]:
        """Roles without a ready worker that was built from the pipeline's record."""
        wanted = {"state": "ready", "setup": self._setup}
        return [
            role
            for role in self._workers
            if role not in claims or not wanted.items() <= claims[role].facts.items()
        ]

    def _is_loading(self, claims: Claims, role: str) -> bool:
        """Whether a worker of ``role`` that was built from the pipeline's record will be ready."""
        known = claims[role].facts if role in claims else {}
        return known.get("state") != "ready" and known.get("setup") == self._setup

    def _take_back(self, claims: Claims, running: Sequence[str]) -> None:
        """Put the running jobs back that have lost a worker, or whose worker was replaced."""
        gone = self._gone(claims)
        for job in running:
            holders = self._control.holders(job)
            if not holders and not self._control.job(job):
                self._end_unrecorded(job)
                continue
            replaced = {
                role for role, claim in claims.items() if claim.generation != holders.get(role)
            }
            lost = [role for role in self._workers if role in gone | replaced]
            if lost:
                self._put_back(job, Holder(lost[0], holders.get(lost[0], 0)))

    def _end_unfollowed(self) -> None:
        """End the jobs of clients that have vanished."""
        now = self._clock.now
        if now - self._followed_looked_at < FOLLOWED_LOOK_SECONDS:
            return
        self._followed_looked_at = now
        since = self._unfollowed_since
        self._unfollowed_since = {job: since.get(job, now) for job in self._control.unfollowed()}
        for job, moment in self._unfollowed_since.items():
            if now - moment >= UNFOLLOWED_SECONDS:
                self._revoke(job, "the client that waited for the job is gone; submit it again")

    def _gone(self, claims: Claims) -> set[str]:
        """Roles whose lease expired ``late_seconds`` ago: their workers are lost, not just late."""
        now = self._clock.now
        absent = [role for role in self._workers if role not in claims]
        self._absent_since = {role: self._absent_since.get(role, now) for role in absent}
        return {
            role for role, since in self._absent_since.items() if now - since >= self._late_seconds
        }

    def _end_waiting(self, missing: list[str]) -> None:
        """End the jobs that have waited for missing workers for too long."""
        if not missing:
            self._incomplete_since = None
            return
        now = self._clock.now
        if self._incomplete_since is None:
            self._incomplete_since = now
        for job in self._queue.waiting_since(now - self._incomplete_seconds):
            if now - self._incomplete_since < self._incomplete_seconds:
                continue
            waited = f"{self._incomplete_seconds:g} s"
            self._revoke(
                job,
                f"no {self._worker_name(missing[0])} for {waited}; "
                f"start one with `{command_of(missing[0])}`",
            )

    def _end_unrecorded(self, job: str) -> None:
        """End a job whose record is gone from the broker; nobody else takes it from its place."""
        code = self._control.revoke(job, "error", by=self._generation)
        self._log.error("job has no record", job=job, code=code.name)

    def _put_back(self, job: str, lost: Holder) -> None:
        """Let ``job`` begin again behind what is committed, with another worker for ``lost``."""
        error = (
            f"the {self._worker_name(lost.role)} was lost, and the job had lost {MOST_AGAIN} "
            "workers before; submit the job again"
        )
        losses = self._control.job(job).get("again")
        code = self._control.revoke(
            job, "error", error, LOST, by=self._generation, lost=lost, again=MOST_AGAIN
        )
        if code is Code.STALE:  # the worker is there again, or its role is not free yet
            return
        known = self._control.job(job)
        state = known.get("state", "unknown")
        if state == "queued" and known.get("again") == losses:
            self._log.info("worker left", job=job, role=lost.role)
        else:
            self._log.warning("worker lost", job=job, role=lost.role, state=state)

    def _revoke(self, job: str, error: str, cause: str = LOST) -> None:
        code = self._control.revoke(job, "error", error, cause, by=self._generation)
        self._log.warning("job ended", job=job, error=error, code=code.name)

    def _worker_name(self, role: str) -> str:
        """The name of the worker of ``role`` in a message to the user."""
        worker = self._workers[role]
        match worker.role:
            case Role.VERIFY:
                return f"worker of verify stage {worker.number}"
            case Role.MIDDLE:
                return f"worker of middle model {worker.number}"
            case _:
                return "draft worker"
