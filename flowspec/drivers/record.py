"""The one form in which steps are written down: JSON, one step a line.

A line says which node stepped, when, on which input, and what it gave out. Only what concerns
one job is kept, so that the machines can be run again with that job alone.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from flowspec.core.protocol import machine, messages
from flowspec.core.protocol.machine import (
    Done,
    Draft,
    Encode,
    Input,
    Output,
    Pass,
    PassDone,
    Poll,
    Received,
    Refused,
    Run,
    Tick,
    Work,
)
from flowspec.core.run import limits, sampling, spec
from flowspec.core.tree import slots
from flowspec.errors import ReplayMismatch

#: Version of the recording's form; the header names it.
FORMAT = 1

#: Fields that recordings did not always have: left out as long as they say nothing.
_LATER = {("Draft", "drafter"): 0, ("Limits", "others"): ()}

_CLASSES: dict[str, type] = {
    name: kind
    for module in (machine, messages, sampling, slots, spec, limits)
    for name, kind in vars(module).items()
    if dataclasses.is_dataclass(kind) and isinstance(kind, type)
}


def to_json(value: Any) -> Any:
    """``value`` as JSON types; dataclasses keep their name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        silent = [
            at for at, kept in fields.items() if (name, at) in _LATER and _LATER[name, at] == kept
        ]
        return {"_": name, **{at: to_json(kept) for at, kept in fields.items() if at not in silent}}
    if isinstance(value, tuple | list):
        return [to_json(part) for part in value]
    if isinstance(value, frozenset):
        return {"_": "frozenset", "of": sorted(value)}
    if isinstance(value, dict):
        return {str(key): to_json(part) for key, part in value.items()}
    return value


def from_json(value: Any) -> Any:
    """The inverse of ``to_json``; lists become tuples, as every message has them."""
    if isinstance(value, list):
        return tuple(from_json(part) for part in value)
    if not isinstance(value, dict):
        return value
    name = value.get("_")
    if name is None:
        return {key: from_json(part) for key, part in value.items()}
    if name == "frozenset":
        return frozenset(value["of"])
    kind = _CLASSES.get(name)
    if kind is None:
        raise ReplayMismatch(
            f"the recording holds an unknown {name!r}; it was made by another version"
        )
    try:
        return kind(**{key: from_json(part) for key, part in value.items() if key != "_"})
    except TypeError as error:
        raise ReplayMismatch(
            f"the recording's {name} has other fields than this version's: {error}"
        ) from None


class Recorder:
    """Writes down the steps of one node for the jobs that asked; ``emit(job, line)`` takes the
    lines.

    ``header`` is written once a job, by the one node that has it.
    """

    def __init__(self, node: str, emit: Callable[[str, str], None], header: str = "") -> None:
        self._node = node
        self._emit = emit
        self._header = header
        self._jobs: dict[str, int] = {}  # recorded jobs -> lines so far
        self._work: Work | None = None

    def step(self, now: float, event: Input, outputs: Sequence[Output]) -> None:
        """Take note of one step of the machine."""
        self._watch(event)
        for job in tuple(self._jobs):
            self._write(job, now, event, outputs)
        for output in outputs:
            if isinstance(output, Run):
                self._work = output.work

    def forget(self, job: str) -> None:
        """The job has ended here."""
        self._jobs.pop(job, None)

    def _watch(self, event: Input) -> None:
        if not isinstance(event, Received):
            return
        for envelope in event.envelopes:
            message = envelope.message
            asked = isinstance(message, messages.Submit) and dict(message.fields).get("record") in (
                "1",
                "true",
            )
            opened = isinstance(message, messages.Open) and message.record
            if (asked or opened) and message.job not in self._jobs:
                self._jobs[message.job] = 0
                if self._header:
                    self._emit(message.job, self._header)

    def _write(self, job: str, now: float, event: Input, outputs: Sequence[Output]) -> None:
        about = _about(job, event, self._work)
        given = [_only(job, output) for output in outputs if _concerns(job, output)]
        if about is None or (isinstance(about, Poll | Tick) and not given):
            return
        number = self._jobs[job] = self._jobs[job] + 1
        line = {
            "node": self._node,
            "n": number,
            "now": now,
            "in": to_json(about),
            "out": to_json(given),
        }
        self._emit(job, json.dumps(line, separators=(",", ":")))


def _about(job: str, event: Input, work: Work | None) -> Input | None:
    """What of ``event`` concerns ``job``; None if nothing does."""
    match event:
        case Received(envelopes):
            kept = tuple(envelope for envelope in envelopes if envelope.message.job == job)
            return Received(kept) if kept else None
        case Refused(about):
            return event if about == job else None
        case Done(PassDone(choices)) if isinstance(work, Pass):
            pairs = zip(work.parts, choices, strict=True)
            own = tuple(choice for part, choice in pairs if part.job == job)
            return Done(PassDone(own)) if own else None
        case Done():
            return event if work is not None and _concerns_work(job, work) else None
        case _:
            return event


def _concerns_work(job: str, work: Work) -> bool:
    match work:
        case Pass(parts):
            return any(part.job == job for part in parts)
        case Draft(part):
            return part.job == job
        case Encode(about):
            return about == job


def _concerns(job: str, output: Output) -> bool:
    match output:
        case Run(work):
            return _concerns_work(job, work)
        case machine.Send(envelope=envelope):
            return envelope.message.job == job
        case _:
            return output.job == job


def _only(job: str, output: Output) -> Output:
    if isinstance(output, Run) and isinstance(output.work, Pass):
        return Run(Pass(tuple(part for part in output.work.parts if part.job == job)))
    return output
