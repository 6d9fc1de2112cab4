"""Timing passes: of blocks and drafters as they are, and of one layer with random weights."""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flowspec.core.protocol.work import Part, Pruned
from flowspec.core.run.key import RunKey
from flowspec.model.base import RowArray
from flowspec.model.weights.directory import ModelDirectory, open_directory
from flowspec.model.weights.shapes import Shape, built_shapes, few_layers, library_config

#: The run of timed passes.
MEASURED = RunKey("measured", 1)
#: Untimed passes before the first that counts; they allocate and fill caches.
WARM_UP = 2
#: Most tokens before the rows of a timed pass.
CONTEXT = 64
#: Layers of the deeper of two blocks whose difference is a layer's time; more if layers are small.
DEEP, DEEP_SMALL = 2, 5
#: Values of a layer that count as small; a pass through one is mostly the pass around it.
SMALL = 1 << 24
#: Scale of random weights, as models are initialised.
_SCALE = 0.02
#: The least that a difference of two medians counts as, seconds.
_LEAST = 1e-6

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of passes by rows: a layer, the norm and LM head, the embedding of tokens.

    ``each``: of a pass through any number of layers, beside them: masks, positions, KV rows.
    """

    layer: Mapping[int, float]
    each: Mapping[int, float]
    head: Mapping[int, float]
    embedding: Mapping[int, float]


def time_layer(
    config: Mapping[str, Any],
    rows: Sequence[int],
    repeats: int,
    *,
    dtype: str = "float32",
    device: str = "cpu",
) -> LayerSeconds:
    """Time one layer of the model that ``config`` describes, with random weights.

    ``dtype`` and ``device`` as of a stage. Errors as of loading a stage.
    """
    import torch

    with tempfile.TemporaryDirectory(prefix="flowspec-layer-") as folder:
        directory = _random_model(Path(folder), config)
        one, deep = range(1), range(directory.layers)
        shallow = _block(directory, one, dtype, device, last=False)
        deeper = _block(directory, deep, dtype, device, last=False)
        ending = _block(directory, one, dtype, device, last=True)
    norm = ending.body.norm
    table = torch.zeros(min(4096, directory.vocabulary), directory.hidden_size)
    table = table.to(norm.weight.device, norm.weight.dtype)

    @torch.inference_mode()
    def norm_and_head(given: torch.Tensor) -> object:
        return ending.logits(norm(given))

    calls: dict[tuple[str, int], Call] = {}
    for count in rows:
        given = random_rows(count, directory.hidden_size)
        calls["one", count] = block_pass(shallow, directory, given)
        calls["deep", count] = block_pass(deeper, directory, given)
        placed = torch.from_numpy(given).to(norm.weight.device, norm.weight.dtype)
        calls["head", count] = partial(norm_and_head, placed)
        ids = torch.arange(count, device=table.device)
        calls["embedding", count] = partial(torch.nn.functional.embedding, ids, table)
    seconds = medians(calls, repeats, device)
    layer = {}
    each = {}
    for count in rows:
        whole, single = seconds["deep", count], seconds["one", count]
        layer[count] = max(_LEAST, (whole - single) / (len(deep) - 1))
        each[count] = max(_LEAST, single - layer[count])
    head, embedding = (
        {count: seconds[part, count] for count in rows} for part in ("head", "embedding")
    )
    return LayerSeconds(layer, each, head, embedding)


def _block(directory: ModelDirectory, layers: range, dtype: str, device: str, *, last: bool) -> Any:
    """Layers as a stage has them, not the first one; with the norm and head of the last one."""
    from flowspec.model.layers.block import LayerBlock
    from flowspec.model.layers.placing import place

    placing = place(dtype, device, directory.config)
    return LayerBlock(directory, layers, first=False, last=last, placing=placing)


def _random_model(folder: Path, config: Mapping[str, Any]) -> ModelDirectory:
    """A checkpoint of ``few_layers`` in ``folder``, without the embedding.

    As many as needed to tell a layer's time from that of the pass around it.
    """
    import torch
    from safetensors.torch import save_file

    directory, shapes = _written(folder, few_layers(config, DEEP))
    layer = sum(math.prod(shape) for name, shape in shapes.items() if ".layers.0." in name)
    if layer < SMALL:
        directory, shapes = _written(folder, few_layers(config, DEEP_SMALL))
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (_SCALE * torch.randn(shape, generator=generator)).to(torch.bfloat16)
        for name, shape in shapes.items()
        if name != "model.embed_tokens.weight"
    }
    save_file(weights, folder / "model.safetensors")
    return directory


def _written(folder: Path, config: Mapping[str, Any]) -> tuple[ModelDirectory, Mapping[str, Shape]]:
    """The directory of ``config`` alone, and the shapes of its parameters."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    directory = open_directory(str(folder))
    return directory, built_shapes(directory, library_config(directory))


