"""Where the stages and the draft could go: the splits that are worth a prediction.

The draft is tried on every kind of box, beside a stage or alone. For each of these the exact
splits over every number of boxes are found (``split``), with the fastest slowest stage at
``SEGMENT`` rows, which bounds a full pipeline, with the least sum at one row, which is the time
between tokens of plain decoding, and with the least sums below bounds on the slowest stage between
the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flowspec.model.drafters.kinds import NGRAM
from flowspec.plan.boxes import TimedBox
from flowspec.plan.estimate import rising
from flowspec.plan.needs import BARE_BYTES, StageNeeds
from flowspec.plan.split import BoxKind, Split, SplitSearch
from flowspec.rehearse.devices.profile import LinkShape, Profile, Times

#: Rows of a segment in a full pipeline, at which stages are balanced.
SEGMENT = 16
#: How far from the fastest slowest stage to that of the least sum splits between them are tried.
BETWEEN = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage on its box; ``needs``: bytes, of the draft too if it is on this box."""

    box: TimedBox
    layers: range
    needs: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Stages in their order, and the box of the draft.

    ``source``: the drafters by their names in a profile. ``draft_needs``: bytes of the draft.
    """

    stages: tuple[PlacedStage, ...]
    draft: TimedBox
    draft_needs: int
    source: str

    @property
    def beside(self) -> int | None:
        """The number of the stage whose box the draft shares, from 1; None: none."""
        names = [stage.box.name for stage in self.stages]
        return names.index(self.draft.name) + 1 if self.draft.name in names else None

    @property
    def boxes(self) -> int:
        """How many boxes serve."""
        return len(self.stages) + (self.beside is None)

    def block(self, stage: int, *, drafting: bool) -> Times:
        """A pass through the layers of stage ``stage``, from 1, by rows.

        ``drafting``: while the draft computes too.
        """
        placed = self.stages[stage - 1]
        tables = [placed.box.layers[layer] for layer in placed.layers]
        if placed.box.each is not None:
            tables.append(placed.box.each)
        if stage == 1:
            tables.append(placed.box.embedding)
        slower = self._slower if drafting and stage == self.beside else 1.0
        return _summed(tables, slower)

    def head(self, *, drafting: bool) -> Times:
        """The norm and LM head on the last stage's box."""
        slower = self._slower if drafting and self.beside == len(self.stages) else 1.0
        return _summed([self.stages[-1].box.head], slower)

    def drafters(self, *, drafting: bool) -> dict[str, Times]:
        """A pass of each drafter, by its name in a profile."""
        slower = self._slower if drafting and self.beside is not None else 1.0
        return {
            name: _summed([times], slower if name != NGRAM else 1.0)
            for name, times in self.draft.drafters.items()
        }

    @property
    def _slower(self) -> float:
        return self.draft.shared if _computes(self.source) else 1.0

    def profile(
        self,
        hidden: int,
        value_bytes: int,
        link: LinkShape,
        *,
        drafting: bool,
        software: float = 0.0,
    ) -> Profile:
        """This layout as a cluster to simulate or emulate.

        ``hidden`` and ``value_bytes``: of the target's rows. ``drafting``: for strategies that
        draft; without, no pass is slowed by a draft on the same box. ``software``: seconds that a
        worker's own work adds to every pass, and the draft worker's to every answer; emulated
        workers have their own.
        """
        stages = range(1, len(self.stages) + 1)
        around = Times(((1, software),)) if software else None
        answered = software / (len(self.stages) + 1)  # spread over a round's hops
        slowed = replace(link, latency=link.latency + answered)
        split = tuple(len(stage.layers) for stage in self.stages)
        return Profile(
            "plan",
            f"a plan over {self.boxes} boxes",
            "flowspec plan",
            sum(split),
            hidden,
            value_bytes,
            self.stages[0].box.layers[0],
            self.head(drafting=drafting),
            {
                name: _with(times, around)
                for name, times in self.drafters(drafting=drafting).items()
            },
            slowed,
            (len(split),),
            split=split,
            blocks=tuple(_with(self.block(stage, drafting=drafting), around) for stage in stages),
        )


