"""Trying a family that the tests do not cover: a small random copy of it, whole and in stages.

Whether a model can be split by layers is a property of the library's code for its family and of
the switches in its config, not of its weights or sizes. So a copy of a few narrow layers shows in
a second whether stages compute what the whole model computes.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils.logging import disable_progress_bar

from flowspec.core.protocol.messages import Open, Prune, Segment
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage.stage_run import StageRun, rows_of
from flowspec.errors import ModelError
from flowspec.model.layers.architecture import build, read_config
from flowspec.model.layers.block import LayerBlock
from flowspec.model.rows.attention import EXACT
from flowspec.model.weights.directory import ModelDirectory, open_directory
from flowspec.model.weights.families import TESTED_FAMILIES

#: Largest difference of logits that passes, relative to the largest logit.
TOLERANCE = 1e-4
_LAYERS = 4
_HEAD_DIM = 32
_WINDOW = 8
_VOCABULARY = 120
#: New values of a config's fields, by name, where the model has a larger one.
_SMALL = {
    "vocab_size": _VOCABULARY,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": _WINDOW,
}
#: What the library's code raises where a pass, or a small config, is not what it expects.
_FAILURES = (
    *(RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError),
    *(OSError, ArithmeticError),
)
_FOLDER = "flowspec-trial-"
_RUN = RunKey("trial", 1)
_PROMPT = tuple(range(5, 5 + 2 * _WINDOW))
#: A tree above the prompt: token and parent by node, and the segments it is fed in.
_TREE = {16: (7, 15), 17: (9, 16), 18: (11, 16), 19: (7, 17), 20: (30, 18), 21: (31, 20)}
_SEGMENTS = ((16, 17, 18, 19), (20,))
_tried: dict[str, str] = {}


def check_family(directory: ModelDirectory) -> None:
    """ModelError unless the model's family is tested, or a small copy of it passes."""
    if directory.config["model_type"] in TESTED_FAMILIES:
        return
    config = read_config(directory)
    build(
        directory,
        config,
        range(config.num_hidden_layers),
        first=True,
        last=True,
        dtype=torch.float32,
        implementation=EXACT,
    )
    key = config.to_json_string()
    if key not in _tried:
        _tried[key] = _fault(config)
    if _tried[key]:
        raise ModelError(
            f"{directory.path}: {config.model_type} models cannot be split here: {_tried[key]}; "
            f"tested families: {', '.join(TESTED_FAMILIES)}"
        )


def _fault(config: PretrainedConfig) -> str:
    """What a small copy of the model does wrong in stages; empty if nothing."""
    try:
        difference = try_small(config)
    except ModelError as error:
        return re.sub(rf"\S*{_FOLDER}\S* ?", "a small copy of it ", error.found)
    except _FAILURES as error:
        first = (str(error).splitlines() or [""])[0]
        return f"a small copy of it fails with {type(error).__name__} ({first})"
    if not difference < TOLERANCE:
        return (
            "a small copy of it in two stages differs from the whole "
            f"by {difference:.2g} of the largest logit"
        )
    return ""


def try_small(config: PretrainedConfig) -> float:
    """The largest difference between stages and whole of a small copy, in parts of a logit."""
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix=_FOLDER) as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = small_config(config)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
        _spread(model)
        model.save_pretrained(folder)
        return _compare(_Whole(model), _Stages(open_directory(folder)))


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    """A config of the same family and switches with few, narrow layers."""
    small = copy.deepcopy(config)
    for name, value in _SMALL.items():
        found = getattr(small, name, None)
        if isinstance(found, int) and not isinstance(found, bool) and found > value:
            setattr(small, name, value)
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    small.num_attention_heads = 4
    if hasattr(small, "num_key_value_heads"):
        small.num_key_value_heads = 4 if key_heads == heads else 2
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if not _has_factors(config):
        head_dim = min(head_dim, _HEAD_DIM)
    if getattr(small, "head_dim", None):
        small.head_dim = head_dim
    small.hidden_size = small.num_attention_heads * head_dim
    _keep_layers(small)
    small.pad_token_id = None
    small.bos_token_id, small.eos_token_id = 0, 1
    return small


