"""A lease on a role: taken once, renewed by its own thread, released; its loss stops the worker.

A lease shows which worker is alive; the epochs keep a worker without one from writing. So a *late*
renewal is not a *lost* lease: if the lease is still this worker's, or free, it is renewed and the
delay is logged. A lease is lost only if another worker holds it, the broker cannot be reached, or
renewing fails unexpectedly. On a busy machine, or after late renewals, a worker requests a longer
lease, so that a starved but healthy worker keeps its role and its job.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from flowspec.broker.base import LEASE_MS, MOST_LEASE_MS, RENEW_SECONDS, Control
from flowspec.errors import BrokerError, BrokerFull, ClaimError
from flowspec.observe import logger

#: Lifetime of a lease relative to the longest recent interval between two renewals.
MARGIN = 4.0
#: Number of recent intervals.
REMEMBERED = 30

Facts = Callable[[], dict[str, object]]


class Lease:
    """The lease on ``role``; every renewal publishes ``facts``.

    ``control``: a connection for the renewing thread alone, so that a renewal never waits behind
    the worker's own commands.
    """

    def __init__(self, control: Control, role: str, facts: Facts) -> None:
        self.role = role
        self.token = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.lost = ""  # why the lease is lost, one line; "" while it is held
        self._control = control
        self._facts = facts
        self._log = logger(role=role)
        self._stop = threading.Event()
        self._intervals: deque[float] = deque(maxlen=REMEMBERED)
        self._lifetime_ms = self._needed_ms()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{role}", daemon=True)

    def take(self) -> None:
        """Take the lease and keep renewing it; ClaimError if another worker holds it."""
        if not self._claim():
            holder = self._control.claims().get(self.role, ("somebody else", {}))[0]
            raise ClaimError(
                f"{self.role} is taken by {holder.rpartition(':')[0] or holder}; "
                "stop that worker first, or wait for its lease to run out"
            )
        self._thread.start()

    def release(self) -> None:
        """Stop renewing and release the lease, if the broker can be reached."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(RENEW_SECONDS * 2)
        try:
            self._control.release(self.role, self.token)
        except BrokerError as error:
            self._log.info("lease not given back", reason=str(error))

    def _claim(self) -> bool:
        info = {"host": socket.gethostname(), "pid": os.getpid(), **self._facts()}
        return self._control.claim(self.role, self.token, info, self._lifetime_ms)

    def _keep(self) -> None:
        renewed_at = time.monotonic()
        while not self._stop.wait(RENEW_SECONDS):
            try:
                self._adapt(time.monotonic() - renewed_at)
                held = self._claim()
            except BrokerFull as error:
                # What the broker holds can still be read and finished, until the lease expires.
                self._log.warning("lease not renewed", reason=str(error))
                continue
            except BrokerError as error:
                self.lost = str(error)
                return
            except Exception as error:  # noqa: BLE001 - a lease nobody renews must not look held
                why = f"{type(error).__name__}: {error}"
                self.lost = f"renewing the lease on {self.role} failed: {why}"
                return
            if not held:
                self.lost = f"{self.role} was taken over by another worker"
                return
            renewed_at = time.monotonic()

    def _adapt(self, interval: float) -> None:
        """Set the lifetime for a renewal that comes ``interval`` seconds after the last one."""
        if interval * 1000 > self._lifetime_ms:
            self._log.warning("lease renewed late", seconds=round(interval, 1))
        self._intervals.append(interval)
        self._lifetime_ms = self._needed_ms()

    def _needed_ms(self) -> int:
        by_load = LEASE_MS * load_per_core()
        by_intervals = MARGIN * 1000 * max(self._intervals, default=0.0)
        return int(min(MOST_LEASE_MS, max(LEASE_MS, by_load, by_intervals)))


def load_per_core() -> float:
    """The machine's load average over the last minute, per core."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:  # not every system has one
        return 0.0
