"""What a profile calls a drafter, and which packaged one that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flowspec.errors import ConfigError
from flowspec.model.sources import choices, source_names

#: The packaged drafter of every name a profile has times for; ``draft`` is the small model's name elsewhere.
DRAFTERS = {"slm": "draft", "draft": "draft", "head": "head", "ngram": "ngram"}


def drafter_of(source: str, timed: Iterable[str] = ("slm", "head", "ngram")) -> str:
    """What ``load_sources`` calls a profile's drafter ``source``; else a ConfigError names those of ``timed``."""
    unknown = [name for name in source_names(source) if name not in DRAFTERS]
    if unknown:
        known = ", ".join(name for name in timed if name in DRAFTERS)
        raise ConfigError(
            f"unknown draft source {unknown[0]!r}; expected {known}, or several joined by +; draft means slm"
        )
    return _renamed(source, DRAFTERS)


def canonical(source: str) -> str:
    """``source`` as profiles call it."""
    return _renamed(source, {"draft": "slm"})


def _renamed(source: str, names: Mapping[str, str]) -> str:
    merged = (choice.split("+") for choice in choices(source))
    return ":".join("+".join(names.get(name.strip(), name.strip()) for name in parts) for parts in merged)


def first_choice(source: str) -> str:
    """What a strategy that does not choose drafts with."""
    return choices(source)[0]
