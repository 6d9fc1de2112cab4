"""Work of several jobs in one pass, of which what fails is kept to the job that caused it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from flowspec.core.protocol.work import WorkFailed
from flowspec.errors import FlowSpecError
from flowspec.model.base import reason_of
from flowspec.observe import logger

Given = TypeVar("Given")
Placed = TypeVar("Placed")
Found = TypeVar("Found")


def each_of(
    given: Sequence[Given],
    place: Callable[[Given], Placed],
    compute: Callable[[Sequence[Placed]], list[Found]],
    *,
    joins: bool,
    device: torch.device,
) -> list[Found | WorkFailed]:
    """``compute`` of what ``place`` makes of each job's part, or why there is none.

    If the parts cannot be computed together, as for want of memory, they are one by one, so that
    only those fail which cannot be computed at all: a row computed again goes where it went before.
    ``joins``: whether to try it together. ``device``: where it is computed.
    """
    found: dict[int, Found | WorkFailed] = {}
    placed: dict[int, Placed] = {}
    for at, part in enumerate(given):
        try:
            placed[at] = place(part)
        except FlowSpecError as error:
            found[at] = WorkFailed(str(error))
    if placed:
        attempt = partial(_attempt, compute, device)
        found.update(zip(placed, _computed(list(placed.values()), attempt, joins), strict=True))
    return [found[at] for at in range(len(given))]


def _computed(
    placed: Sequence[Placed],
    attempt: Callable[[Sequence[Placed]], Sequence[Found] | WorkFailed],
    joins: bool,
) -> list[Found | WorkFailed]:
    if joins:
        together = attempt(placed)
        if not isinstance(together, WorkFailed):
            return [*together]
        logger().warning("a pass over several jobs failed", reason=together.reason)
    found: list[Found | WorkFailed] = []
    for one in placed:
        alone = attempt([one])
        found.append(alone if isinstance(alone, WorkFailed) else alone[0])
    return found


def _attempt(
    compute: Callable[[Sequence[Placed]], list[Found]],
    device: torch.device,
    placed: Sequence[Placed],
) -> list[Found] | WorkFailed:
    try:
        return compute(placed)
    except torch.OutOfMemoryError:
        pass  # its traceback holds the pass's memory until here
    except Exception as error:  # noqa: BLE001 - whatever it is ends its job, no other
        return WorkFailed(reason_of(error))
    return WorkFailed(out_of_memory(device))


def out_of_memory(device: torch.device) -> str:
    """Give back what the failed pass held, which the next job needs; what to tell the user."""
    torch.cuda.empty_cache()
    return (
        f"the device {device} is out of memory; "
        "run fewer jobs, shorter contexts or smaller segments, or give it fewer layers"
    )
