"""A lease on a role: taken once, renewed by a thread, given back; its loss stops the worker.

The lease is about who is alive. That a worker without one can do no harm is the epoch's business.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from flowspec.broker.base import LEASE_MS, RENEW_SECONDS, Control
from flowspec.errors import BrokerError, BrokerFull, ClaimError
from flowspec.observe import logger

#: A worker whose lease was not renewed for so long stops by itself, seconds.
FENCE_SECONDS = 0.8 * LEASE_MS / 1000

Facts = Callable[[], dict[str, object]]


class Lease:
    """The lease on ``role``; ``facts`` are shown to others with every renewal."""

    def __init__(self, control: Control, role: str, facts: Facts) -> None:
        self._control = control
        self.role = role
        self._facts = facts
        self.token = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._stop = threading.Event()
        self._renewed_at = time.monotonic()
        self._thread = threading.Thread(target=self._renew, name=f"lease-{role}", daemon=True)
        self.lost = ""  # why the lease is gone, one line; "" while it holds

    def take(self) -> None:
        """Take the lease and keep renewing it; ClaimError if somebody else holds it."""
        if not self._control.claim(self.role, self.token, self._info()):
            holder = self._control.claims().get(self.role, ("somebody else", {}))[0]
            raise ClaimError(
                f"{self.role} is taken by {holder.rpartition(':')[0] or holder}; "
                "stop that worker first, or wait for its lease to run out"
            )
        self._renewed_at = time.monotonic()
        self._thread.start()

    def release(self) -> None:
        """Stop renewing and give the lease back, if the broker can be reached."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(RENEW_SECONDS * 2)
        try:
            self._control.release(self.role, self.token)
        except BrokerError as error:
            logger(role=self.role).info("lease not given back", reason=str(error))

    def _info(self) -> dict[str, object]:
        return {"host": socket.gethostname(), "pid": os.getpid(), **self._facts()}

    def _renew(self) -> None:
        while not self._stop.wait(RENEW_SECONDS):
            try:
                held = self._control.claim(self.role, self.token, self._info())
            except BrokerFull as error:
                logger(role=self.role).warning("lease not renewed", reason=str(error))
                # what is there may still be read and finished; the fence below is the limit
                continue
            except BrokerError as error:
                self.lost = str(error)
                return
            except Exception as error:  # noqa: BLE001 - a lease nobody renews must not look held
                self.lost = (
                    f"renewing the lease on {self.role} failed: {type(error).__name__}: {error}"
                )
                return
            now = time.monotonic()
            if not held:
                self.lost = f"{self.role} was taken over by another worker"
            elif now - self._renewed_at > FENCE_SECONDS:
                self.lost = f"the lease on {self.role} could not be renewed in time"
            if self.lost:
                return
            self._renewed_at = now
