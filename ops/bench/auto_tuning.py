"""The options of all systems for ``ops.bench.auto``: searched once, kept in a file, and read again.

The file has an entry per profile, temperature, draft and strategy. It can be used only with the
models, prompts, tokens, seed, profiles and searched values with which it was written.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flowspec.errors import ConfigError
from flowspec.rehearse.compare.digests import digest, model_digest, profile_digest
from flowspec.rehearse.compare.grid import Cell, Grid
from flowspec.rehearse.compare.naming import PACKAGED, canonical
from flowspec.rehearse.compare.prompts import Prompt
from flowspec.rehearse.devices.profile import Profile
from ops.compare.search import Space
from ops.compare.tuning import Effort, Tuned, Tuner

#: Marks a file as one of these, screened with a warmed history; nothing else in it shows that.
KIND = "flowspec auto tuned, warm"
EFFORT = Effort(configurations=10, few=2, finalists=1)


@dataclass(frozen=True, slots=True)
class Found:
    """The options found for one strategy in one place.

    ``found``: the best text. ``configurations``: the number evaluated; ``prompts``: of the tuning
    prompts that do not repeat themselves. ``finalists``: seconds per token over these by text, the
    default's among them.
    """

    profile: str
    stages: int
    temperature: float
    draft: str
    strategy: str
    found: str
    configurations: int
    prompts: int
    finalists: Mapping[str, float]

    @property
    def place(self) -> tuple[str, float, str, str]:
        """What differs between two entries of a file."""
        return (self.profile, self.temperature, self.draft, self.strategy)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What options depend on, beside the place: a file of other conditions cannot be used.

    ``prompts``: those given, before the ones that repeat themselves are left out. ``models``:
    digests by name.
    """

    prompts: Sequence[Prompt]
    tokens: int
    seed: int
    models: Mapping[str, str]
    strategies: Sequence[str]
    profiles: Sequence[Profile]

    def header(self, effort: Effort) -> dict[str, Any]:
        """The file's entries on these conditions."""
        return {
            "kind": KIND,
            "tokens": self.tokens,
            "seed": self.seed,
            "models": dict(self.models),
            "prompts": {
                "count": len(self.prompts),
                "digest": digest([[prompt.set, prompt.text] for prompt in self.prompts]),
            },
            "effort": dataclasses.asdict(effort),
            "searched": {name: _searched(name) for name in self.strategies},
            "profiles": {profile.name: profile_digest(profile) for profile in self.profiles},
        }

    def check(self, header: Mapping[str, Any], effort: Effort, file: Path) -> None:
        """ConfigError with the first condition in which ``file``, with ``header``, differs.

        ``effort``: of the search that would add to the file.
        """
        own = self.header(effort)
        for name in ("tokens", "seed", "models", "prompts", "effort"):
            if header[name] != own[name]:
                raise ConfigError(
                    f"{file} was tuned with other {name} ({_brief(header[name])}; expected "
                    f"{_brief(own[name])}); name a new file to tune again"
                )
        for name, what in (("searched", "searched values of"), ("profiles", "times in profile")):
            for key, value in own[name].items():
                if header[name].get(key, value) != value:
                    raise ConfigError(
                        f"{file} was tuned with other {what} {key}; name a new file to tune again"
                    )


def _searched(name: str) -> dict[str, Any]:
    space = Space.of(name)
    return {
        "values": {option: list(values) for option, values in space.values.items()},
        "starts": [space.text(start) for start in space.starts],
    }


def _brief(value: object) -> str:
    """A header's entry in words: ``few 2, finalists 1``."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{name} {its}" for name, its in value.items())


@cache
def packaged_models() -> Mapping[str, str]:
    """The digests of the packaged target and of the drafters that learnt from it."""
    return {name: model_digest(PACKAGED[name]) for name in ("target", "slm", "head")}


def load(file: Path, conditions: Conditions, effort: Effort) -> list[Found]:
    """The entries of ``file``; ConfigError if it is none of these or of other conditions."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["kind"] != KIND:
            raise ValueError("it is of another kind")
        conditions.check(content, effort, file)
        return [Found(**entry) for entry in content["found"]]
    except KeyError as error:
        raise ConfigError(f"{file} is no file of tuned options: it has no {error}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no file of tuned options: {error}") from None


def add(file: Path, conditions: Conditions, effort: Effort, found: Sequence[Found]) -> None:
    """Add ``found`` to ``file``, which is of the same conditions or does not exist.

    Other processes may add to it at the same time. ConfigError as of ``load``.
    """
    with _alone_in(file.parent):
        said = conditions.header(effort)
        kept: list[Found] = []
        if file.exists():
            kept = load(file, conditions, effort)
            before = json.loads(file.read_text(encoding="utf-8"))
            said |= {name: before[name] | said[name] for name in ("searched", "profiles")}
        _write(file, said, list({one.place: one for one in (*kept, *found)}.values()))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is here with the same folder."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _write(file: Path, said: Mapping[str, Any], found: Sequence[Found]) -> None:
    header = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in said.items()]
    entries = ",\n  ".join(json.dumps(dataclasses.asdict(one)) for one in found)
    text = ",\n ".join((*header, f'"found": [\n  {entries}\n ]'))
    partial = file.with_suffix(".partial")
    partial.write_text(f"{{\n {text}\n}}\n", encoding="utf-8")
    partial.replace(file)


def tune(
    grids: Sequence[Grid],
    draft: str,
    strategies: Sequence[str],
    effort: Effort,
    keep: Callable[[Sequence[Found]], None],
    say: Callable[[str], None] = lambda line: None,
) -> list[Found]:
    """The options of every strategy on every grid, at its one temperature and with ``draft``.

    The grids share prompts and drafters (``Grid.on``). ``keep`` is given those of a grid as soon as
    they are found.
    """
    source = canonical(draft)
    found: list[Found] = []
    for grid in grids:
        began = time.monotonic()
        (temperature,) = grid.plan.temperatures
        cells = {
            cell: its
            for cell, its in grid.cells().items()
            if cell.strategy in strategies and its == source
        }
        tuned = Tuner(grid, effort, keeps_drafts=True).run(cells)
        here = [_found(grid, temperature, draft, one) for one in tuned]
        keep(here)
        found += here
        seconds = time.monotonic() - began
        say(f"tuned {grid.plan.profile.name}, T={temperature:g}, {draft}: {seconds:.0f} s")
    grids[0].forget_drafts()
    return found


def _found(grid: Grid, temperature: float, draft: str, tuned: Tuned) -> Found:
    cell: Cell = tuned.cell
    return Found(
        grid.plan.profile.name,
        cell.stages,
        temperature,
        draft,
        cell.strategy,
        tuned.strategy,
        tuned.configurations,
        len(grid.cases),
        tuned.finalists,
    )