def layouts(
    boxes: Sequence[TimedBox], needs: StageNeeds, source: str, drafters: int
) -> dict[int, list[Layout]]:
    """The layouts worth a prediction by number of boxes; none where nothing fits.

    ``drafters``: bytes of the drafters' weights and KV rows.
    """
    found: dict[int, list[Layout]] = {}
    for layout in _every(boxes, needs, source, BARE_BYTES + drafters):
        known = found.setdefault(layout.boxes, [])
        if _signature(layout) not in map(_signature, known):
            known.append(layout)
    return dict(sorted(found.items()))


def _every(
    boxes: Sequence[TimedBox], needs: StageNeeds, source: str, draft: int
) -> Iterator[Layout]:
    kinds = grouped(boxes)
    for host in kinds:
        if host[0].memory < draft:
            continue
        others = [kind[1:] if kind is host else kind for kind in kinds]
        beside = [kind for kind in others if kind]
        for groups, shared in ((beside, None), ([*beside, host[:1]], host[0])):
            if groups:
                yield from _placed(groups, needs, host[0], shared, draft, source)


def _placed(
    groups: Sequence[Sequence[TimedBox]],
    needs: StageNeeds,
    host: TimedBox,
    shared: TimedBox | None,
    draft: int,
    source: str,
) -> Iterator[Layout]:
    """Layouts with the draft on ``host``, which is among the groups if it is ``shared``."""
    slower = host.shared if _computes(source) else 1.0
    full = [_kind(group, needs, SEGMENT, shared, draft, slower) for group in groups]
    single = [_kind(group, needs, 1, shared, draft, 1.0) for group in groups]
    for split in _splits(SplitSearch(full), SplitSearch(single)):
        stages = tuple(_stages(split, groups, needs, shared, draft))
        yield Layout(stages, host, draft, source)


def _splits(full: SplitSearch, single: SplitSearch) -> Iterator[Split]:
    """Both ends of the trade between a fast slowest stage and a small sum, and some between."""
    fastest = full.fastest_stages()
    smallest = full.least_sum()
    yield from fastest.values()
    yield from smallest.values()
    yield from single.least_sum().values()
    for count, split in fastest.items():
        slack = smallest[count].slowest / split.slowest
        for share in BETWEEN if slack > 1 else ():
            bounded = full.least_sum(split.slowest * slack**share)
            yield from [bounded[count]] if count in bounded else []


def _stages(
    split: Split,
    groups: Sequence[Sequence[TimedBox]],
    needs: StageNeeds,
    shared: TimedBox | None,
    draft: int,
) -> Iterator[PlacedStage]:
    left = [list(group) for group in groups]
    for kind, layers in zip(split.kinds, split.layers, strict=True):
        box = left[kind].pop(0)
        yield PlacedStage(box, layers, needs.stage(layers) + draft * (box is shared))


def _kind(
    group: Sequence[TimedBox],
    needs: StageNeeds,
    rows: int,
    shared: TimedBox | None,
    draft: int,
    slower: float,
) -> BoxKind:
    """The boxes of ``group``, alike; the one that is ``shared`` is slower and has less memory."""
    box = group[0]
    memory = box.memory - draft if box is shared else box.memory
    factor = slower if box is shared else 1.0
    return BoxKind(
        len(group),
        tuple(factor * times.at(rows) for times in box.layers),
        factor * box.embedding.at(rows),
        factor * box.head.at(rows),
        lambda layers: needs.stage(layers) <= memory,
        factor * box.each.at(rows) if box.each is not None else 0.0,
    )


def grouped(boxes: Sequence[TimedBox]) -> list[list[TimedBox]]:
    """The boxes by what they are, whatever their names."""
    found: list[list[TimedBox]] = []
    for box in boxes:
        like = next((group for group in found if group[0].alike(box)), None)
        if like is None:
            found.append([box])
        else:
            like.append(box)
    return found


def _signature(layout: Layout) -> object:
    """Equal for layouts that differ only in which of several equal boxes they use."""
    stages = tuple((replace(stage.box, name=""), stage.layers) for stage in layout.stages)
    return stages, replace(layout.draft, name=""), layout.beside


def _computes(source: str) -> bool:
    """Whether drafting slows a stage beside it: looking up n-grams does not."""
    return source != NGRAM


def _with(times: Times, more: Times | None) -> Times:
    return times if more is None else _summed([times, more], 1.0)


def _summed(tables: Sequence[Times], factor: float) -> Times:
    """The sum of tables, times ``factor``, at every row count that one of them names."""
    rows = sorted({row for table in tables for row, _ in table.points})
    return rising((row, factor * math.fsum(table.at(row) for table in tables)) for row in rows)
