"""Replay of a recording: the machines get its inputs and must return the recorded outputs.

A replay needs neither a broker nor a model. Commits are among the compared outputs, so a replay
also proves that the text follows from the recorded results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, Role, middle_address, stage_address
from flowspec.core.protocol.machine import Commit, Input, Machine, Output, Release
from flowspec.core.run.fields import shown
from flowspec.core.run.limits import Limits
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import FlowSpecError, ReplayMismatch
from flowspec.roles.record import FORMAT, MAX_INT, from_json, is_whole, line_of, to_json
from flowspec.strategies import build

#: Most stages, and most middle models, of a recording: each is a process, so no pipeline has as
#: many. It bounds the machines that a damaged first line can request.
MAX_WORKERS = 1024
#: Deepest nesting of lists and objects in a line; recorded steps need less than half of it.
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay."""

    steps: int
    nodes: tuple[str, ...]
    tokens: tuple[int, ...]


def header(limits: Limits) -> str:
    """The first line of a recording: the limits that the machines are built from."""
    return line_of({"format": FORMAT, "limits": to_json(limits)})


def replay(lines: Iterable[str], source: str = "the recording") -> Replay:
    """Run the machines over ``lines``; ReplayMismatch names the first difference.

    ``source``: what errors about the recording as a whole call it.
    """
    rows = (row for row, _ in _parse(lines))
    limits = _limits(next(rows, None), source)
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
        unasked = Address.parse(node).role is Role.MIDDLE and not counts[node]
        if not whole and not unasked:
            raise ReplayMismatch(
                f"the recording ends before the job does at {node}: after its step {counts[node]}"
            )
    return Replay(sum(counts.values()), tuple(machines), tuple(tokens))


def _limits(first: Mapping[str, Any] | None, source: str) -> Limits:
    """What a recording's first line says that the machines are built from."""
    form = first.get("format") if first else None
    if first is None or type(form) is not int:
        says = "nothing" if form is None else shown(form)
        raise ReplayMismatch(
            f"{source} is not a recording of format {FORMAT}: its first line says {says}"
        )
    if form != FORMAT:
        raise ReplayMismatch(
            f"{source} is a recording of format {shown(form)}; this version replays format "
            f"{FORMAT}: record it again"
        )
    limits = from_json(first.get("limits"))
    if not isinstance(limits, Limits):
        raise ReplayMismatch(
            f"the first line of {source} does not say what the machines are built from"
        )
    for name, least, most in (
        ("stages", 1, MAX_WORKERS),
        ("middles", 0, MAX_WORKERS),
        ("context", 1, MAX_INT),
        ("vocabulary", 1, MAX_INT),
        ("tree_rows", 1, MAX_INT),
    ):
        value = getattr(limits, name)
        if not least <= value <= most:
            raise ReplayMismatch(
                f"the first line of {source} has {name} {value}; expected {least} to {most}"
            )
    if not (math.isfinite(limits.stall_seconds) and limits.stall_seconds > 0):
        raise ReplayMismatch(
            f"the first line of {source} has stall_seconds {limits.stall_seconds}; expected a "
            "number above 0"
        )
    return limits


def _step(
    machines: Mapping[str, Machine], counts: Mapping[str, int], row: Mapping[str, Any]
) -> tuple[str, int, Sequence[Output]]:
    """Replay one step; its node, its number, and the machine's outputs."""
    node, number, now = _place(row)
    if node not in machines:
        raise ReplayMismatch(
            f"the recording has a step of {shown(node)}, and the pipeline has no such node"
        )
    if number != counts[node] + 1:
        raise ReplayMismatch(
            f"step {counts[node] + 1} of {node} is missing; the recording goes on with "
            f"{shown(number)}"
        )
    try:
        event = from_json(row.get("in"))
        if not isinstance(event, Input):
            raise ReplayMismatch(f"{shown(event)} is no input")
        outputs = machines[node].step(event, now)
    except Exception as error:
        raise ReplayMismatch(
            f"step {number} of {node} cannot be taken: {_reason(error)}"
        ) from error
    recorded = row.get("out")
    _compare(
        node, number, to_json(list(outputs)), recorded if isinstance(recorded, list) else [recorded]
    )
    return node, number, outputs


def _place(row: Mapping[str, Any]) -> tuple[str, int, float]:
    """The node, the number and the time of a step."""
    node = row.get("node")
    number = row.get("n")
    now = row.get("now")
    if not isinstance(node, str) or type(number) is not int or not _is_time(now):
        raise ReplayMismatch(f"the recording has a line that is no step: {_short(dict(row))}")
    return node, number, now


def _is_time(now: Any) -> TypeGuard[float]:
    return type(now) in (int, float) and -MAX_INT <= now <= MAX_INT


def _reason(error: Exception) -> str:
    """What is wrong with an input that raised ``error``, on one line."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, FlowSpecError):
        return text
    return f"its input is damaged ({type(error).__name__}{': ' if text else ''}{text})"


def replay_file(path: Path) -> Replay:
    """As ``replay``, for a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayMismatch(f"recording {path} cannot be read: {error}") from None
    return replay(text.splitlines(), str(path))


def merge(lines: Iterable[str]) -> list[str]:
    """A recording from the lines of all nodes: the header, then steps by time, each once.

    ReplayMismatch for a line that no worker has written.
    """
    heads: list[str] = []
    steps: dict[tuple[str, int], tuple[float, str]] = {}
    for row, line in _parse(lines):
        if "format" in row:
            heads = [line]
        else:
            node, number, now = _place(row)
            steps[node, number] = (now, line)
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


def _parse(lines: Iterable[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """The lines, and what they say; a first line of another format need not be whole."""
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ReplayMismatch(
                f"line {number} of the recording is no JSON: it is damaged or cut short"
            ) from None
        if not isinstance(row, dict):
            raise ReplayMismatch(f"line {number} of the recording is no step")
        if _too_deep(row):
            raise ReplayMismatch(
                f"line {number} of the recording is damaged: it is nested deeper than "
                f"{_MAX_DEPTH} levels"
            )
        if not is_whole(line) and (number > 1 or row.get("format") == FORMAT):
            raise ReplayMismatch(
                f"line {number} of the recording is damaged: its checksum is not that of its text"
            )
        yield row, line


def _too_deep(row: dict[str, Any]) -> bool:
    """Whether recursion over ``row`` could exceed Python's limit."""
    level: list[Any] = [row]
    for _ in range(_MAX_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [part for group in parts for part in group if isinstance(part, dict | list)]
    return bool(level)


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
