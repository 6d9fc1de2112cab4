"""Findings: an error's text becomes what was found and what to do; one error fails the whole."""

from __future__ import annotations

import pytest

from flowspec.doctor.finding import (
    Severity,
    any_error,
    error,
    from_error,
    note,
    ok,
    size,
    warning,
)
from flowspec.errors import ModelError


def test_only_an_error_fails() -> None:
    harmless = [ok("s", "f"), note("s", "f", "r"), warning("s", "f", "r")]
    assert not any_error(harmless)
    assert any_error([*harmless, error("s", "f", "r")])


def test_an_errors_last_part_is_the_remedy() -> None:
    found = from_error("s", ModelError("a is bad; b is worse; do c"), "other")
    assert (found.found, found.remedy) == ("a is bad; b is worse", "do c")
    assert found.level is Severity.ERROR
    found = from_error("s", ModelError("a is bad"), "other")
    assert (found.found, found.remedy) == ("a is bad", "other")


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (5 << 20, "5 MiB"), (3 << 29, "1.5 GiB")],
)
def test_sizes_are_in_the_largest_unit_that_fits(count: int, shown: str) -> None:
    assert size(count) == shown
