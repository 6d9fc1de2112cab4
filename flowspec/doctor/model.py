"""Model folders: whether target and drafters can be loaded, fit together, and fit into memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.doctor.finding import Finding, error, from_error, note, ok, size, warning
from flowspec.errors import ConfigError, ModelError, unusable
from flowspec.model.drafters.kinds import NGRAM, kind_of
from flowspec.model.drafters.sources import source_names
from flowspec.model.weights import formats as unread
from flowspec.model.weights.directory import (
    ModelDirectory,
    local_path,
    open_directory,
    read_config_file,
)
from flowspec.model.weights.precision import AUTO, PRECISIONS, declared

Ends = Callable[[Path], frozenset[int] | None]

_LOAD = "download the model again"
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A language model that can be opened. ``sizes``: bytes of its weights by precision.

    ``stored``: the precision of the checkpoint.
    """

    name: str
    family: str
    layers: int
    vocabulary: int
    context: int
    stored: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What a model's files say of texts. ``named``: the end-of-sequence ids in its configs.

    ``ends``: the ids that end texts; None: its chat template, which may name one, fails.
    """

    vocabulary: int
    named: frozenset[int]
    ends: frozenset[int] | None
    chat_template: bool


def locate(name: str) -> Path | None:
    """The folder of ``name``, of the hub's cache too; None if it is not on this machine.

    Nothing is fetched.
    """
    found = local_path(name)
    if found is not None or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return found
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None


def check_names(
    target: str,
    draft: str,
    memory: int | None,
    dtype: str,
    families: Sequence[str],
    ends: Ends,
) -> Iterator[Finding]:
    """Everything on the target and the drafters in ``draft``.

    ``memory``: free bytes where the model computes. ``families``: those that can be split; empty:
    that is unknown, since no model can be loaded. ``ends``: returns the ids that end texts of the
    model in a folder, or None if its chat template fails.
    """
    opened, findings = _open(target, "target")
    yield from findings
    if opened is not None:
        kind = kind_of(opened)
        if kind.reads_target:
            yield error(
                "target",
                f"{target} is {kind.shown}, which can only draft",
                "give a language model as the target, and the head as the draft",
            )
            return
        yield from check(gather(target, opened), memory, dtype, families)
        if families:
            yield from _texts(opened, ends)
    try:
        names = source_names(draft)
    except ConfigError as wrong:
        yield from_error("draft", wrong, "give a folder, a hub name or ngram")
        return
    for name in names:
        yield from _draft(name, opened)


def _open(name: str, role: str) -> tuple[ModelDirectory | None, list[Finding]]:
    """The model ``name``, and what is wrong with it; None if it cannot be used."""
    try:
        path = locate(name)
        if path is None:
            return None, [_absent(name, role)]
        found = list(formats(role, path))
        if found:
            return None, found
        config = read_config_file(path)
        wrong = unread.of_config(path, config)
        if wrong is None and role == "target":
            wrong = unread.of_family(path, config) or unread.of_template(path)
        if wrong is not None:
            return None, [error(role, wrong.what, wrong.remedy)]
        directory = open_directory(str(path))
        directory.check_weights()
        for tensor in directory.weight_files:
            directory.tensor(tensor)
    except ModelError as refused:
        return None, [from_error(role, refused, _LOAD)]
    except OSError as unreadable:
        return None, [from_error(role, ModelError(unusable(unreadable)), _LOAD)]
    return directory, []


def _texts(target: ModelDirectory, ends: Ends) -> Iterator[Finding]:
    from flowspec.model.text.tokenizer import Tokenizer

    try:
        target.check_tokenizer()
        has_template = Tokenizer(target).has_chat_template
    except ModelError as wrong:
        yield from_error(
            "target", wrong, "copy tokenizer.json and tokenizer_config.json of the original model"
        )
        return
    facts = TextFacts(target.vocabulary, target.eos, ends(target.path), has_template)
    yield from check_texts(facts)


def _absent(name: str, role: str) -> Finding:
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return warning(
            role,
            f"{name} is not on this machine: the first run fetches it from the hub, if there is "
            "such a model",
            f"fetch it now: `hf download {name}`; or give a folder",
        )
    return error(role, f"model folder {name} does not exist", "give a folder or a hub name")


def formats(role: str, path: Path) -> Iterator[Finding]:
    """Errors for a folder whose weights are in another format than safetensors, or not there."""
    pointers = [file.name for file in sorted(path.glob("*.safetensors")) if _is_pointer(file)]
    if pointers:
        yield error(
            role,
            f"{path / pointers[0]} is a Git LFS pointer and not the weights",
            "run `git lfs pull` in the folder",
        )
        return
    wrong = unread.of_folder(path)
    if wrong is not None:
        yield error(role, wrong.what, wrong.remedy)


def _is_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(_POINTER)) == _POINTER
    except OSError:
        return False


def gather(name: str, directory: ModelDirectory) -> ModelFacts:
    """Read the config and the headers of the weights."""
    return ModelFacts(
        name=name,
        family=str(directory.config["model_type"]),
        layers=directory.layers,
        vocabulary=directory.vocabulary,
        context=directory.context,
        stored=_stored(directory.config),
        sizes=sizes(directory),
    )


def _stored(config: Mapping[str, Any]) -> str:
    name = declared(config)
    return name if name in PRECISIONS else "float32"


def sizes(directory: ModelDirectory) -> dict[str, int]:
    """Bytes of the weights by precision: matrices but for the embedding in it, the rest in rows."""
    matrices, others = [], 0
    for name in directory.weight_files:
        shape = directory.tensor(name).shape
        if len(shape) >= 2 and "embed" not in name:
            matrices.append(shape)
        else:
            others += math.prod(shape)
    return {
        name: sum(map(precision.weight_bytes, matrices)) + others * precision.row_bytes("cpu")
        for name, precision in PRECISIONS.items()
    }


def check(
    facts: ModelFacts, memory: int | None, dtype: str, families: Sequence[str]
) -> Iterator[Finding]:
    """Findings on a target; parameters as ``check_names``'s."""
    subject = "target"
    if families and facts.family not in families:
        yield warning(
            subject,
            f"{facts.name} is a {facts.family} model, a family that is not tested",
            f"compare its text with plain decoding, or choose one of {', '.join(families)}",
        )
    else:
        yield ok(subject, f"{facts.name}: {facts.family}, {facts.layers} layers, weights complete")
    yield _memory(facts, memory, dtype)


