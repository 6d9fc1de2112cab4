"""A Llama with random weights of a real model's shape, written to a folder once.

    python -m ops.bench.random_model [--folder DIR]

The weights are bfloat16, a safetensors file for each layer. The tokenizer is the packaged target's;
its vocabulary is filled up with tokens that no text has, so that the embedding and the LM head are
as large as a real model's. Such a model takes the time of a real one, and its text is random.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flowspec.errors import ConfigError, FlowSpecError
from flowspec.model.weights.directory import ModelDirectory, open_directory
from ops.parser import Parser

#: Standard deviation of the weights times the square root of a matrix's inputs. Three times the
#: usual one, so that the greedy text neither repeats a token nor is near ties.
SPREAD = 3.0
_INDEX = "model.safetensors.index.json"
_KEPT = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Llama; the default ones are those of a model of 1.1 billion weights.

    ConfigError unless ``key_heads`` divides ``heads``.
    """

    hidden: int = 2048
    intermediate: int = 8192
    layers: int = 16
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 64
    vocabulary: int = 32_000
    context: int = 1024

    def __post_init__(self) -> None:
        if self.heads % self.key_heads:
            raise ConfigError(f"{self.key_heads} key heads do not divide {self.heads} heads")

    @property
    def name(self) -> str:
        """The name of the model's folder."""
        sizes = (self.hidden, self.intermediate, self.layers, self.heads, self.key_heads)
        return "-".join(map(str, ("llama", *sizes, self.head_dim, self.vocabulary)))

    def layer(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's tensors, by their names after ``model.layers.N.``."""
        queries = self.heads * self.head_dim
        keys = self.key_heads * self.head_dim
        return {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (queries, self.hidden),
            "self_attn.k_proj.weight": (keys, self.hidden),
            "self_attn.v_proj.weight": (keys, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, queries),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }

    def shards(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """Tensor shapes by name, a file at a time: the embedding, each layer, norm and head."""
        yield {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            yield {f"model.layers.{layer}.{name}": size for name, size in self.layer().items()}
        yield {
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocabulary, self.hidden),
        }

    @property
    def weights(self) -> int:
        """The number of weights."""
        return sum(math.prod(size) for shard in self.shards() for size in shard.values())

    def config(self, base: ModelDirectory) -> dict[str, Any]:
        """The model's ``config.json``: this shape, and the special tokens of ``base``."""
        return {
            **base.config,
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.key_heads,
            "tie_word_embeddings": False,
            "vocab_size": self.vocabulary,
        }


def default_folder(shape: Shape) -> Path:
    """Where a model of ``shape`` is kept if no folder is given."""
    return Path(tempfile.gettempdir()) / "flowspec-random" / shape.name


def random_model(shape: Shape, folder: Path | None = None, *, seed: int = 0) -> Path:
    """The folder of a random model of ``shape``, written unless it is there already.

    ConfigError if the folder has another model, or the shape's vocabulary is smaller than the
    packaged one.
    """
    folder = folder or default_folder(shape)
    base = open_directory("target")
    config = shape.config(base)
    if folder.exists():
        if open_directory(str(folder)).config != config:
            raise ConfigError(f"{folder} has another model; give another --folder, or remove it")
        return folder
    if shape.vocabulary < base.vocabulary:
        raise ConfigError(
            f"a vocabulary of {shape.vocabulary}; expected at least the packaged tokenizer's "
            f"{base.vocabulary}"
        )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in _KEPT:
        shutil.copy(base.path / name, partial / name)
    (partial / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (partial / "tokenizer.json").write_text(
        json.dumps(filled(base, shape.vocabulary)), encoding="utf-8"
    )
    _write_weights(shape, partial, seed)
    partial.rename(folder)
    return folder


def filled(base: ModelDirectory, vocabulary: int) -> dict[str, Any]:
    """The tokenizer of ``base`` with ``vocabulary`` tokens; no merge leads to the added ones."""
    tokenizer: dict[str, Any] = json.loads(
        (base.path / "tokenizer.json").read_text(encoding="utf-8")
    )
    added = {f"added-{number}": number for number in range(base.vocabulary, vocabulary)}
    tokenizer["model"]["vocab"] |= added
    return tokenizer


def _write_weights(shape: Shape, folder: Path, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    files: dict[str, str] = {}
    count = shape.layers + 2
    for number, shard in enumerate(shape.shards(), 1):
        name = f"model-{number:05}-of-{count:05}.safetensors"
        save_file(
            {tensor: _values(size, source) for tensor, size in shard.items()},
            folder / name,
            metadata={"format": "pt"},
        )
        files |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": 2 * shape.weights}, "weight_map": files}
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def _values(size: tuple[int, ...], source: torch.Generator) -> torch.Tensor:
    """Ones for a norm, else random weights."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    values = torch.randn(size, generator=source) * (SPREAD / math.sqrt(size[1]))
    return values.bfloat16()


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where the model is, or is written to")
    given = parser.parse_args()
    try:
        print(random_model(Shape(), given.folder))
    except FlowSpecError as error:
        sys.exit(f"random_model: {error}")


if __name__ == "__main__":
    main()
