"""An emulated cluster: the costs of passes on its devices and of messages on its links.

A profile describes the emulated machines and models, never those that compute: times of the
emulated target's layers, bytes of its hidden size. All times are nominal seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter

from flowspec.core.protocol.addresses import DRAFT, Address, Role
from flowspec.core.protocol.messages import Answer, Envelope, Prune, Segment
from flowspec.core.protocol.work import DraftPass, Pass, Work, rows_of
from flowspec.errors import ConfigError
from flowspec.rehearse.devices.way import NO_BROKER, Way

#: Bytes of an envelope without its rows: names, counters and framing of one stream entry.
ENVELOPE_BYTES = 160
#: Bytes per row in an envelope: id, parent, position and token in msgpack.
ROW_BYTES = 12
#: Bytes of one returned (id, log-probability) pair.
PAIR_BYTES = 12


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a pass by its rows: ``points`` of (rows, seconds), interpolated linearly.

    Below the first point its seconds hold; beyond the last one the last line is extended.
    ConfigError unless rows increase, and seconds are positive and never decrease.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        rows = [row for row, _ in self.points]
        seconds = [second for _, second in self.points]
        rising = all(low < high for low, high in pairwise(rows))
        falling = any(low > high for low, high in pairwise(seconds))
        if (
            not rows
            or rows[0] < 1
            or not rising
            or falling
            or not 0 < min(seconds) <= max(seconds) < 1e6
        ):
            raise ConfigError(
                f"pass times {self.points} are no table; "
                "expected rising rows from 1 on, and seconds above 0 that never fall"
            )

    def at(self, rows: int) -> float:
        """Seconds of a pass over ``rows`` rows."""
        points = self.points
        after = bisect_right(points, rows, key=itemgetter(0))
        if after == 0 or len(points) == 1:
            return points[0][1]
        low, high = points[after - 1 : after + 1] if after < len(points) else points[-2:]
        return low[1] + (high[1] - low[1]) * (rows - low[0]) / (high[0] - low[0])


@dataclass(frozen=True, slots=True)
class LinkShape:
    """A directed link: ``latency`` in seconds one way, ``bandwidth`` in bytes per second.

    ``exclusive``: a segment or an answer occupies both its ends until it has arrived.
    """

    latency: float
    bandwidth: float
    exclusive: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.latency < 1e3 or not self.bandwidth > 0:
            raise ConfigError(
                f"a link has latency {self.latency} s and {self.bandwidth} bytes/s; "
                "expected a latency from 0 to below 1000 s and a bandwidth above 0"
            )


@dataclass(frozen=True, slots=True)
class Profile:
    """A cluster: pass times of its devices, the size of a target row, and its links.

    ``layer``: one layer of the target. ``head``: its final norm and LM head, on the last stage.
    ``drafters``: a drafter's pass by source name. ``middles``: a whole middle model's pass, by its
    place in the chain from 1. A row of the target is ``hidden`` values of ``value_bytes`` bytes.
    ``link`` joins neighbours of the pipeline and the last stage to the draft device. ``stages``:
    the stage counts the profile is meant for, its default first. ``anchors``: published figures
    that its arithmetic reproduces, and their conditions. ``speeds``: of the stages' devices,
    relative to that of ``layer`` and ``head``, from stage 1 on and then from the first again;
    empty: all 1. ``even_split``: every stage has as many layers, whatever its speed. ``split``: the
    layers of each stage, as they are; empty: chosen here. ``blocks``: with a split, a pass through
    each stage's layers as a whole, instead of ``layer`` and ``speeds``; ``head`` is then that of
    the last stage's device. ``way``: where the broker is, and which way rows go. ``hop``: seconds
    of software from when a message is sent until its receiver acts on it, beside its links; an
    emulation that charges software as it runs has its own instead. ``models``: the measured models,
    as ``--target`` and ``--draft`` name them, by ``target`` and source name; empty: the packaged
    ones stand for them. ConfigError for counts below 1, speeds that are not above 0, a split or
    blocks that do not match the rest, a broker or a hop on exclusive links, and drafters without
    a target.
    """

    name: str
    summary: str
    source: str
    layers: int
    hidden: int
    value_bytes: int
    layer: Times
    head: Times
    drafters: Mapping[str, Times]
    link: LinkShape
    stages: tuple[int, ...]
    middles: tuple[Times, ...] = ()
    anchors: Mapping[str, float] = field(default_factory=dict)
    speeds: tuple[float, ...] = ()
    even_split: bool = False
    split: tuple[int, ...] = ()
    blocks: tuple[Times, ...] = ()
    way: Way = Way()
    hop: float = 0.0
    models: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "value_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if not self.stages or min(self.stages) < 1:
            raise ConfigError(
                f"stages is {list(self.stages)}; expected at least one count of 1 or more"
            )
        if not all(0 < speed < math.inf for speed in self.speeds):
            raise ConfigError(f"speeds is {list(self.speeds)}; expected numbers above 0")
        if self.split and (min(self.split) < 0 or sum(self.split) != self.layers):
            raise ConfigError(
                f"split is {list(self.split)}; expected counts of layers that add up to "
                f"{self.layers}"
            )
        if self.blocks and (len(self.blocks) != len(self.split) or self.speeds):
            raise ConfigError(
                f"there are times of {len(self.blocks)} blocks, a split over {len(self.split)} "
                f"stages and {len(self.speeds)} speeds; expected a block for every stage of the "
                "split, and no speeds beside blocks"
            )
        if self.link.exclusive and self.way != NO_BROKER:
            raise ConfigError(
                f'links are exclusive and {self.way}; expected no broker (at = "none") on '
                "exclusive links, which are those of a paper"
            )
        strange = self.models.keys() - {"target"} - self.drafters.keys()
        if self.models and ("target" not in self.models or strange or self.middles):
            raise ConfigError(
                f"models names {', '.join(self.models)}, beside times of "
                f"{', '.join(('target', *self.drafters))} "
                f"and of {len(self.middles)} middle models; expected target, further drafters of "
                "which there are times, and no middle models"
            )
        if not 0 <= self.hop < 1e3 or (self.hop and self.link.exclusive):
            raise ConfigError(
                f"hop is {self.hop} s; expected 0 to below 1000 s, and 0 on exclusive links"
            )

    def stage_layers(self, stage: int, stages: int) -> int:
        """Layers of stage ``stage`` of ``stages``, in the split whose slowest stage is fastest.

        The head counts by its time for one row; ties go to the split with the longest last block.
        Before the last stage, longer blocks come first. With more stages than layers, the surplus
        stages have none and pass rows on. With ``speeds``, ties go to the earlier stage. A profile
        with a ``split`` has that one; ConfigError for another number of stages.
        """
        if self.split:
            if stages != len(self.split):
                raise ConfigError(
                    f"profile {self.name} is split over {len(self.split)} stages, not {stages}"
                )
            return self.split[stage - 1]
        if self.even_split:
            size, longer = divmod(self.layers, stages)
            return size + (stage <= longer)
        head_layers = self.head.at(1) / self.layer.at(1)
        if self.speeds:
            speeds = tuple(self._speed(number) for number in range(1, stages + 1))
            return _fastest_split(self.layers, head_layers, speeds)[stage - 1]
        last = _last_layers(self.layers, head_layers, stages)
        if stage == stages:
            return last
        size, longer = divmod(self.layers - last, stages - 1)
        return size + (stage <= longer)

    def stage_seconds(
        self, stage: int, stages: int, rows: int, answers: int | None = None
    ) -> float:
        """Seconds of a stage's pass over ``rows`` rows.

        The last stage's includes the LM head over ``answers`` of the rows; None: over all.
        """
        layers = self.stage_layers(stage, stages)
        blocks = self.blocks
        seconds = blocks[stage - 1].at(rows) if blocks else layers * self.layer.at(rows)
        judged = rows if answers is None else answers
        head = self.head.at(judged) if stage == stages and judged else 0.0
        return (seconds + head) / self._speed(stage)

    def _speed(self, stage: int) -> float:
        return self.speeds[(stage - 1) % len(self.speeds)] if self.speeds else 1.0

    def check_source(self, source: str) -> None:
        """ConfigError unless there are times for every drafter of every choice of ``source``."""
        for drafter in range(len(source_parts(source))):
            self.draft_seconds(source, 1, drafter)

    def draft_seconds(self, source: str, rows: int, drafter: int = 0) -> float:
        """Seconds of a drafter's pass over ``rows`` rows; a hybrid's drafters run in sequence.

        ``drafter``: its number among the choices in ``source``. ConfigError if there is no such
        choice, or the profile has no times for it.
        """
        parts = source_parts(source)
        if not 0 <= drafter < len(parts):
            raise ConfigError(
                f"draft source {source!r} has no drafter number {drafter}; "
                f"expected 0 to {len(parts) - 1}: "
                "give it the same choices as the drafter that runs"
            )
        names = parts[drafter]
        unknown = [name for name in names if name not in self.drafters]
        if unknown:
            known = ", ".join(self.drafters)
            raise ConfigError(
                f"profile {self.name} has no drafter {unknown[0]!r}; expected one of: {known}"
            )
        return sum(self.drafters[name].at(rows) for name in names)

    def work_seconds(self, worker: Address, work: Work, stages: int, source: str) -> float:
        """Seconds of ``work`` at ``worker``, with ``stages`` stages and drafts by ``source``."""
        if isinstance(work, DraftPass):
            counts = Counter[int]()
            for draft in work.drafts:
                counts[draft.drafter] += draft.rows
            return sum(self.draft_seconds(source, n, drafter) for drafter, n in counts.items())
        if not isinstance(work, Pass):
            return 0.0
        rows = rows_of(work)
        if worker.role is Role.MIDDLE:
            return self._middle(worker.number).at(rows)
        answers = sum(len(part.answers) for part in work.parts)
        return self.stage_seconds(worker.number, stages, rows, answers)

    def _middle(self, model: int) -> Times:
        if model > len(self.middles):
            raise ConfigError(
                f"profile {self.name} has {len(self.middles)} middle models; "
                f"this is a chain of {model}"
            )
        return self.middles[model - 1]

    def message_bytes(self, target: Address, envelope: Envelope, *, hidden: bool = False) -> int:
        """Bytes of ``envelope`` and its rows; ``hidden``: the target's answers have hidden rows."""
        message = envelope.message
        row = self.hidden * self.value_bytes
        match message:
            case Segment():
                carried = 0 if message.tokens else row
                return ENVELOPE_BYTES + len(message.ids) * (ROW_BYTES + carried)
            case Answer():
                pairs = sum(map(len, message.top)) * PAIR_BYTES
                with_hidden = hidden and target == DRAFT and envelope.sender.role is Role.VERIFY
                returned = row if with_hidden else 0
                return ENVELOPE_BYTES + len(message.ids) * (ROW_BYTES + returned) + pairs
            case Prune():
                return ENVELOPE_BYTES + 4 * (len(message.accepted) + len(message.retained))
        return ENVELOPE_BYTES

    def transfer_seconds(
        self, target: Address, envelope: Envelope, *, hidden: bool = False
    ) -> float:
        """How long ``envelope`` occupies its link; it arrives ``link.latency`` later."""
        return self.message_bytes(target, envelope, hidden=hidden) / self.link.bandwidth


