"""A block of a Hugging Face decoder's layers: built from a config cut to them, own weights only.

The library's own layers run, so a stage computes what the library computes. Only the products of
linear layers (``kernels``), the attention (``attention``), the masks (from parent links) and the
storage of keys and values (``kv``) differ.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig

from flowspec.core.protocol.work import Part
from flowspec.errors import ModelError
from flowspec.model.base import RowArray
from flowspec.model.kernels.integer import Integer
from flowspec.model.layers.architecture import build, read_config
from flowspec.model.layers.lean import (
    LIBRARY,
    LeanLayers,
    Readers,
    bias_copies,
    has_short_path,
    lean_layers,
)
from flowspec.model.layers.linear import KernelLinear, rows_are_independent
from flowspec.model.layers.loading import HEAD, Loader
from flowspec.model.layers.placing import Placing
from flowspec.model.rows.arrays import joined, split, to_tensor
from flowspec.model.rows.attention import EXACT, EXACT_DEVICES, bias_of
from flowspec.model.rows.kv import TreeCache
from flowspec.model.rows.masks import full_mask, windowed
from flowspec.model.rows.paged import PagedStore, RowCache
from flowspec.model.rows.placement import Placement
from flowspec.model.rows.ragged import Masks, for_layers, hands_through
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.families import TESTED_FAMILIES
from flowspec.model.weights.precision import KEPT


def tensor_prefixes(directory: ModelDirectory, layers: range) -> tuple[str, ...]:
    """Prefixes of the checkpoint tensors that the block ``layers`` needs."""
    first = layers.start == 0
    last = layers.stop == directory.layers
    own = tuple(f"model.layers.{layer}." for layer in layers)
    embedding = ("model.embed_tokens.",) if first or (last and directory.tied) else ()
    return own + embedding + (("model.norm.", "lm_head.") if last else ())


def linear_names(directory: ModelDirectory, layers: range) -> tuple[str, ...]:
    """Names in the checkpoint of the matrices of the linear layers in ``layers``."""
    found = build(
        directory,
        read_config(directory),
        layers,
        first=False,
        last=False,
        dtype=torch.float32,
        implementation=EXACT,
    )
    return tuple(
        f"model.layers.{number + layers.start}.{name}.weight"
        for number, layer in enumerate(found.body.layers)
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
    )


class LayerBlock(torch.nn.Module):
    """Layers ``layers`` of the model in ``directory``, in the precision and place of ``placing``.

    For a family that is not in ``families.TESTED_FAMILIES``, ``trial`` finds out whether this is
    right.

    ``first``: with the embedding. ``last``: with the final norm and the head.
    """

    #: Whether plain layers are run by the short path (``lean``) where it is equal.
    short_path = True

    def __init__(
        self,
        directory: ModelDirectory,
        layers: range,
        *,
        first: bool,
        last: bool,
        placing: Placing | None = None,
    ) -> None:
        super().__init__()
        self.first = first
        self.last = last
        self.seconds = 0.0  # CPU time in the layers and the head, without masks and KV moves
        self.placing = placing if placing is not None else Placing()
        self.dtype = self.placing.rows
        self.device = self.placing.device
        whole = read_config(directory)
        found = build(
            directory,
            whole,
            layers,
            first=first,
            last=last,
            dtype=self.dtype,
            implementation=EXACT,
        )
        self.config = found.config
        self.body = found.body
        self.head = found.head
        self._vocabulary = int(self.config.vocab_size)
        self._heads = int(self.config.num_attention_heads)
        self._key_heads = _key_heads(self.config)
        self._head_dim = _head_dim(self.config)
        self._window = getattr(self.config, "sliding_window", None)
        self._has_types = bool(getattr(self.config, "layer_types", None))
        short = self.short_path and has_short_path(self.body, self.device)
        Loader(self, directory, layers, self.placing, join=short).load()
        self.eval()
        self.lean: LeanLayers | None = None
        if short:
            self.lean = lean_layers(self)
        #: Whether rows of several jobs may go through the layers together.
        self.joins = True
        if directory.config["model_type"] not in TESTED_FAMILIES:
            self.joins = hands_through(self)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels in use, that of the layers first."""
        linears = [module for module in self.modules() if isinstance(module, KernelLinear)]
        return tuple(dict.fromkeys(linear.kernel for linear in linears))

    def facts(self) -> dict[str, object]:
        """What runs where, for logs, ``status`` and a job's stats; rows are tested for it."""
        dependent = self.dependent_parts()
        return {
            **self.place_facts(),
            "rows_independent": not dependent,
            "dependent_parts": list(dependent),
        }

    def place_facts(self) -> dict[str, object]:
        """``facts`` without what a test of the rows tells."""
        config = self.config.to_dict()
        stored = "+".join(config.get("gguf_types", ()))
        return {
            **({"stored": f"{self._how_stored(stored)} from {stored}"} if stored else {}),
            "precision": self.placing.precision,
            "device": str(self.device),
            "kernels": list(self.kernels),
            "layers_by": LIBRARY if self.lean is None else self.lean.name,
            "weights_mib": round(self.nbytes / 2**20, 1),
        }

    def _how_stored(self, types: str) -> str:
        """Whether the layers have the values of a GGUF file of ``types``, or its codes alone."""
        precision = self.placing.precision
        if precision not in (self.config.to_dict().get(KEPT), "float32"):
            return "rounded"
        # Scales of Q4_K are products, and only ours multiplies by scales as they are.
        ours = Integer(4).name in self.kernels
        exact = precision != "int4" or (ours and "Q4_K" not in types)
        return "kept" if exact else "codes kept"

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, without KV rows."""
        linears = sum(m.nbytes for m in self.modules() if isinstance(m, KernelLinear))
        return linears + sum(parameter.nbytes for parameter in self.parameters())

    def dependent_parts(self) -> tuple[str, ...]:
        """Parts whose rows depend on what shares their pass: measured, one of each shape.

        Attention depends on it by design where it does not sum in float64.
        """
        attention = () if self.device.type in EXACT_DEVICES else ("attention",)
        return attention + self._dependent_layers()

    def _dependent_layers(self) -> tuple[str, ...]:
        shapes: dict[tuple[str, int, int], str] = {}
        for name, module in self.named_modules():
            if isinstance(module, KernelLinear):
                key = (module.kernel, module.out_features, module.in_features)
                shapes.setdefault(key, name)
        return tuple(
            name
            for (_, _, inputs), name in shapes.items()
            if not rows_are_independent(
                self.get_submodule(name), inputs, self._rows_into(name), self.device
            )
        )

    def _rows_into(self, name: str) -> torch.dtype:
        return self.placing.head_rows if name == HEAD else self.dtype

    def new_cache(self, capacity: int) -> RowCache:
        """KV rows for one job, in a store of its own."""
        return TreeCache.allocate(
            self.config.num_hidden_layers,
            self._key_heads,
            capacity,
            self._head_dim,
            self.dtype,
            self.device,
        )

    def new_store(self, blocks: int) -> PagedStore:
        """A pool of ``blocks`` blocks for the KV rows of all jobs."""
        return PagedStore.allocate(
            self.config.num_hidden_layers,
            self._key_heads,
            blocks,
            self._head_dim,
            self.dtype,
            self.device,
        )

    @torch.inference_mode()
    def run(self, part: Part, rows: RowArray | None, cache: RowCache) -> torch.Tensor:
        """Hidden rows after this block (in the last one, after the norm), ``[rows, hidden]``."""
        (hidden,) = self.run_together([part], [rows], [cache], [cache.begin_pass(part)])
        return hidden

    @torch.inference_mode()
    def run_together(
        self,
        parts: Sequence[Part],
        rows: Sequence[RowArray | None],
        caches: Sequence[RowCache],
        placements: Sequence[Placement],
        readers: Readers | None = None,
    ) -> list[torch.Tensor]:
        """``run`` for parts of several jobs, whose rows go through the linear layers together.

        Several parts only where the block ``joins``. ``rows``: of all parts, or of none.
        ``placements``: what ``begin_pass`` of each cache, which must have been called, has
        returned.
        """
        given = joined([self._given(*pair) for pair in zip(parts, rows, strict=True)])
        counts = [len(part.ids) for part in parts]
        masks = [self._mask(*pair) for pair in zip(placements, counts, strict=True)]
        positions = [position for part in parts for position in part.positions]
        began = time.thread_time()
        if self.lean is not None:
            embedded = given if given.is_floating_point() else self.body.embed_tokens(given)
            whole = [mask["full_attention"] if isinstance(mask, dict) else mask for mask in masks]
            hidden = self.lean.run(embedded, positions, counts, whole, caches, readers=readers)
        else:
            name = "inputs_embeds" if given.is_floating_point() else "input_ids"
            with self._read_by(readers or {}):
                hidden = self.body(
                    **{name: given[None]},
                    position_ids=torch.tensor([positions], device=self.device),
                    use_cache=True,
                    **for_layers(caches, counts, masks),
                ).last_hidden_state[0]
        self._note_since(began)
        return list(split(hidden, counts))

    @contextlib.contextmanager
    def _read_by(self, readers: Readers) -> Iterator[None]:
        """The library's layers call ``readers`` meanwhile."""
        modules = [*self.body.layers, self.body.norm]
        with contextlib.ExitStack() as hooks:
            for layer, reader in readers.items():
                hand = partial(_hand_over, reader)
                hook = modules[layer].register_forward_pre_hook(hand, with_kwargs=True)
                hooks.callback(hook.remove)
            yield

    def _given(self, part: Part, rows: RowArray | None) -> torch.Tensor:
        """The part's tokens, or its rows into the first layer, ``[rows, hidden]``.

        Models of one tokenizer pad their vocabularies differently: ids that another one of a chain
        has and this one lacks are read as id 0.
        """
        if rows is None:
            tokens = part.tokens
            if max(tokens, default=0) >= self._vocabulary:
                tokens = tuple(token if token < self._vocabulary else 0 for token in tokens)
            return torch.tensor(tokens, device=self.device)
        kept = rows if len(part.offsets) == len(rows) else rows[list(part.offsets)]
        return to_tensor(kept, self.dtype, self.device)

    def _mask(self, placement: Placement, new: int) -> Masks:
        """The masks of the ``new`` rows as ``attention.bias_of`` returns them, by layer type if
        needed.
        """
        context = placement.context
        parents = placement.parents
        whole = full_mask(context, parents, new)
        masks = {"full_attention": self._bias(whole)}
        if self._window is not None:
            near = windowed(whole, context, parents, self._window)
            masks["sliding_attention"] = self._bias(near)
        if self._has_types:
            return masks
        return masks.get("sliding_attention", masks["full_attention"])

    def _bias(self, mask: npt.NDArray[np.bool_]) -> torch.Tensor:
        return bias_of(mask, bias_copies(self.lean, self._heads // self._key_heads), self.device)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocabulary]`` from rows after the final norm."""
        if self.head is None:
            raise ModelError("only the last stage has the output head")
        began = time.thread_time()
        short = self.lean.head if self.lean is not None else None
        head = self.head if short is None else short
        logits: torch.Tensor = head(hidden.to(self.placing.head_rows))
        self._note_since(began)
        return logits

    def _note_since(self, began: float) -> None:
        # A module's own way to set an attribute takes ten times as long.
        object.__setattr__(self, "seconds", self.seconds + time.thread_time() - began)


def _hand_over(reader: Any, module: Any, args: Any, named: dict[str, Any]) -> None:
    reader((args[0] if args else named["hidden_states"])[0])


def _key_heads(config: PretrainedConfig) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _head_dim(config: PretrainedConfig) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
