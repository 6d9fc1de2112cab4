"""Names of a profile's models: the target, and drafters of one kind each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flowspec.errors import ConfigError
from flowspec.model.drafters.kinds import NGRAM
from flowspec.model.weights.directory import PACKAGED_HEAD, packaged
from flowspec.rehearse.devices.profile import Profile, source_parts

#: The packaged models by their names in profiles.
PACKAGED = {
    "target": packaged("target"),
    "medium": packaged("medium"),
    "slm": packaged("draft"),
    "head": PACKAGED_HEAD,
    NGRAM: NGRAM,
}
_NO_DRAFTERS = ("target", "medium")


def models_of(profile: Profile) -> Mapping[str, str]:
    """The models whose text and acceptance a simulation on ``profile`` shows, by name."""
    return {**profile.models, NGRAM: NGRAM} if profile.models else PACKAGED


def of_whom(profile: Profile) -> str:
    """Whose text and acceptance that is, in words."""
    return Path(profile.models["target"]).name if profile.models else "the packaged models"


def drafter_of(source: str, models: Mapping[str, str] = PACKAGED) -> str:
    """The name of ``source`` for ``load_sources``; ConfigError lists the drafters in ``models``."""
    drafters = {name: model for name, model in models.items() if name not in _NO_DRAFTERS}
    named = canonical(source)
    unknown = [name for name in names_of(named) if name not in drafters]
    if unknown:
        raise ConfigError(
            f"unknown draft source {unknown[0]!r}; expected {', '.join(drafters)}, or several "
            "joined by + or :; draft means slm"
        )
    return _renamed(named, drafters)


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
