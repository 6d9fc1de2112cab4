"""An EAGLE-3 head: one decoder layer over token and feature side by side, with its own LM head.

A *feature* of a token is ``fc`` over the target's rows at the tapped layers (``taps``), which the
stages sum up, and the head's own output row until that has arrived. For node u with token x and
parent v the layer's attention reads ``[norm(embed(x)); norm(feature(v))]``, its residual is
``feature(v)`` itself. The output row is the feature for the levels below; after ``norm`` the LM
head turns it into logits over its vocabulary.

Source: arXiv 2503.01840 and the authors' code; docs/algorithms.md#draft-heads. Positions and the
first token are as in ``eagle``, whose drafter runs this head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from flowspec.model.drafters.draft_vocabulary import DraftVocabulary
from flowspec.model.drafters.drafter_weights import (
    TARGET_EMBEDDING,
    checked_entry,
    read_checked,
    read_linear,
    read_lm_head,
)
from flowspec.model.drafters.eagle import (
    EagleDrafter,
    head_cache,
    masks_for,
    set_attention,
    shorten,
)
from flowspec.model.drafters.eagle3_layout import (
    EMBEDDING,
    LM_HEAD,
    OFFSETS,
    Eagle3Layout,
    read_layout,
)
from flowspec.model.layers.lean import LeanLayers
from flowspec.model.layers.placing import Placing
from flowspec.model.rows.kv import CACHE, TreeCache
from flowspec.model.rows.ragged import for_layers
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.tensors import read_integers

_LAYER = "midlayer."


class Eagle3Layer(torch.nn.Module):
    """The decoder layer. ``normed``: the residual is the feature after ``hidden_norm``."""

    def __init__(self, config: LlamaConfig, *, normed: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.normed = normed
        self.self_attn: Any = LlamaAttention(config, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, torch.nn.Linear(2 * hidden, outputs, bias=False))
        self.mlp: Any = LlamaMLP(config)
        self.input_layernorm: Any = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        self.hidden_norm: Any = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        self.post_attention_layernorm: Any = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        **given: Any,
    ) -> torch.Tensor:
        """Output rows ``[batch, rows, hidden]``, as ``embedded`` and ``features`` are.

        ``given``: what the attention is given, its mask and cache among it.
        """
        residual, entering = self.entering(embedded, features)
        attended, _ = self.self_attn(hidden_states=entering, position_embeddings=rotary, **given)
        rows = residual + attended
        output: torch.Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return output

    def entering(
        self, embedded: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual, and what the attention reads, ``[..., rows, 2 x hidden]``."""
        normed = self.hidden_norm(features)
        beside = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        return normed if self.normed else features, beside


class _Body(torch.nn.Module):
    """The decoder layer of ``head`` as the body of a decoder, for ``lean``."""

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.config = head.config
        self.layers = torch.nn.ModuleList([head.midlayer])
        self.norm = torch.nn.Identity()
        self.rotary_emb = head.rotary
        self.head = head  # whose own norm is one of the body's, too


