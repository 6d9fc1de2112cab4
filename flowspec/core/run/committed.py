"""What is committed of a job, as its output has it."""

from __future__ import annotations

from collections.abc import Mapping

from flowspec.core.run.fields import read_ids
from flowspec.errors import StateError


def committed_ids(job: str, fields: Mapping[str, str]) -> tuple[int, ...]:
    """The tokens of an entry of the output of ``job``; StateError if it cannot be read."""
    try:
        return read_ids(fields["ids"])
    except (KeyError, ValueError):
        raise unreadable_output(job) from None


def unreadable_output(job: str) -> StateError:
    """That an entry of the output of ``job`` is not what a worker writes."""
    return StateError(
        f"the output of job {job} at the broker has an entry that cannot be read; submit it again"
    )
