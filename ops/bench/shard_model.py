"""A random shard of a 1B-class Llama: four layers and the LM head, and repeatable passes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from flowspec.core.protocol.work import Part, Pruned
from flowspec.core.run.key import RunKey
from flowspec.model.base import RowArray
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import ModelDirectory

HIDDEN = 2048
INTERMEDIATE = 8192
HEADS = 32
KEY_HEADS = 8


def _linears(
    hidden: int, intermediate: int, keys: int, queries: int
) -> tuple[tuple[int, int], ...]:
    attention = ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries))
    return (*attention, (intermediate, hidden), (intermediate, hidden), (hidden, intermediate))


#: ``[outputs, inputs]`` of a layer's seven linears.
LINEARS = _linears(HIDDEN, INTERMEDIATE, HIDDEN // HEADS * KEY_HEADS, HIDDEN)
_RUN = RunKey("shard", 1)


def linears_of(directory: ModelDirectory) -> tuple[tuple[int, int], ...]:
    """The shapes of the seven linears of a layer of a Llama in ``directory``."""
    config = directory.config
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or directory.hidden_size // heads)
    keys = int(config.get("num_key_value_heads") or heads)
    return _linears(
        directory.hidden_size, int(config["intermediate_size"]), keys * head, heads * head
    )


def write_model(folder: Path) -> None:
    """Random bfloat16 weights in ``folder``, without a tokenizer."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")


def load_shard(directory: ModelDirectory, precision: str) -> LayerBlock:
    """All layers and the head, without the embedding."""
    layers = range(directory.layers)
    return LayerBlock(directory, layers, first=False, last=True, placing=Placing(precision))


def shard_pass(block: LayerBlock, context: int, rows: int) -> Callable[[], torch.Tensor]:
    """A repeatable pass, to logits, of ``rows`` siblings after ``context`` rows."""
    hidden = int(block.config.hidden_size)
    cache = block.new_cache(context + rows)
    ids = tuple(range(context))
    prompt = Part(_RUN, 0, ids, tuple(n - 1 for n in ids), ids, (), ids, context=context)
    block.run(prompt, _random(context, hidden), cache)
    siblings = Part(
        _RUN,
        1,
        ids=tuple(range(context, context + rows)),
        parents=(context - 1,) * rows,
        positions=(context,) * rows,
        tokens=(),
        offsets=tuple(range(rows)),
        pruned=Pruned((), ()),
    )
    given = _random(rows, hidden)
    return lambda: block.logits(block.run(siblings, given, cache))


def _random(rows: int, hidden: int) -> RowArray:
    return np.random.default_rng(rows).standard_normal((rows, hidden), dtype=np.float32)
