"""What a pipeline's models are called, checked before anything is loaded. torch only to load a
drafter.

A draft's name is a folder or hub name of a small language model or of an EAGLE head (told apart
by what is in it), ``ngram``, or several of these joined by ``+``, merged into one tree. Drafts
joined by ``:`` are there to be chosen from; a strategy that does not choose has the first. Where
joined names are a folder's, it is the folder: the longest from the left. Target and middle
models are language models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flowspec.errors import ConfigError, ModelError
from flowspec.model.base import DraftExecutor
from flowspec.model.directory import ModelDirectory, check_pair, fetch_weights, local_path
from flowspec.model.head_layout import check_head, is_head

NGRAM = "ngram"
#: A prefix no tensor has: of the weights nothing but the tensors' names.
_NO_TENSOR = ("config only",)


def open_models(
    target: str, draft: str, middles: Iterable[str] = ()
) -> tuple[ModelDirectory, tuple[ModelDirectory, ...]]:
    """The target and the middle models of a chain, found to serve together with ``draft``.

    ModelError if the target or a middle model is something that can only draft, or if tokenizers
    differ; errors as ``check_sources``'s for the draft. Weights are not looked into beyond their
    tensors' names.
    """
    first = _language_model(target, "target")
    _ = first.vocabulary_fingerprint  # fails here without a tokenizer, whatever drafts
    check_sources(first, draft)
    others = tuple(_language_model(name, "middle model") for name in middles)
    for other in others:
        check_pair(first, other, "middle model")
    return first, others


def choices(draft: str) -> tuple[str, ...]:
    """The drafts of ``draft`` there are to choose from; errors as ``source_names``'s."""
    return tuple("+".join(names) for names in _merged(draft))


def labels(draft: str) -> tuple[str, ...]:
    """What a report calls each choice of ``draft``: as it was given, folders by their last part,
    unless two would be called the same. ``draft`` is not checked.
    """
    found = _split(draft)
    short = [tuple(map(_last_part, names)) for names in found]
    apart = len(set(short)) == len(short) and all(len(set(names)) == len(names) for names in short)
    return tuple(map("+".join, short if apart else found))


def _last_part(name: str) -> str:
    path = _folder(name)
    if path is None:
        return name
    return (path.resolve() if path.name in ("", "..") else path).name or name


def source_names(draft: str) -> tuple[str, ...]:
    """The parts of ``draft``, over all its choices; ConfigError if one is empty or, of a choice,
    named twice, or if a choice is there twice. Two names of one folder are one.
    """
    return tuple(dict.fromkeys(name for names in _merged(draft) for name in names))


def _merged(draft: str) -> tuple[tuple[str, ...], ...]:
    """The parts of every choice of ``draft``; errors as ``source_names``'s."""
    found = _split(draft)
    meant = [tuple(map(_meant, names)) for names in found]
    for names in meant:
        if not all(names) or len(set(names)) != len(names):
            raise ConfigError(
                f"draft {draft!r} is no list of drafters; expected like DIR, ngram, DIR+ngram or "
                "DIR:DIR+ngram"
            )
    if len(set(meant)) != len(meant):
        raise ConfigError(
            f"draft {draft!r} names one choice twice; expected like DIR:ngram or DIR:DIR+ngram"
        )
    return found


def _meant(name: str) -> str | Path:
    """The folder that ``name`` is, however it is written; else the name itself."""
    path = _folder(name)
    return name if path is None else path.resolve()


def _folder(name: str) -> Path | None:
    """Where ``name`` is on this machine; None for what is no folder here, as ``ngram`` never is."""
    return None if name == NGRAM else local_path(name)


def _split(draft: str) -> tuple[tuple[str, ...], ...]:
    """The names in ``draft`` by choice, folders with a + or : in their name in one piece."""
    pieces = re.split("([+:])", draft)
    at = 0
    found: list[list[str]] = [[]]
    while at < len(pieces):
        ends = range(len(pieces), at + 1, -2)
        folders = (end for end in ends if local_path("".join(pieces[at:end]).strip()) is not None)
        end = next(folders, at + 1)
        found[-1].append("".join(pieces[at:end]).strip())
        if pieces[end : end + 1] == [":"]:
            found.append([])
        at = end + 1
    return tuple(map(tuple, found))


def check_sources(target: ModelDirectory, draft: str) -> None:
    """ModelError or ConfigError unless every part of ``draft`` can draft for ``target``."""
    for name in source_names(draft):
        if name == NGRAM:
            continue
        directory = fetch_weights(name, _all)
        if is_head(directory):
            check_head(directory, target)
        else:
            check_pair(target, directory)


def fingerprint(draft: str) -> str:
    """Digests of the parts: equal for copies of the same drafters."""
    return ":".join("+".join(map(_digest, names)) for names in _merged(draft))


def _digest(name: str) -> str:
    return name if name == NGRAM else fetch_weights(name, _all).fingerprint


def load_sources(
    draft: str,
    target: ModelDirectory,
    wrapped: Callable[[DraftExecutor], DraftExecutor] = lambda drafter: drafter,
) -> DraftExecutor:
    """The drafter called ``draft``, for ``target``; ``wrapped`` is put around it, or around each
    there is to choose.
    """
    drafters = [wrapped(_load_merged(names, target)) for names in _merged(draft)]
    if len(drafters) == 1:
        return drafters[0]
    from flowspec.model.choice import ChoiceDrafter

    return ChoiceDrafter(drafters)


def _load_merged(names: Sequence[str], target: ModelDirectory) -> DraftExecutor:
    loaded = [_load(name, target) for name in names]
    if len(loaded) == 1:
        return loaded[0]
    from flowspec.model.hybrid import HybridDrafter

    return HybridDrafter(loaded)


def target_needs(draft: str) -> Callable[[ModelDirectory], tuple[str, ...]]:
    """Which of the target's tensors the draft worker reads, by prefix: a head shares its ends."""
    heads = any(
        name != NGRAM and is_head(fetch_weights(name, _all)) for name in source_names(draft)
    )
    return lambda target: ("model.embed_tokens.", "lm_head.") if heads else _NO_TENSOR


def _language_model(name: str, role: str) -> ModelDirectory:
    if name == NGRAM and local_path(name) is None:
        raise _only_drafts(name, NGRAM, role)
    directory = fetch_weights(name, lambda found: _NO_TENSOR)
    if is_head(directory):
        raise _only_drafts(name, "an EAGLE head", role)
    return directory


def _only_drafts(name: str, kind: str, role: str) -> ModelError:
    return ModelError(
        f"the {role} is {name}, and {kind} can only draft; "
        f"expected a language model: give one as the {role}, and {name} as the draft"
    )


def _load(name: str, target: ModelDirectory) -> DraftExecutor:
    if name == NGRAM:
        from flowspec.model.ngram import NgramDrafter

        return NgramDrafter(target.vocabulary)
    directory = fetch_weights(name, _all)
    if is_head(directory):
        from flowspec.model.eagle import load_head

        return load_head(directory, target)
    from flowspec.model.drafter import load_drafter

    check_pair(target, directory)
    return load_drafter(directory)


def _all(directory: ModelDirectory) -> tuple[str, ...]:
    return ("",)
