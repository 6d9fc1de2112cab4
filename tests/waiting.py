"""Waiting for what other threads and processes do: the only clock of the tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: The bound of every wait of a test, seconds: far above what a busy machine takes.
SECONDS = 60.0


def until(condition: Callable[[], T], *, pause: float = 0.01) -> T:
    """The value of ``condition()`` once it is true; it is asked every ``pause`` seconds.

    AssertionError with the last value if it is not within ``SECONDS``.
    """
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still {found!r} after {SECONDS:g} s"
        time.sleep(pause)
    return found


def seconds_of(action: Callable[[], object]) -> float:
    """Seconds that ``action()`` takes, for tests whose subject is waiting.

    A busy machine adds any number of them: compare with a lower bound, or with half of ``SECONDS``.
    """
    began = time.monotonic()
    action()
    return time.monotonic() - began
