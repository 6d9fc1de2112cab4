"""The cluster file: a plan as TOML, which ``flowspec up`` and the scheduler take by ``--cluster``.

``docs/planning.md`` describes the entries. Reading is strict: an entry that is unknown, missing or
of another kind is an error, in one line that names it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.errors import ConfigError
from flowspec.model.weights.precision import AUTO, check_device, check_dtype
from flowspec.rehearse.devices.profile import LinkShape

_MEGABIT = 1e6 / 8
_RANGE = re.compile(r"(\d{1,6})-(\d{1,6})", re.ASCII)
#: Entries of each table and their kinds.
_TOP = {
    "model": str,
    "draft": str,
    "draft_box": str,
    "draft_dtype": str,
    "context": int,
    "link": dict,
    "stage": list,
}
_STAGE = {"box": str, "layers": str, "dtype": str, "device": str}
#: What an entry is that a file lacks.
_DEFAULTS = {"draft_dtype": AUTO, "dtype": AUTO, "device": AUTO}
_LINK = {"latency_ms": float, "mbit": float}
_KINDS = {str: "text", int: "a whole number", float: "a number", dict: "a table", list: "tables"}


@dataclass(frozen=True, slots=True)
class ClusterStage:
    """A stage: the name of its box, its layers, its precision and its device."""

    box: str
    layers: range
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_device(self.device)


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A pipeline as planned: ``context`` tokens of prompt and output, and a box for every part.

    ConfigError unless the stages' layers follow each other from 0 on, each stage with at least one.
    """

    model: str
    draft: str
    draft_box: str
    context: int
    stages: tuple[ClusterStage, ...]
    link: LinkShape
    draft_dtype: str = AUTO

    def __post_init__(self) -> None:
        check_dtype(self.draft_dtype)
        if self.context < 1:
            raise ConfigError(f"context is {self.context}; expected 1 or more")
        check_ranges(self.layers)

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of every stage."""
        return tuple(stage.layers for stage in self.stages)

    @property
    def dtypes(self) -> str:
        """The precisions of the stages, by spaces, as in a pipeline's record."""
        return " ".join(stage.dtype for stage in self.stages)

    @property
    def devices(self) -> str:
        """The devices of the stages, by spaces, as in a pipeline's record."""
        return " ".join(stage.device for stage in self.stages)


def check_ranges(
    ranges: Sequence[range], layers: int | None = None, stages: int | None = None
) -> None:
    """ConfigError unless ``ranges`` are not empty, follow each other from 0 on, and end the model.

    ``layers``: of the model, ``stages``: of the pipeline; None: unknown.
    """
    told = ranges_text(ranges)
    expected = 0
    for block in ranges:
        if block.start != expected or not block:
            raise ConfigError(
                f"layers are {told!r}; expected ranges that follow each other from 0 on, "
                "like '0-5 5-12', each with a layer or more"
            )
        expected = block.stop
    if stages not in (None, len(ranges)):
        raise ConfigError(
            f"layers are {told!r}; expected as many ranges as stages, {stages} of them"
        )
    if not ranges or (layers is not None and expected != layers):
        raise ConfigError(
            f"layers are {told!r}; expected all {layers} layers of the model, from 0 to {layers}"
            if ranges
            else "there is no stage; expected at least one"
        )


def ranges_text(ranges: Sequence[range]) -> str:
    """``ranges`` as in a pipeline's record: ``0-5 5-12``."""
    return " ".join(f"{block.start}-{block.stop}" for block in ranges)


def parse_ranges(text: str) -> tuple[range, ...]:
    """The inverse of ``ranges_text``; ConfigError for anything else."""
    found = []
    for part in text.split():
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigError(f"layers are {text!r}; expected ranges like '0-5 5-12'")
        found.append(range(int(match[1]), int(match[2])))
    check_ranges(found)
    return tuple(found)


def write_cluster(cluster: ClusterFile, remarks: Sequence[str] = ()) -> str:
    """``cluster`` as TOML, ``remarks`` as comments before it."""
    link = cluster.link
    lines = [
        *(f"# {remark}" for remark in remarks),
        f"model = {_quoted(cluster.model)}",
        f"draft = {_quoted(cluster.draft)}",
        f"draft_box = {_quoted(cluster.draft_box)}",
        f"draft_dtype = {_quoted(cluster.draft_dtype)}",
        f"context = {cluster.context}",
        "",
        "[link]",
        f"latency_ms = {link.latency * 1e3!r}",
        f"mbit = {link.bandwidth / _MEGABIT!r}",
    ]
    for stage in cluster.stages:
        lines += [
            "",
            "[[stage]]",
            f"box = {_quoted(stage.box)}",
            f'layers = "{ranges_text([stage.layers])}"',
            f"dtype = {_quoted(stage.dtype)}",
            f"device = {_quoted(stage.device)}",
        ]
    return "\n".join(lines) + "\n"


def read_cluster(file: Path) -> ClusterFile:
    """The cluster in ``file``; ConfigError that says what is wrong where."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster file {file} cannot be read: {error}") from None
    try:
        return parse_cluster(text)
    except ConfigError as error:
        raise ConfigError(f"cluster file {file}: {error}") from None


def parse_cluster(text: str) -> ClusterFile:
    """The inverse of ``write_cluster``, remarks aside; ConfigError for anything else."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"it is no TOML: {error}") from None
    table = _entries(table, _TOP, "")
    link = _entries(_number_entries(table["link"]), _LINK, "link.")
    stages = []
    for number, entries in enumerate(table["stage"], start=1):
        if not isinstance(entries, dict):
            raise ConfigError("stage is no list of tables; expected [[stage]] for every stage")
        whole = _entries(entries, _STAGE, f"stage {number}: ")
        try:
            stages.append(_stage(whole))
        except ConfigError as error:
            raise ConfigError(f"stage {number}: {error}") from None
    return ClusterFile(
        table["model"],
        table["draft"],
        table["draft_box"],
        table["context"],
        tuple(stages),
        LinkShape(link["latency_ms"] / 1e3, link["mbit"] * _MEGABIT),
        table["draft_dtype"],
    )


def _stage(entries: Mapping[str, str]) -> ClusterStage:
    match = _RANGE.fullmatch(entries["layers"])
    if match is None:
        raise ConfigError(f"layers is {entries['layers']!r}; expected like '5-12'")
    layers = range(int(match[1]), int(match[2]))
    return ClusterStage(entries["box"], layers, entries["dtype"], entries["device"])


def _entries(table: Mapping[str, Any], kinds: Mapping[str, type], where: str) -> dict[str, Any]:
    """``table`` with defaults of what it may lack; ConfigError unless it is of ``kinds``."""
    defaults = {name: value for name, value in _DEFAULTS.items() if name in kinds}
    table = {**defaults, **table}
    unknown = sorted(set(table) - set(kinds))
    if unknown:
        raise ConfigError(f"{where}unknown entry {unknown[0]!r}; expected: {', '.join(kinds)}")
    for name, kind in kinds.items():
        if name not in table:
            raise ConfigError(f"{where}{name} is missing; expected {_KINDS[kind]}")
        if type(table[name]) is not kind:
            raise ConfigError(f"{where}{name} is {table[name]!r}; expected {_KINDS[kind]}")
    return table


def _number_entries(table: Mapping[str, Any]) -> dict[str, Any]:
    """``table`` with whole numbers as floats."""
    return {name: float(value) if type(value) is int else value for name, value in table.items()}


def _quoted(text: str) -> str:
    """A TOML basic string; JSON's escapes are TOML's, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
