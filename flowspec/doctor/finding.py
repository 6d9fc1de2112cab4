"""One thing found, how bad it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from flowspec.errors import FlowSpecError


class Severity(StrEnum):
    """From harmless to fatal; ``ERROR``: a run would fail, or jobs would be lost."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """``found`` and ``remedy`` are one line each; a finding that is not OK has a remedy."""

    subject: str
    found: str
    level: Severity = Severity.OK
    remedy: str = ""


def ok(subject: str, found: str) -> Finding:
    """A finding that needs nothing done."""
    return Finding(subject, found)


def note(subject: str, found: str, remedy: str) -> Finding:
    """Something that is worth knowing and may be meant."""
    return Finding(subject, found, Severity.NOTE, remedy)


def warning(subject: str, found: str, remedy: str) -> Finding:
    """Runs work, but slowly, or until something else happens."""
    return Finding(subject, found, Severity.WARNING, remedy)


def error(subject: str, found: str, remedy: str) -> Finding:
    """A run would fail, or jobs would be lost."""
    return Finding(subject, found, Severity.ERROR, remedy)


def from_error(subject: str, raised: FlowSpecError, otherwise: str) -> Finding:
    """The finding for an error; ``otherwise``: the remedy of one that names none."""
    return error(subject, raised.found, raised.remedy or otherwise)


def any_error(findings: Iterable[Finding]) -> bool:
    """Whether one of ``findings`` would make a run fail."""
    return any(finding.level is Severity.ERROR for finding in findings)


def size(count: float) -> str:
    """A number of bytes for the user, like ``3.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
