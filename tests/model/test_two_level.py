"""Two-level attention against the plain one: equal rows through growth, prunes and misses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.messages import Open, Prune, Segment
from flowspec.core.protocol.work import Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_run import StageRun, rows_of
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import ModelError, StateError
from flowspec.model.drafters.drafter import load_drafter
from flowspec.model.layers.block import LayerBlock
from flowspec.model.rows.attention import bias_of
from flowspec.model.rows.kv import TreeCache
from flowspec.model.rows.rows import Moves, Placement, two_level
from flowspec.model.rows.two_level import TREE_ROWS, TwoLevelCache, two_level_attention
from flowspec.model.stage import load_stage
from flowspec.model.weights.directory import ModelDirectory, layer_ranges
from flowspec.rehearse.simulator import Simulation
from flowspec.strategies import build
from tests.marks import crossed, examples
from tests.model.families import COMMON

Family = Callable[..., ModelDirectory]
RUN = RunKey("j", 1)
SERVED = ("llama", "llama3-rope-tied", "qwen2", "qwen3")
VOCABULARY = COMMON["vocab_size"]
CAPACITY = 200


class Story:
    """A stage's log of one random run: a prompt in chunks, segments, hits and misses.

    A segment may enter the log after the next prune, so that a stage gets dead rows.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.length = int(self.rng.integers(2, 30))
        self.tokens = self.rng.integers(2, VOCABULARY, self.length).tolist()
        self.parents = list(range(-1, self.length - 1))
        self.root = self.length - 1
        self.context = self.root
        self.alive = {self.root}
        self.computed = {self.root}  # not pruned: written, and met by the stage

    def line(self, node: int) -> list[int]:
        """Ids from the prompt's first row to ``node``."""
        return [*self.line(self.parents[node]), node] if node >= 0 else []

    def events(self, steps: int) -> Iterator[Segment | Prune]:
        cuts = self.rng.choice(
            np.arange(1, self.length), size=min(2, self.length - 1), replace=False
        )
        for chunk in np.split(np.arange(self.length), sorted(cuts)):
            yield self.segment(chunk.tolist())
        late: list[int] = []
        for _ in range(steps):
            nodes = self.grow()
            if not late and self.root in self.computed and self.rng.random() < 0.3:
                late = nodes
            else:
                self.computed |= set(nodes)
                yield self.segment(nodes)
            if self.root in self.computed and self.rng.random() < 0.6:
                yield self.commit()
                if late:
                    self.computed |= self.alive & set(late)
                    yield self.segment(late)
                    late = []

    def segment(self, ids: Sequence[int]) -> Segment:
        rows = [
            (node, self.parents[node], len(self.line(node)) - 1, self.tokens[node]) for node in ids
        ]
        return Segment(RUN, 0, 1, *zip(*rows, strict=True))

    def add(self, parent: int) -> int:
        self.parents.append(parent)
        self.tokens.append(int(self.rng.integers(2, VOCABULARY)))
        return len(self.tokens) - 1

    def grow(self) -> list[int]:
        """After a miss a new root, and children of nodes that a segment may build on."""
        nodes = [] if self.root in self.alive else [self.root]
        for _ in range(int(self.rng.integers(0 if nodes else 1, 6))):
            nodes.append(self.add(int(self.rng.choice(sorted({*self.computed, *nodes})))))
        self.alive |= set(nodes)
        return nodes

    def commit(self) -> Prune:
        """Accept a random computed path; continue at a computed child of its end, or miss."""
        last = int(self.rng.choice(sorted(self.computed)))
        accepted = [node for node in self.line(last) if node >= self.root]
        children = [node for node in self.computed if self.parents[node] == last]
        if children and self.rng.random() < 0.7:
            self.root = int(self.rng.choice(children))
            self.alive = {node for node in self.alive if self.root in self.line(node)}
        else:
            self.root = self.add(last)
            self.alive = set()
        self.computed &= self.alive
        prune = Prune(
            RUN,
            self.context,
            tuple(accepted),
            self.root,
            tuple(sorted(self.alive - {self.root})),
        )
        self.context += len(accepted)
        return prune

    def run(self) -> StageRun:
        return StageRun(1, Open(RUN, self.length, CAPACITY, Sampling()), last=True)