class Eagle3Head(torch.nn.Module):
    """``midlayer``, ``norm`` and ``lm_head``; ``fc`` too if ``joined`` rows of a target go in.

    ``joined``: values of the tapped rows side by side; 0: features come from the stages.
    ``vocabulary``: of the LM head.
    """

    def __init__(
        self, config: LlamaConfig, vocabulary: int, *, joined: int = 0, normed: bool = False
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.midlayer = Eagle3Layer(config, normed=normed)
        self.norm: Any = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        self.lm_head: Any = torch.nn.Linear(hidden, vocabulary, bias=False)
        self.rotary: Any = LlamaRotaryEmbedding(config)
        self.lean: LeanLayers | None = None
        if joined:
            self.fc = torch.nn.Linear(joined, hidden, bias=False)

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """The rows' output rows, ``[batch, rows, hidden]``; parameters as ``EagleHead``'s."""
        rotary = self.rotary(features, position_ids=positions)
        given = {"attention_mask": mask, CACHE: cache}
        output: torch.Tensor = self.midlayer(embedded, features, rotary, **given)
        return output

    def run(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        masks: Sequence[torch.Tensor],
        positions: Sequence[int],
        caches: Sequence[TreeCache],
    ) -> torch.Tensor:
        """As ``eagle.FeatureHead.run``."""
        counts = [len(mask) for mask in masks]
        given = masks_for(self.config, masks, self.lean)
        if self.lean is not None:
            residual, entering = self.midlayer.entering(embedded, features)
            return self.lean.run(residual, positions, counts, given, caches, entering)
        places = torch.tensor([positions], device=features.device)
        rotary = self.rotary(features, position_ids=places)
        more = for_layers(caches, counts, given)
        output: torch.Tensor = self.midlayer(embedded[None], features[None], rotary, **more)[0]
        return output

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """``[..., vocabulary]`` from output rows."""
        found: torch.Tensor = self.lm_head(self.norm(outputs))
        return found

    def new_cache(
        self, capacity: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> TreeCache:
        """KV rows for one job."""
        return head_cache(self.config, capacity, dtype, device)


def load_eagle3(
    directory: ModelDirectory, target: ModelDirectory, placing: Placing | None = None
) -> EagleDrafter:
    """Load the EAGLE-3 head in ``directory`` as a drafter for ``target``.

    Of the target only the embedding is read, and not even that if the head has one. ModelError if
    ``directory`` is no head of this kind, fits another target, or is incomplete.
    """
    where = placing if placing is not None else Placing()
    layout = read_layout(directory, target)
    head = _read(directory, layout, where)
    owner, name = (directory, EMBEDDING) if layout.embeds else (target, TARGET_EMBEDDING)
    shape = (target.vocabulary, head.config.hidden_size)
    embedding = read_checked(owner, name, shape, where)
    vocabulary = None
    if layout.mapped:
        entry = checked_entry(directory, OFFSETS, (layout.vocabulary,))
        vocabulary = DraftVocabulary(read_integers(OFFSETS, entry), target.vocabulary)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        return head.logits(rows.to(where.head_rows))

    return EagleDrafter(head, embedding, logits, where, vocabulary)


def read_eagle3(directory: ModelDirectory, target: ModelDirectory) -> Eagle3Head:
    """The head in ``directory`` with ``fc``, float32, which can be trained; errors as above."""
    return _read(directory, read_layout(directory, target), None)


def _read(directory: ModelDirectory, layout: Eagle3Layout, placing: Placing | None) -> Eagle3Head:
    """The head in ``directory``; without a ``placing`` with ``fc`` and the library's linears."""
    where = placing if placing is not None else Placing()
    config = LlamaConfig.from_dict(dict(directory.config))
    set_attention(config, placing)
    joined = 0 if placing else directory.tensor(layout.taps.weight).shape[1]
    with torch.device("meta"):
        head = Eagle3Head(config, layout.vocabulary, joined=joined, normed=layout.normed)
    head.rotary = LlamaRotaryEmbedding(config).to(where.device)
    for name, parameter in list(head.named_parameters()):
        stored = name.replace(_LAYER, layout.layer, 1)
        module, _, leaf = name.rpartition(".")
        owner = head.get_submodule(module)
        shape = tuple(parameter.shape)
        if placing is not None and isinstance(owner, torch.nn.Linear):
            above, _, own = module.rpartition(".")
            read = read_lm_head if stored == LM_HEAD else read_linear
            linear = read(directory, stored, (shape[0], shape[1]), where)
            setattr(head.get_submodule(above), own, linear)
            continue
        kind = where.head_rows if owner is head.norm else where.rows
        value = read_checked(directory, stored, shape, where, kind)
        setattr(owner, leaf, torch.nn.Parameter(value, requires_grad=False))
    head.eval()
    shorten(head, _Body(head), where)
    return head
