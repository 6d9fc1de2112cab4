"""A block drafter: one pass proposes for a whole block of positions.

Each layer attends to context rows, whose keys and values it makes from *features* of the target
(``fc`` over the rows of several of its layers, then a norm), and to the rows of the block, in both
directions. A block has the known tokens after the context, the root first, and then masked rows;
the LM head turns rows into proposals, for each position apart from what the others propose.

Source: DFlash, arXiv 2602.06036, whose published drafters have blocks of one known token; DeepSpec
(docs/algorithms.md#block-drafters). The layers are the library's Qwen3 layers: a context row adds
nothing but its keys and values, so it only has to be put into their cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import Qwen3Config, Qwen3Model
from transformers.cache_utils import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import (
    BlockDone,
    Draft,
    DraftDone,
    Kept,
    LevelProposals,
    Part,
    WorkFailed,
)
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import StateError
from flowspec.model.base import RowArray
from flowspec.model.drafters.block_layout import (
    EMBEDDING,
    LM_HEAD,
    BlockLayout,
    check_block_drafter,
)
from flowspec.model.drafters.drafter_weights import (
    TARGET_EMBEDDING,
    TARGET_LM_HEAD,
    read_checked,
    read_linear,
    read_lm_head,
)
from flowspec.model.drafters.language_model import ranked
from flowspec.model.layers.linear import KernelLinear
from flowspec.model.layers.placing import Placing
from flowspec.model.rows.arrays import joined, split, to_tensor
from flowspec.model.rows.attention import LIBRARY
from flowspec.model.rows.kept_rows import KeptRows
from flowspec.model.rows.kv import CACHE, CopiedRows, TreeCache
from flowspec.model.rows.ragged import Masks, RaggedCache, for_layers
from flowspec.model.rows.several import each_of
from flowspec.model.weights.directory import ModelDirectory

#: Most rows of blocks computed at once, unless a single block has more.
_BATCH_ROWS = 512


class BlockLayers(torch.nn.Module):
    """Layers and norms, without embedding, LM head and ``fc``, which the target's stages have."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.config = config
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.body: Any = Qwen3Model(config)
        self.body.embed_tokens = torch.nn.Identity()

    def add_context(self, sums: torch.Tensor, positions: torch.Tensor, cache: Cache) -> None:
        """Append the keys and values of context rows to ``cache``.

        ``sums``: what ``fc`` gives for the rows, ``[batch, rows, hidden]``; ``positions``:
        ``[batch, rows]``.
        """
        features = self.hidden_norm(sums)
        cos, sin = self.body.rotary_emb(features, positions)
        for number, layer in enumerate(self.body.layers):
            attention = layer.self_attn
            shape = (*features.shape[:-1], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(features).view(shape)).transpose(1, 2)
            values = attention.v_proj(features).view(shape).transpose(1, 2)
            keys, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
            cache.update(keys, values, number)

    def forward(
        self, embedded: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Rows of blocks after the final norm, ``[batch, rows, hidden]``.

        ``embedded`` has that shape too. ``mask`` is boolean ``[batch or 1, 1, rows, slots]``, the
        cache's slots and then the rows; the rows are appended to ``cache``.
        """
        by_type = {"full_attention": mask}
        return self._run(embedded, positions, attention_mask=by_type, **{CACHE: cache})

    def run(
        self,
        embedded: torch.Tensor,
        masks: Sequence[torch.Tensor],
        positions: Sequence[int],
        caches: Sequence[TreeCache],
    ) -> torch.Tensor:
        """As a call, over rows of one or several jobs, ``[rows, hidden]``, one's behind another's.

        ``masks``: boolean, ``[rows, slots]`` of each job.
        """
        places = torch.tensor([positions], device=embedded.device)
        by_type: list[Masks] = [{"full_attention": mask[None, None]} for mask in masks]
        given = for_layers(caches, [len(mask) for mask in masks], by_type)
        return self._run(embedded[None], places, **given)[0]

    def _run(self, embedded: torch.Tensor, positions: torch.Tensor, **given: Any) -> torch.Tensor:
        output = self.body(inputs_embeds=embedded, position_ids=positions, use_cache=True, **given)
        rows: torch.Tensor = output.last_hidden_state
        return rows

    def new_cache(self, capacity: int, dtype: torch.dtype, device: torch.device) -> TreeCache:
        """KV rows for one job."""
        config = self.config
        return TreeCache.allocate(
            config.num_hidden_layers,
            config.num_key_value_heads,
            capacity,
            config.head_dim,
            dtype,
            device,
        )


@dataclass(frozen=True, slots=True)
class _Block:
    """A block's rows: known tokens and masks; ``asked``: those that propose, first level first."""

    tokens: tuple[int, ...]
    first_position: int
    asked: range

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + len(self.tokens))


