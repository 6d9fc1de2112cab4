"""A model directory in the Hugging Face layout, checked before loading. Needs no torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flowspec.errors import ModelError, unusable
from flowspec.model.weights import formats, gguf
from flowspec.model.weights.gguf_metadata import GGUF_INDEX
from flowspec.model.weights.manifest import Manifest, read_manifest
from flowspec.model.weights.same_tokenizer import difference
from flowspec.model.weights.tensor_files import TensorEntry, read_header
from flowspec.model.weights.value_digests import digest_of, group_digests, group_of, of_prefixes

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: Rotary embeddings with one set of factors for short texts and one for long ones, and the field
#: that holds the length of short ones. ``su`` is its old name.
_LONGROPE = ("longrope", "su")
_SHORT = "original_max_position_embeddings"
#: The config of a head's decoder layer in the ``speculators`` dialect.
_NESTED = "transformer_layer_config"
#: Packaged models: a target, two smaller ones with its tokenizer, an EAGLE head for it, and an
#: EAGLE-3 head for SmolLM2-135M-Instruct (docs/models.md#a-head-from-a-models-own-answers).
PACKAGED = ("target", "medium", "draft", "head", "smollm2-head")
_PACKAGE = Path(__file__).parents[2] / "default_pair"
#: Files of which a tokenizer is made; the first that is there is used.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True)
class ModelDirectory:
    """A model directory whose config describes a decoder-only language model."""

    path: Path
    config: Mapping[str, Any]

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def context(self) -> int:
        """Tokens the model was trained for, prompt and output together.

        With longrope, those of the short factors: the library changes the factors of a whole text
        at that length, so rows computed before it would be others than those of the whole model.
        """
        longest = int(self.config.get("max_position_embeddings", 2048))
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type")) not in _LONGROPE:
            return longest
        short = rope.get(_SHORT) or self.config.get(_SHORT) or longest
        return min(longest, int(short))

    @property
    def tied(self) -> bool:
        """Whether the output head shares the embedding's weights.

        As for the library, a head that is there is used, whatever the config says. ModelError if
        there is none and the config says that it is not the embedding. Where no weights of the
        whole model are, the config alone tells.
        """
        known = self.has(_INDEX) or self.has(_SINGLE) or self.has(GGUF_INDEX)
        if known and "lm_head.weight" in self.weight_files:
            return False
        given = self.config.get("tie_word_embeddings")
        if given is None:
            given = ties_by_default(str(self.config.get("model_type")))
        if self.shard is not None or not known:
            return bool(given)
        if not given:
            raise ModelError(
                f"{self.path} has no tensor lm_head.weight, and by its config.json "
                "(tie_word_embeddings, or its default) the embedding does not take its place; "
                "it is incomplete: download the model again"
            )
        return True

    @cached_property
    def eos(self) -> frozenset[int]:
        """Ids of the tokens that end a text: of the generation config, config and tokenizer.

        Models differ in which of them is complete, and none of these tokens continues a text. A
        config may have the default of its class, which is an ordinary token of the model's own
        vocabulary: beside a generation config, its ids count if they are added tokens, where those
        are known.
        """
        generation = self._ends("generation_config.json", self._optional("generation_config.json"))
        own = self._ends("config.json", self.config)
        if generation and not own <= generation and self._added_tokens:
            own &= set(self._added_tokens.values())
        ends = self.tokenizer_eos
        return generation | own | (frozenset() if ends is None else {ends})

    def _ends(self, file: str, config: Mapping[str, Any]) -> frozenset[int]:
        """``eos_token_id`` of ``config``, which is in ``file``: none, one or several."""
        given = config.get("eos_token_id")
        try:
            return frozenset(
                int(token)
                for token in (given if isinstance(given, list) else [given])
                if token is not None
            )
        except (TypeError, ValueError):
            raise ModelError(
                f"{self.path / file}: eos_token_id {given!r} is no token id and no list of them; "
                "correct it"
            ) from None

    @property
    def tokenizer_eos(self) -> int | None:
        """The id of the tokenizer's end-of-sequence token; None: it has none, or is in no JSON."""
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            named = self._optional(file).get("eos_token")
            text = named.get("content") if isinstance(named, dict) else named
            if text is None:
                continue
            listed = self._listed_tokens
            if text in listed:
                return listed[text]
            return self._added_tokens.get(text, self._vocabulary_id(text))
        return None

    def _vocabulary_id(self, text: str) -> int | None:
        """The id of a token that is not an added one; None: there is none."""
        model = self._optional("tokenizer.json").get("model") or {}
        vocabulary = model.get("vocab") or {}
        if isinstance(vocabulary, dict):
            found = vocabulary.get(text)
            return None if found is None else int(found)
        return next((at for at, (piece, _) in enumerate(vocabulary) if piece == text), None)

    @cached_property
    def _listed_tokens(self) -> dict[str, int]:
        """Ids of added tokens by their texts, as far as the small file lists them."""
        listed = self._optional("tokenizer_config.json").get("added_tokens_decoder") or {}
        return {str(one.get("content")): int(number) for number, one in listed.items()}

    @cached_property
    def _added_tokens(self) -> dict[str, int]:
        """Ids of the tokens that are added to the vocabulary, by their texts."""
        added = self._optional("tokenizer.json").get("added_tokens") or []
        known = [one for one in added if one.get("id") is not None]
        return self._listed_tokens | {str(one.get("content")): int(one["id"]) for one in known}

    def _optional(self, name: str) -> Mapping[str, Any]:
        """The JSON object in the file ``name``; empty if there is no such file."""
        return _read_json(self.path / name) if self.has(name) else {}

    def has(self, name: str) -> bool:
        """Whether the directory has a file ``name``."""
        return (self.path / name).is_file()

    @cached_property
    def _gguf(self) -> dict[str, TensorEntry]:
        """The tensors of the GGUF file that the folder describes; empty: it describes none."""
        return gguf.read_index(self.path / GGUF_INDEX) if self.has(GGUF_INDEX) else {}

    @property
    def source(self) -> Path:
        """The folder, or the GGUF file that it describes: what a user knows it by."""
        return next((entry.file for entry in self._gguf.values()), self.path)

    @property
    def of_gguf(self) -> bool:
        """Whether the weights are in a GGUF file."""
        return bool(self._gguf)

    @cached_property
    def weight_files(self) -> dict[str, Path]:
        """The file that holds each tensor, by tensor name.

        From the header of the only weights file; without one, from the index. As for the library,
        an index beside a single file is one of earlier files.
        """
        if self._gguf:
            return {name: entry.file for name, entry in self._gguf.items()}
        if self.has(_INDEX) and not self.has(_SINGLE):
            weight_map = _read_json(self.path / _INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelError(
                    f"{self.path / _INDEX} has no weight_map; download the model again"
                )
            return {
                str(tensor): self._inside(str(file), _INDEX) for tensor, file in weight_map.items()
            }
        if not self.has(_SINGLE):
            raise ModelError(
                f"{self.path} has no weights: no {_SINGLE} and no {_INDEX}; download the model "
                "again (of a hub model in another format, the whole folder with `hf download`: "
                "given as the model, it tells how to convert it)"
            )
        return dict.fromkeys(read_header(self.path / _SINGLE), self.path / _SINGLE)

    def _inside(self, file: str, source: str) -> Path:
        """The path of ``file``, which ``source`` names; ModelError if it is outside the folder."""
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise ModelError(
                f"{self.path / source} names {file!r}, a file outside the folder; expected names "
                "of files beside it: download the model again"
            )
        return self.path / file

    def tensor(self, name: str) -> TensorEntry:
        """The entry of tensor ``name``; ModelError if it or its file is missing or cut short."""
        file = self.weight_files.get(name)
        entry = self._gguf.get(name)
        if entry is None and file is not None:
            entry = read_header(file).get(name)
        if entry is None:
            kind = f"it is a shard: {self.shard.named}" if self.shard else "it is incomplete"
            raise ModelError(f"{self.path} has no tensor {name}: {kind}")
        return entry

    def check_weights(self, prefixes: tuple[str, ...] = ("",)) -> None:
        """ModelError if a file with tensors under ``prefixes`` is missing or cut short."""
        if self._gguf:
            return  # looked at as the index was read
        files = {file for name, file in self.weight_files.items() if name.startswith(prefixes)}
        for file in sorted(files):
            read_header(file)

    @cached_property
    def shard(self) -> Manifest | None:
        """The manifest, if the folder holds one stage's shard of a model."""
        return read_manifest(self.path)

    @cached_property
    def identity(self) -> str:
        """Digest of the config and the tensors' names; a shard has that of its whole model."""
        if self.shard is not None:
            return self.shard.source
        text = json.dumps([dict(self.config), sorted(self.weight_files)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def values(self, prefixes: tuple[str, ...] = ("",)) -> dict[str, str]:
        """Digests of the weights' values under ``prefixes``, by group (``value_digests``).

        A shard has them in its manifest. Groups whose files are not here are left out.
        """
        if self.shard is not None:
            known = self.shard.values.items()
            return {group: digest for group, digest in known if of_prefixes(group, prefixes)}
        wanted = {
            name: file
            for name, file in self.weight_files.items()
            if of_prefixes(group_of(name), prefixes)
        }
        absent = {group_of(name) for name, file in wanted.items() if not file.is_file()}
        return group_digests(
            {name: self.tensor(name) for name in wanted if group_of(name) not in absent}
        )

    @cached_property
    def fingerprint(self) -> str:
        """Digest of config, tensors' names and all weights' values: equal for copies of a model."""
        return digest_of([self.identity, json.dumps(self.values(), sort_keys=True)])

    def check_tokenizer(self) -> None:
        """ModelError if there is no tokenizer."""
        if not any(map(self.has, TOKENIZERS)):
            raise ModelError(
                f"{self.path} has no tokenizer.json and no tokenizer.model: it has no tokenizer; "
                + (
                    "it is one stage's shard: give the scheduler and the draft worker the folder "
                    "`draft` beside it"
                    if self.shard is not None
                    else "copy tokenizer.json and tokenizer_config.json of the original model "
                    "into it"
                )
            )


def open_directory(name: str) -> ModelDirectory:
    """Open the model ``name``: a folder, a packaged model or a hub name like ``org/model``.

    A hub model comes from the local cache or, unless offline, from the hub. Only configuration
    and tokenizer files are fetched here; ``fetch_weights`` fetches the weights of a stage.
    """
    path = local_path(name)
    if path is not None:
        check_name(name)
        return _checked(path)
    if expanded(name).exists():
        raise ModelError(f"{name} is a file; expected a model directory, or a GGUF file, NAME.gguf")
    if not _looks_like_hub_name(name):
        raise ModelError(
            f"model {name} does not exist; expected a folder, a GGUF file, a hub name like "
            f"org/model, or a packaged model: {', '.join(PACKAGED)}"
        )
    return _checked(_snapshot(name, [*_TEXT_FILES]))


def fetch_weights(name: str, needs: Callable[[ModelDirectory], tuple[str, ...]]) -> ModelDirectory:
    """Like ``open_directory``, but also fetch weights of a hub model.

    ``needs`` returns the prefixes of the tensors whose files are fetched. ModelError if one of
    these files is missing or cut short, in a local model too, or if a file of a shard was changed.
    """
    directory = open_directory(name)
    if directory.shard is not None:
        directory.shard.check_files()
    prefixes = needs(directory)
    if local_path(name) is None:
        wanted = {_SINGLE}
        if directory.has(_INDEX):
            wanted = {
                file.name
                for tensor, file in directory.weight_files.items()
                if tensor.startswith(prefixes)
            }
        directory = _checked(_snapshot(name, [*_TEXT_FILES, *sorted(wanted)]))
    directory.check_weights(prefixes)
    return directory


def all_tensors(directory: ModelDirectory) -> tuple[str, ...]:
    """Every tensor: the ``needs`` of who reads the whole model."""
    return ("",)


def expanded(name: str) -> Path:
    """``name`` as a path, with a user's home in the place of ``~``; as it is if there is none."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def local_path(name: str) -> Path | None:
    """The folder ``name``, else the packaged model of that name; None if there is neither.

    Of a GGUF file, the folder that describes it.
    """
    path = expanded(name)
    if gguf.is_file(path):
        return gguf.folder_of(path)
    if not path.exists() and name in PACKAGED:
        path = _PACKAGE / name
    return path if name and path.is_dir() else None


def absolute_name(name: str) -> str:
    """``name`` for use from any other folder: a local one's absolute path, else as it is.

    A link is not followed, since a name's end tells what a file is. Of a packaged model its name.
    """
    path = expanded(name).absolute()
    if path.parent == _PACKAGE and path.name in PACKAGED:
        return path.name
    return str(path) if name and path.exists() else name


def check_name(name: str) -> None:
    """ModelError unless the folder ``name`` can stand in the pipeline's record, which is UTF-8."""
    path = os.path.abspath(name)  # noqa: PTH100 - links stay as they are
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise ModelError(
            f"the name of the model folder {shown} is not UTF-8 text in this locale; rename it, or "
            "give a link with another name"
        ) from None


def packaged(name: str) -> str:
    """The packaged model ``name``, even where the current folder has one of that name."""
    return str(_PACKAGE / name)


PACKAGED_HEAD = packaged("head")


def default_pair() -> tuple[str, str]:
    """The packaged target and draft."""
    return packaged("target"), packaged("draft")


def layer_range(text: str, stage: int) -> range:
    """The block of ``stage`` in a pipeline record's ``layers``, such as ``0-3 3-6``."""
    first, _, end = text.split()[stage - 1].partition("-")
    return range(int(first), int(end))


def layer_ranges(layers: int, stages: int, *, surplus: bool = False) -> list[range]:
    """Near-equal consecutive blocks of layers, one per stage, larger ones first.

    ``surplus``: allow more stages than layers; the surplus ones, just before the last, get none.
    """
    if surplus and stages > layers >= 2:
        without = [range(layers - 1, layers - 1)] * (stages - layers)
        return [
            *(range(layer, layer + 1) for layer in range(layers - 1)),
            *without,
            range(layers - 1, layers),
        ]
    if not 1 <= stages <= layers:
        raise ModelError(
            f"{stages} stages asked for; "
            f"the target has {layers} layers, so 1 to {layers} are possible"
        )
    size, longer = divmod(layers, stages)
    bounds = [0]
    for stage in range(stages):
        bounds.append(bounds[-1] + size + (stage < longer))
    return [range(first, end) for first, end in itertools.pairwise(bounds)]


def check_pair(target: ModelDirectory, model: ModelDirectory, role: str = "draft") -> None:
    """ModelError unless ``model`` shares the target's tokenizer; the error calls it ``role``."""
    target.check_tokenizer()
    model.check_tokenizer()
    found = difference(target.path, model.path)
    if found:
        raise ModelError(
            f"{role} {model.source} and target {target.source} have different tokenizers: {found}; "
            f"a {role} must share the target's: choose a {role} of the same family"
        )


def read_config_file(path: Path) -> dict[str, Any]:
    """The config of the model in the folder ``path``; ModelError if there is none."""
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is not a model: it has no config.json{_likely(path)}")
    return _read_json(path / "config.json")


def _likely(path: Path) -> str:
    """What a folder without a config.json is, if that can be told, and what to give instead."""
    if (path / "adapter_config.json").is_file():
        return "; it is an adapter: merge it into its base model first (peft's merge_and_unload)"
    if (path / "draft" / "config.json").is_file():
        return (
            f"; it holds shards: give {path / 'draft'} to the scheduler and the draft worker, "
            f"{path / 'stage-1'} and so on to the stages"
        )
    return ""


def _checked(path: Path) -> ModelDirectory:
    wrong = formats.of_folder(path)
    if wrong is not None:
        raise ModelError(str(wrong))
    read_config_file(path)
    return described(path / "config.json")


def described(file: Path) -> ModelDirectory:
    """The model that the configuration ``file`` describes, in its folder; ModelError if it cannot.

    There may be nothing else in the folder.
    """
    config = flattened(_read_json(file))
    wrong = formats.of_config(file.parent, config)
    if wrong is not None:
        raise ModelError(str(wrong))
    missing = [
        key
        for key in ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
        if key not in config
    ]
    if missing:
        kind = config.get("model_type")
        raise ModelError(
            f"{file} has no {missing[0]}: "
            + (
                f"a {kind!r} model names its sizes otherwise, or is no decoder-only language "
                f"model; it cannot be split here"
                if kind
                else "it is not a decoder-only language model's"
            )
        )
    for key in ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"):
        if not isinstance(config.get(key, 1), int) or config.get(key, 1) < 1:
            raise ModelError(f"{file}: {key} is {config[key]!r}; expected a whole number above 0")
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{file.parent} is an encoder-decoder model; "
            "only decoder-only language models can be split"
        )
    return ModelDirectory(file.parent, config)


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the shape of a head's layer, which ``speculators`` nests, at its top."""
    nested = config.get(_NESTED)
    if not isinstance(nested, Mapping):
        return dict(config)
    own = {key: value for key, value in config.items() if key != _NESTED}
    named = {"architectures": own["architectures"]} if "architectures" in own else {}
    return {**own, **nested, **named}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(unusable(error)) from None
    except ValueError as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value


def _looks_like_hub_name(name: str) -> bool:
    owner, slash, model = name.partition("/")
    return (
        bool(slash and owner and model)
        and "/" not in model
        and not name.startswith((".", "/", "~"))
    )


def _snapshot(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"model {name} is neither a local folder nor available from the hub ({reason}); "
            "download it first, or give a folder"
        ) from None


def ties_by_default(model_type: str) -> bool:
    """Whether configs of ``model_type`` that do not say so mean that the head is the embedding."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return True
    return bool(getattr(CONFIG_MAPPING[model_type](), "tie_word_embeddings", True))
