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
from typing import Any, Protocol

import torch
from transformers import LlamaConfig, LlamaModel

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import StateError
from flowspec.model import lean
from flowspec.model.arrays import to_tensor
from flowspec.model.attention import EXACT, EXACT_DEVICES, bias_of
from flowspec.model.base import RowArray
from flowspec.model.directory import ModelDirectory
from flowspec.model.draft_vocabulary import DraftVocabulary
from flowspec.model.drafter import propose
from flowspec.model.drafter_weights import checked_entry, read_checked
from flowspec.model.head_layout import check_head
from flowspec.model.joined import Stack, grouped, parts_of
from flowspec.model.kv import TreeCache
from flowspec.model.lean import LeanLayers
from flowspec.model.linear import KernelLinear, load_linear
from flowspec.model.masks import full_mask
from flowspec.model.placing import Placing
from flowspec.model.rows import Placement
from flowspec.model.stored_weight import StoredWeight

_FC_BIAS = "fc.bias"
_EMBEDDING = "embed_tokens.weight"
_FIRST_NORM = "layers.0.input_layernorm.weight"
_OUTPUT_BIAS = ".self_attn.o_proj.bias"


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
        """The rows' predicted features, ``[batch, rows, hidden]``.

        ``embedded`` (the rows' tokens) and ``features`` (their parents') have that shape too.
        ``mask`` is boolean ``[1, 1, rows, slots]``, ``positions`` is ``[1, rows]``. The rows' keys
        and values are appended to ``cache``, a ``transformers`` cache.
        """
        entering = self.fc(torch.cat((embedded, features), dim=-1))
        if self.config._attn_implementation == EXACT:
            shared = self.config.num_attention_heads // self.config.num_key_value_heads
            mask = bias_of(mask[0, 0].numpy(), shared, mask.device)
        if self.lean is not None:
            return self.lean.run(entering[0], positions[0].tolist(), mask, cache).unsqueeze(0)
        output = self.body(
            inputs_embeds=entering,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        predicted: torch.Tensor = output.last_hidden_state
        return predicted

    def new_cache(
        self, capacity: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> TreeCache:
        """KV rows for one job."""
        return head_cache(self.config, capacity, dtype, device)


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

    def __call__(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
    ) -> Any:
        """As ``EagleHead.forward``."""
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

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        cache = self._head.new_cache(capacity, self._placing.rows, self._placing.device)
        self._runs[run] = _HeadState(cache, sampling)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

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

    @torch.inference_mode()
    def run(self, work: Draft) -> DraftDone:
        """As ``DraftExecutor.run``; StateError if a parent has no feature at all.

        A row whose parent's feature is predicted in the same pass needs it first, so the pass is
        computed in waves.
        """
        part = work.part
        state = self._runs[part.run]
        placement = state.cache.begin_pass(part)
        outputs = []
        at = 0
        while at < len(part.ids):
            end = self._wave_end(part, state, at)
            outputs.append(self._wave(part, placement, state, range(at, end)))
            at = end
        if part.context:
            state.settle(part.ids[part.context - 1])
        if not part.answers:
            return DraftDone((), ())
        logits = self._lm_head(torch.cat(outputs)[list(part.answers)])
        return self._propose(logits, work, state.sampling)

    @staticmethod
    def _wave_end(part: Part, state: _HeadState, first: int) -> int:
        """The end of the wave from row ``first``: no row in it needs a feature predicted in it."""
        waiting: set[int] = set()
        for row in range(first, len(part.ids)):
            if part.parents[row] in waiting:
                return row
            if part.ids[row] not in state.true:  # a prediction kept from earlier is outdated
                waiting.add(part.ids[row])
        return len(part.ids)

    def _wave(
        self, part: Part, placement: Placement, state: _HeadState, rows: range
    ) -> torch.Tensor:
        """Predicted features of ``rows`` of the part, ``[rows, hidden]``."""
        slot = placement.held + rows.start
        state.cache.carry_out(None, slot)
        tree_rows = placement.held - placement.context + rows.stop
        mask = full_mask(placement.context, placement.parents[:tree_rows], len(rows))
        mask[0 if slot else 1 :, 0] = False
        parents = part.parents[rows.start : rows.stop]
        features = torch.stack([self._parent_feature(state, parent) for parent in parents])
        tokens = list(part.tokens[rows.start : rows.stop])
        predicted: torch.Tensor = self._head(
            self._embedding[tokens].unsqueeze(0),
            features.unsqueeze(0),
            torch.from_numpy(mask)[None, None].to(self._placing.device),
            torch.tensor(
                part.positions[rows.start : rows.stop], device=self._placing.device
            ).unsqueeze(0),
            state.cache,
        )[0]
        state.predicted.update(zip(part.ids[rows.start : rows.stop], predicted, strict=True))
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
    check_head(directory, target)
    names = directory.weight_files
    config = LlamaConfig.from_dict(
        {**directory.config, "attention_bias": "layers.0.self_attn.q_proj.bias" in names}
    )
    exact = placing is not None and where.device.type in EXACT_DEVICES
    config._attn_implementation = EXACT if exact else "sdpa"
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
    if exact and lean.has_short_path(head.body, where.device):
        head.lean = _short_path(head, where)
    return head


@torch.inference_mode()
def _short_path(head: EagleHead, placing: Placing) -> LeanLayers | None:
    """The short path through the head's layers; None: it does not give the library's bits."""
    source = torch.Generator().manual_seed(head.config.hidden_size)
    short = LeanLayers(head.body)
    counts = lean.TESTED
    found: list[list[torch.Tensor]] = []
    given = [
        torch.randn((2, 1, count, head.config.hidden_size), generator=source).to(placing.rows)
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
            places = torch.arange(begin, begin + count).unsqueeze(0)
            rows.append(head(embedded, features, mask[None, None], places, cache))
            begin += count
        found.append([*rows, cache.storage])
    head.lean = None
    return short if all(map(torch.equal, *found)) else None


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
