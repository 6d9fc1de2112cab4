"""One job at a verify stage: which rows it holds, what is left of a segment, what its
work came to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowspec.core.protocol.machine import Part
from flowspec.core.protocol.messages import Meter, Open, Prune, Segment
from flowspec.core.protocol.sequence import SeqReader, SeqWriter
from flowspec.core.tree.slots import SlotTable
from flowspec.errors import GapError, StateError


class StageJob:
    """Rows and counters of ``opened``; raises ProtocolErrors, which fail the job."""

    def __init__(self, stage: int, opened: Open, *, last: bool) -> None:
        self.opened = opened
        self.failed = False
        self.seen = SeqReader()
        self.sent = SeqWriter()
        self._counts = dict.fromkeys(("prompt", "useful", "wasted", "void", "passes"), 0)
        self._busy_seconds = 0.0
        self._stage = stage
        self._last = last
        self._slots = SlotTable(opened.prompt_length)
        self._offset = opened.prompt_length - 1  # context length of the last prune

    @property
    def first_tree_id(self) -> int:
        """Ids below it are context from the start; the prompt's last token is the first root."""
        return self.opened.prompt_length - 1

    @property
    def meter(self) -> Meter:
        """What the work came to so far."""
        return Meter(**self._counts, busy_seconds=self._busy_seconds)

    def prune(self, prune: Prune) -> None:
        """Apply a prune; one that was applied before changes nothing."""
        if prune.offset < self._offset:
            return
        absent = [node for node in prune.accepted if node not in self._slots]
        if prune.offset > self._offset or absent:
            raise GapError(
                f"stage {self._stage} lacks rows before position "
                f"{prune.offset + len(prune.accepted)}"
            )
        before = len(self._slots.held)
        self._slots.prune(prune.accepted, prune.root)
        self._offset += len(prune.accepted)
        left = self._slots.held
        # A segment sent after this prune may have overtaken it: newer ids than it knows are none of
        # its business.
        newest = max((prune.root, *prune.retained))
        if any(node <= newest for node in left - {prune.root, *prune.retained}):
            raise StateError(f"stage {self._stage} keeps rows the draft worker has pruned")
        self._counts["useful"] += sum(node > self.first_tree_id for node in prune.accepted)
        self._counts["wasted"] += before - len(prune.accepted) - len(left)

    def left_of(self, segment: Segment) -> list[int]:
        """Offsets of the segment's rows that are live and have to be computed."""
        kept = self._slots.live_rows(segment.ids, segment.parents)
        self._counts["void"] += len(segment.ids) - len(kept)
        return kept

    def still_live(self, ids: Sequence[int]) -> list[int]:
        """Offsets of computed rows ``ids`` that no prune has reached since."""
        held = self._slots.held
        first = self.first_tree_id
        return [at for at, node in enumerate(ids) if node in held or node < first]

    def plan(self, segment: Segment, kept: Sequence[int]) -> Part:
        """The part that computes the rows of ``segment``, which are offsets ``kept`` of what was
        sent.
        """
        after = self._slots.length + len(kept)
        if after > self.opened.capacity:
            raise StateError(
                f"stage {self._stage} has room for {self.opened.capacity} rows, not {after}"
            )
        context_rows = _below(self.first_tree_id, segment.ids)
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
        prompt = _below(self.first_tree_id + 1, ids)
        self._counts["prompt"] += prompt
        if prompt < len(ids):
            self._counts["passes"] += 1
            self._busy_seconds += seconds

    def close(self, queued: int) -> Meter:
        """The final meter: rows still held were computed for nothing, ``queued`` ones never
        computed.
        """
        self._counts["wasted"] += sum(node > self.first_tree_id for node in self._slots.held)
        self._counts["void"] += queued
        return self.meter


def _below(end: int, ids: Sequence[int]) -> int:
    """How many of ``ids`` are below ``end``; few segments have prompt rows, so most are told by
    their lowest.
    """
    return sum(node < end for node in ids) if ids and min(ids) < end else 0


def rows_of(segment: Segment, kept: Sequence[int]) -> Segment:
    """``segment`` with only the rows at offsets ``kept``."""
    if len(kept) == len(segment.ids):
        return segment
    return replace(
        segment,
        ids=_pick(segment.ids, kept),
        parents=_pick(segment.parents, kept),
        positions=_pick(segment.positions, kept),
        tokens=_pick(segment.tokens, kept) if segment.tokens else (),
    )


def onward(segment: Segment, kept: Sequence[int], seconds: float) -> Segment:
    """What the next stage gets of ``segment``: rows at offsets ``kept``, no tokens, one hop further
    on its route; ``seconds`` is its slowest pass by now.
    """
    hop = segment.route[0] if segment.route else None
    whole = len(kept) == len(segment.ids)
    return Segment(  # not ``replace``, which takes several times as long, once a hop
        segment.job,
        segment.epoch,
        segment.segment,
        segment.round,
        segment.ids if whole else _pick(segment.ids, kept),
        segment.parents if whole else _pick(segment.parents, kept),
        segment.positions if whole else _pick(segment.positions, kept),
        (),
        segment.marker,
        hop.task if hop else segment.task,
        segment.route[1:],
        seconds,
    )


def _pick(column: Sequence[int], kept: Sequence[int]) -> tuple[int, ...]:
    return tuple([column[at] for at in kept])
