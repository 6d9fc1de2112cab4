"""A server's replies about jobs and leases as values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flowspec.transport.base import Claim, OutputEntry

Claims = dict[str, Claim]


def texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """A hash's or an entry's fields."""
    return {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in fields.items()
    }


def pipeline_record(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """A pipeline's record; empty, as if it were gone, if a part is not what a scheduler writes."""
    return _readable(fields, _OF_PIPELINE, ("stages",))


def job_record(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    """A job's record; empty, as if it were gone, if a part is not what a script writes."""
    return _readable(fields, _OF_JOB, ("state", "epoch"))


def _readable(
    fields: Mapping[bytes, bytes],
    parts: Mapping[str, Callable[[str], bool]],
    needed: Sequence[str],
) -> dict[str, str]:
    found = texts(fields)
    is_sound = all(is_right(found[name]) for name, is_right in parts.items() if name in found)
    return found if is_sound and found.keys() >= set(needed) else {}


def _is_number(text: str, digits: int = 12) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= digits


def _is_list(text: str, of: type) -> bool:
    """Whether ``text`` is a JSON array with values of this type alone."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, list) and all(type(value) is of for value in found)


_is_stages = partial(_is_number, digits=4)
_are_names = partial(_is_list, of=str)
_are_ids = partial(_is_list, of=int)
_OF_PIPELINE: dict[str, Callable[[str], bool]] = {
    "stages": _is_stages,
    "middles": _are_names,
    "drafts": _are_names,
    "context": _is_number,
    "kept_rows": _is_number,
    "most_rows": _is_number,
}
_OF_JOB: dict[str, Callable[[str], bool]] = {
    "state": {"queued", "running", "done"}.__contains__,
    "epoch": _is_number,
    "again": _is_number,
    "prompt_token_ids": _are_ids,
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
