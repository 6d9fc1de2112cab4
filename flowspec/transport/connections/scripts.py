"""The Lua scripts: loaded from ``lua/``, checked against their headers, called by hash."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

from flowspec.errors import ConfigError

_FILE = re.compile(r"(?P<name>[a-z_]+)-(?P<keys>\d+|n)\.lua")
_INCLUDE = re.compile(r"^-- include (\w+)$", re.MULTILINE)
_KEY_LINE = re.compile(r"^-- KEYS\[(\d+)(\.\.)?\]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """A script's text and its hash. ``keys``: the number of its keys; None: it varies."""

    name: str
    text: str
    sha: str
    keys: int | None


@lru_cache(maxsize=1)
def load() -> Mapping[str, Script]:
    """Every script by name; ConfigError if a file breaks the rules of ``lua/README.md``."""
    folder = _folder()
    scripts = {}
    for file in sorted(folder.glob("*.lua")):
        script = read(file, folder / "include")
        scripts[script.name] = script
    if not scripts:
        raise ConfigError(f"no Lua scripts in {folder}; the installation is incomplete")
    return scripts


def read(file: Path, includes: Path) -> Script:
    """Read one script, insert its includes and check its header against its name."""
    match = _FILE.fullmatch(file.name)
    if match is None:
        raise ConfigError(f"{file.name} is not named like operation-keys.lua")
    text = file.read_text(encoding="utf-8")
    listed = _KEY_LINE.findall(text)
    numbers = [int(number) for number, _ in listed]
    varies = any(dots for _, dots in listed)
    if numbers != list(range(1, len(numbers) + 1)) or not text.startswith(f"-- {match['name']}: "):
        raise ConfigError(
            f"the header of {file.name} must name it and list KEYS[1], KEYS[2] and so on"
        )
    if (match["keys"] == "n") != varies or (not varies and int(match["keys"]) != len(numbers)):
        raise ConfigError(f"{file.name} lists {len(numbers)} keys; its name says {match['keys']}")
    if "-- returns" not in text:
        raise ConfigError(f"the header of {file.name} does not say what it returns")
    body = _INCLUDE.sub(lambda found: _included(includes, found[1], file.name), text)
    sha = hashlib.sha1(body.encode(), usedforsecurity=False).hexdigest()
    return Script(match["name"], body, sha, None if varies else len(numbers))


def _included(folder: Path, name: str, by: str) -> str:
    file = folder / f"{name}.lua"
    if not file.is_file():
        raise ConfigError(f"{by} includes {name}, and there is no {file}")
    text = file.read_text(encoding="utf-8")
    if _INCLUDE.search(text):
        raise ConfigError(f"{file.name} is included by {by} and must not include others")
    return text


def _folder() -> Path:
    """``flowspec/_lua`` in an installed wheel, ``lua/`` beside the package in a checkout."""
    package = Path(str(resources.files("flowspec")))
    for folder in (package / "_lua", package.parent / "lua"):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"the Lua scripts are neither in {package / '_lua'} nor beside {package}; reinstall "
        "flowspec"
    )
