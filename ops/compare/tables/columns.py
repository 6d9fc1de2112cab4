"""The columns of a table: what is shown of a figure, by the names that a table's file uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowspec.core.protocol.addresses import Role
from flowspec.rehearse.compare.report import Estimate
from flowspec.rehearse.devices.profile import Profile
from flowspec.strategies import build
from flowspec.strategies.expected_tbt import expected_tbt
from ops.compare.tables.contents import Block, PaperRow, Table
from ops.compare.tables.figures import AT_K, Figure, cluster
from ops.compare.tables.ranks import AT

#: Tokens per verdict that have a column of their own; longer ones share the last column.
LONGEST = 9


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure in its place; ``base``: that of the block's first system."""

    table: Table
    block: Block
    row: PaperRow
    figure: Figure
    base: Figure


@dataclass(frozen=True, slots=True)
class Column:
    """One or several neighbouring columns; the head of a figure's value is its source's name.

    ``note``: what the heads mean, for the line above the table.
    """

    heads: tuple[str, ...]
    cells: Callable[[Shown], tuple[str, ...]]
    note: str = ""


def number(value: float | None) -> str:
    """``value`` for a cell."""
    return "-" if value is None else f"{value:.2f}"


def _difference(shown: Shown) -> tuple[str, ...]:
    paper = shown.row.paper
    return (f"{shown.figure.value / paper - 1:+.0%}" if paper else "-",)


def _speedup(shown: Shown) -> tuple[str, ...]:
    return (number(shown.table.speedup(shown.figure.value, shown.base.value)),)


def _interval(shown: Shown) -> tuple[str, ...]:
    found = Estimate.of(shown.figure.values)
    if found is None or found.low is None or found.high is None:
        return ("-",)
    return (f"{found.low:.2f} to {found.high:.2f}",)


def _thirds(shown: Shown) -> tuple[str, ...]:
    found = shown.figure.thirds
    return (f"{min(found):.2f} to {max(found):.2f}",)


def _lengths(shown: Shown) -> tuple[str, ...]:
    found = [length for run in shown.figure.runs for length in run.lengths]
    if not found:
        return ("-",) * (LONGEST + 2)
    each = [sum(length == count for length in found) for count in range(1, LONGEST + 1)]
    shares = [count / len(found) for count in (*each, len(found) - sum(each))]
    return (number(sum(found) / len(found)), *(f"{share:.0%}" for share in shares))


def _busy(shown: Shown) -> tuple[str, ...]:
    runs = shown.figure.runs
    seconds = sum(run.seconds for run in runs)

    def share(role: Role) -> str:
        return f"{sum(run.busy.get(role, 0.0) * run.seconds for run in runs) / seconds:.0%}"

    return (share(Role.DRAFT), share(Role.MIDDLE), share(Role.VERIFY))


def _memory(shown: Shown) -> tuple[str, ...]:
    profile = cluster(shown.block)
    stages = shown.block.stages
    layers = max(profile.stage_layers(stage, stages) for stage in range(1, stages + 1))
    megabytes = layers * shown.table.kv_bytes / 2**20
    tree = max(run.peak.tree for run in shown.figure.runs)
    total = max(run.peak.total for run in shown.figure.runs)
    return (str(tree), f"{tree * megabytes:.1f}", f"{total * megabytes:.1f}")


def _expected(shown: Shown) -> tuple[str, ...]:
    """SpecPipe's formula at the width of the row's strategy and the figure's own hit rate."""
    block = shown.block
    params = build(shown.row.strategy, block.stages).params  # type: ignore[attr-defined]
    times = step_seconds(cluster(block), block.stages, params.width)
    draft = cluster(block).draft_seconds(shown.row.draft or shown.table.draft, params.width)
    paced = max(draft, *times) - max(times)
    hit = shown.figure.hit_rate
    found = (expected_tbt(times, hit, refill) for refill in (None, block.stages - 1))
    return tuple(f"{(paced + seconds) * 1e3:.2f}" for seconds in found)


def step_seconds(profile: Profile, stages: int, rows: int) -> list[float]:
    """Seconds of each pipeline step with ``rows`` rows, its transfer included."""
    transfer = profile.link.latency + rows * profile.hidden * profile.value_bytes / (
        profile.link.bandwidth
    )
    return [profile.stage_seconds(stage, stages, rows) + transfer for stage in range(1, stages + 1)]


def _agreed(shown: Shown) -> tuple[str, ...]:
    runs = shown.figure.runs
    return (f"{sum(run.agreed for run in runs) / len(runs):.0%}",)


COLUMNS = {
    "value": Column(("",), lambda shown: (number(shown.figure.value),)),
    "x": Column(("x",), _speedup, "x: times the first system's speed"),
    "hit": Column(
        ("hit",),
        lambda shown: (f"{shown.figure.hit_rate:.3f}",),
        "hit: share of tokens in the tree when they were chosen",
    ),
    "difference": Column(("difference",), _difference),
    "interval": Column(
        ("95%",), _interval, "95%: interval of the median over texts, by order statistics"
    ),
    "thirds": Column(
        ("3 runs",), _thirds, "3 runs: least to most of three runs, each with its own texts"
    ),
    "lengths": Column(
        ("mean", *map(str, range(1, LONGEST + 1)), f"{LONGEST + 1}+"),
        _lengths,
        "mean: tokens per verdict, then the shares of verdicts with 1, 2, ... tokens",
    ),
    "busy": Column(
        ("drafter", "middle", "stages"),
        _busy,
        "share of decoding during which a model works, a stage on average",
    ),
    "memory": Column(
        ("rows", "tree, MiB", "all, MiB"),
        _memory,
        "rows: most tree rows held by a stage at once; MiB: keys and values of these rows, and of "
        "all rows with the context, at the stage with the most layers",
    ),
    "expected": Column(
        ("E[TBT], n", "n - 1"),
        _expected,
        "E[TBT]: the paper's formula at this hit rate, a miss costing n or n - 1 steps",
    ),
    "agreed": Column(
        ("same",), _agreed, "same: share of the text before its first difference from the target's"
    ),
    AT_K: Column(
        tuple(map(str, AT)),
        lambda shown: tuple(f"{share:.3f}" for share in shown.figure.at_k),
        "share of tokens among the drafter's k best, for k of 1, 2, ...",
    ),
}
