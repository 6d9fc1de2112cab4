"""One job at a verify stage: which rows it holds, what is left of a segment, what its work came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowspec.core.machine import Part
from flowspec.core.messages import Meter, Open, Prune, Segment
from flowspec.core.sequence import SeqReader, SeqWriter
from flowspec.core.slots import SlotTable
from flowspec.errors import GapError, StateError


class StageJob:
    """Rows and counters of ``opened``; raises ProtocolErrors, which fail the job."""

    def __init__(self, stage: int, opened: Open, *, last: bool) -> None:
        self.opened = opened
        self.failed = False
        self.seen, self.sent = SeqReader(), SeqWriter()
        self.meter = Meter()
        self._stage, self._last = stage, last
        self._slots = SlotTable(opened.prompt_length)
        self._offset = opened.prompt_length - 1  # context length of the last prune

    @property
    def first_tree_id(self) -> int:
        """Ids below it are context from the start; the prompt's last token is the first root."""
        return self.opened.prompt_length - 1

    def count(self, **more: float) -> None:
        """Add to the meter's counters."""
        self.meter = replace(self.meter, **{name: getattr(self.meter, name) + by for name, by in more.items()})

    def prune(self, prune: Prune) -> None:
        """Apply a prune; one that was applied before changes nothing."""
        if prune.offset < self._offset:
            return
        absent = [node for node in prune.accepted if node not in self._slots]
        if prune.offset > self._offset or absent:
            raise GapError(f"stage {self._stage} lacks rows before position {prune.offset + len(prune.accepted)}")
        before = len(self._slots.live)
        self._slots.prune(prune.accepted, prune.root)
        self._offset += len(prune.accepted)
        left = self._slots.live
        # A segment sent after this prune may have overtaken it: newer ids than it knows are none of its business.
        newest = max((prune.root, *prune.retained))
        if not {node for node in left if node <= newest} <= {prune.root, *prune.retained}:
            raise StateError(f"stage {self._stage} keeps rows the draft worker has pruned")
        useful = sum(node > self.first_tree_id for node in prune.accepted)
        self.count(useful=useful, wasted=before - len(prune.accepted) - len(left))

    def left_of(self, segment: Segment) -> list[int]:
        """Offsets of the segment's rows that are live and have to be computed."""
        kept: list[int] = []
        alive: set[int] = set()
        for offset, (node, parent) in enumerate(zip(segment.ids, segment.parents, strict=True)):
            if parent in alive or self._slots.is_live(node, parent):
                alive.add(node)
                kept.append(offset)
        self.count(void=len(segment.ids) - len(kept))
        return kept

    def still_live(self, ids: Sequence[int]) -> list[int]:
        """Offsets of computed rows ``ids`` that no prune has reached since."""
        return [at for at, node in enumerate(ids) if node < self.first_tree_id or node in self._slots]

    def plan(self, segment: Segment, kept: Sequence[int]) -> Part:
        """The part that computes the rows of ``segment``, which are offsets ``kept`` of what was sent."""
        after = self._slots.length + len(kept)
        if after > self.opened.capacity:
            raise StateError(f"stage {self._stage} has room for {self.opened.capacity} rows, not {after}")
        context_rows = sum(node < self.first_tree_id for node in segment.ids)
        plan = self._slots.plan(segment.ids, segment.parents, context_rows)
        unanswered = 0 if self.opened.returns.hidden else context_rows
        return Part(
            job=segment.job,
            epoch=segment.epoch,
            segment=segment.segment,
            ids=segment.ids,
            positions=segment.positions,
            tokens=segment.tokens,
            offsets=tuple(kept),
            context=plan.context,
            held=plan.held,
            moves=plan.moves,
            parents=plan.parents,
            answers=tuple(range(unanswered, len(kept))) if self._last else (),
        )

    def computed(self, ids: Sequence[int], seconds: float) -> None:
        """Count a pass over ``ids``; a pass over prompt rows alone is prefill."""
        prompt = sum(node <= self.first_tree_id for node in ids)
        self.count(prompt=prompt)
        if prompt < len(ids):
            self.count(passes=1, busy_seconds=seconds)

    def close(self, queued: int) -> Meter:
        """The final meter: rows still held were computed for nothing, ``queued`` ones never computed."""
        self.count(wasted=sum(node > self.first_tree_id for node in self._slots.live), void=queued)
        return self.meter


def rows_of(segment: Segment, kept: Sequence[int]) -> Segment:
    """``segment`` with only the rows at offsets ``kept``."""
    if len(kept) == len(segment.ids):
        return segment
    return replace(
        segment,
        ids=tuple(segment.ids[at] for at in kept),
        parents=tuple(segment.parents[at] for at in kept),
        positions=tuple(segment.positions[at] for at in kept),
        tokens=tuple(segment.tokens[at] for at in kept) if segment.tokens else (),
    )