@lru_cache(maxsize=256)
def source_parts(source: str) -> tuple[tuple[str, ...], ...]:
    """The drafters in ``source``: choices joined by ``:``, each of drafters joined by ``+``.

    ConfigError if a name is empty or occurs twice in a choice, or if a choice occurs twice.
    """
    parts = tuple(tuple(name.strip() for name in choice.split("+")) for choice in source.split(":"))
    whole = all(map(all, parts))
    doubled = len(set(parts)) != len(parts) or any(len(set(names)) != len(names) for names in parts)
    if doubled or not whole:
        raise ConfigError(
            f"draft source {source!r} "
            f"{'names one drafter twice' if whole else 'has an empty name'}; "
            "expected like slm, slm+ngram or slm:head+ngram"
        )
    return parts


@lru_cache(maxsize=256)
def _fastest_split(layers: int, head_layers: float, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Layers by stage, so that the slowest of the devices with these ``speeds`` is fastest.

    Each layer goes where the time with it is least, which is optimal for equal layers.
    """
    split = [0] * len(speeds)
    extra = [0.0] * (len(speeds) - 1) + [head_layers]
    for _ in range(layers):
        times = [
            (own + more + 1) / speed for own, more, speed in zip(split, extra, speeds, strict=True)
        ]
        split[times.index(min(times))] += 1
    return tuple(split)


@lru_cache(maxsize=256)
def _last_layers(layers: int, head_layers: float, stages: int) -> int:
    """Layers of the last of ``stages`` stages; the head costs as much as ``head_layers`` layers."""
    if stages == 1:
        return layers

    def slowest(last: int) -> float:
        return max(last + head_layers, -((last - layers) // (stages - 1)))

    return min(range(layers // stages, -1, -1), key=slowest)
