"""A lease on a role: taken once, renewed by its own thread, released.

The rules are ``core.protocol.lease``. A lease is lost if another worker has taken the role, if the
broker cannot be reached, or if renewing fails unexpectedly; the worker then drops its rows and may
take the role again, under a new generation. A worker whose loop hangs gives its role up.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from flowspec import __version__
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.lease import (
    TERMS,
    Doing,
    HangWatch,
    LeaseMachine,
    LeaseState,
    LeaseTerms,
)
from flowspec.errors import BrokerError, BrokerFull, ClaimError, LeaseLost
from flowspec.observe import logger
from flowspec.transport.base import Control

#: How long a write waits for a late renewal before the lease counts as lost, seconds.
RENEWAL_SECONDS = 60.0
#: Interval between two looks at a lease that is late, seconds.
_LOOK_SECONDS = 0.02
#: The fact that tells whether a worker is loading, and its value then.
STATE = "state"
LOADING = "loading"
#: The fact of a worker that it was a spare.
WAS_SPARE = "was_spare"
#: A worker that loads hangs if its threads, but the lease's own, compute less than a step within
#: this time, seconds. Another process may compile the kernels meanwhile, for up to a minute.
_LOADING_SECONDS = 120.0
_STEP_SECONDS = 0.1

Facts = Callable[[], dict[str, object]]


class Lease:
    """The lease on ``role``; every renewal publishes ``facts``.

    ``control``: a connection for the renewing thread alone, so that a renewal never waits behind
    the worker's own commands. ``on_hung``: called by that thread once the loop hangs, after the
    role was given up.
    """

    def __init__(
        self,
        control: Control,
        role: str,
        facts: Facts,
        *,
        terms: LeaseTerms = TERMS,
        on_hung: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.role = role
        self.token = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.lost = ""  # why the lease is lost, one line; "" while it is held
        self.by_broker = False  # whether that is because the broker could not be reached
        self.doing: Callable[[], Doing] = Doing  # what the worker's loop does
        self._control = control
        self._facts = facts
        self._terms = terms
        self._on_hung = on_hung
        self._log = logger(role=role)
        self._is_loading = False
        self._stop = threading.Event()
        self._machine = LeaseMachine(terms)
        self._watch = HangWatch(2 * terms.renew_seconds)
        self._thread = threading.Thread(target=self._keep, name=f"lease-{role}", daemon=True)

    @property
    def holder(self) -> Holder:
        """This worker as the role's holder, once the lease is taken."""
        return Holder(self.role, self._machine.generation)

    def take(self) -> None:
        """Take the lease and keep renewing it; ClaimError if another worker holds it."""
        self._renew()
        if self._machine.state is LeaseState.LOST:
            raise ClaimError(self._taken())
        self._thread.start()

    def _taken(self) -> str:
        """Who holds the role, one line."""
        claim = self._control.claims().get(self.role)
        holder = claim.token if claim is not None else "somebody else"
        taken = f"{self.role} is taken by {holder.rpartition(':')[0] or holder}"
        if claim is not None and claim.facts.get(WAS_SPARE):
            return f"{taken}, which was its spare; start this worker as a spare, by --spare"
        return (
            f"{taken}; stop that worker first; if it has crashed on another machine, its lease "
            f"runs out within {self._terms.longest_ms / 1000:g} s"
        )

    def check(self) -> None:
        """Before a write: wait until the lease is young enough; LeaseLost if it is lost."""
        deadline = time.monotonic() + RENEWAL_SECONDS
        while not self.lost and not self._machine.may_write(time.monotonic()):
            if self._stop.wait(_LOOK_SECONDS):
                self.lost = f"the lease on {self.role} was given back"
            elif time.monotonic() > deadline:
                self.lost = f"the lease on {self.role} could not be renewed for a long time"
        if self.lost:
            raise LeaseLost(self.lost)

    def release(self, *, leaves: bool = False) -> None:
        """Stop renewing and release the lease, if the broker can be reached.

        ``leaves``: on purpose; its jobs go on elsewhere as if they had not lost a worker.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._terms.renew_seconds * 2)
        self._give_back(leaves=leaves)

    def _give_back(self, *, leaves: bool = False) -> None:
        try:
            self._control.release(self.role, self.token, leaves=leaves)
        except BrokerError as error:
            self._log.info("lease not given back", reason=str(error))

    def _renew(self) -> None:
        """Ask for the lease, and tell the machine what comes of it."""
        told = self._facts()
        machine = self._machine
        self._is_loading = told.get(STATE) == LOADING
        lifetime = machine.ask(time.monotonic(), loading=self._is_loading, load=load_per_core())
        info = {"host": socket.gethostname(), "pid": os.getpid(), "version": __version__, **told}
        generation = self._control.claim(self.role, self.token, info, lifetime)
        if generation:
            machine.granted(generation)
        else:
            machine.refused()

    def _keep(self) -> None:
        while not self._stop.wait(self._terms.renew_seconds):
            try:
                if self._is_hung():
                    return
                late = self._machine.late_by(time.monotonic())
                if late > 0:
                    self._log.warning("lease renewed late", seconds=round(late, 1))
                self._renew()
            except BrokerFull as error:
                # What the broker holds can still be read and finished, until the lease expires.
                self._log.warning("lease not renewed", reason=str(error))
                continue
            except BrokerError as error:
                self.by_broker = True
                self.lost = str(error)
                return
            except Exception as error:  # noqa: BLE001 - a lease nobody renews must not look held
                why = f"{type(error).__name__}: {error}"
                self.lost = f"renewing the lease on {self.role} failed: {why}"
                return
            if self._machine.state is LeaseState.LOST:
                self.lost = f"{self.role} was taken over by another worker"
                return

    def _is_hung(self) -> bool:
        """Whether the worker's loop hangs, or its loading before: then its role is given up."""
        doing = _loading() if self._is_loading else self.doing()
        if not self._watch.look(doing, time.monotonic()):
            return False
        what = "loading" if self._is_loading else "loop"
        self.lost = f"the {what} of {self.role} has hung for {self._watch.age:.0f} s"
        self._log.error(f"{what} hangs", seconds=round(self._watch.age, 1))
        self._give_back()
        self._on_hung(self.lost)
        return True


def _loading() -> Doing:
    """What a process does before its loop: a number that grows as its other threads compute."""
    seconds = time.process_time() - time.thread_time()
    return Doing(1 + int(seconds / _STEP_SECONDS), _LOADING_SECONDS)


def has_ended(token: str) -> bool:
    """Whether the process that holds a lease by ``token`` was one of this host, and is no more.

    Hosts may have one name: such a lease is not to be given back for its holder.
    """
    host, pid, *_ = (*token.split(":"), "")
    if host != socket.gethostname() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it is another user's, or no number of a process
        return False
    return False


def load_per_core() -> float:
    """The machine's load average over the last minute, per core."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:  # not every system has one
        return 0.0
