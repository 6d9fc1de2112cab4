"""Replay of a recording: the machines get its inputs and must return the recorded outputs.

A replay needs neither a broker nor a model. Commits are among the compared outputs, so a replay
also proves that the text follows from the recorded results.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, middle_address, stage_address
from flowspec.core.protocol.machine import Commit, Machine, Output, Release
from flowspec.core.run.limits import Limits
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.drivers.record import FORMAT, from_json, to_json
from flowspec.errors import FlowSpecError, ReplayMismatch
from flowspec.strategies import build


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay."""

    steps: int
    nodes: tuple[str, ...]
    tokens: tuple[int, ...]


def header(limits: Limits) -> str:
    """The first line of a recording: the limits that the machines are built from."""
    return json.dumps({"format": FORMAT, "limits": to_json(limits)}, separators=(",", ":"))


def replay(lines: Iterable[str]) -> Replay:
    """Run the machines over ``lines``; ReplayMismatch names the first difference."""
    rows = iter(_parse(lines))
    first = next(rows, None)
    if first is None or first.get("format") != FORMAT:
        found = first.get("format") if first else "nothing"
        raise ReplayMismatch(f"not a recording of format {FORMAT}: its first line says {found}")
    limits = from_json(first.get("limits"))
    if not isinstance(limits, Limits):
        raise ReplayMismatch(
            "the recording's first line does not say what the machines are built from"
        )
    machines = _machines(limits)
    counts = dict.fromkeys(machines, 0)
    ended = dict.fromkeys(machines, False)
    tokens: list[int] = []
    for row in rows:
        node, number, outputs = _step(machines, counts, row)
        counts[node] = number
        ended[node] |= any(isinstance(output, Release) for output in outputs)
        tokens += [
            token for output in outputs if isinstance(output, Commit) for token in output.tokens
        ]
    for node, whole in ended.items():
        # A job may leave a middle model unused.
        unasked = node.startswith("m") and not counts[node]
        if not whole and not unasked:
            raise ReplayMismatch(
                f"the recording ends before the job does at {node}: after its step {counts[node]}"
            )
    return Replay(sum(counts.values()), tuple(machines), tuple(tokens))


def _step(
    machines: Mapping[str, Machine], counts: Mapping[str, int], row: Mapping[str, Any]
) -> tuple[str, int, Sequence[Output]]:
    """Replay one step; its node, its number, and the machine's outputs."""
    node = row.get("node")
    number = row.get("n")
    now = row.get("now")
    if not isinstance(node, str) or not isinstance(number, int) or not isinstance(now, int | float):
        raise ReplayMismatch(f"the recording has a line that is no step: {_short(dict(row))}")
    if node not in machines:
        raise ReplayMismatch(
            f"the recording has a step of {node}, and the pipeline has no such node"
        )
    if number != counts[node] + 1:
        raise ReplayMismatch(
            f"step {counts[node] + 1} of {node} is missing; the recording goes on with {number}"
        )
    try:
        outputs = machines[node].step(from_json(row.get("in")), now)
    except (FlowSpecError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        if isinstance(error, ReplayMismatch):
            raise
        raise ReplayMismatch(f"step {number} of {node} cannot be taken: {error}") from None
    recorded = row.get("out")
    _compare(
        node, number, to_json(list(outputs)), recorded if isinstance(recorded, list) else [recorded]
    )
    return node, number, outputs


def replay_file(path: Path) -> Replay:
    """As ``replay``, for a file."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayMismatch(f"recording {path} cannot be read: {error}") from None
    return replay(text.splitlines())


def merge(lines: Iterable[str]) -> list[str]:
    """A recording from the lines of all nodes: the header, then steps by time, each once."""
    heads: list[str] = []
    steps: dict[tuple[str, int], tuple[float, str]] = {}
    for line in lines:
        row = json.loads(line)
        if "format" in row:
            heads = [line]
        else:
            steps[row["node"], row["n"]] = (row["now"], line)
    # Numbers order the steps of a node; time only interleaves the nodes.
    latest: dict[str, float] = {}
    placed: list[tuple[float, str, int]] = []
    for node, number in sorted(steps):
        latest[node] = max(latest.get(node, 0.0), steps[node, number][0])
        placed.append((latest[node], node, number))
    return heads + [steps[node, number][1] for _, node, number in sorted(placed)]


def _machines(limits: Limits) -> dict[str, Machine]:
    machines: dict[str, Machine] = {str(DRAFT): DraftMachine(limits, build)}
    for stage in range(1, limits.stages + 1):
        machines[str(stage_address(stage))] = StageMachine(stage, limits.stages)
    for model in range(1, limits.middles + 1):
        machines[str(middle_address(model))] = StageMachine(1, limits.stages, middle=model)
    return machines


def _parse(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            raise ReplayMismatch(
                f"line {number} of the recording is no JSON: it is damaged or cut short"
            ) from None
        if not isinstance(row, dict):
            raise ReplayMismatch(f"line {number} of the recording is no step")
        yield row


def _compare(node: str, number: int, ours: list[Any], theirs: list[Any]) -> None:
    for at in range(max(len(ours), len(theirs))):
        got = ours[at] if at < len(ours) else None
        was = theirs[at] if at < len(theirs) else None
        if got != was:
            where = f"step {number} of {node}, output {at + 1}"
            raise ReplayMismatch(f"{where}: {_difference('', was, got)}")


def _difference(path: str, was: Any, got: Any) -> str:
    """The first place at which two outputs differ."""
    if isinstance(was, dict) and isinstance(got, dict) and was.keys() == got.keys():
        for key in was:
            if was[key] != got[key]:
                return _difference(f"{path}.{key}" if path else str(key), was[key], got[key])
    return f"{path or 'it'} was {_short(was)} and is now {_short(got)}"


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