def block_pass(block: Any, directory: ModelDirectory, given: RowArray) -> Callable[[], Any]:
    """A repeatable pass of ``block`` over the rows ``given``, siblings after a context."""
    context = context_of(directory)
    cache = block.new_cache(context + len(given))
    block.run(
        prompt_part(directory, tokens=False), random_rows(context, directory.hidden_size), cache
    )
    part = siblings(directory, len(given), tokens=False)
    return lambda: block.run(part, given, cache)


def medians(
    calls: Mapping[tuple[str, int], Call], repeats: int, device: str = "cpu"
) -> dict[tuple[str, int], float]:
    """Median seconds of each call: CPU time of the one torch thread, or until the GPU is done.

    Every repeat makes all calls in a new order, because the call before affects the caches.
    """
    clock = _gpu_clock if device.startswith("cuda") else time.thread_time
    order = list(calls)
    shuffled = random.Random(0)
    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    found: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        shuffled.shuffle(order)
        for key in order:
            began = clock()
            calls[key]()
            found[key].append(clock() - began)
    return {key: statistics.median(taken) for key, taken in found.items()}


def _gpu_clock() -> float:
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def context_of(directory: ModelDirectory) -> int:
    """Rows before those of a timed pass."""
    return min(CONTEXT, directory.context // 2)


def prompt_part(directory: ModelDirectory, *, tokens: bool = True) -> Part:
    """The context's rows, each the child of the one before."""
    ids = tuple(range(context_of(directory)))
    rows = _part(directory, ids, tokens=tokens)
    return replace(rows, parents=tuple(range(-1, len(ids) - 1)), positions=ids, context=len(ids))


def siblings(directory: ModelDirectory, rows: int, *, tokens: bool = True) -> Part:
    """``rows`` siblings after the context, all of them answered; the pass can be repeated."""
    context = context_of(directory)
    found = _part(directory, tuple(range(context, context + rows)), tokens=tokens)
    return replace(
        found,
        parents=(context - 1,) * rows,
        positions=(context,) * rows,
        pruned=Pruned((), ()),
        answers=tuple(range(rows)),
    )


def _part(directory: ModelDirectory, ids: tuple[int, ...], *, tokens: bool) -> Part:
    texts = tuple(node * 7919 % directory.vocabulary for node in ids) if tokens else ()
    offsets = () if tokens else tuple(range(len(ids)))
    return Part(MEASURED, 1, ids, ids, ids, texts, offsets)


def random_rows(rows: int, hidden: int) -> RowArray:
    """Rows of random values, the same each time."""
    return np.random.default_rng(rows).standard_normal((rows, hidden), dtype=np.float32)


def time_request(request: Mapping[str, Any], device: str = "cpu") -> dict[str, Mapping[int, float]]:
    """Seconds of what a plan asks for, by rows: ``LayerSeconds`` by name, and drafters.

    ``request``: ``target``, a config; ``drafts``, by name a config, how many of its layers a pass
    is worth, and whether the head is the target's; ``dtype``, ``draft_dtype``, ``rows`` and
    ``repeats``. The process gets one torch thread, as every worker has.
    """
    import torch

    torch.set_num_threads(1)
    rows = tuple(request["rows"])
    repeats = int(request["repeats"])
    target = time_layer(request["target"], rows, repeats, dtype=request["dtype"], device=device)
    found: dict[str, Mapping[int, float]] = {
        "layer": target.layer,
        "each": target.each,
        "head": target.head,
        "embedding": target.embedding,
    }
    for name, draft in request["drafts"].items():
        own = time_layer(
            draft["config"], rows, repeats, dtype=request["draft_dtype"], device=device
        )
        head = target.head if draft["target_head"] else own.head
        found[name] = {
            count: draft["layers"] * own.layer[count] + own.each[count] + head[count]
            for count in rows
        }
    return found
