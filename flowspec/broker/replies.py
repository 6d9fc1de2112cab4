"""A server's replies about jobs and leases as values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowspec.broker.base import OutputEntry

#: The id of a stream entry, which is a job's id.
ENTRY_ID = re.compile(r"[0-9]{1,18}-[0-9]{1,18}", re.ASCII)

Claims = dict[str, tuple[str, dict[str, Any]]]


def texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """A hash's or an entry's fields."""
    return {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in fields.items()
    }


def output_entries(entries: Sequence[Any]) -> list[OutputEntry]:
    """Entries of an output stream, as (id, fields)."""
    return [OutputEntry(entry.decode(), texts(fields)) for entry, fields in entries]


def claims_of(roles: Sequence[str], values: Sequence[bytes | None]) -> Claims:
    """Token and facts of the leases in force, of ``values`` parallel to ``roles``."""
    held = {}
    for role, value in zip(roles, values, strict=True):
        if value is not None:
            token, _, facts = value.decode(errors="replace").partition(" ")
            held[role] = (token, _facts(facts))
    return held


def _facts(text: str) -> dict[str, Any]:
    """The facts in a lease's ``text``; empty if it is not a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
