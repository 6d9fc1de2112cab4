"""One run at a verify stage: its rows, the live part of its segments, its meter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from flowspec.core.protocol.messages import Meter, Open, Prune, Segment
from flowspec.core.protocol.sequence import SeqReader, SeqWriter
from flowspec.core.protocol.work import Kept, Part
from flowspec.core.tree.live_rows import LiveRows
from flowspec.errors import GapError, StateError


class Slowest(NamedTuple):
    """A segment's slowest pass so far: its seconds, and its rows, other runs' included."""

    seconds: float
    rows: int


class StageRun:
    """Rows and counters of the run ``opened``; the ProtocolErrors it raises fail the run.

    ``held``: prompt rows that it begins with; ``lacks_prefix``: it should, but they are not here.
    """

    def __init__(self, stage: int, opened: Open, *, last: bool, held: int = 0) -> None:
        self.opened = opened
        self.failed = False
        self.seen = SeqReader()
        self.sent = SeqWriter()
        self._counts = dict.fromkeys(("prompt", "useful", "wasted", "void", "passes"), 0)
        self._busy_seconds = 0.0
        self._stage = stage
        self._last = last
        self.lacks_prefix = opened.prefix is not None and not held
        self._rows = LiveRows(opened.prompt_length, held)
        self._offset = opened.prompt_length - 1  # context length at the last prune

    @property
    def first_tree_id(self) -> int:
        """Ids below it are context from the start; the prompt's last token is the first root."""
        return self.opened.prompt_length - 1

    @property
    def meter(self) -> Meter:
        """The stage's work for the run so far."""
        return Meter(**self._counts, busy_seconds=self._busy_seconds)

    def prune(self, prune: Prune) -> None:
        """Apply a prune; one that was applied before has no effect."""
        if prune.offset < self._offset:
            return
        absent = [node for node in prune.accepted if node not in self._rows]
        if prune.offset > self._offset or absent:
            end = prune.offset + len(prune.accepted)
            raise GapError(f"stage {self._stage} lacks rows before position {end}")
        before = len(self._rows.tree)
        self._rows.prune(prune.accepted, prune.root)
        self._offset += len(prune.accepted)
        left = self._rows.tree
        # A segment sent after this prune may have overtaken it, at stage 2 or later: its rows are
        # named if they were drafted before the prune, and above all that it names if later.
        newest = max((prune.root, *prune.retained))
        if any(node <= newest for node in left - {prune.root, *prune.retained}):
            raise StateError(f"stage {self._stage} keeps rows the draft worker has pruned")
        self._counts["useful"] += sum(node > self.first_tree_id for node in prune.accepted)
        self._counts["wasted"] += before - len(prune.accepted) - len(left)

    def is_void(self, segment: Segment) -> bool:
        """Whether all rows of ``segment`` are dead; those before it have been computed."""
        return not self._rows.live(segment.ids, segment.parents)

    def begins_anew(self, segment: Segment) -> bool:
        """Whether the text comes from its first row on, although rows are held or expected."""
        return segment.ids[:1] == (0,) and (self.lacks_prefix or len(self._rows) > 0)

    def begin_anew(self) -> None:
        """Drop all rows: another stage lacked those that the run began with."""
        self.lacks_prefix = False
        self._rows = LiveRows(self.opened.prompt_length)

    def keep(self, rows: int) -> Kept | None:
        """The first ``rows`` rows, to keep; None: not all of them are here."""
        if self.failed or self._rows.context < rows:
            return None
        return Kept(rows, self._rows.begin_pass((), ()))

    def share(self, rows: int) -> Kept | None:
        """The first ``rows`` rows, to keep while the run goes on; None: not all of them are here.

        StateError if they are not rows of the prompt alone: only these are in place for good.
        """
        if rows > self.first_tree_id:
            raise StateError(f"stage {self._stage} is to keep {rows} rows of a run that goes on")
        return Kept(rows) if self._rows.context >= rows else None

    def live_part(self, segment: Segment) -> list[int]:
        """Offsets of the segment's live rows, which are to be computed; the others are void."""
        kept = self._rows.live(segment.ids, segment.parents)
        self._counts["void"] += len(segment.ids) - len(kept)
        return kept

    def still_live(self, ids: Sequence[int]) -> list[int]:
        """Offsets of the computed rows ``ids`` that have not been pruned since."""
        tree = self._rows.tree
        first = self.first_tree_id
        return [at for at, node in enumerate(ids) if node in tree or node < first]

    def begin_pass(self, segment: Segment, kept: Sequence[int]) -> Part:
        """The part that computes ``segment``; its rows had offsets ``kept`` when it was sent."""
        rows = len(self._rows) + len(kept)
        if rows > self.opened.capacity:
            raise StateError(
                f"stage {self._stage} has room for {self.opened.capacity} rows, not {rows}"
            )
        context = _count_below(self.first_tree_id, segment.ids)
        pruned = self._rows.begin_pass(segment.ids, segment.parents, context)
        unanswered = 0 if self.opened.returns.hidden else context
        return Part(
            run=segment.run,
            segment=segment.segment,
            ids=segment.ids,
            parents=segment.parents,
            positions=segment.positions,
            tokens=segment.tokens,
            offsets=tuple(kept),
            context=context,
            pruned=pruned,
            answers=tuple(range(unanswered, len(kept))) if self._last else (),
        )

    def end_pass(self, ids: Sequence[int], seconds: float) -> None:
        """Count a pass over ``ids``; a pass over prompt rows alone is prefill."""
        prompt = _count_below(self.first_tree_id + 1, ids)
        self._counts["prompt"] += prompt
        if prompt < len(ids):
            self._counts["passes"] += 1
            self._busy_seconds += seconds

    def close(self, queued: int) -> Meter:
        """The final meter: rows still held count as wasted, ``queued`` rows as void."""
        self._counts["wasted"] += sum(node > self.first_tree_id for node in self._rows.tree)
        self._counts["void"] += queued
        return self.meter


def _count_below(end: int, ids: Sequence[int]) -> int:
    """The number of ``ids`` below ``end``.

    Few segments have prompt rows, so comparing the lowest id is enough for most of them.
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


def onward(segment: Segment, kept: Sequence[int], slowest: Slowest) -> Segment:
    """``segment`` for the next stage: rows at offsets ``kept``, no tokens, one hop less to go."""
    hop = segment.route[0] if segment.route else None
    whole = len(kept) == len(segment.ids)
    return Segment(  # ``replace`` takes several times as long, and this runs once per hop
        run=segment.run,
        segment=segment.segment,
        round=segment.round,
        ids=segment.ids if whole else _pick(segment.ids, kept),
        parents=segment.parents if whole else _pick(segment.parents, kept),
        positions=segment.positions if whole else _pick(segment.positions, kept),
        tokens=(),
        marker=segment.marker,
        task=hop.task if hop else segment.task,
        route=segment.route[1:],
        seconds=slowest.seconds,
        rows=slowest.rows,
        together=segment.together,
    )


def _pick(column: Sequence[int], kept: Sequence[int]) -> tuple[int, ...]:
    return tuple([column[at] for at in kept])