class _DrafterContext:
    """One job's context: KV rows, and what was learnt of rows that are not computed yet."""

    def __init__(self, cache: TreeCache, sampling: Sampling) -> None:
        self.cache = cache
        self.sampling = sampling
        self.context = 0
        self.learnt: dict[int, torch.Tensor] = {}
        self.tip = -1  # the last context row computed

    def take(self, node: int) -> torch.Tensor:
        row = self.learnt.get(node)
        if row is None:
            raise StateError(f"context row {node} was not learnt")
        return row

    def settle(self, tip: int, count: int) -> None:
        """``count`` more rows are context, the last one ``tip``; no row before it is needed."""
        self.tip = tip
        self.context += count
        for node in [node for node in self.learnt if node <= tip]:
            del self.learnt[node]


@dataclass(slots=True)
class _Drafting:
    """A draft under way: blocks that are not computed, and the rows of those that are."""

    work: Draft
    state: _DrafterContext
    batches: list[list[_Block]] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)

    @property
    def part(self) -> Part:
        return self.work.part

    @property
    def context(self) -> int:
        """Rows of context that the blocks see."""
        return self.state.context + self.part.context


class BlockDrafter:
    """Proposes for ``levels`` positions below every answered row; values as ``ModelDrafter``'s.

    ``embedding`` is ``[vocabulary, hidden]``; ``lm_head`` maps rows of the type that ``placing``
    has for heads to logits.
    """

    wants_hidden = True

    def __init__(
        self,
        layers: BlockLayers,
        layout: BlockLayout,
        embedding: torch.Tensor,
        lm_head: Callable[[torch.Tensor], torch.Tensor],
        placing: Placing,
    ) -> None:
        self._layers = layers.eval()
        self._layout = layout
        self._embedding = embedding
        self._lm_head = lm_head
        self._placing = placing
        self._runs: dict[RunKey, _DrafterContext] = {}
        self._kept: KeptRows[CopiedRows] = KeptRows()
        self.evict = self._kept.evict

    @property
    def levels(self) -> int:
        """Positions that one block proposes for."""
        return self._layout.levels

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        cache = self._layers.new_cache(capacity, self._placing.rows, self._placing.device)
        self._runs[run] = _DrafterContext(cache, sampling)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        """See ``KeepsRows``; so too below. What was learnt is not kept."""
        (wanted,) = caches
        state = self._runs[run]
        if wanted.rows > state.context:
            raise StateError(f"{wanted.rows} rows are to be kept of {state.context}")
        if wanted.rows:  # no row of a tree outlasts its pass here, so nothing is to be pruned
            self._kept.put(run, state.cache.kept(wanted.rows))

    def resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        (rows,) = held
        state = self._runs[run]
        self._kept.resume(state.cache, source, rows)
        state.settle(rows - 1, rows)  # a prompt row's id is its position

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        """Store what ``fc`` gives for nodes ``ids``, before the norm.

        StateError if ``rows`` is not ``[ids, hidden]``.
        """
        state = self._runs[run]
        wanted = (len(ids), self._layers.config.hidden_size)
        if rows.shape != wanted:
            raise StateError(f"{len(ids)} nodes came with rows of shape {rows.shape}; not {wanted}")
        sums = to_tensor(rows, self._placing.rows, self._placing.device)
        state.learnt.update(
            (node, row) for node, row in zip(ids, sums, strict=True) if node > state.tip
        )

    def facts(self) -> dict[str, object]:
        """What it runs on: precision, device and kernels."""
        linears = [m for m in self._layers.modules() if isinstance(m, KernelLinear)]
        return {
            "precision": self._placing.precision,
            "device": str(self._placing.device),
            "kernels": list(dict.fromkeys(linear.kernel for linear in linears)),
        }

    def run(self, work: Draft) -> BlockDone:
        """As ``DraftExecutor.run``; the part has every tree row above an answered one.

        StateError if a context row was not learnt.
        """
        (found,) = self._propose([work])
        return found

    def run_together(self, works: Sequence[Draft]) -> list[DraftDone | WorkFailed]:
        device = self._placing.device
        return [*each_of(works, _itself, self._propose, joins=True, device=device)]

    @torch.inference_mode()
    def _propose(self, works: Sequence[Draft]) -> list[BlockDone]:
        """The proposals of every draft, the rows of all computed together."""
        drafts = [_Drafting(work, self._runs[work.part.run]) for work in works]
        extended = [one for one in drafts if one.part.context]
        if extended:
            self._extend(extended)
        for one in drafts:
            one.batches = list(_batches([self._block(one.part, row) for row in one.part.answers]))
        while waiting := [one for one in drafts if one.batches]:
            self._compute(waiting)
        found = self._ranked(drafts)
        for one in extended:
            one.state.settle(one.part.ids[one.part.context - 1], one.part.context)
        return found

    def _extend(self, drafts: Sequence[_Drafting]) -> None:
        """Compute the context rows of ``drafts``."""
        counts = [one.part.context for one in drafts]
        sums = torch.stack(
            [one.state.take(node) for one in drafts for node in one.part.ids[: one.part.context]]
        )
        positions = [place for one in drafts for place in one.part.positions[: one.part.context]]
        for one in drafts:
            one.state.cache.carry_out(None, one.state.context)
        caches = [one.state.cache for one in drafts]
        cache = caches[0] if len(caches) == 1 else RaggedCache(caches, counts)
        places = torch.tensor([positions], device=self._placing.device)
        self._layers.add_context(sums[None], places, cache)

    def _compute(self, drafts: Sequence[_Drafting]) -> None:
        """Compute the first batch of blocks of each of ``drafts``.

        A job's blocks are one sequence of rows; each sees the context and itself.
        """
        device = self._placing.device
        taken = [one.batches.pop(0) for one in drafts]
        masks = []
        for one, blocks in zip(drafts, taken, strict=True):
            one.state.cache.carry_out(None, one.context)
            masks.append(torch.from_numpy(_mask(one.context, _starts(blocks))).to(device))
        tokens = [token for blocks in taken for block in blocks for token in block.tokens]
        positions = [place for blocks in taken for block in blocks for place in block.positions]
        embedded = self._embedding[tokens]
        caches = [one.state.cache for one in drafts]
        rows = self._layers.run(embedded, masks, positions, caches)
        counts = [len(mask) for mask in masks]
        for one, blocks, own in zip(drafts, taken, split(rows, counts), strict=True):
            one.outputs.append(own[_asked(blocks)])

    def _ranked(self, drafts: Sequence[_Drafting]) -> list[BlockDone]:
        """The proposals from the computed rows."""
        asked = [rows for one in drafts for rows in one.outputs]
        if not asked:
            return [BlockDone((), ()) for _ in drafts]
        logits = self._lm_head(joined(asked).to(self._placing.head_rows))
        counts = [sum(map(len, one.outputs)) for one in drafts]
        each = split(logits, counts)
        return [self._done(one, own) for one, own in zip(drafts, each, strict=True)]

    def _done(self, draft: _Drafting, logits: torch.Tensor) -> BlockDone:
        part = draft.part
        levels = self.levels
        indices = [
            part.positions[row] + level for row in part.answers for level in range(1, levels + 1)
        ]
        if not indices:
            return BlockDone((), ())
        rows = ranked(logits, draft.work, draft.state.sampling, indices)
        found = [LevelProposals(*row) for row in rows]
        by_block = [found[at : at + levels] for at in range(0, len(found), levels)]
        return BlockDone(
            tuple(block[0].tokens for block in by_block),
            tuple(block[0].values for block in by_block),
            below=tuple(tuple(block[1:]) for block in by_block),
        )

    def _block(self, part: Part, row: int) -> _Block:
        """The block below ``row``: its path in the tree, itself included, and the masks."""
        first = part.context
        places = {node: at for at, node in enumerate(part.ids[first:], start=first)}
        path = [row]
        while (above := places.get(part.parents[path[-1]])) is not None:
            path.append(above)
        path.reverse()
        known = tuple(part.tokens[at] for at in path)
        asked = len(known) - self._layout.predicts_next
        return _Block(
            known + (self._layout.mask,) * self._layout.masks,
            part.positions[path[0]],
            range(asked, asked + self.levels),
        )


