"""Shapes of a model's weights and KV rows from its configuration alone; no weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowspec.errors import ModelError
from flowspec.model.weights import gguf
from flowspec.model.weights.directory import ModelDirectory, described, expanded, open_directory

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """One decoder layer: its ``matrices``, 3-D for experts, and ``values`` of norms and biases."""

    matrices: tuple[Shape, ...]
    values: int


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """A decoder-only language model.

    ``kv_values``: keys and values of one row in one layer. ``experts`` and ``experts_used``: of a
    layer that has experts, and by one token; 1 and 1 without. ``tied``: the head is the embedding.
    """

    layers: tuple[LayerShapes, ...]
    embedding: Shape
    tied: bool
    hidden: int
    kv_values: int
    context: int
    experts: int = 1
    experts_used: int = 1


def read_config(name: str) -> ModelDirectory:
    """The model ``name``, a folder, a hub name or a lone JSON file of a config; no weights needed.

    Errors as ``open_directory``'s.
    """
    path = expanded(name)
    if path.is_file() and not gguf.is_file(path):
        if path.suffix != ".json":
            raise ModelError(
                f"{name} is a file; expected a model's folder, its config.json, or a GGUF file, "
                "NAME.gguf"
            )
        return described(path)
    return open_directory(name)


def shapes_of(directory: ModelDirectory) -> ModelShapes:
    """The shapes of the model that the library builds from ``directory``'s config.

    ModelError if it builds none, or one whose layers cannot be split.
    """
    config = library_config(directory)
    names = built_shapes(directory, config)
    prefix = "model.layers."
    layers: list[tuple[list[Shape], int]] = [([], 0) for _ in range(directory.layers)]
    for name, shape in names.items():
        if not name.startswith(prefix):
            continue
        number = int(name.removeprefix(prefix).partition(".")[0])
        matrices, values = layers[number]
        if len(shape) > 1:
            matrices.append(shape)
        else:
            layers[number] = (matrices, values + shape[0])
    if not all(matrices for matrices, _ in layers) or "model.embed_tokens.weight" not in names:
        raise ModelError(
            f"{directory.path} is a model of type {directory.config['model_type']}, "
            "whose layers cannot be split here"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or (
        directory.hidden_size // config.num_attention_heads
    )
    experts, used = _experts(config, layers)
    return ModelShapes(
        tuple(LayerShapes(tuple(matrices), values) for matrices, values in layers),
        names["model.embed_tokens.weight"],
        bool(getattr(config, "tie_word_embeddings", False)),
        directory.hidden_size,
        2 * heads * head_dim,
        directory.context,
        experts,
        used,
    )


def few_layers(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """``config`` of the model with ``count`` layers like its last, and with a head of its own."""
    cut = {**config, "num_hidden_layers": count, "tie_word_embeddings": False}
    if config.get("layer_types"):
        cut["layer_types"] = list(config["layer_types"])[-1:] * count
    return cut


def _experts(config: Any, layers: list[tuple[list[Shape], int]]) -> tuple[int, int]:
    found = [shape[0] for matrices, _ in layers for shape in matrices if len(shape) == 3]
    if not found:
        return 1, 1
    return found[0], min(found[0], int(getattr(config, "num_experts_per_tok", found[0])))


def library_config(directory: ModelDirectory) -> Any:
    """The library's config object; ModelError if it knows no such family."""
    from transformers import AutoConfig

    kind = str(directory.config["model_type"])
    try:
        return AutoConfig.for_model(kind).from_dict(dict(directory.config))
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{directory.path} cannot be read as a {kind} model: {str(error).splitlines()[0][:200]}"
        ) from None


def built_shapes(directory: ModelDirectory, config: Any) -> Mapping[str, Shape]:
    """Names and shapes of the parameters, on torch's meta device, which holds no data."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{directory.path} cannot be built: {str(error).splitlines()[0][:200]}"
        ) from None
    return {name: tuple(weights.shape) for name, weights in model.named_parameters()}