def next_part(run: StageRun, event: Segment | Prune) -> Part | None:
    """The rows of ``event`` that a stage computes, if any."""
    if isinstance(event, Prune):
        run.prune(event)
        return None
    kept = run.live_part(event)
    return run.begin_pass(rows_of(event, kept), kept) if kept else None


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=examples(150))
def test_both_levels_together_hold_what_one_store_holds(seed: int) -> None:
    """Per row, over all layers: the model cache holds the context, the tree cache the rest."""
    story = Story(seed)
    linear = TreeCache.allocate(2, 3, CAPACITY, 4, torch.float32)
    levels = TwoLevelCache.allocate(2, 3, CAPACITY, 4, torch.float32)
    assert levels.model.is_contiguous()
    rows = torch.Generator().manual_seed(seed)
    run = story.run()
    for event in story.events(12):
        part = next_part(run, event)
        if part is None:
            continue
        placement = linear.begin_pass(part)
        assert levels.begin_pass(part) == placement
        context = placement.context
        held = placement.held
        above = held - context
        assert levels.context == context
        assert torch.equal(levels.model[..., :context, :], linear.storage[..., :context, :])
        assert torch.equal(
            levels.tree.storage[..., :above, :], linear.storage[..., context:held, :]
        )
        for one, two in zip(linear.layers, levels.tree.layers, strict=True):
            keys, values = torch.randn(2, 1, 3, len(part.ids), 4, generator=rows)
            one.update(keys, values)
            assert two.update(keys, values)[0].shape[2] == above + len(part.ids)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(("context", "tree", "rows"), [(0, 5, 5), (9, 7, 3), (30, 1, 1)])
def test_one_softmax_over_both_parts(
    heads: int, key_heads: int, context: int, tree: int, rows: int
) -> None:
    """Against the library's kernel on one store with one mask, with large scores of either sign."""
    generator = torch.Generator().manual_seed(heads + context)
    cache = TwoLevelCache.allocate(2, key_heads, 64, 8, torch.float32)
    cache.model.copy_(torch.randn(cache.model.shape, generator=generator) * 4)
    cache.context = context
    query = torch.randn(1, heads, rows, 8, generator=generator) * 4
    keys, values = torch.randn(2, 1, key_heads, tree, 8, generator=generator) * 4
    mask = torch.rand(1, 1, rows, tree, generator=generator) < 0.5
    mask[..., tree - rows :] |= torch.eye(rows, dtype=torch.bool)
    layer = torch.nn.Module()
    layer.layer_idx = 1  # type: ignore[assignment]
    bias = bias_of(mask[0, 0].numpy(), heads // key_heads, torch.device("cpu"))
    output, _ = two_level_attention(layer, query, keys, values, bias, scaling=0.3, two_level=cache)
    past = cache.model[1, :, :, :, :context]
    rows_of_all = torch.cat((past, torch.stack((keys, values))), dim=3).repeat_interleave(
        heads // key_heads, dim=2
    )
    seen = torch.nn.functional.pad(mask, (context, 0), value=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, *rows_of_all, attn_mask=seen, scale=0.3
    )
    assert torch.allclose(output, expected.transpose(1, 2), atol=1e-5)


class Stages:
    """Two stages under both attentions, given the same passes; no prunes between the two."""

    def __init__(self, directory: ModelDirectory, story: Story) -> None:
        self.run = story.run()
        self.blocks = {}
        for name in ("plain", "two-level"):
            first = LayerBlock(directory, range(3), first=True, last=False, attention=name)
            last = LayerBlock(directory, range(3, 6), first=False, last=True, attention=name)
            self.blocks[name] = (first, first.new_cache(CAPACITY), last, last.new_cache(CAPACITY))

    def feed(self, event: Segment | Prune) -> tuple[tuple[int, ...], dict[str, list[np.ndarray]]]:
        """Run a pass; ids computed and, by attention, the rows of both stages and the logits."""
        part = next_part(self.run, event)
        if part is None:
            return (), {}
        onward = replace(part, tokens=(), offsets=tuple(range(len(part.ids))))
        outputs = {}
        for name, (first, first_cache, last, last_cache) in self.blocks.items():
            middle = first.run(part, None, first_cache).numpy()
            hidden = last.run(onward, middle, last_cache)
            outputs[name] = [middle, hidden.numpy(), last.logits(hidden).numpy()]
        return part.ids, outputs


@pytest.mark.parametrize(("name", "seed"), crossed(SERVED, range(6), keep=3))
def test_rows_and_choices_are_those_of_plain_attention(
    family: Family, name: str, seed: int
) -> None:
    story = Story(seed)
    stages = Stages(family(name), story)
    computed = 0
    for event in story.events(14):
        ids, outputs = stages.feed(event)
        if not ids:
            continue
        computed += len(ids)
        for plain, levels in zip(outputs["plain"], outputs["two-level"], strict=True):
            assert np.abs(plain - levels).max() < 1e-5
        assert (
            outputs["plain"][-1].argmax(-1).tolist() == outputs["two-level"][-1].argmax(-1).tolist()
        )
    assert computed > story.length + 10


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_row_sees_its_ancestors_alone(family: Family, name: str) -> None:
    """Siblings and cousins in one segment, then a lone row beside live cousins.

    The whole model gets each row's path only, so a row that saw more of the tree would differ.
    """
    directory = family(name)
    whole = AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.float32).eval()
    story = Story(3)
    stages = Stages(directory, story)

    def check(ids: Sequence[int], dead: Sequence[int] = ()) -> None:
        computed, outputs = stages.feed(story.segment([*dead, *ids]))
        assert computed == tuple(ids)
        for node, row in zip(ids, outputs["two-level"][-1], strict=True):
            tokens = torch.tensor([[story.tokens[above] for above in story.line(node)]])
            with torch.inference_mode():
                truth = whole(input_ids=tokens).logits[0, -1].numpy()
            assert np.abs(row - truth).max() < 1e-4, f"node {node}"

    check(range(story.length))
    children = [story.add(story.root) for _ in range(3)]
    cousins = [story.add(child) for child in children]
    check([*children, *cousins])
    stages.feed(Prune(RUN, story.context, (story.root,), children[1], (cousins[1],)))
    check([story.add(children[1]), story.add(cousins[1])])
    check([story.add(cousins[1])], dead=[story.add(cousins[0])])