def _has_factors(config: PretrainedConfig) -> bool:
    """Whether rotary embeddings have a factor for each dimension, which fixes their number."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return any(isinstance(value, list) for value in parameters.values())


def _keep_layers(config: PretrainedConfig) -> None:
    """Keep a few layers, one of every kind that the config names among them."""
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * count
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    others = [layer for layer in range(count) if layer not in firsts]
    kept = sorted((firsts + others)[:_LAYERS])
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(config, name, [value[layer] for layer in kept])
    config.num_hidden_layers = len(kept)


def _spread(model: Any) -> None:
    """Make the random weights large enough for every part of the model to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape))


class _Whole:
    """The library's model, over one path of tokens at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Of the last of ``tokens``."""
        row: np.ndarray[Any, Any] = (
            self._model(input_ids=torch.tensor([list(tokens)])).logits[0, -1].numpy()
        )
        return row


class _Stages:
    """Two stages of one model, fed in turn."""

    def __init__(self, directory: ModelDirectory) -> None:
        layers = directory.layers
        ranges = [range(layers // 2), range(layers // 2, layers)]
        self._blocks = [
            LayerBlock(directory, block, first=not at, last=at == 1)
            for at, block in enumerate(ranges)
        ]
        self._caches = [block.new_cache(64) for block in self._blocks]
        opening = Open(_RUN, len(_PROMPT), 64, Sampling())
        self._runs = [StageRun(at + 1, opening, last=at == 1) for at in range(2)]
        self._number = 0

    def feed(
        self, ids: Sequence[int], parents: Sequence[int], at: Sequence[int], tokens: Sequence[int]
    ) -> np.ndarray[Any, Any]:
        """Logits of a segment's rows, at positions ``at``."""
        segment = Segment(
            _RUN, self._number, 1, tuple(ids), tuple(parents), tuple(at), tuple(tokens)
        )
        self._number += 1
        rows = None
        for block, cache, run in zip(self._blocks, self._caches, self._runs, strict=True):
            kept = run.live_part(segment)
            segment = rows_of(segment, kept)
            hidden = block.run(run.begin_pass(segment, kept), rows, cache)
            rows = hidden.numpy()
        result: np.ndarray[Any, Any] = self._blocks[-1].logits(hidden).numpy()
        return result

    def prune(
        self, offset: int, accepted: tuple[int, ...], root: int, kept: tuple[int, ...]
    ) -> None:
        for run in self._runs:
            run.prune(Prune(_RUN, offset, accepted, root, kept))


def _path(node: int) -> list[int]:
    """Tokens from the prompt's first to that of ``node``."""
    if node < len(_PROMPT):
        return list(_PROMPT)
    token, parent = _TREE[node]
    return [*_path(parent), token]


def _compare(whole: _Whole, stages: _Stages) -> float:
    """A prompt in two chunks, a tree in two segments, a prune, a lone row."""
    pairs = []
    size = len(_PROMPT)
    for chunk in (range(size // 2 + 1), range(size // 2 + 1, size)):
        tokens = [_PROMPT[at] for at in chunk]
        rows = stages.feed(chunk, [at - 1 for at in chunk], chunk, tokens)
        pairs.append((rows[-1], whole.logits(_PROMPT[: chunk.stop])))
    stages.prune(size - 1, (size - 1,), size, ())
    for segment in _SEGMENTS:
        pairs += _fed(whole, stages, segment)
    stages.prune(size, (16, 18), 20, (20,))
    pairs += _fed(whole, stages, (21,))
    largest = max(float(np.abs(truth).max()) for _, truth in pairs)
    return float(np.max([np.abs(row - truth).max() for row, truth in pairs])) / largest


def _fed(
    whole: _Whole, stages: _Stages, nodes: Sequence[int]
) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    parents = [_TREE[node][1] for node in nodes]
    positions = [len(_path(node)) - 1 for node in nodes]
    rows = stages.feed(nodes, parents, positions, [_TREE[node][0] for node in nodes])
    return [(row, whole.logits(_path(node))) for node, row in zip(nodes, rows, strict=True)]
