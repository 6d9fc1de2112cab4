"""What is committed of a job, as its output has it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from flowspec.errors import StateError


def committed_ids(job: str, fields: Mapping[str, str]) -> tuple[int, ...]:
    """The tokens of an entry of the output of ``job``; StateError if it cannot be read."""
    try:
        ids = json.loads(fields["ids"])
    except (KeyError, ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise unreadable_output(job)
    return tuple(ids)


def unreadable_output(job: str) -> StateError:
    """That an entry of the output of ``job`` is not what a worker writes."""
    return StateError(
        f"the output of job {job} at the broker has an entry that cannot be read; submit it again"
    )
