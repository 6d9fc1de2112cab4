"""An emulated cluster: what a pass costs on its devices and a message on its links.

A profile describes the machines and the models that are pretended, never the ones that compute:
times of the emulated target's layers, bytes of its hidden size. All times are nominal seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from flowspec.core.protocol.machine import Draft, Pass, Work
from flowspec.core.protocol.messages import DRAFT, Answer, Envelope, Prune, Segment
from flowspec.errors import ConfigError

#: Bytes of an envelope without its rows: names, counters and framing of one stream entry.
ENVELOPE_BYTES = 160
#: Bytes a row takes in an envelope: id, parent, position and token, as msgpack writes them.
ROW_BYTES = 12
#: Bytes of one returned (id, log-probability) pair.
PAIR_BYTES = 12


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a pass by its rows: ``points`` of (rows, seconds), straight lines between them.

    Below the first point its seconds hold; beyond the last one the last line goes on.
    ConfigError unless rows rise, and seconds are positive and never fall.
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
        after = sum(known <= rows for known, _ in points)
        if after == 0 or len(points) == 1:
            return points[0][1]
        low, high = points[after - 1 : after + 1] if after < len(points) else points[-2:]
        return low[1] + (high[1] - low[1]) * (rows - low[0]) / (high[0] - low[0])


@dataclass(frozen=True, slots=True)
class LinkShape:
    """A directed link: ``latency`` in seconds one way, ``bandwidth`` in bytes a second."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency < 1e3 or not self.bandwidth > 0:
            raise ConfigError(
                f"a link has latency {self.latency} s and {self.bandwidth} bytes/s; expected more"
            )


@dataclass(frozen=True, slots=True)
class Profile:
    """A cluster. ``layer``: one layer of the target; ``head``: its final norm and LM head, on the
    last stage; ``drafters``: a drafter's pass by source name; ``middles``: a whole middle
    model's pass, by its place in a chain from 1; ``hidden`` values of ``value_bytes`` bytes are
    what a row of the target is.

    ``link`` joins neighbours of the pipeline and the last stage to the draft device. ``stages``:
    the stage counts the profile is meant for, its default first. ``anchors``: published figures
    its arithmetic gives, and what they were taken at. ConfigError for counts below 1.
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

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "value_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected 1 or more")
        if not self.stages or min(self.stages) < 1:
            raise ConfigError(
                f"stages is {list(self.stages)}; expected at least one count of 1 or more"
            )

    def stage_layers(self, stage: int, stages: int) -> int:
        """Layers of stage ``stage`` of ``stages``, longer blocks first: the split whose slowest
        stage is fastest, the head counted by its time for one row. Of equal ones that with the
        longest last block.

        More stages than layers: the surplus ones have none and pass rows on.
        """
        last = _last_layers(self.layers, self.head.at(1) / self.layer.at(1), stages)
        if stage == stages:
            return last
        size, longer = divmod(self.layers - last, stages - 1)
        return size + (stage <= longer)

    def stage_seconds(
        self, stage: int, stages: int, rows: int, answers: int | None = None
    ) -> float:
        """A pass of a stage over ``rows`` rows; the last one's includes the LM head over
        ``answers`` of them, all if None.
        """
        seconds = self.stage_layers(stage, stages) * self.layer.at(rows)
        judged = rows if answers is None else answers
        return seconds + (self.head.at(judged) if stage == stages and judged else 0.0)

    def check_source(self, source: str) -> None:
        """ConfigError unless there are times for every drafter of every choice of ``source``."""
        for drafter in range(len(source_parts(source))):
            self.draft_seconds(source, 1, drafter)

    def draft_seconds(self, source: str, rows: int, drafter: int = 0) -> float:
        """A pass of the drafter ``source`` over ``rows`` rows; a hybrid's drafters compute one
        after another.

        ``drafter``: its number, where ``source`` names several to choose from. ConfigError if it
        names none of that number, or one the profile has no times for.
        """
        parts = source_parts(source)
        if not 0 <= drafter < len(parts):
            raise ConfigError(
                f"draft source {source!r} has no drafter number {drafter}; expected 0 to "
                f"{len(parts) - 1}: "
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

    def work_seconds(self, node: str, work: Work, stages: int, source: str) -> float:
        """What ``work`` costs at ``node`` of a pipeline of ``stages`` that drafts with
        ``source``.
        """
        if isinstance(work, Pass):
            rows = sum(len(part.ids) for part in work.parts)
            if node.startswith("m"):
                return self._middle(int(node[1:])).at(rows)
            answers = sum(len(part.answers) for part in work.parts)
            return self.stage_seconds(int(node[1:]), stages, rows, answers)
        return (
            self.draft_seconds(source, len(work.part.ids), work.drafter)
            if isinstance(work, Draft)
            else 0.0
        )

    def _middle(self, model: int) -> Times:
        if model > len(self.middles):
            raise ConfigError(
                f"profile {self.name} has {len(self.middles)} middle models; this is a chain of "
                f"{model}"
            )
        return self.middles[model - 1]

    def message_bytes(self, target: str, envelope: Envelope, *, hidden: bool = False) -> int:
        """Bytes of ``envelope`` to ``target``, rows included. ``hidden``: the target's answers
        carry hidden rows.
        """
        message = envelope.message
        row = self.hidden * self.value_bytes
        match message:
            case Segment():
                carried = 0 if message.tokens else row
                return ENVELOPE_BYTES + len(message.ids) * (ROW_BYTES + carried)
            case Answer():
                pairs = sum(map(len, message.top)) * PAIR_BYTES
                returned = (
                    row if hidden and target == DRAFT and not envelope.sender.startswith("m") else 0
                )
                return ENVELOPE_BYTES + len(message.ids) * (ROW_BYTES + returned) + pairs
            case Prune():
                return ENVELOPE_BYTES + 4 * (len(message.accepted) + len(message.retained))
        return ENVELOPE_BYTES

    def transfer_seconds(self, target: str, envelope: Envelope, *, hidden: bool = False) -> float:
        """How long ``envelope`` occupies its link; it arrives ``link.latency`` later."""
        return self.message_bytes(target, envelope, hidden=hidden) / self.link.bandwidth


@lru_cache(maxsize=256)
def source_parts(source: str) -> tuple[tuple[str, ...], ...]:
    """The drafters a profile calls ``source``: choices, joined by ``:``, each of one or several
    merged by ``+``.

    ConfigError if a name is empty or twice in a choice, or a choice is there twice.
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
def _last_layers(layers: int, head_layers: float, stages: int) -> int:
    """Layers of the last of ``stages`` stages, whose head costs as much as
    ``head_layers`` layers.
    """
    if stages == 1:
        return layers

    def slowest(last: int) -> float:
        return max(last + head_layers, -((last - layers) // (stages - 1)))

    return min(range(layers // stages, -1, -1), key=slowest)
