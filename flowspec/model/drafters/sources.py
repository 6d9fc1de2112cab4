"""Names of a pipeline's models, checked before anything is loaded. Only loading needs torch.

A draft's name is a folder or hub name of a small language model, an EAGLE head or a block drafter
(told apart by their contents), ``ngram``, or several of these joined by ``+`` and merged into one
tree (block drafters are not merged). Drafts joined by ``:`` are choices; a strategy that does not
choose uses the first. Joined names that are the path of a folder mean that folder; the longest
match from the left wins. Target and middle models are language models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from flowspec.errors import ConfigError, ModelError
from flowspec.model.base import DraftExecutor
from flowspec.model.drafters.kinds import BLOCK, NGRAM, FolderKind, kind_of
from flowspec.model.layers.taps import Taps
from flowspec.model.weights import formats
from flowspec.model.weights.directory import (
    ModelDirectory,
    absolute_name,
    all_tensors,
    check_pair,
    fetch_weights,
    local_path,
)
from flowspec.model.weights.precision import AUTO

#: A prefix that no tensor has, for callers that need the tensors' names only.
_NO_TENSOR = ("config only",)


def open_models(
    target: str, draft: str, middles: Iterable[str] = ()
) -> tuple[ModelDirectory, tuple[ModelDirectory, ...]]:
    """Open the target and a chain's middle models; check that they and ``draft`` fit together.

    ModelError if the target or a middle model can only draft, or if tokenizers differ; errors as
    ``check_sources``'s for the draft. At most the headers of weights files are read.
    """
    first = _language_model(target, "target")
    first.check_tokenizer()  # raises without a tokenizer, even if the draft needs none
    broken = formats.of_template(first.path)
    if broken is not None:
        raise ModelError(str(broken))
    check_sources(first, draft)
    others = tuple(_language_model(name, "middle model") for name in middles)
    for other in others:
        check_pair(first, other, "middle model")
    return first, others


def choices(draft: str) -> tuple[str, ...]:
    """The choices in ``draft``; errors as ``source_names``'s."""
    return tuple("+".join(names) for names in _merged(draft))


def labels(draft: str) -> tuple[str, ...]:
    """Display names of the choices in ``draft``, with folders shortened to their last part.

    If two names would become equal, all stay as given. ``draft`` is not checked.
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
    """The drafters in ``draft``, over all its choices.

    ConfigError for an empty name, a drafter named twice in a choice, or a choice named twice.
    Different names of one folder count as equal there.
    """
    return tuple(dict.fromkeys(name for names in _merged(draft) for name in names))


def placed_absolutely(draft: str) -> str:
    """``draft`` with its folders as in ``absolute_name``."""
    return ":".join(
        "+".join(name if name == NGRAM else absolute_name(name) for name in names)
        for names in _split(draft)
    )


def _merged(draft: str) -> tuple[tuple[str, ...], ...]:
    """The drafters of each choice in ``draft``; errors as ``source_names``'s."""
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
    """The resolved path of the folder ``name``, else the name itself."""
    path = _folder(name)
    return name if path is None else path.resolve()


def _folder(name: str) -> Path | None:
    """The local folder of ``name``; None if there is none, and always for ``ngram``."""
    return None if name == NGRAM else local_path(name)


def _split(draft: str) -> tuple[tuple[str, ...], ...]:
    """The names in ``draft`` by choice; a folder with + or : in its name stays in one piece."""
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
    """ModelError or ConfigError unless every drafter in ``draft`` can draft for ``target``."""
    for names in _merged(draft):
        _check_merged(names)
    for name in source_names(draft):
        if name == NGRAM:
            continue
        directory = fetch_weights(name, all_tensors)
        kind_of(directory).check(directory, target)
    taps_of(draft, target)


def _check_merged(names: Sequence[str]) -> None:
    """ConfigError if several drafters are to be merged, and one of them is a block drafter."""
    if len(names) < 2:
        return
    for name in names:
        if name != NGRAM and kind_of(fetch_weights(name, all_tensors)) is BLOCK:
            raise ConfigError(
                f"draft {'+'.join(names)!r} merges a block drafter, {name}: its proposals are for "
                "several levels at once; join it to the others by : instead, as a choice"
            )


def fingerprint(draft: str) -> str:
    """Digests of the drafters in ``draft``: equal for copies of the same drafters."""
    return ":".join("+".join(map(_digest, names)) for names in _merged(draft))


def _digest(name: str) -> str:
    return name if name == NGRAM else fetch_weights(name, all_tensors).fingerprint


