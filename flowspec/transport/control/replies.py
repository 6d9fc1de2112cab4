"""A server's replies about jobs and leases as values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flowspec.core.run.fields import read_ids, read_list
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


def job_record(*stored: Mapping[bytes, bytes]) -> dict[str, str]:
    """A job's record of what is ``stored``: its hash, and its request if that is wanted.

    Empty, as if it were gone, if a part is not what a script writes.
    """
    fields = {name: value for part in stored for name, value in part.items()}
    return _readable(fields, _OF_JOB, ("state", "epoch"))


def _readable(
    fields: Mapping[bytes, bytes], parts: Mapping[str, Callable[[str], Any]], needed: Sequence[str]
) -> dict[str, str]:
    """``fields`` as texts; empty if one of ``parts`` cannot be read, or a needed one lacks."""
    found = texts(fields)
    if not found.keys() >= set(needed):
        return {}
    try:
        for name in parts.keys() & found.keys():
            parts[name](found[name])
    except (ValueError, RecursionError):
        return {}
    return found


def _number(text: str, digits: int = 12) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= digits):
        raise ValueError
    return int(text)


def _digests(text: str) -> None:
    """Digests by group of a model, or of each of several."""
    found = json.loads(text)
    for model in found if isinstance(found, list) else [found]:
        if not isinstance(model, dict) or set(map(type, model.values())) - {str}:
            raise ValueError


_names = partial(read_list, of=str)
_OF_PIPELINE: dict[str, Callable[[str], Any]] = {
    "stages": partial(_number, digits=4),
    "middles": _names,
    "drafts": _names,
    "target_values": _digests,
    "middle_values": _digests,
    "context": _number,
    "kept_rows": _number,
    "most_rows": _number,
}
_OF_JOB: dict[str, Callable[[str], Any]] = {
    "state": ("queued", "running", "done").index,
    "epoch": _number,
    "again": _number,
    "prompt_token_ids": read_ids,
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


def spares_of(members: Sequence[bytes]) -> list[dict[str, Any]]:
    """Those of ``members`` that describe a spare: its ``roles``, ``host`` and ``pid``."""
    found = [_facts(member.decode(errors="replace")) for member in members]
    return [
        spare
        for spare in found
        if isinstance(spare.get("roles"), list)
        and all(isinstance(role, str) for role in spare["roles"])
        and isinstance(spare.get("host"), str)
        and isinstance(spare.get("pid"), int)
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
