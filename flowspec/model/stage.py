"""A block of a Hugging Face decoder's layers: built from a config cut to them, own weights only.

The library's own layers run, so a stage computes what the library computes. Only the masks (from
parent links) and the storage of keys and values (``kv``) differ.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Choice, Part, Pass, PassDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ModelError
from flowspec.model.base import RowArray
from flowspec.model.directory import ModelDirectory
from flowspec.model.kv import TreeCache
from flowspec.model.masks import full_mask, tree_mask, windowed
from flowspec.model.rows import Placement
from flowspec.model.sampling import choose_rows, top_logprobs
from flowspec.model.two_level import PLAIN, TWO_LEVEL, RowCache, TwoLevelCache, implementation
from flowspec.model.weights import read_tensor

#: Families for which the test suite compares stages with the whole model.
TESTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def tensor_prefixes(directory: ModelDirectory, layers: range) -> tuple[str, ...]:
    """Prefixes of the checkpoint tensors that the block ``layers`` needs."""
    first = layers.start == 0
    last = layers.stop == directory.layers
    own = tuple(f"model.layers.{layer}." for layer in layers)
    embedding = ("model.embed_tokens.",) if first or (last and directory.tied) else ()
    return own + embedding + (("model.norm.", "lm_head.") if last else ())


class LayerBlock(torch.nn.Module):
    """Layers ``layers`` of the model in ``directory``, float32 on the CPU.

    ``first``: with the embedding. ``last``: with the final norm and the head. ``attention``:
    ``plain``, or ``two-level`` (``two_level``), which gives the same rows; ModelError if the model
    does not allow it.
    """

    def __init__(
        self,
        directory: ModelDirectory,
        layers: range,
        *,
        first: bool,
        last: bool,
        attention: str = PLAIN,
    ) -> None:
        super().__init__()
        self.first = first
        self.last = last
        self.seconds = 0.0  # CPU time in the layers and the head, without masks and KV moves
        self.two_level = attention == TWO_LEVEL
        self.dtype = torch.float32
        self.config = _cut_config(directory, layers)
        kernel = implementation(attention, self.config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                self.config, dtype=self.dtype, attn_implementation=kernel
            )
        _check_shape(directory, model)
        self.body = model.model
        self.head = model.lm_head if last else None
        self.body.rotary_emb = type(self.body.rotary_emb)(self.config)
        if not first:
            self.body.embed_tokens = torch.nn.Identity()
        if not last:
            self.body.norm = torch.nn.Identity()
        self._load(directory, layers)
        self.eval()

    def _load(self, directory: ModelDirectory, layers: range) -> None:
        prefix = {"body.": "model.", "head.": "lm_head."}
        for name, parameter in list(self.named_parameters()):
            part = next(key for key in prefix if name.startswith(key))
            stored = prefix[part] + name.removeprefix(part)
            if stored.startswith("model.layers."):
                number, _, rest = stored.removeprefix("model.layers.").partition(".")
                stored = f"model.layers.{int(number) + layers.start}.{rest}"
            if stored == "lm_head.weight" and directory.tied:
                stored = "model.embed_tokens.weight"
            entry = directory.tensor(stored)
            if entry.shape != tuple(parameter.shape):
                raise ModelError(
                    f"{stored} has shape {entry.shape}; the config says {tuple(parameter.shape)}"
                )
            module, _, leaf = name.rpartition(".")
            owner = self.get_submodule(module)
            setattr(
                owner,
                leaf,
                torch.nn.Parameter(read_tensor(stored, entry, self.dtype), requires_grad=False),
            )
        if self.first and self.head is not None and directory.tied:
            self.head.weight = self.body.embed_tokens.weight
        if any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers())):
            kind = directory.config["model_type"]
            raise ModelError(
                f"{directory.path}: {kind} models keep state outside their weights; not supported"
            )

    def new_cache(self, capacity: int) -> RowCache:
        """KV rows for one job."""
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        kind = TwoLevelCache if self.two_level else TreeCache
        return kind.allocate(config.num_hidden_layers, heads, capacity, head_dim, self.dtype)

    @torch.inference_mode()
    def run(self, part: Part, rows: RowArray | None, cache: RowCache) -> torch.Tensor:
        """Hidden rows after this block (in the last one, after the norm), ``[rows, hidden]``."""
        placement = cache.begin_pass(part)
        inputs: dict[str, Any] = {"past_key_values": cache}
        if isinstance(cache, TwoLevelCache):
            inputs = {"past_key_values": cache.tree, "two_level": cache}
        positions = torch.tensor(part.positions).unsqueeze(0)
        if rows is None:
            inputs["input_ids"] = torch.tensor(part.tokens).unsqueeze(0)
        else:
            inputs["inputs_embeds"] = torch.from_numpy(_kept(rows, part.offsets)).unsqueeze(0)
        mask = self._mask(placement, len(part.ids))
        began = time.thread_time()
        output = self.body(**inputs, attention_mask=mask, position_ids=positions, use_cache=True)
        self.seconds += time.thread_time() - began
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _mask(self, placement: Placement, new: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Boolean masks ``[1, 1, rows, slots]`` of the ``new`` rows, by layer type if needed.

        Two-level attention masks tree slots only. Boolean masks suit SDPA only: the library's
        eager attention would add them to the scores.
        """
        context = placement.context
        parents = placement.parents
        if self.two_level:
            whole = tree_mask(parents, new)
        else:
            whole = full_mask(context, parents, new)
        window = getattr(self.config, "sliding_window", None)
        masks = {"full_attention": torch.from_numpy(whole)[None, None]}
        if window is not None:
            near = windowed(whole, context, parents, window)
            masks["sliding_attention"] = torch.from_numpy(near)[None, None]
        if getattr(self.config, "layer_types", None):
            return masks
        return masks.get("sliding_attention", masks["full_attention"])

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocabulary]`` from rows after the final norm."""
        if self.head is None:
            raise ModelError("only the last stage has the output head")
        began = time.thread_time()
        logits: torch.Tensor = self.head(hidden)
        self.seconds += time.thread_time() - began
        return logits


class ModelStage:
    """A verify stage's executor: one block and the KV rows of its jobs."""

    def __init__(self, block: LayerBlock) -> None:
        self._block = block
        self._runs: dict[RunKey, tuple[RowCache, Sampling, Returns]] = {}

    @property
    def model_seconds(self) -> float:
        """CPU seconds spent in the model itself so far; the rest of the passes is overhead."""
        return self._block.seconds

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._runs[run] = (self._block.new_cache(capacity), sampling, returns)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        choices = []
        outputs = []
        for part, rows in zip(work.parts, inputs, strict=True):
            cache, sampling, returns = self._runs[part.run]
            hidden = self._block.run(part, rows, cache)
            outputs.append(hidden.numpy())
            choices.append(
                self._choose(part, hidden, sampling, returns) if part.answers else Choice()
            )
        return PassDone(tuple(choices)), outputs

    def _choose(
        self, part: Part, hidden: torch.Tensor, sampling: Sampling, returns: Returns
    ) -> Choice:
        logits = self._block.logits(hidden[list(part.answers)])
        indices = [part.positions[row] + 1 for row in part.answers]
        tokens = choose_rows(logits, sampling, indices)
        if not returns.top:
            return Choice(tokens)
        best = top_logprobs(logits, returns.top)
        return Choice(tokens, tuple(tuple(zip(*pair, strict=True)) for pair in best))