def check_texts(facts: TextFacts) -> Iterator[Finding]:
    """Findings on where a target's texts end, and on its chat template."""
    subject = "target"
    if max(facts.named, default=0) >= facts.vocabulary:
        yield warning(
            subject,
            f"end-of-sequence token {max(facts.named)} is outside the vocabulary of "
            f"{facts.vocabulary}",
            "correct eos_token_id in generation_config.json and config.json",
        )
    if facts.ends is None:
        yield warning(
            subject,
            "its chat template fails on a conversation of two turns, so it names no token that "
            "ends a text",
            "send the model a conversation: the error says what is wrong with the template",
        )
    elif not facts.ends:
        yield warning(
            subject,
            "neither its configs nor its chat template name an end-of-sequence token: every text "
            "runs to --max-new-tokens",
            "copy generation_config.json of the original model, or add eos_token_id to config.json",
        )
    else:
        ids = ", ".join(map(str, sorted(facts.ends)))
        of = "token" if len(facts.ends) == 1 else "the tokens"
        yield ok(subject, f"texts end at {of} {ids}")
    if not facts.chat_template:
        yield note(
            subject,
            "it has no chat template: prompts are continued as they are",
            "for a chat model, copy tokenizer_config.json or chat_template.jinja of the original",
        )


def _memory(facts: ModelFacts, memory: int | None, dtype: str) -> Finding:
    subject = "target"
    chosen = facts.stored if dtype == AUTO else dtype
    needed = facts.sizes[chosen]
    all_sizes = ", ".join(f"{name} {size(count)}" for name, count in facts.sizes.items())
    if memory is None or needed <= memory:
        return ok(subject, f"the whole model's weights take {all_sizes}")
    machines = math.ceil(needed / max(1, memory))
    smaller = [name for name, count in facts.sizes.items() if count <= memory]
    fits = f", or choose --dtype {' or '.join(smaller)}" if smaller else ""
    return warning(
        subject,
        f"its weights in {chosen} take {size(needed)}, and {size(memory)} are free here "
        f"({all_sizes})",
        f"split it over {machines} such machines or more{fits}",
    )


def _draft(name: str, target: ModelDirectory | None) -> Iterator[Finding]:
    if name == NGRAM:
        yield ok("draft", "n-grams of the text, which need no model")
        return
    directory, findings = _open(name, "draft")
    yield from findings
    if directory is None or target is None:
        return
    try:
        kind = kind_of(directory)
        kind.check(directory, target)
        if kind.reads_target:
            yield ok("draft", f"{name} is {kind.shown} of the target's shape, weights complete")
        else:
            yield ok("draft", f"{name} shares the target's tokenizer, weights complete")
    except ModelError as wrong:
        yield from_error("draft", wrong, "choose another draft, or ngram")
