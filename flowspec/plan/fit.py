"""What to say when a model does not fit: what it needs, what there is, and what would fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flowspec.model.weights.precision import PRECISIONS
from flowspec.plan.boxes import TimedBox
from flowspec.plan.drafts import PlannedDrafts
from flowspec.plan.layout import layouts
from flowspec.plan.needs import BARE_BYTES, StageNeeds

#: Precisions from large to small, and the least context worth an offer.
SMALLER = ("float32", "bfloat16", "int8", "nf4")
LEAST_CONTEXT = 256
#: Most boxes offered beyond those there are.
MOST_BOXES = 16
_GIB = 2.0**30


def gib(size: float) -> str:
    """``size`` bytes in GiB."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB / 10 else f"{size / 2**20:.0f} MiB"


def unfit(model: str, boxes: Sequence[TimedBox], needs: StageNeeds, drafts: PlannedDrafts) -> str:
    """One line: ``model`` does not fit on ``boxes``, and the nearest things that do."""
    memory = sum(box.memory for box in boxes)
    smaller = [_smaller_context(boxes, needs, drafts), _smaller_precision(boxes, needs, drafts)]
    if not any(smaller):
        smaller = [_smaller_both(boxes, needs, drafts)]
    offers = [offer for offer in (*smaller, _more_boxes(boxes, needs, drafts)) if offer]
    last = len(needs.shapes.layers)
    least = max(needs.stage(range(1)), needs.stage(range(last - 1, last)))
    nearest = (
        f"it would fit with {', or '.join(offers)}"
        if offers
        else f"the smallest possible stages need up to {gib(least)} on a box"
    )
    count = f"{len(boxes)} boxes" if len(boxes) > 1 else "1 box"
    return (
        f"{model} in {needs.precision.name} with a context of {needs.context} does not fit: "
        f"{count} with a draft {_need(len(boxes))} {gib(_whole(len(boxes), needs, drafts))}, "
        f"and {'have' if len(boxes) > 1 else 'has'} {gib(memory)}; {nearest}"
    )


def _need(count: int) -> str:
    return "need" if count > 1 else "needs"


def _whole(count: int, needs: StageNeeds, drafts: PlannedDrafts) -> int:
    """Bytes of near-equal stages on ``count`` boxes and of the draft."""
    layers = len(needs.shapes.layers)
    stages = min(count, layers)
    bounds = [layers * at // stages for at in range(stages + 1)]
    parts = sum(needs.stage(range(*pair)) for pair in itertools.pairwise(bounds))
    return parts + BARE_BYTES + drafts.size(needs.precision, needs.context)


def fits(boxes: Sequence[TimedBox], needs: StageNeeds, drafts: PlannedDrafts) -> bool:
    """Whether any layout does."""
    size = drafts.size(needs.precision, needs.context)
    return bool(layouts(boxes, needs, drafts.source, size))


def _smaller_context(boxes: Sequence[TimedBox], needs: StageNeeds, drafts: PlannedDrafts) -> str:
    context = needs.context // 2
    while context >= LEAST_CONTEXT:
        if fits(boxes, replace(needs, context=context), drafts):
            return f"a context of {context}"
        context //= 2
    return ""


def _smaller_precision(boxes: Sequence[TimedBox], needs: StageNeeds, drafts: PlannedDrafts) -> str:
    for name in _below(needs.precision.name):
        smaller = replace(needs, precision=PRECISIONS[name])
        if fits(boxes, smaller, drafts):
            return f"--dtype {name} ({gib(_whole(len(boxes), smaller, drafts))})"
    return ""


def _smaller_both(boxes: Sequence[TimedBox], needs: StageNeeds, drafts: PlannedDrafts) -> str:
    for name in _below(needs.precision.name):
        smaller = replace(needs, precision=PRECISIONS[name])
        context = _smaller_context(boxes, smaller, drafts)
        if context:
            return f"--dtype {name} and {context}"
    return ""


def _below(name: str) -> Iterator[str]:
    bits = PRECISIONS[name].bits
    return (other for other in SMALLER if PRECISIONS[other].bits < bits)


def _more_boxes(boxes: Sequence[TimedBox], needs: StageNeeds, drafts: PlannedDrafts) -> str:
    largest = max(boxes, key=lambda box: box.memory)
    for more in range(1, MOST_BOXES + 1):
        added = [replace(largest, name=f"{largest.name}+{at}") for at in range(more)]
        if fits([*boxes, *added], needs, drafts):
            return f"{more} more {'box' if more == 1 else 'boxes'} like {largest.name}"
    return ""
