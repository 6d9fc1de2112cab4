"""An EAGLE-1/2 head as drafter: one decoder layer that predicts the target's next feature.

A *feature* is a hidden row of the target after its final norm. The row of node u, with token x
and parent v, goes in as ``fc([embed(x); feature(v)])``, through the head's own decoder layer,
and comes out as the predicted feature of u; the target's LM head turns it into proposals.
``feature(v)`` is the target's own row once it was learnt, the head's prediction until then.
Source: arXiv 2401.15077 and 2406.16858; ``algorithms.md`` 2.3 and 2.12. Weight layout: that of
the authors' published heads. Positions are the tokens' own; the authors count from the second
token, which rotary embeddings, knowing distances only, cannot tell apart. Their first token has
no row for want of a parent, so here no other row sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaModel

from flowspec.core.protocol.machine import Draft, DraftDone, Part
from flowspec.core.protocol.messages import Returns
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ModelError, StateError
from flowspec.model.base import RowArray
from flowspec.model.directory import ModelDirectory
from flowspec.model.drafter import propose
from flowspec.model.head_layout import check_head
from flowspec.model.kv import TreeCache
from flowspec.model.masks import full_mask
from flowspec.model.weights import read_tensor

_FC_BIAS = "fc.bias"
_EMBEDDING = "embed_tokens.weight"
_FIRST_NORM = "layers.0.input_layernorm.weight"
_OUTPUT_BIAS = ".self_attn.o_proj.bias"


class EagleHead(torch.nn.Module):
    """``fc`` and the decoder layers, float32; embedding and LM head are the target's and not in
    here.

    ``input_norm``: the first layer has an input norm (the authors' heads have none). ``bias``:
    ``fc`` has one.
    """

    def __init__(
        self, config: LlamaConfig, *, bias: bool = False, input_norm: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.body: Any = LlamaModel(config)
        self.body.embed_tokens = torch.nn.Identity()
        self.body.norm = torch.nn.Identity()
        if not input_norm:
            self.body.layers[0].input_layernorm = torch.nn.Identity()

    def forward(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """Predicted features ``[batch, rows, hidden]`` of rows whose tokens are ``embedded`` and
        whose parents have ``features``, both of that shape; ``mask`` is boolean ``[1, 1, rows,
        slots]``, ``positions`` ``[1, rows]``; ``cache`` (the library's kind) takes the rows'
        keys and values.
        """
        output = self.body(
            inputs_embeds=self.fc(torch.cat((embedded, features), dim=-1)),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        predicted: torch.Tensor = output.last_hidden_state
        return predicted

    def new_cache(self, capacity: int) -> TreeCache:
        """KV rows for one job."""
        config = self.config
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        heads = config.num_key_value_heads or config.num_attention_heads
        return TreeCache.allocate(
            config.num_hidden_layers, heads, capacity, head_dim, torch.float32
        )


class _HeadState:
    """KV rows and features of one job. Features are kept by node id: the target's and the head's
    own.
    """

    def __init__(self, cache: TreeCache, sampling: Sampling) -> None:
        self.cache = cache
        self.sampling = sampling
        self.true: dict[int, torch.Tensor] = {}
        self.predicted: dict[int, torch.Tensor] = {}
        self.tip = -1  # the last context row computed

    def feature(self, node: int) -> torch.Tensor | None:
        known = self.true.get(node)
        return self.predicted.get(node) if known is None else known

    def settle(self, tip: int) -> None:
        """``tip`` is the last context row: nothing below it can be a parent any more, since ids
        only grow.
        """
        self.tip = tip
        for store in (self.true, self.predicted):
            for node in [node for node in store if node < tip]:
                del store[node]


class EagleDrafter:
    """Proposes what ``lm_head`` says of the features the head predicts; values as
    ``ModelDrafter``'s.

    ``embedding`` and ``lm_head`` are ``[vocabulary, hidden]``, float32.
    """

    wants_hidden = True

    def __init__(self, head: EagleHead, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        self._head = head.eval()
        self._embedding = embedding
        self._lm_head = lm_head
        self._zero = torch.zeros(head.config.hidden_size)
        self._jobs: dict[str, _HeadState] = {}

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._jobs[job] = _HeadState(self._head.new_cache(capacity), sampling)

    def release(self, job: str) -> None:
        self._jobs.pop(job, None)

    def learn(self, job: str, ids: Sequence[int], rows: RowArray) -> None:
        """See ``DraftExecutor.learn``; StateError if ``rows`` is not ``[ids, hidden]``."""
        state = self._jobs[job]
        if rows.shape != (len(ids), *self._zero.shape):
            raise StateError(
                f"{len(ids)} nodes came with features of shape {rows.shape}; hidden is "
                f"{len(self._zero)}"
            )
        features = torch.from_numpy(rows.astype(np.float32, copy=True))
        state.true.update(
            (node, row) for node, row in zip(ids, features, strict=True) if node >= state.tip
        )

    @torch.inference_mode()
    def run(self, work: Draft) -> DraftDone:
        """As ``DraftExecutor.run``. Rows whose parents' features are only predicted in this pass
        wait for them: the pass is computed in waves. StateError if a parent has no feature at
        all.
        """
        part = work.part
        state = self._jobs[work.part.job]
        parents = _above(work, state.tip)
        state.cache.begin_pass(part.held, part.moves)
        outputs = []
        at = 0
        while at < len(part.ids):
            end = self._wave_end(part, parents, state, at)
            outputs.append(self._wave(part, parents, state, at, end))
            at = end
        context_rows = _context_rows(part)
        if context_rows:
            state.settle(part.ids[context_rows - 1])
        if not part.answers:
            return DraftDone((), ())
        answered = torch.cat(outputs)[list(part.answers)]
        return propose(torch.nn.functional.linear(answered, self._lm_head), work, state.sampling)

    @staticmethod
    def _wave_end(part: Part, parents: Sequence[int], state: _HeadState, first: int) -> int:
        """Rows from ``first`` to here need no feature that is only predicted among them."""
        waiting: set[int] = set()
        for row in range(first, len(part.ids)):
            if parents[row] in waiting:
                return row
            if part.ids[row] not in state.true:  # an older prediction of it is from older features
                waiting.add(part.ids[row])
        return len(part.ids)

    def _wave(
        self, part: Part, parents: Sequence[int], state: _HeadState, first: int, end: int
    ) -> torch.Tensor:
        state.cache.begin_pass(part.held + first, None)
        mask = full_mask(part.context, part.parents[: part.held - part.context + end], end - first)
        mask[0 if part.held + first else 1 :, 0] = False
        predicted: torch.Tensor = self._head(
            self._embedding[list(part.tokens[first:end])].unsqueeze(0),
            torch.stack(
                [self._parent_feature(state, parent) for parent in parents[first:end]]
            ).unsqueeze(0),
            torch.from_numpy(mask)[None, None],
            torch.tensor(part.positions[first:end]).unsqueeze(0),
            state.cache,
        )[0]
        state.predicted.update(zip(part.ids[first:end], predicted, strict=True))
        return predicted

    def _parent_feature(self, state: _HeadState, parent: int) -> torch.Tensor:
        if parent < 0:
            return self._zero
        feature = state.feature(parent)
        if feature is None:
            raise StateError(
                f"node {parent} has no feature: its row was neither learnt nor computed"
            )
        return feature


def _context_rows(part: Part) -> int:
    """How many rows of ``part``, the first ones, are context: they are the ones
    without an answer.
    """
    return part.answers[0] if part.answers else len(part.ids)


def _above(work: Draft, tip: int) -> list[int]:
    """Ids of the rows' parents; the first row of a pass that continues the context may leave out
    its own, ``tip``.
    """
    first, *others = work.parents
    return [tip if first < 0 and work.part.held else first, *others]


def load_head(directory: ModelDirectory, target: ModelDirectory) -> EagleDrafter:
    """The head in ``directory`` as a drafter for ``target``, of which only embedding and LM head
    are read.

    ModelError if it is no head, one for another target, or incomplete.
    """
    head = read_head(directory, target)
    shape = (target.vocabulary, target.hidden_size)
    stored = "model.embed_tokens.weight"
    if _EMBEDDING in directory.weight_files:
        embedding = _read(directory, _EMBEDDING, shape)
    else:
        embedding = _read(target, stored, shape)
    if target.tied and _EMBEDDING not in directory.weight_files:
        return EagleDrafter(head, embedding, embedding)
    return EagleDrafter(
        head, embedding, _read(target, stored if target.tied else "lm_head.weight", shape)
    )


def read_head(directory: ModelDirectory, target: ModelDirectory) -> EagleHead:
    """The head's own layers in ``directory``; errors as ``load_head``'s."""
    check_head(directory, target)
    names = directory.weight_files
    config = LlamaConfig.from_dict(
        {**directory.config, "attention_bias": "layers.0.self_attn.q_proj.bias" in names}
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        head = EagleHead(config, bias=_FC_BIAS in names, input_norm=_FIRST_NORM in names)
    head.body.rotary_emb = type(head.body.rotary_emb)(config)
    for name, parameter in list(head.named_parameters()):
        stored = name.removeprefix("body.")
        module, _, leaf = name.rpartition(".")
        value = None
        if stored in names or not stored.endswith(_OUTPUT_BIAS):
            value = torch.nn.Parameter(
                _read(directory, stored, tuple(parameter.shape)), requires_grad=False
            )
        setattr(head.get_submodule(module), leaf, value)
    return head.eval()


def _read(directory: ModelDirectory, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    entry = directory.tensor(name)
    if entry.shape != shape:
        raise ModelError(f"{directory.path}: {name} has shape {entry.shape}; expected {shape}")
    return read_tensor(name, entry, torch.float32)
