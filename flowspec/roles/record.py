"""The format of recordings: JSON, one step of a machine per line.

A line holds the worker, the time, the input and the outputs of a step, and ends with a checksum of
what is before it. It is restricted to one run, so that the machines can replay that run alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from flowspec.core.protocol import machine, messages, work
from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.machine import (
    Compute,
    Granted,
    Input,
    Output,
    Poll,
    Received,
    Refused,
    Send,
    Tick,
)
from flowspec.core.protocol.messages import Envelope, Open, Revoke, Submit
from flowspec.core.protocol.work import (
    DraftPass,
    DraftPassDone,
    Encoded,
    Encoding,
    Pass,
    PassDone,
    Work,
)
from flowspec.core.run import key, limits, sampling, share, spec, turns
from flowspec.core.run.fields import shown
from flowspec.core.run.key import RunKey
from flowspec.errors import FlowSpecError, ReplayMismatch

#: Version of the format; the header names it.
FORMAT = 8
#: Largest integer a field may hold; ids, positions and counts all fit.
MAX_INT = (1 << 63) - 1
#: Name of a line's last field, the CRC-32 of the line without it.
_SUM = "sum"

_CLASSES: dict[str, type] = {
    name: kind
    for module in (machine, messages, work, key, limits, sampling, share, spec, turns)
    for name, kind in vars(module).items()
    if dataclasses.is_dataclass(kind) and isinstance(kind, type)
}


def to_json(value: Any) -> Any:
    """``value`` as JSON types; dataclasses keep their name, addresses are text."""
    if isinstance(value, Address):
        return {"_": "Address", "of": str(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
        return {"_": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [to_json(part) for part in value]
    if isinstance(value, frozenset):
        return {"_": "frozenset", "of": sorted(value)}
    if isinstance(value, dict):
        return {str(name): to_json(part) for name, part in value.items()}
    return value


def from_json(value: Any) -> Any:
    """The inverse of ``to_json``; lists become tuples, as in all messages.

    ReplayMismatch for anything that ``to_json`` does not write: the types of all fields are
    checked.
    """
    if isinstance(value, list):
        return tuple(from_json(part) for part in value)
    if not isinstance(value, dict):
        return value
    if "_" not in value:
        return {key: from_json(part) for key, part in value.items()}
    name = value["_"]
    if name in ("frozenset", "Address"):
        return _wrapped(name, value)
    kind = _CLASSES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ReplayMismatch(
            f"the recording holds an unknown {shown(name)}; it is damaged, or another version made "
            "it"
        )
    return _dataclass(kind, {key: from_json(part) for key, part in value.items() if key != "_"})


def _wrapped(name: str, value: dict[str, Any]) -> Any:
    """A value that is not a dataclass, under its name ``name``."""
    of = value.get("of")
    if value.keys() == {"_", "of"}:
        if name == "Address" and isinstance(of, str):
            return _address(of)
        if name == "frozenset" and isinstance(of, list) and all(map(_is_whole, of)):
            return frozenset(of)
    raise ReplayMismatch(f"the recording has a damaged {name}: it holds {shown(of)}")


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except FlowSpecError as error:
        raise ReplayMismatch(f"the recording is damaged: {error}") from None


def _dataclass(kind: type, parts: dict[str, Any]) -> Any:
    hints = _hints(kind)
    for name, part in parts.items():
        if name in hints and not _fits(part, hints[name]):
            raise ReplayMismatch(
                f"the recording's {kind.__name__}.{name} is {shown(part)}; expected "
                f"{_expected(hints[name])}"
            )
    try:
        return kind(**parts)
    except TypeError as error:
        raise ReplayMismatch(
            f"the recording's {kind.__name__} has other fields than this version's: {error}"
        ) from None
    except FlowSpecError as error:
        raise ReplayMismatch(f"the recording's {kind.__name__} is damaged: {error}") from None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is of the type ``hint``; whole numbers must also fit into 64 bits."""
    check = _CHECKS.get(hint)
    if check is not None:
        return check(value)
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is tuple:
        return type(value) is tuple and _parts_fit(value, args)
    if origin is frozenset:
        return isinstance(value, frozenset)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    return isinstance(value, origin or hint)


def _parts_fit(parts: tuple[Any, ...], args: tuple[Any, ...]) -> bool:
    if len(args) == 2 and args[1] is ...:
        return all(_fits(part, args[0]) for part in parts)
    return len(parts) == len(args) and all(map(_fits, parts, args))


def _expected(hint: Any) -> str:
    """The type ``hint`` in words."""
    words = _WORDS.get(hint) or _WORDS.get(typing.get_origin(hint))
    if words is not None:
        return words
    kinds = typing.get_args(hint) or (hint,)
    return " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in kinds)


def _is_whole(value: Any) -> bool:
    return type(value) is int and -1 <= value <= MAX_INT


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= MAX_INT)


_CHECKS: dict[Any, Callable[[Any], bool]] = {
    int: _is_whole,
    float: _is_number,
    bool: lambda value: type(value) is bool,
    str: lambda value: type(value) is str,
}
_WORDS: dict[Any, str] = {
    int: "a whole number (64 bits, at least -1)",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list of values of the right types",
    frozenset: "a set",
}


def line_of(row: Mapping[str, Any]) -> str:
    """``row`` as a line of a recording, whose last field is the checksum of all before it."""
    text = json.dumps(row, separators=(",", ":"))
    return f'{text[:-1]},"{_SUM}":{zlib.crc32(text.encode())}}}'


def is_whole(line: str) -> bool:
    """Whether ``line`` is as ``line_of`` has written it."""
    before, _, last = line.rpartition(f',"{_SUM}":')
    return last == f"{zlib.crc32(f'{before}}}'.encode())}}}"


