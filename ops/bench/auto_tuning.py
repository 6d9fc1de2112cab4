"""The options of all systems for ``ops.bench.auto``: searched once, kept in a file, and read again.

The file has an entry per profile, temperature, draft and strategy. It can be used only with the
prompts, tokens, profiles and searched values with which it was written.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.emulation.profile import Profile
from flowspec.errors import ConfigError
from flowspec.testbed.digests import digest, profile_digest
from flowspec.testbed.grid import Cell, Grid
from flowspec.testbed.naming import canonical
from flowspec.testbed.prompts import Prompt
from flowspec.testbed.search import Space
from flowspec.testbed.tuning import Effort, Tuned, Tuner

#: Marks a file as one of these.
KIND = "flowspec auto tuned"
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

    ``prompts``: those given, before the ones that repeat themselves are left out.
    """

    prompts: Sequence[Prompt]
    tokens: int
    strategies: Sequence[str]
    profiles: Sequence[Profile]

    def header(self, effort: Effort) -> dict[str, Any]:
        """The file's entries on these conditions."""
        return {
            "kind": KIND,
            "tokens": self.tokens,
            "prompts": {
                "count": len(self.prompts),
                "digest": digest([[prompt.set, prompt.text] for prompt in self.prompts]),
            },
            "effort": dataclasses.asdict(effort),
            "searched": {name: _searched(name) for name in self.strategies},
            "profiles": {profile.name: profile_digest(profile) for profile in self.profiles},
        }

    def check(self, header: Mapping[str, Any], file: Path) -> None:
        """ConfigError with the first condition in which ``file``, with ``header``, differs."""
        own = self.header(EFFORT)
        for name in ("tokens", "prompts", "effort"):
            if header[name] != own[name]:
                raise ConfigError(
                    f"{file} was tuned with other {name} ({_brief(header[name])}; these are "
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
    return " with digest ".join(map(str, value.values())) if isinstance(value, dict) else str(value)


def load(file: Path, conditions: Conditions) -> list[Found]:
    """The entries of ``file``; ConfigError if it is none of these or of other conditions."""
    try:
        content = json.loads(file.read_text())
        if content["kind"] != KIND:
            raise ValueError("it is of another kind")
        found = [Found(**entry) for entry in content["found"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is no file of tuned options: {error}") from None
    conditions.check(content, file)
    return found


def save(file: Path, conditions: Conditions, effort: Effort, found: Sequence[Found]) -> None:
    """Write ``found``, replacing ``file``; what it says of other profiles and systems stays."""
    said = conditions.header(effort)
    if file.exists():
        before = json.loads(file.read_text())
        said |= {name: before[name] | said[name] for name in ("searched", "profiles")}
    header = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in said.items()]
    entries = ",\n  ".join(json.dumps(dataclasses.asdict(one)) for one in found)
    text = ",\n ".join((*header, f'"found": [\n  {entries}\n ]'))
    partial = file.with_suffix(".partial")
    partial.write_text(f"{{\n {text}\n}}\n")
    partial.replace(file)


def tune(
    grids: Sequence[Grid],
    draft: str,
    strategies: Sequence[str],
    effort: Effort,
    say: Callable[[str], None] = lambda line: None,
) -> list[Found]:
    """The options of every strategy on every grid, at its one temperature and with ``draft``.

    The grids share prompts and drafters (``Grid.on``).
    """
    source = canonical(draft)
    found = []
    for grid in grids:
        began = time.monotonic()
        (temperature,) = grid.plan.temperatures
        cells = {
            cell: its
            for cell, its in grid.cells().items()
            if cell.strategy in strategies and its == source
        }
        tuned = Tuner(grid, effort, keeps_drafts=True).run(cells)
        found += [_found(grid, temperature, draft, one) for one in tuned]
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