def load_stage(directory: ModelDirectory, layers: range, attention: str = PLAIN) -> ModelStage:
    """The executor of the verify stage with ``layers``; ``attention`` as in ``LayerBlock``."""
    first = layers.start == 0
    last = layers.stop == directory.layers
    return ModelStage(LayerBlock(directory, layers, first=first, last=last, attention=attention))


def _kept(rows: RowArray, offsets: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if len(offsets) == rows.shape[0]:
        return rows if rows.flags.writeable else rows.copy()
    return rows[list(offsets)]


def _cut_config(directory: ModelDirectory, layers: range) -> PretrainedConfig:
    """The model's config as if it had only ``layers``."""
    try:
        config = AutoConfig.from_pretrained(
            directory.path, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(
            f"{directory.path} cannot be loaded: {str(error).splitlines()[0]}"
        ) from None
    config = copy.deepcopy(config)
    if getattr(config, "final_logit_softcapping", None) is not None:
        raise ModelError(
            f"{directory.path} caps its logits ({config.model_type}); such models are not supported"
        )
    types = getattr(config, "layer_types", None)
    if types:
        config.layer_types = list(types[layers.start : layers.stop])
        strange = sorted(set(config.layer_types) - {"full_attention", "sliding_attention"})
        if strange:
            raise ModelError(
                f"{directory.path} has {strange[0]} layers; "
                "only attention over KV rows can be split"
            )
    config.num_hidden_layers = len(layers)
    return config


def _check_shape(directory: ModelDirectory, model: torch.nn.Module) -> None:
    body = getattr(model, "model", None)
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    if (
        body is None
        or not hasattr(model, "lm_head")
        or not all(hasattr(body, part) for part in parts)
    ):
        raise ModelError(
            f"{directory.path} is a {directory.config['model_type']} model, "
            f"whose layers cannot be split here; tested families: {', '.join(TESTED_FAMILIES)}"
        )
