"""The packaged profiles, one TOML file each, and the loader for any profile."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowspec.core.run.fields import shown
from flowspec.errors import ConfigError
from flowspec.rehearse.devices.profile import LinkShape, Profile, Times
from flowspec.rehearse.devices.way import NO_BROKER, Way

_PLACE = Path(__file__).parent
_MEGABIT = 1e6 / 8
_KEYS = {
    "": {
        *("base", "summary", "source", "stages", "speeds", "even_split"),
        *("target", "drafters", "middles", "link", "broker", "software", "models", "anchors"),
    },
    "target": {"layers", "hidden", "value_bytes", "layer_ms", "head_ms"},
    "link": {"latency_ms", "mbit", "exclusive"},
    "broker": {"at", "rows"},
    "software": {"hop_ms"},
}
#: Tables that a file may lack.
_OPTIONAL = ("broker", "software")


def names() -> list[str]:
    """The names of the packaged profiles."""
    return sorted(path.stem for path in _PLACE.glob("*.toml"))


def load(name: str) -> Profile:
    """The packaged profile ``name``, or the one in the .toml file of that path.

    A file with ``base`` inherits from that packaged profile every top-level entry it lacks, except
    anchors. ConfigError for an unknown name or an invalid file; it says what was expected where.
    """
    path = Path(name) if name.endswith(".toml") else _PLACE / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(
            f"there is no profile {name!r}; expected a .toml file or one of: {', '.join(names())}"
        )
    try:
        return _profile(path.stem, _table(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {path} is no TOML: {error}") from None
    except KeyError as error:
        raise ConfigError(
            f"profile {path} lacks the entry {error}; compare a packaged one"
        ) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"profile {path} has a value of the wrong kind: {error}; compare a packaged one"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"profile {path}: {error}") from None


def _table(path: Path) -> Mapping[str, Any]:
    own = tomllib.loads(path.read_text(encoding="utf-8"))
    if "base" not in own:
        return own
    if own["base"] not in names() or path == _PLACE / f"{own['base']}.toml":
        raise ConfigError(f"its base is {own['base']!r}; expected one of: {', '.join(names())}")
    base = {
        key: value
        for key, value in _table(_PLACE / f"{own['base']}.toml").items()
        if key != "anchors"
    }
    return {**base, **own}


def _profile(name: str, table: Mapping[str, Any]) -> Profile:
    for part, known in _KEYS.items():
        given = table if not part else table.get(part, {}) if part in _OPTIONAL else table[part]
        unknown = set(given) - known
        if unknown:
            raise ConfigError(
                f"unknown entry {min(unknown)!r}; expected: {', '.join(sorted(known))}"
            )
    target = table["target"]
    link = _link(table["link"])
    return Profile(
        name,
        _text("summary", table["summary"]),
        _text("source", table["source"]),
        _whole("target.layers", target["layers"]),
        _whole("target.hidden", target["hidden"]),
        _whole("target.value_bytes", target["value_bytes"]),
        _times("target.layer_ms", target["layer_ms"]),
        _times("target.head_ms", target["head_ms"]),
        {
            source: _times(f"drafters.{source}", points)
            for source, points in table["drafters"].items()
        },
        link,
        tuple(_whole("stages", count) for count in table["stages"]),
        tuple(
            _times(f"middles.{model}", points) for model, points in table.get("middles", {}).items()
        ),
        {key: _number(f"anchors.{key}", value) for key, value in table.get("anchors", {}).items()},
        tuple(_number("speeds", speed) for speed in table.get("speeds", ())),
        _switch("even_split", table.get("even_split", False)),
        way=_way(table.get("broker"), link),
        hop=_milliseconds("software.hop_ms", table.get("software", {}).get("hop_ms", 0.0)),
        models={
            part: _text(f"models.{part}", model) for part, model in table.get("models", {}).items()
        },
    )


def _link(entries: Mapping[str, Any]) -> LinkShape:
    return LinkShape(
        _milliseconds("link.latency_ms", entries["latency_ms"]),
        _bandwidth("link.mbit", entries["mbit"]),
        _switch("link.exclusive", entries.get("exclusive", False)),
    )


def _way(entries: Mapping[str, str] | None, link: LinkShape) -> Way:
    if entries is None:
        return NO_BROKER if link.exclusive else Way()
    try:
        return Way(**entries)
    except ConfigError as error:
        raise ConfigError(f"broker.{error}") from None


def _text(place: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{place} is {_written(value)}; expected text")
    return value


def _whole(place: str, value: object) -> int:
    if type(value) is not int:
        raise ConfigError(f"{place} is {_written(value)}; expected a whole number")
    return value


def _number(place: str, value: object) -> float:
    if type(value) is not int and type(value) is not float:
        raise ConfigError(f"{place} is {_written(value)}; expected a number")
    return float(value)


def _milliseconds(place: str, value: object) -> float:
    """``value`` in seconds."""
    found = _number(place, value)
    if not 0 <= found < 1e6:
        raise ConfigError(f"{place} is {_written(value)}; expected 0 to below 1000000")
    return found / 1e3


def _bandwidth(place: str, value: object) -> float:
    """Megabits in bytes, each per second."""
    found = _number(place, value)
    if not found > 0:
        raise ConfigError(f"{place} is {_written(value)}; expected a number above 0")
    return found * _MEGABIT


def _switch(place: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{place} is {_written(value)}; expected true or false")
    return value


def _times(place: str, points: Mapping[str, float]) -> Times:
    """Pass times from milliseconds by rows, like ``{1 = 2.0, 16 = 2.2}``.

    ``place``: the entry's name in the file, for the ConfigError.
    """
    try:
        times = ((int(rows), _number(place, ms) / 1e3) for rows, ms in points.items())
        return Times(tuple(sorted(times)))
    except (ConfigError, TypeError, ValueError, AttributeError):
        raise ConfigError(
            f"{place} is {str(points)[:200]}; "
            "expected milliseconds by rows, with items like 1 = 2.0, 16 = 2.2: "
            "rows from 1 on, times above 0 that never fall as rows rise"
        ) from None


def _written(value: object) -> str:
    """``value`` as it stands in the file."""
    return str(value).lower() if isinstance(value, bool) else shown(value)
