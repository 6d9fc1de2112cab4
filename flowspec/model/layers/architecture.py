"""The library's model of a block of layers, without weights, from a config cut to them.

What the library's code computes once for a whole model is computed once here too: the first block
embeds and scales, the last one applies the norm, the head and whatever the library does to logits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils.logging import disable_progress_bar

from flowspec.errors import ModelError
from flowspec.model.weights.convert import library_tensors
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.families import TESTED_FAMILIES

#: Layer types that are attention over rows, which can be kept, moved and dropped one by one.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
#: What a model does to embeddings outside its embedding layer, and the value that does nothing.
_EMBEDDING_FACTORS = {"embedding_multiplier": 1.0}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Layers with what comes before and after them, on no device (torch's ``meta``).

    ``head`` maps rows after the final norm to logits: the library's own model around an empty body.
    None if the block is not the last.
    """

    config: PretrainedConfig
    body: Any
    head: torch.nn.Module | None


class LogitHead(torch.nn.Module):
    """The library's model from the LM head on: soft caps and scales of logits are its own code."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.model = _GivenRows()
        self.causal = model

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` after the final norm to ``[rows, vocabulary]``."""
        logits: torch.Tensor = self.causal(inputs_embeds=rows.unsqueeze(0), use_cache=False).logits
        return logits[0]


class _GivenRows(torch.nn.Module):
    """A body whose last hidden state is what it was given."""

    def forward(self, inputs_embeds: torch.Tensor, **_unused: object) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def library_model(directory: ModelDirectory, dtype: torch.dtype) -> Any:
    """The library's whole model in ``directory`` on the CPU, its weights in ``dtype``."""
    disable_progress_bar()  # it would land in the middle of a report
    if not directory.of_gguf:
        return AutoModelForCausalLM.from_pretrained(
            directory.path, dtype=dtype, local_files_only=True, trust_remote_code=False
        ).eval()
    # The library's own reading passes over some sizes.
    config = read_config(directory)
    values = {name: one.read(dtype) for name, one in library_tensors(directory).items()}
    with torch.device("meta"):
        kind: Any = type(AutoModelForCausalLM.from_config(config))
    return kind.from_pretrained(None, config=config, state_dict=values, dtype=dtype).eval()


def read_config(directory: ModelDirectory) -> PretrainedConfig:
    """The library's config; ModelError if it knows no such model, or rows cannot be split."""
    try:
        config = AutoConfig.from_pretrained(
            directory.path, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(
            f"{directory.path} cannot be loaded: {str(error).splitlines()[0]}"
        ) from None
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if strange:
        raise ModelError(
            f"{directory.path} has {strange[0]} layers; only attention over KV rows can be split"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelError(
            f"{directory.path} attends to later tokens; it is not a decoder-only language model"
        )
    return config


def build(
    directory: ModelDirectory,
    whole: PretrainedConfig,
    layers: range,
    *,
    first: bool,
    last: bool,
    dtype: torch.dtype,
    implementation: str,
) -> Architecture:
    """The modules of the block ``layers`` of a model with config ``whole``.

    ``implementation``: the library's name of the attention. ModelError if the model has another
    shape than embedding, layers, norm and head.
    """
    config = copy.deepcopy(whole)
    if getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # only training needs them
    for name, neutral in _EMBEDDING_FACTORS.items():
        if not first and hasattr(config, name):
            setattr(config, name, neutral)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=implementation
            )
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{directory.path}: the library cannot build its {config.model_type} model: "
            f"{(str(error).splitlines() or [''])[0]}"
        ) from None
    body: Any = getattr(model, "model", None)
    if not hasattr(model, "lm_head") or not all(hasattr(body, part) for part in _PARTS):
        raise ModelError(
            f"{directory.path} is a model of type {config.model_type}, "
            f"whose layers cannot be split here; tested families: {', '.join(TESTED_FAMILIES)}"
        )
    _cut(body, config, layers)
    body.rotary_emb = _rotary(body, config)
    if not first:
        body.embed_tokens = torch.nn.Identity()
    if not last:
        body.norm = torch.nn.Identity()
    _fill_buffers(model, body)
    return Architecture(config, body, LogitHead(model) if last else None)


def _cut(body: Any, config: PretrainedConfig, layers: range) -> None:
    """Keep ``layers`` of a whole ``body``, numbered from 0 as in the block's cache.

    They are cut from the whole, not built from a shorter config, as a layer's kind may depend on
    its number in the whole model.
    """
    body.layers = body.layers[layers.start : layers.stop]
    for module in body.layers.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx -= layers.start
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types[layers.start : layers.stop])


def _rotary(body: Any, config: PretrainedConfig) -> Any:
    """Rotary embeddings whose frequencies are the same in every pass.

    The library would choose them by the largest position of a pass, and so by a row's company.
    """
    rotary: Any = type(body.rotary_emb)(config)
    if isinstance(getattr(rotary, "rope_type", None), dict):
        rotary.rope_type = dict.fromkeys(rotary.rope_type, "default")
    else:
        rotary.rope_type = "default"
    return rotary


def _fill_buffers(model: Any, body: Any) -> None:
    """Compute the buffers that no checkpoint holds, by the library's own initialisation."""
    for module in body.modules():
        empty = {name: part for name, part in module.named_buffers(recurse=False) if part.is_meta}
        stored = module.state_dict() if empty else {}
        missing = empty.keys() - stored.keys()
        for name in missing:
            setattr(module, name, torch.empty_like(empty[name], device="cpu"))
        if missing:
            model._init_weights(module)
