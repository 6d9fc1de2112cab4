"""Profile names of drafters, and the packaged drafters they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flowspec.errors import ConfigError
from flowspec.rehearse.devices.profile import source_parts

#: Packaged drafters by profile name; ``draft`` is the small model's name outside profiles.
DRAFTERS = {"slm": "draft", "draft": "draft", "head": "head", "ngram": "ngram"}


def drafter_of(source: str, timed: Iterable[str] = ("slm", "head", "ngram")) -> str:
    """The name of ``source`` for ``load_sources``; ConfigError lists those of ``timed``."""
    unknown = [name for name in names_of(canonical(source)) if name not in DRAFTERS]
    if unknown:
        known = ", ".join(name for name in timed if name in DRAFTERS)
        raise ConfigError(
            f"unknown draft source {unknown[0]!r}; expected {known}, or several joined by + or :; "
            "draft means slm"
        )
    return _renamed(source, DRAFTERS)


def canonical(source: str) -> str:
    """``source`` in profile names; ConfigError unless it lists drafters, each of them once."""
    found = _renamed(source, {"draft": "slm"})
    try:
        source_parts(found)
    except ConfigError as error:
        raise ConfigError(f"{error}; draft means slm") from None
    return found


def names_of(source: str) -> tuple[str, ...]:
    """Every drafter in ``source``, over all its choices."""
    return tuple(dict.fromkeys(name for names in source_parts(source) for name in names))


def choices_of(source: str) -> tuple[str, ...]:
    """The choices in ``source``."""
    return tuple(map("+".join, source_parts(source)))


def first_choice(source: str) -> str:
    """The choice used by strategies that do not choose."""
    return choices_of(source)[0]


def _renamed(source: str, names: Mapping[str, str]) -> str:
    return ":".join(
        "+".join(names.get(name, name) for name in parts) for parts in source_parts(source)
    )


def counted(number: int, noun: str) -> str:
    """A number and its noun: ``1 prompt``, ``2 prompts``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