class Recorder:
    """Records the steps of one worker for the runs that request it, by ``emit(run, line)``.

    ``header``: a first line for every run; empty for all workers but one. ``serves``: whether the
    run that a message begins is the worker's: of others it records nothing.
    """

    def __init__(
        self,
        address: Address,
        emit: Callable[[RunKey, str], None],
        header: str = "",
        serves: Callable[[messages.Message], bool] = lambda message: True,
    ) -> None:
        self._serves = serves
        self._address = address
        self._emit = emit
        self._header = header
        self._lines: dict[RunKey, int] = {}  # recorded runs -> lines so far
        self._work: Work | None = None
        self._encoding: Encoding | None = None

    def step(self, now: float, event: Input, outputs: Sequence[Output]) -> None:
        """Record one step of the machine."""
        self._watch(event)
        for run in tuple(self._lines):
            self._write(run, now, event, outputs)
        for output in outputs:
            if isinstance(output, Compute) and isinstance(output.work, Encoding):
                self._encoding = output.work
            elif isinstance(output, Compute):
                self._work = output.work

    def forget(self, run: RunKey) -> None:
        """Stop recording ``run``, which has ended here."""
        self._lines.pop(run, None)

    def _watch(self, event: Input) -> None:
        if not isinstance(event, Received):
            return
        for envelope in event.envelopes:
            message = envelope.message
            if message.run in self._lines or not _asks_for_recording(message):
                continue
            if self._serves(message):
                self._lines[message.run] = 0
                if self._header:
                    self._emit(message.run, self._header)

    def _write(self, run: RunKey, now: float, event: Input, outputs: Sequence[Output]) -> None:
        encoded = isinstance(event, machine.Done) and isinstance(event.result, Encoded)
        about = _about(run, event, self._encoding if encoded else self._work)
        given = [_only(run, output) for output in outputs if _concerns(run, output)]
        # What the run is granted follows from other runs: in its recording it is an input.
        grants = (at for at, output in enumerate(given) if isinstance(output, Granted))
        end = next(grants, len(given))
        if about is not None and (end or not isinstance(about, Poll | Tick)):
            self._write_line(run, now, about, given[:end])
        if end < len(given):
            self._write_line(run, now, cast(Granted, given[end]), given[end:])

    def _write_line(self, run: RunKey, now: float, about: Input, given: Sequence[Output]) -> None:
        self._lines[run] += 1
        line = {
            "node": str(self._address),
            "n": self._lines[run],
            "now": now,
            "in": to_json(about),
            "out": to_json(list(given)),
        }
        self._emit(run, line_of(line))


def _asks_for_recording(message: messages.Message) -> bool:
    match message:
        case Submit(fields=fields):
            return dict(fields).get("record") in ("1", "true")
        case Open(record=record):
            return record
        case _:
            return False


def _about(run: RunKey, event: Input, work: Work | None) -> Input | None:
    """The part of ``event`` that concerns ``run``; None: there is none."""
    match event:
        case Received(envelopes):
            parts = (_envelope_about(run, envelope) for envelope in envelopes)
            kept = tuple(part for part in parts if part is not None)
            return Received(kept) if kept else None
        case Refused(run=about):
            return event if about == run else None
        case machine.Done(PassDone(choices)) if isinstance(work, Pass):
            pairs = zip(work.parts, choices, strict=True)
            own = tuple(choice for part, choice in pairs if part.run == run)
            others = sum(len(part.ids) for part in work.parts if part.run != run)
            return machine.Done(PassDone(own, others)) if own else None
        case machine.Done(DraftPassDone(results)) if isinstance(work, DraftPass):
            found = zip(work.drafts, results, strict=True)
            answers = tuple(result for draft, result in found if draft.part.run == run)
            return machine.Done(DraftPassDone(answers)) if answers else None
        case machine.Done():
            return event if work is not None and _concerns_work(run, work) else None
        case _:
            return event


def _envelope_about(run: RunKey, envelope: Envelope) -> Envelope | None:
    """``envelope`` if it concerns ``run``; None: it does not.

    What came with it, and the number of their entry, concern other runs. A message that begins or
    revokes a newer run of the job ends ``run``, which is all that a recording of ``run`` needs to
    know of it.
    """
    message = envelope.message
    if message.run == run:
        return dataclasses.replace(envelope, bundle=0) if envelope.bundle else envelope
    newer = message.run.job == run.job and message.run.epoch > run.epoch
    if newer and isinstance(message, Open | Submit | Revoke):
        return dataclasses.replace(envelope, message=Revoke(message.run))
    return None


def _concerns_work(run: RunKey, work: Work) -> bool:
    match work:
        case Pass(parts):
            return any(part.run == run for part in parts)
        case DraftPass(drafts):
            return any(draft.part.run == run for draft in drafts)
        case _:
            return work.run == run


def _concerns(run: RunKey, output: Output) -> bool:
    match output:
        case Compute(work):
            return _concerns_work(run, work)
        case Send(envelope=envelope):
            return envelope.message.run == run
        case _:
            return output.run == run


def _only(run: RunKey, output: Output) -> Output:
    """``output`` as it were if the worker served ``run`` alone, which has one part of a pass."""
    if isinstance(output, Compute) and isinstance(output.work, Pass):
        return Compute(Pass(tuple(part for part in output.work.parts if part.run == run)))
    if isinstance(output, Compute) and isinstance(output.work, DraftPass):
        own = (draft for draft in output.work.drafts if draft.part.run == run)
        return Compute(DraftPass(tuple(own)))
    if isinstance(output, Send) and output.rows is not None:
        return dataclasses.replace(output, rows=dataclasses.replace(output.rows, part=0))
    return output