def test_only_the_tree_is_masked(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's layers call the path once per pass each, with a mask as wide as the tree."""
    calls: list[tuple[int, tuple[int, ...]]] = []

    def spy(module: torch.nn.Module, *args: torch.Tensor, **named: object) -> object:
        calls.append((named["two_level"].context, tuple(args[3].shape)))  # type: ignore[attr-defined]
        return two_level_attention(module, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setitem(two_level.AttentionInterface._global_mapping, "flowspec_two_level", spy)
    block = LayerBlock(family("qwen2"), range(3), first=True, last=False, attention="two-level")
    cache = block.new_cache(64)
    rows = (0, 1, 2)
    block.run(Part(RUN, 0, rows, (-1, 0, 1), rows, (5, 6, 7), rows, context=2), None, cache)
    shared = 2  # heads of a key head, folded into rows
    assert calls == [(0, (1, 1, 3 * shared, 3))] * 3
    calls.clear()
    block.run(Part(RUN, 1, (3,), (2,), (3,), (8,), (0,)), None, cache)
    assert calls == [(2, (1, 1, shared, 2))] * 3


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    crossed(("pipedec", "flowspec"), (Sampling(), Sampling(1.0, seed=3))),
)
def test_a_pipeline_writes_the_same_text(family: Family, strategy: str, sampling: Sampling) -> None:
    """A prompt of several chunks; the drafter errs, so that prunes and misses occur."""
    target = family("llama")
    texts = []
    prompt = tuple(np.random.default_rng(2).integers(2, VOCABULARY, 90).tolist())
    for attention in ("plain", "two-level"):
        limits = Limits(2, target.context, target.vocabulary, target.eos)
        drafter = load_drafter(family("llama", seed=9))
        nodes: dict[Address, tuple[object, object]] = {
            DRAFT: (DraftMachine(limits, build), drafter)
        }
        for stage, layers in enumerate(layer_ranges(target.layers, 2), start=1):
            nodes[stage_address(stage)] = (
                StageMachine(stage, 2),
                load_stage(target, layers, attention),
            )
        simulation = Simulation(nodes)  # type: ignore[arg-type]
        simulation.submit(
            "j",
            JobSpec(prompt_ids=prompt, max_new_tokens=30, strategy=strategy, sampling=sampling),
        )
        simulation.run()
        texts.append(tuple(simulation.jobs["j"].tokens))
    assert len(texts[0]) == 30
    assert texts[0] == texts[1]


def test_what_does_not_fit_or_does_not_continue_is_refused() -> None:
    cache = TwoLevelCache.allocate(1, 1, 8, 4, torch.float32)
    cache.carry_out(Placement(0, 0, None, ()), 8)
    with pytest.raises(
        StateError, match="9 rows above the context do not fit the tree cache, which has room for 8"
    ):
        cache.carry_out(Placement(3, 8, None, (-1,) * 9), 4)
    assert cache.context == 0
    cache.carry_out(Placement(3, 8, None, (-1,) * 8), 3)
    for context, held, moves in [(2, 4, None), (4, 8, Moves(5, (6,)))]:
        with pytest.raises(StateError, match="does not continue 3 rows"):
            cache.carry_out(Placement(context, held, moves, ()), 1)
    assert (
        TwoLevelCache.allocate(1, 1, 4 * TREE_ROWS, 4, torch.float32).tree.storage.shape[-2]
        == TREE_ROWS
    )


def test_what_cannot_be_served_is_refused(family: Family) -> None:
    for name, window in {"qwen2-sliding": 12, "mistral-sliding": 16}.items():
        with pytest.raises(ModelError, match=f"sliding window of {window} tokens; use plain"):
            load_stage(family(name), range(2), attention="two-level")
    with pytest.raises(
        ModelError, match="attention 'flash' is unknown; expected plain or two-level"
    ):
        load_stage(family("llama"), range(2), attention="flash")
