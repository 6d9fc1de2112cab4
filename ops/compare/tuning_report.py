"""What tuning found, as part of a report's header and as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flowspec.rehearse.compare.digests import digest
from flowspec.rehearse.compare.grid import Cell, place
from flowspec.rehearse.compare.naming import counted, first_choice
from flowspec.rehearse.compare.report import Estimate, ReportRow, estimate_text
from ops.compare.search import Space
from ops.compare.tuning import Tuned, Tuner


def tuning_header(
    tuner: Tuner, tuned: Sequence[Tuned], rows: Iterable[ReportRow], against: str | None
) -> dict[str, Any]:
    """The entry ``tuning`` of a report's header: how it was searched, and a row per tuned cell.

    ``rows``: the report's, measured on other prompts. ``against``: the strategy they are compared
    with, prompt by prompt; None: with none.
    """
    grid = tuner.grid
    numbers = sorted({case.number for case in grid.cases})
    used = [[grid.prompts[number].set, grid.prompts[number].text] for number in numbers]
    rows = list(rows)
    given = dict.fromkeys(one.cell.strategy for one in tuned)
    return {
        "against": against,
        "prompts": {"half": "tuning", "count": len(used), "digest": digest(used)},
        "effort": dataclasses.asdict(tuner.effort),
        "searched": {text: _searched(text) for text in given},
        "rows": [_row(one, rows, against) for one in tuned],
    }


def _searched(text: str) -> dict[str, Any]:
    space = Space.of(text)
    return {
        "values": dict(space.values),
        "starts": [space.text(start) for start in space.starts],
    }


def _row(one: Tuned, rows: Sequence[ReportRow], against: str | None) -> dict[str, Any]:
    """One tuned cell: what was found on the tuning prompts, and how it did on the others."""
    cell = one.cell
    row = next(row for row in rows if _is_of(row, one.measured))
    default = next(row for row in rows if _is_of(row, cell))
    gained = [row.speeds[at] / speed for at, speed in default.speeds.items() if at in row.speeds]
    other = paired(row, rows, against) if against is not None else None
    return {
        "strategy": cell.strategy,
        "source": cell.source,
        "stages": cell.stages,
        "temperature": cell.temperature,
        "swept": cell.link.swept,
        "latency_ms": cell.link.shape.latency * 1e3,
        "mbit": cell.link.shape.bandwidth * 8 / 1e6,
        "found": one.strategy,
        "configurations": one.configurations,
        "finalists": dict(one.finalists),
        "default_seconds_per_token": _fields(_times(default)),
        "seconds_per_token": _fields(_times(row)),
        "gained": _fields(Estimate.of(gained)),
        "ratios": other,
        "ratio": _fields(Estimate.of(list(other.values()))) if other else None,
    }


def _times(row: ReportRow) -> Estimate | None:
    """Seconds per token over prompts."""
    return Estimate.of([1 / speed for speed in row.speeds.values()])


def paired(row: ReportRow, rows: Iterable[ReportRow], against: str) -> dict[int, float] | None:
    """By prompt, the time per token of ``row`` over that of ``against`` in the same place.

    That is its row with the same source, else with the same first choice, else without drafts.
    None: there is no such row.
    """
    others = {place(other): other for other in rows if other.strategy == against}
    for other in list(others.values()):
        first = dataclasses.replace(other, source=first_choice(other.source))
        others.setdefault(place(first), other)
    for source in (row.source, first_choice(row.source), "-"):
        if found := others.get(place(dataclasses.replace(row, source=source))):
            return {
                at: found.speeds[at] / speed
                for at, speed in row.speeds.items()
                if at in found.speeds
            }
    return None


def _is_of(row: ReportRow, cell: Cell) -> bool:
    link = cell.link
    return (row.strategy, row.source, row.stages, row.temperature) == (
        cell.strategy,
        cell.source,
        cell.stages,
        cell.temperature,
    ) and (row.swept, row.latency_ms, row.mbit) == (
        link.swept,
        link.shape.latency * 1e3,
        link.shape.bandwidth * 8 / 1e6,
    )


def _fields(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else dataclasses.asdict(estimate)


def tuning_markdown(tuning: Mapping[str, Any]) -> list[str]:
    """The lines of a report on its header's entry ``tuning``."""
    effort = tuning["effort"]
    against = tuning["against"]
    count = tuning["prompts"]["count"]
    columns = [
        *("strategy", "draft", "stages", "T", "link", "found", "configurations"),
        *("default, ms per token (95%)", "found, ms per token (95%)", "default over found (95%)"),
        *([f"found over {against} (95%)"] if against else []),
    ]
    return [
        f"Tuned on the other half, {counted(count, 'prompt')} (1, 3, ... of each set): at most "
        f"{effort['configurations']} configurations on {min(effort['few'], count)} of them, then "
        f"the best {effort['finalists']} and the default on all. Times are of the prompts of the "
        "table above, medians over prompts. The last columns are ratios of times, the median of "
        "the prompts' own ratios: above 1 the one named second is faster. An interval that has 1 "
        "in it decides nothing.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
        *(f"| {' | '.join(_cells(row, against))} |" for row in tuning["rows"]),
        "",
        "Searched values:",
        "",
        *(
            f"- {text}: {'; '.join(_values(found['values'])) or 'nothing'}"
            for text, found in tuning["searched"].items()
        ),
        "",
    ]


def _values(values: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{option} {', '.join(tried)}" for option, tried in values.items()]


def _cells(row: Mapping[str, Any], against: str | None) -> list[str]:
    return [
        row["strategy"],
        row["source"],
        str(row["stages"]),
        f"{row['temperature']:g}",
        f"{row['latency_ms']:g} ms, {row['mbit']:g} Mbit/s",
        row["found"],
        str(row["configurations"]),
        *(
            estimate_text(_scaled(row[name], 1e3))
            for name in ("default_seconds_per_token", "seconds_per_token")
        ),
        estimate_text(_scaled(row["gained"], 1.0)),
        *([estimate_text(_scaled(row["ratio"], 1.0))] if against else []),
    ]


def _scaled(fields: Mapping[str, Any] | None, factor: float) -> Estimate | None:
    if fields is None:
        return None
    low, high = (None if fields[end] is None else fields[end] * factor for end in ("low", "high"))
    return Estimate(fields["median"] * factor, low, high)
