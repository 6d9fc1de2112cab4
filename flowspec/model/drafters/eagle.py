"""An EAGLE-1/2 head as drafter: one decoder layer that predicts the target's next feature.

A *feature* is a hidden row of the target after its final norm. For node u with token x and parent
v, the head's own decoder layer maps ``fc([embed(x); feature(v)])`` to the predicted feature of u,
and the target's LM head turns that into proposals. ``feature(v)`` is the target's row once it was
learnt, and the head's prediction until then.

Source: arXiv 2401.15077 and 2406.16858; docs/algorithms.md#draft-heads. The weight layout is that
of the authors' published heads. Positions are the tokens' own; the authors count from the second
token, which is equivalent because rotary embeddings depend on distances only. The authors' first
token has no row, as it has no parent; here it has one, but no other row attends to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaModel

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Kept, Part, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import StateError
from flowspec.model.base import RowArray
from flowspec.model.drafters.draft_vocabulary import DraftVocabulary
from flowspec.model.drafters.drafter_weights import checked_entry, read_checked
from flowspec.model.drafters.eagle_layout import check_eagle
from flowspec.model.drafters.language_model import propose
from flowspec.model.layers import lean
from flowspec.model.layers.joined import Stack, grouped, parts_of
from flowspec.model.layers.lean import LeanLayers
from flowspec.model.layers.linear import KernelLinear, load_linear
from flowspec.model.layers.placing import Placing
from flowspec.model.rows.arrays import joined, split, taken, to_tensor
from flowspec.model.rows.attention import EXACT, EXACT_DEVICES, LIBRARY, bias_of
from flowspec.model.rows.kept_rows import KeptRows
from flowspec.model.rows.kv import CACHE, CopiedRows, TreeCache
from flowspec.model.rows.masks import full_mask
from flowspec.model.rows.placement import Placement
from flowspec.model.rows.ragged import for_layers
from flowspec.model.rows.several import each_of
from flowspec.model.weights.directory import ModelDirectory
from flowspec.model.weights.stored_weight import StoredWeight

_FC_BIAS = "fc.bias"
_EMBEDDING = "embed_tokens.weight"
_FIRST_NORM = "layers.0.input_layernorm.weight"
_OUTPUT_BIAS = ".self_attn.o_proj.bias"

T = TypeVar("T")


class EagleHead(torch.nn.Module):
    """``fc`` and the decoder layers, without the target's embedding and LM head.

    ``input_norm``: the first layer has an input norm (the authors' heads have none). ``bias``:
    ``fc`` has a bias. ``lean``: the short path through its layers, if a drafter has one.
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
        self.lean: LeanLayers | None = None
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
        """The rows' predicted features, ``[batch, rows, hidden]``, by the library's layers.

        ``embedded`` (the rows' tokens) and ``features`` (their parents') have that shape too.
        ``mask`` is ``[1, 1, rows, slots]``, as the attention takes it; ``positions`` is ``[1,
        rows]``. The rows' keys and values are appended to ``cache``, a ``transformers`` cache.
        """
        entering = self.fc(torch.cat((embedded, features), dim=-1))
        return self._by_library(entering, positions, **{CACHE: cache}, attention_mask=mask)

    def run(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        masks: Sequence[torch.Tensor],
        positions: Sequence[int],
        caches: Sequence[TreeCache],
    ) -> torch.Tensor:
        """As ``FeatureHead.run``."""
        entering = self.fc(torch.cat((embedded, features), dim=-1))
        counts = [len(mask) for mask in masks]
        given = masks_for(self.config, masks, self.lean)
        if self.lean is not None:
            return self.lean.run(entering, positions, counts, given, caches)
        places = torch.tensor([positions], device=entering.device)
        return self._by_library(entering[None], places, **for_layers(caches, counts, given))[0]

    def _by_library(
        self, entering: torch.Tensor, positions: torch.Tensor, **more: Any
    ) -> torch.Tensor:
        output = self.body(inputs_embeds=entering, position_ids=positions, use_cache=True, **more)
        predicted: torch.Tensor = output.last_hidden_state
        return predicted

    def new_cache(
        self, capacity: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> TreeCache:
        """KV rows for one job."""
        return head_cache(self.config, capacity, dtype, device)


def set_attention(config: LlamaConfig, placing: Placing | None) -> None:
    """Make ``config`` that of a head in ``placing``; None: of one that is trained."""
    exact = placing is not None and placing.device.type in EXACT_DEVICES
    config._attn_implementation = EXACT if exact else LIBRARY


def masks_for(
    config: LlamaConfig, masks: Sequence[torch.Tensor], short: LeanLayers | None
) -> list[torch.Tensor]:
    """``masks``, boolean, ``[rows, slots]``, as the attention of ``config`` takes them.

    ``short``: that of the short path, if there is one.
    """
    if config._attn_implementation != EXACT:
        return [mask[None, None] for mask in masks]
    times = lean.bias_copies(short, config.num_attention_heads // config.num_key_value_heads)
    return [bias_of(mask.numpy(), times, mask.device) for mask in masks]


def head_cache(
    config: LlamaConfig, capacity: int, dtype: torch.dtype, device: torch.device | None
) -> TreeCache:
    """KV rows of one job for a head whose decoder layers have this ``config``."""
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    heads = config.num_key_value_heads or config.num_attention_heads
    return TreeCache.allocate(config.num_hidden_layers, heads, capacity, head_dim, dtype, device)


class FeatureHead(Protocol):
    """A head that ``EagleDrafter`` can run: a module over embeddings and features.

    ``config``: of its decoder layers.
    """

    config: LlamaConfig

    def eval(self) -> Any: ...

    def modules(self) -> Iterator[torch.nn.Module]: ...

    def new_cache(
        self, capacity: int, dtype: torch.dtype, device: torch.device | None
    ) -> TreeCache: ...

    def run(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        masks: Sequence[torch.Tensor],
        positions: Sequence[int],
        caches: Sequence[TreeCache],
    ) -> torch.Tensor:
        """Predicted features of the rows of one or several jobs, one's behind another's.

        They, ``embedded`` (the rows' tokens) and ``features`` (their parents') are ``[rows,
        hidden]``. ``masks``: boolean, ``[rows, slots]`` of each job. The rows' keys and values are
        appended to its cache.
        """
        ...


class _HeadState:
    """KV rows of one job, and its features by node id: the target's and the head's."""

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
        """Make ``tip`` the last context row and drop the features of rows before it.

        Ids only grow, so no further row has a parent before ``tip``.
        """
        self.tip = tip
        for store in (self.true, self.predicted):
            for node in [node for node in store if node < tip]:
                del store[node]


class _PlacedFeatures(NamedTuple):
    """A draft, its job's rows and features, and the places of its rows."""

    work: Draft
    state: _HeadState
    placement: Placement

    @property
    def part(self) -> Part:
        return self.work.part


class _Wave(NamedTuple):
    """The ``rows`` of a draft that are computed at once."""

    placed: _PlacedFeatures
    rows: range

    def of(self, column: Sequence[T]) -> Sequence[T]:
        """The wave's part of a column of the draft's rows."""
        return column[self.rows.start : self.rows.stop]


class EagleDrafter:
    """Proposes the LM head's best tokens for predicted features; values as ``ModelDrafter``'s.

    ``embedding`` is ``[vocabulary, hidden]``; ``lm_head`` maps the head's rows to logits over
    ``vocabulary``, None: the target's.
    """

    wants_hidden = True

    def __init__(
        self,
        head: FeatureHead,
        embedding: torch.Tensor,
        lm_head: Callable[[torch.Tensor], torch.Tensor],
        placing: Placing,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self._head: FeatureHead = head.eval()
        self._propose = propose if vocabulary is None else vocabulary.propose
        self._embedding = embedding
        self._lm_head = lm_head
        self._placing = placing
        self._zero = torch.zeros(head.config.hidden_size, dtype=placing.rows, device=placing.device)
        self._runs: dict[RunKey, _HeadState] = {}
        self._kept: KeptRows[CopiedRows] = KeptRows()
        self.evict = self._kept.evict

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        cache = self._head.new_cache(capacity, self._placing.rows, self._placing.device)
        self._runs[run] = _HeadState(cache, sampling)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        """See ``KeepsRows``; so too below. Features are not kept."""
        (wanted,) = caches
        self._kept.keep(run, self._runs[run].cache, wanted)

    def resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        (rows,) = held
        state = self._runs[run]
        self._kept.resume(state.cache, source, rows)
        state.settle(rows - 1)  # a prompt row's id is its position

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        """See ``DraftExecutor.learn``; StateError if ``rows`` is not ``[ids, hidden]``."""
        state = self._runs[run]
        if rows.shape != (len(ids), *self._zero.shape):
            raise StateError(
                f"{len(ids)} nodes came with features of shape {rows.shape}; hidden is "
                f"{len(self._zero)}"
            )
        features = to_tensor(rows, self._placing.rows, self._placing.device)
        state.true.update(
            (node, row) for node, row in zip(ids, features, strict=True) if node >= state.tip
        )

    def facts(self) -> dict[str, object]:
        """What it runs on: precision, device and kernels."""
        linears = [m for m in self._head.modules() if isinstance(m, KernelLinear)]
        return {
            "precision": self._placing.precision,
            "device": str(self._placing.device),
            "kernels": list(dict.fromkeys(linear.kernel for linear in linears)),
        }

    def run(self, work: Draft) -> DraftDone:
        """As ``DraftExecutor.run``; StateError if a parent has no feature at all."""
        (found,) = self._compute([self._place(work)])
        return found

    def run_together(self, works: Sequence[Draft]) -> list[DraftDone | WorkFailed]:
        device = self._placing.device
        return each_of(works, self._place, self._compute, joins=True, device=device)

    def _place(self, work: Draft) -> _PlacedFeatures:
        state = self._runs[work.part.run]
        return _PlacedFeatures(work, state, state.cache.begin_pass(work.part))

    @torch.inference_mode()
    def _compute(self, placed: Sequence[_PlacedFeatures]) -> list[DraftDone]:
        """The proposals of every draft, the rows of all computed together.

        A row whose parent's feature is predicted in the same pass needs it first, so the pass is
        computed in waves.
        """
        outputs: list[list[torch.Tensor]] = [[] for _ in placed]
        begins = [0] * len(placed)
        while waiting := [at for at, one in enumerate(placed) if begins[at] < len(one.part.ids)]:
            wave = [_Wave(placed[at], _next_wave(placed[at], begins[at])) for at in waiting]
            for at, part, rows in zip(waiting, wave, self._predict(wave), strict=True):
                outputs[at].append(rows)
                begins[at] = part.rows.stop
        found = self._proposals(placed, outputs)
        for one in placed:
            if one.part.context:
                one.state.settle(one.part.ids[one.part.context - 1])
        return found

    def _proposals(
        self, placed: Sequence[_PlacedFeatures], outputs: Sequence[Sequence[torch.Tensor]]
    ) -> list[DraftDone]:
        asked = [
            taken(joined(rows), one.part.answers)
            for one, rows in zip(placed, outputs, strict=True)
            if one.part.answers
        ]
        if not asked:
            return [DraftDone((), ()) for _ in placed]
        counts = [len(one.part.answers) for one in placed if one.part.answers]
        logits = iter(split(self._lm_head(joined(asked)), counts))
        return [
            self._propose(next(logits), one.work, one.state.sampling)
            if one.part.answers
            else DraftDone((), ())
            for one in placed
        ]

    def _predict(self, wave: Sequence[_Wave]) -> Sequence[torch.Tensor]:
        """Predicted features of the rows of ``wave``, ``[rows, hidden]`` of each job."""
        device = self._placing.device
        masks = [torch.from_numpy(_prepare(one)).to(device) for one in wave]
        tokens = [token for one in wave for token in one.of(one.placed.part.tokens)]
        positions = [place for one in wave for place in one.of(one.placed.part.positions)]
        features = torch.stack(
            [
                self._parent_feature(one.placed.state, parent)
                for one in wave
                for parent in one.of(one.placed.part.parents)
            ]
        )
        embedded = self._embedding[tokens]
        caches = [one.placed.state.cache for one in wave]
        predicted = self._head.run(embedded, features, masks, positions, caches)
        found = split(predicted, [len(one.rows) for one in wave])
        for one, rows in zip(wave, found, strict=True):
            one.placed.state.predicted.update(zip(one.of(one.placed.part.ids), rows, strict=True))
        return found

    def _parent_feature(self, state: _HeadState, parent: int) -> torch.Tensor:
        if parent < 0:
            return self._zero
        feature = state.feature(parent)
        if feature is None:
            raise StateError(
                f"node {parent} has no feature: its row was neither learnt nor computed"
            )
        return feature


def _next_wave(placed: _PlacedFeatures, first: int) -> range:
    """The wave from row ``first``: no row in it needs a feature predicted in it."""
    part = placed.part
    waiting: set[int] = set()
    for row in range(first, len(part.ids)):
        if part.parents[row] in waiting:
            return range(first, row)
        if part.ids[row] not in placed.state.true:  # a prediction kept from earlier is outdated
            waiting.add(part.ids[row])
    return range(first, len(part.ids))


def _prepare(wave: _Wave) -> npt.NDArray[np.bool_]:
    """Make room for the wave's rows; their mask, ``[rows, slots]``."""
    placement = wave.placed.placement
    slot = placement.held + wave.rows.start
    wave.placed.state.cache.carry_out(None, slot)
    tree_rows = placement.held - placement.context + wave.rows.stop
    mask = full_mask(placement.context, placement.parents[:tree_rows], len(wave.rows))
    mask[0 if slot else 1 :, 0] = False
    return mask


def load_head(
    directory: ModelDirectory, target: ModelDirectory, placing: Placing | None = None
) -> EagleDrafter:
    """Load the head in ``directory`` as a drafter for ``target``.

    Only the target's embedding and LM head are read. ModelError if ``directory`` is not a head,
    fits another target, or is incomplete.
    """
    where = placing if placing is not None else Placing()
    head = read_head(directory, target, where)
    shape = (target.vocabulary, target.hidden_size)
    stored = "model.embed_tokens.weight"
    if _EMBEDDING in directory.weight_files:
        embedding = read_checked(directory, _EMBEDDING, shape, where)
    else:
        embedding = read_checked(target, stored, shape, where)
    name = stored if target.tied else "lm_head.weight"
    checked_entry(target, name, shape)
    lm_head = load_linear(StoredWeight(target, name), where.head, where.head_rows, where.device)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = lm_head(rows.to(where.head_rows))
        return found

    return EagleDrafter(head, embedding, logits, where)


def read_head(
    directory: ModelDirectory, target: ModelDirectory, placing: Placing | None = None
) -> EagleHead:
    """The head's own layers in ``directory``; errors as ``load_head``'s.

    Without a ``placing`` they are float32 with the library's own linear layers, which can be
    trained.
    """
    where = placing if placing is not None else Placing()
    check_eagle(directory, target)
    names = directory.weight_files
    config = LlamaConfig.from_dict(
        {**directory.config, "attention_bias": "layers.0.self_attn.q_proj.bias" in names}
    )
    set_attention(config, placing)
    with torch.device("meta"):
        head = EagleHead(config, bias=_FC_BIAS in names, input_norm=_FIRST_NORM in names)
    head.body.rotary_emb = type(head.body.rotary_emb)(config).to(where.device)
    if placing is not None:
        _place_linears(head, directory, placing)
    for name, parameter in list(head.named_parameters()):
        stored = name.removeprefix("body.")
        module, _, leaf = name.rpartition(".")
        value = None
        if stored in names or not stored.endswith(_OUTPUT_BIAS):
            value = torch.nn.Parameter(
                read_checked(directory, stored, tuple(parameter.shape), where), requires_grad=False
            )
        setattr(head.get_submodule(module), leaf, value)
    head.eval()
    shorten(head, head.body, where)
    return head


def shorten(head: Any, body: Any, placing: Placing) -> None:
    """Give ``head``, whose layers are ``body``'s, the short path through them if it is equal."""
    if lean.has_short_path(body, placing.device):
        head.lean = lean.first_equal(body, None, partial(_equal, head, placing))


@torch.inference_mode()
def _equal(head: Any, placing: Placing, short: LeanLayers) -> bool:
    """Whether the short path through the head's layers gives the library's bits."""
    source = torch.Generator().manual_seed(head.config.hidden_size)
    counts = lean.TESTED
    found: list[list[torch.Tensor]] = []
    given = [
        torch.randn((2, count, head.config.hidden_size), generator=source).to(placing.rows)
        for count in counts
    ]
    for path in (None, short):
        head.lean = path
        cache = head.new_cache(sum(counts), placing.rows, placing.device)
        rows = []
        begin = 0
        for count, (embedded, features) in zip(counts, given, strict=True):
            cache.carry_out(None, begin)
            mask = torch.ones((count, begin + count), dtype=torch.bool).tril(begin)
            places = range(begin, begin + count)
            rows.append(head.run(embedded, features, [mask], places, [cache]))
            begin += count
        found.append([*rows, cache.storage])
    head.lean = None
    return all(map(torch.equal, *found))


def _place_linears(head: EagleHead, directory: ModelDirectory, placing: Placing) -> None:
    """Replace the head's linear layers by kernels', with their biases where they are stored."""
    linears = {
        name: module for name, module in head.named_modules() if isinstance(module, torch.nn.Linear)
    }
    groups: list[tuple[str, ...]] = [(name,) for name in linears]
    if lean.has_short_path(head.body, placing.device):
        groups = grouped(linears, placing.precision, placing.rows, placing.device)
    for group in groups:
        weights = []
        biases = []
        for name in group:
            module = linears[name]
            stored = name.removeprefix("body.")
            checked_entry(directory, f"{stored}.weight", (module.out_features, module.in_features))
            weights.append(StoredWeight(directory, f"{stored}.weight"))
            bias = f"{stored}.bias"
            if module.bias is not None and (
                bias in directory.weight_files or not bias.endswith(_OUTPUT_BIAS)
            ):
                biases.append(read_checked(directory, bias, (module.out_features,), placing))
        whole = load_linear(Stack(weights), placing.precision, placing.rows, placing.device)
        if biases:
            whole.bias = torch.cat(biases)
        members: list[torch.nn.Module] = [whole]
        if len(group) > 1:
            members = [*parts_of(whole, [linears[name].out_features for name in group])]
        for name, member in zip(group, members, strict=True):
            owner, _, leaf = name.rpartition(".")
            setattr(head.get_submodule(owner), leaf, member)
