"""The tables of ``ops.bench.hosts``: one place is a way of rows and a latency of the links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

#: Most that two of the three times of plain decoding may differ.
BAR = 0.05
PLAIN = "autoregressive"
STRAIGHT, BROKER = "straight", "broker"


@dataclass(frozen=True, slots=True)
class Linkage:
    """Rows that go ``straight`` or through the ``broker``, over links of ``latency`` ms."""

    way: str
    latency: float

    def links(self, stages: int) -> int:
        """Links that a token of plain decoding takes one after another.

        The draft worker is beside the broker, so that the first hop and the last take one link.
        """
        return stages + 1 if self.way == STRAIGHT else 2 * stages


@dataclass(frozen=True, slots=True)
class Given:
    """What the profile of a place was made of, seconds: a link's way, a hop's software, and the
    passes of a token through all stages.
    """

    link: float
    hop: float
    passes: float


@dataclass(slots=True)
class Decoded:
    """Seconds a token in a place, by strategy.

    ``passes``: of real plain decoding, all stages' passes. ``charged``: of emulated plain decoding
    whose software is charged as it runs. ``refused``: strategies of emulated runs that fell behind.
    """

    real: dict[str, float] = field(default_factory=dict)
    emulated: dict[str, float] = field(default_factory=dict)
    simulated: dict[str, float] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    passes: float = 0.0
    charged: float = 0.0

    def deviation(self, strategy: str = PLAIN) -> float:
        """The largest by which one of the three times exceeds another."""
        three = (self.real[strategy], self.emulated[strategy], self.simulated[strategy])
        return max(max(pair) / min(pair) for pair in combinations(three, 2)) - 1


Found = Mapping[Linkage, Decoded]


def plain_table(found: Found) -> Iterator[str]:
    """Plain decoding: the three times, their ratios, and whether they are within the bar."""
    yield (
        "| rows | link, ms | real | emulated | simulated | emulated / simulated | real / simulated "
        "| largest deviation | within 5% | emulated, own software |"
    )
    yield "|---" * 10 + "|"
    for place, times in found.items():
        real, emulated, simulated = (
            by[PLAIN] for by in (times.real, times.emulated, times.simulated)
        )
        mark = " (refused)" if PLAIN in times.refused else ""
        deviation = times.deviation()
        yield (
            f"| {place.way} | {place.latency:g} | {ms(real)} | {ms(emulated)}{mark} "
            f"| {ms(simulated)} | {emulated / simulated:.3f} | {real / simulated:.3f} "
            f"| {deviation:.1%} | {'yes' if deviation <= BAR else 'no'} | {ms(times.charged)} |"
        )


def parts_table(found: Found, given: Mapping[Linkage, Given], stages: int) -> Iterator[str]:
    """Where a token's time goes: the real run beside what the profile charges."""
    yield (
        "| rows | link, ms | links | passes, real | passes, profile | software, real "
        "| software, profile |"
    )
    yield "|---" * 7 + "|"
    for place, times in found.items():
        known = given[place]
        links = place.links(stages) * known.link
        software = times.real[PLAIN] - times.passes - links
        yield (
            f"| {place.way} | {place.latency:g} | {ms(links)} | {ms(times.passes)} "
            f"| {ms(known.passes)} | {ms(software)} | {ms((stages + 1) * known.hop)} |"
        )


def strategies_table(found: Found, strategies: Sequence[str]) -> Iterator[str]:
    """The other strategies, without a bar."""
    yield "| rows | link, ms | strategy | real | emulated | simulated | real / simulated |"
    yield "|---" * 7 + "|"
    for place, times in found.items():
        for strategy in strategies:
            mark = " (refused)" if strategy in times.refused else ""
            ratio = times.real[strategy] / times.simulated[strategy]
            yield (
                f"| {place.way} | {place.latency:g} | {strategy} | {ms(times.real[strategy])} "
                f"| {ms(times.emulated[strategy])}{mark} | {ms(times.simulated[strategy])} "
                f"| {ratio:.2f} |"
            )


def verdict(found: Found) -> str:
    """One sentence on the bar."""
    within = sum(times.deviation() <= BAR for times in found.values())
    worst = max(times.deviation() for times in found.values())
    return (
        f"Emulated, simulated and real plain decoding are within {BAR:.0%} of each other in "
        f"{within} of {len(found)} places; the largest deviation is {worst:.1%}."
    )


def ms(seconds: float) -> str:
    """Milliseconds to two digits after the point."""
    return f"{seconds * 1e3:.2f}"
