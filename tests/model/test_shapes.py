"""Shapes from a config alone are those of the weights, for every family of decoders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowspec.errors import ModelError
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.model.weights.shapes import read_config, shapes_of

BASE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
MIXTURE = {"num_local_experts": 8, "num_experts_per_tok": 2}


def config(tmp_path: Path, **entries: object) -> Path:
    file = tmp_path / "some.json"
    given = {"num_hidden_layers": 3, "intermediate_size": 128, **BASE, **entries}
    file.write_text(json.dumps(given))
    return file


def test_shapes_are_those_of_the_stored_weights() -> None:
    directory = open_directory(default_pair()[0])
    shapes = shapes_of(directory)
    assert (len(shapes.layers), shapes.tied, shapes.hidden) == (12, True, 192)
    for number, layer in enumerate(shapes.layers):
        prefix = f"model.layers.{number}."
        names = [name for name in directory.weight_files if name.startswith(prefix)]
        stored = [directory.tensor(name).shape for name in names]
        assert sorted(layer.matrices) == sorted(shape for shape in stored if len(shape) > 1)
        assert layer.values == sum(shape[0] for shape in stored if len(shape) == 1)
    assert shapes.embedding == directory.tensor("model.embed_tokens.weight").shape
    assert shapes.kv_values == 2 * 2 * 32


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_lone_config_suffices(tmp_path: Path, kind: str) -> None:
    shapes = shapes_of(read_config(str(config(tmp_path, model_type=kind))))
    assert len(shapes.layers) == 3
    assert (64, 64) in shapes.layers[0].matrices or (4 * 128, 64) in shapes.layers[0].matrices
    assert shapes.experts == 1


def test_a_file_of_another_kind_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"model\.bin is a file; expected a model's folder, its "):
        read_config(str(tmp_path / "model.bin"))


def test_experts_are_matrices_of_three_dimensions(tmp_path: Path) -> None:
    shapes = shapes_of(read_config(str(config(tmp_path, model_type="mixtral", **MIXTURE))))
    assert (shapes.experts, shapes.experts_used) == (8, 2)
    assert (8, 256, 64) in shapes.layers[0].matrices


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "no-such-family"}, "cannot be read as a no-such-family model"),
        ({"model_type": "llama", "hidden_size": "wide"}, "expected a whole number"),
        ({"model_type": "bert"}, "is a model of type bert, which has an encoder"),
        ({"model_type": "mamba"}, "whose layers cannot be split here"),
    ],
)
def test_a_config_of_no_such_model_is_refused(
    tmp_path: Path, entries: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        shapes_of(read_config(str(config(tmp_path, **entries))))
    assert "\n" not in str(raised.value)
