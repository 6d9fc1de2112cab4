"""A server's replies about jobs and leases as values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flowspec.transport.base import Claim, OutputEntry

Claims = dict[str, Claim]


def texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """A hash's or an entry's fields."""
    return {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in fields.items()
    }


def output_entries(entries: Sequence[Any]) -> list[OutputEntry]:
    """Entries of an output stream, as (id, fields)."""
    return [OutputEntry(entry.decode(), texts(fields)) for entry, fields in entries]


def recording_lines(entries: Sequence[Any]) -> list[str]:
    """A recording's lines, once each: a worker that has lost a reply writes its line again."""
    return list(dict.fromkeys(texts(fields).get("l", "") for _, fields in entries))


def claims_of(
    roles: Sequence[str], values: Sequence[bytes | None], generations: Mapping[bytes, bytes]
) -> Claims:
    """The leases in force, of ``values`` parallel to ``roles`` and the roles' ``generations``."""
    held = {}
    known = texts(generations)
    for role, value in zip(roles, values, strict=True):
        if value is not None:
            token, _, facts = value.decode(errors="replace").partition(" ")
            held[role] = Claim(token, _facts(facts), generation_of(role, token, known))
    return held


def lost_of(
    roles: Sequence[str], values: Sequence[bytes | None], generations: Mapping[bytes, bytes]
) -> list[str]:
    """The roles without a lease, of which the latest holder did not say that it leaves."""
    known = texts(generations)
    return [
        role
        for role, value in zip(roles, values, strict=True)
        if value is None and role in known and known.get(f"left:{role}") != known[role]
    ]


def generation_of(role: str, token: str, generations: Mapping[str, str]) -> int:
    """The generation of ``token`` if it is the latest to have claimed ``role``; else 0."""
    number = generations.get(role, "")
    return int(number) if number.isdecimal() and generations.get(f"by:{role}") == token else 0


def _facts(text: str) -> dict[str, Any]:
    """The facts in a lease's ``text``; empty if it is not a JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
