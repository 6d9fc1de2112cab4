"""Which role a spare takes: one that nobody has, or that a process which still loads has again."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from flowspec.errors import BrokerError
from flowspec.start import boot
from flowspec.start.boot import Process
from flowspec.transport.base import Claim

Look = dict[str, str]  # by role, the state of its holder
ROLES = ("verify-1", "verify-2")
ALL: Look = {"scheduler": "ready", "verify-1": "ready", "verify-2": "ready"}
NEVER: Look = dict.fromkeys(ROLES, "loading") | {"scheduler": "ready"}
AGAIN: Look = ALL | {"verify-2": "loading"}
GONE: Look = {"scheduler": "ready", "verify-1": "ready"}


class Seen:
    """A control that shows one look after another, then the last one for ever."""

    def __init__(self, process: Process, looks: list[Look]) -> None:
        self._process = process
        self._looks: Iterator[Look] = iter(looks)
        self.released: list[tuple[str, str]] = []

    def note_spare(self, spare: dict[str, object]) -> None:
        assert spare["roles"] == ROLES
        raise BrokerError("no permission")  # that it cannot be listed keeps it from nothing

    def claims(self) -> dict[str, Claim]:
        look = next(self._looks, None)
        if look is None:
            self._process._stop(signal.SIGINT, None)
            return {}
        return {role: Claim(f"by-{role}", {"state": state}, 1) for role, state in look.items()}

    def release(self, role: str, token: str) -> None:
        self.released.append((role, token))

    def close(self) -> None:
        pass


@pytest.fixture
def process() -> Iterator[Process]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield Process("unix:///none")
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("looks", "taken", "released"),
    [
        ([ALL, ALL, ALL], None, []),
        ([NEVER, NEVER, ALL, ALL], None, []),  # they start for the first time
        ([ALL, AGAIN], "verify-2", [("verify-2", "by-verify-2")]),
        ([NEVER, ALL, GONE, AGAIN], "verify-2", [("verify-2", "by-verify-2")]),
        ([ALL, GONE, ALL, ALL], None, []),
        ([ALL, GONE, GONE], "verify-2", []),
        ([ALL, ALL | {"verify-2": "joining"}, ALL], None, []),
        ([GONE | {"verify-2": "loading"}] * 3, None, []),
    ],
)
def test_a_spare_takes_a_free_role_or_one_that_is_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
    process: Process,
    looks: list[Look],
    taken: str | None,
    released: list[tuple[str, str]],
) -> None:
    monkeypatch.setattr(boot, "_SPARE_LOOK_SECONDS", 0.0)
    seen = Seen(process, looks)
    monkeypatch.setattr(process, "control", lambda: seen)
    assert process.free_role(ROLES) == taken
    assert seen.released == released