def _itself(work: Draft) -> Draft:
    return work


def _starts(blocks: Sequence[_Block]) -> npt.NDArray[np.int64]:
    """Where every block begins among the rows of all, and where the last one ends."""
    return np.cumsum([0] + [len(block.tokens) for block in blocks])


def _asked(blocks: Sequence[_Block]) -> list[int]:
    """The rows of ``blocks`` that propose."""
    starts = _starts(blocks).tolist()
    return [start + at for start, block in zip(starts, blocks, strict=False) for at in block.asked]


def _mask(context: int, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """``[rows, context + rows]`` of blocks that begin at ``starts``; the last one is the end."""
    rows = int(starts[-1])
    mask = np.zeros((rows, context + rows), dtype=np.bool_)
    mask[:, :context] = True
    for start, end in itertools.pairwise(starts.tolist()):
        mask[start:end, context + start : context + end] = True
    return mask


def _batches(blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
    """``blocks`` in order, in lists of at most ``_BATCH_ROWS`` rows or one block."""
    batch: list[_Block] = []
    for block in blocks:
        rows = sum(len(other.tokens) for other in batch) + len(block.tokens)
        if batch and rows > _BATCH_ROWS:
            yield batch
            batch = []
        batch.append(block)
    if batch:
        yield batch


def load_block_drafter(
    directory: ModelDirectory, target: ModelDirectory, placing: Placing | None = None
) -> BlockDrafter:
    """Load the block drafter in ``directory`` for ``target``.

    Embedding and LM head are the drafter's own if it has them, else the target's. ModelError if it
    is not understood (``block_layout``), fits another target, or is incomplete.
    """
    where = placing if placing is not None else Placing()
    layout = check_block_drafter(directory, target)
    layers = read_layers(directory, where)
    shape = (target.vocabulary, target.hidden_size)
    own = directory.weight_files
    if EMBEDDING in own:
        embedding = read_checked(directory, EMBEDDING, shape, where)
    else:
        embedding = read_checked(target, TARGET_EMBEDDING, shape, where)
    if LM_HEAD in own:
        lm_head = read_lm_head(directory, LM_HEAD, shape, where)
    else:
        name = TARGET_EMBEDDING if target.tied else TARGET_LM_HEAD
        lm_head = read_lm_head(target, name, shape, where)
    return BlockDrafter(layers, layout, embedding, lm_head, where)


def read_layers(directory: ModelDirectory, placing: Placing | None = None) -> BlockLayers:
    """The drafter's own layers and norms.

    Without a ``placing`` they are float32 with the library's own linear layers, which can be
    trained.
    """
    config = Qwen3Config.from_dict(dict(directory.config))
    config._attn_implementation = LIBRARY
    with torch.device("meta"):
        layers = BlockLayers(config)
    where = placing if placing is not None else Placing()
    layers.body.rotary_emb = type(layers.body.rotary_emb)(config).to(where.device)
    if placing is not None:
        _place_linears(layers, directory, placing)
    for name, parameter in list(layers.named_parameters()):
        module, _, leaf = name.rpartition(".")
        stored = name.removeprefix("body.")
        value = read_checked(directory, stored, tuple(parameter.shape), where)
        parameter = torch.nn.Parameter(value, requires_grad=False)
        setattr(layers.get_submodule(module), leaf, parameter)
    return layers.eval()


def _place_linears(layers: BlockLayers, directory: ModelDirectory, placing: Placing) -> None:
    """Replace the linear layers by kernels', with their biases."""
    found = [
        (name, module)
        for name, module in layers.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    for name, module in found:
        stored = name.removeprefix("body.")
        shape = (module.out_features, module.in_features)
        linear = read_linear(directory, f"{stored}.weight", shape, placing)
        if module.bias is not None:
            linear.bias = read_checked(directory, f"{stored}.bias", shape[:1], placing)
        owner, _, leaf = name.rpartition(".")
        setattr(layers.get_submodule(owner), leaf, linear)