def load_sources(
    draft: str,
    target: ModelDirectory,
    wrapped: Callable[[DraftExecutor], DraftExecutor] = lambda drafter: drafter,
    *,
    dtype: str | None = None,
    device: str = "cpu",
) -> DraftExecutor:
    """Load the drafter ``draft`` for ``target``; ``wrapped`` wraps it, or each of its choices.

    ``dtype`` and ``device``: as in ``placing.place_drafter``; no ``dtype``: as the models declare,
    so that it drafts the same on machines of one kind.
    """
    place = (dtype, device)
    drafters = [wrapped(_load_merged(names, target, place)) for names in _merged(draft)]
    if len(drafters) == 1:
        return drafters[0]
    from flowspec.model.drafters.drafter_choice import ChoiceDrafter

    return ChoiceDrafter(drafters)


def _load_merged(
    names: Sequence[str], target: ModelDirectory, place: tuple[str | None, str]
) -> DraftExecutor:
    _check_merged(names)
    loaded = [_load(name, target, place) for name in names]
    if len(loaded) == 1:
        return loaded[0]
    from flowspec.model.drafters.hybrid import HybridDrafter

    return HybridDrafter(loaded)


def target_needs(draft: str) -> Callable[[ModelDirectory], tuple[str, ...]]:
    """Prefixes of the target's tensors that ``draft`` reads: a head its embedding, or more."""
    heads = _heads(draft)
    found: tuple[str, ...] = ("model.embed_tokens.",) if heads else _NO_TENSOR
    if any(kind.lm_head(directory) for _, directory, kind in heads):
        found = (*found, "lm_head.")
    return lambda target: found


def taps_of(draft: str, target: ModelDirectory) -> Taps | None:
    """What ``draft`` reads inside ``target``; None: its last rows, or none at all.

    A pipeline returns one row a token. So ConfigError if a head that reads inside the target is
    named together with another head.
    """
    heads = _heads(draft)
    found = [(name, kind.taps(directory, target)) for name, directory, kind in heads]
    tapped = [(name, taps) for name, taps in found if taps is not None]
    if not tapped:
        return None
    if len(heads) > 1:
        raise ConfigError(
            f"draft {draft!r} has {len(heads)} heads, of which {tapped[0][0]} reads hidden rows "
            "inside the target; such a head can be joined with language models and ngram only"
        )
    name, taps = tapped[0]
    return replace(taps, drafter=name)


def recorded_taps(draft: str, target: ModelDirectory) -> str:
    """``taps_of`` as text for a pipeline's record, with the head's fingerprint; empty: None."""
    taps = taps_of(draft, target)
    return replace(taps, fingerprint=_digest(taps.drafter)).text() if taps is not None else ""


def _heads(draft: str) -> list[tuple[str, ModelDirectory, FolderKind]]:
    """The drafters in ``draft`` that read the target's rows: name, folder and kind."""
    found = [
        (name, fetch_weights(name, all_tensors)) for name in source_names(draft) if name != NGRAM
    ]
    kinds = [(name, directory, kind_of(directory)) for name, directory in found]
    return [known for known in kinds if known[2].reads_target]


def _language_model(name: str, role: str) -> ModelDirectory:
    if name == NGRAM and local_path(name) is None:
        raise _only_drafts(name, NGRAM, role)
    directory = fetch_weights(name, lambda found: _NO_TENSOR)
    kind = kind_of(directory)
    if kind.reads_target:
        raise _only_drafts(name, kind.shown, role)
    wrong = formats.of_family(directory.path, directory.config)
    if wrong is not None:
        raise ModelError(str(wrong))
    return directory


def _only_drafts(name: str, kind: str, role: str) -> ModelError:
    return ModelError(
        f"the {role} is {name}, and {kind} can only draft; "
        f"expected a language model: give one as the {role}, and {name} as the draft"
    )


def _load(name: str, target: ModelDirectory, wanted: tuple[str | None, str]) -> DraftExecutor:
    if name == NGRAM:
        from flowspec.model.drafters.ngram import NgramDrafter

        return NgramDrafter(target.vocabulary)
    from flowspec.model.layers.placing import place, place_drafter

    directory = fetch_weights(name, all_tensors)
    kind = kind_of(directory)
    beside = (target if kind.reads_target else directory).config
    dtype, device = wanted
    placing = (
        place(AUTO, device, beside)
        if dtype is None
        else place_drafter(dtype, device, directory.config, beside)
    )
    return kind.load(directory, target, placing)
