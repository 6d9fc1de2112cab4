"""The EAGLE drafter against a plain forward pass of the same head over whole paths."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaModel

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import ModelError, StateError
from flowspec.model.drafters.eagle import EagleHead, load_head, read_head
from flowspec.model.drafters.sources import check_sources, target_needs
from flowspec.model.layers import lean
from flowspec.model.layers.placing import Placing
from flowspec.model.reference import Reference
from flowspec.model.stage import load_stage
from flowspec.model.weights.directory import ModelDirectory, layer_ranges, open_directory
from flowspec.rehearse.simulator import Simulation
from flowspec.strategies import build
from tests.marks import crossed
from tests.model.heads import RUN, VOCABULARY, Bench, feed, predictions, random_tree
from tests.precisions import FOUR_BITS

Family = Callable[..., ModelDirectory]
HIDDEN = 64
#: Published layouts of heads: plain, and with all optional parts.
LAYOUTS = {
    "plain": {},
    "full": {"bias": True, "input_norm": True, "attention_bias": True, "embedding": True},
    "no output bias": {"attention_bias": True, "drop": ["layers.0.self_attn.o_proj.bias"]},
}


def save_head(
    folder: Path, *, hidden: int = HIDDEN, fc: int = 2, drop: Sequence[str] = (), **layout: bool
) -> ModelDirectory:
    """A random head in the authors' layout."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attention_bias=layout.get("attention_bias", False),
    )
    torch.manual_seed(3)
    head = EagleHead(
        config, bias=layout.get("bias", False), input_norm=layout.get("input_norm", False)
    )
    tensors = {}
    for name, value in head.named_parameters():
        fresh = torch.randn(value.shape)
        tensors[name.removeprefix("body.")] = 0.15 * fresh if value.ndim > 1 else 1 + 0.5 * fresh
    # Embeddings are small; features must not grow along a path, else rounding errors would.
    tensors["fc.weight"] *= torch.tensor([4.0, 0.3]).repeat_interleave(hidden)
    tensors["fc.weight"] = tensors["fc.weight"].repeat(1, fc)[:, : fc * hidden].contiguous()
    if layout.get("embedding"):
        tensors["embed_tokens.weight"] = torch.randn(VOCABULARY, hidden)
    folder.mkdir(exist_ok=True)
    save_file(
        {name: value for name, value in tensors.items() if name not in drop},
        folder / "model.safetensors",
    )
    told = {key: value for key, value in config.to_dict().items() if key != "attention_bias"}
    (folder / "config.json").write_text(json.dumps(told))
    return open_directory(str(folder))


class Plain:
    """The head as one causal sequence, by the library alone.

    Positions count from the second token, as in the authors' code.
    """

    hidden = HIDDEN
    tokens = VOCABULARY

    def __init__(self, head: ModelDirectory, target: ModelDirectory) -> None:
        weights = load_file(head.path / "model.safetensors")
        stored = {
            name: load_file(file)[name]
            for name, file in target.weight_files.items()
            if "layers" not in name
        }
        biased = "layers.0.self_attn.q_proj.bias" in weights
        model = LlamaModel(LlamaConfig.from_dict({**head.config, "attention_bias": biased})).eval()
        model.norm = torch.nn.Identity()
        model.embed_tokens = torch.nn.Identity()
        layer = {name: value for name, value in weights.items() if name.startswith("layers.")}
        if biased:
            layer.setdefault("layers.0.self_attn.o_proj.bias", torch.zeros(HIDDEN))
        if "layers.0.input_layernorm.weight" not in weights:
            model.layers[0].input_layernorm = torch.nn.Identity()
        model.load_state_dict(layer)
        self.model = model
        self.fc = weights["fc.weight"]
        self.bias = weights.get("fc.bias")
        self.embedding = weights.get("embed_tokens.weight", stored["model.embed_tokens.weight"])
        self.lm_head = stored.get("lm_head.weight", stored["model.embed_tokens.weight"])

    @torch.inference_mode()
    def last(self, tokens: Sequence[int], features: Sequence[torch.Tensor]) -> torch.Tensor:
        """The predicted feature of the last of ``tokens``; ``features``: their predecessors'."""
        pairs = torch.cat((self.embedding[list(tokens)], torch.stack(list(features))), dim=-1)
        rows = torch.nn.functional.linear(pairs, self.fc, self.bias)
        return self.model(inputs_embeds=rows[None]).last_hidden_state[0, -1]

    def scores(self, predicted: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(self.lm_head @ predicted, dim=-1)


@pytest.fixture
def make(family: Family, tmp_path: Path) -> Callable[..., Bench]:
    def bench(prompt: Sequence[int], layout: str = "plain", target: str = "llama") -> Bench:
        head = save_head(tmp_path / "head", **LAYOUTS[layout])  # type: ignore[arg-type]
        goal = family(target)
        return Bench(load_head(head, goal), Plain(head, goal), prompt)

    return bench


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("target", ["llama", "llama3-rope-tied"])
def test_true_features_give_the_plain_causal_pass(
    make: Callable[..., Bench], layout: str, target: str
) -> None:
    bench = make(range(5, 17), layout, target)
    bench.learn(*range(12))
    bench.check(range(7), ())
    bench.check(range(7, 11), [11])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", FOUR_BITS])
def test_the_short_path_gives_the_librarys_bits(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, dtype: str
) -> None:
    directory = save_head(tmp_path / "head", **LAYOUTS[layout])  # type: ignore[arg-type]
    placing = Placing(dtype)
    head = read_head(directory, family("llama"), placing)
    assert head.lean is not None
    found = predictions(head, placing.rows)
    head.lean = None
    monkeypatch.setenv(lean.VARIABLE, "library")
    separate = read_head(directory, family("llama"), placing)
    assert separate.lean is None
    for other in (head, separate):
        assert all(map(torch.equal, found, predictions(other, placing.rows)))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_prompts_draft(make: Callable[..., Bench], length: int) -> None:
    bench = make(range(20, 20 + length))
    if length > 1:
        bench.learn(*range(length - 1))
        bench.check(range(length - 1), ())
    bench.parent[length] = length - 1
    bench.token[length] = 40
    bench.check((), [length - 1, length])


@pytest.mark.parametrize("seed", range(8))
def test_any_tree_in_any_passes_equals_its_paths(make: Callable[..., Bench], seed: int) -> None:
    """Deep trees in one pass, branches, nodes learnt in between, prunes, refreshes."""
    rng = np.random.default_rng(seed)
    bench = make(rng.integers(VOCABULARY, size=9).tolist())
    bench.learn(*range(8))
    bench.check(range(8), ())
    root = 8
    fresh = 9
    for _ in range(5):
        held = [*bench.rows.tree]
        nodes = range(fresh, fresh + 14)
        random_tree(bench, rng, held or [root], nodes)
        feed(bench, rng, [*([] if held else [root]), *nodes])
        fresh = nodes.stop
        path = bench.path(int(rng.choice(nodes)))
        accepted = path[path.index(root) : -1]
        root = path[-1]
        if rng.random() < 0.5:
            bench.rows.prune(accepted, root)
            continue
        if rng.random() < 0.5:
            root = fresh
            fresh = fresh + 1
            bench.parent[root] = accepted[-1]
            bench.token[root] = int(rng.integers(VOCABULARY))
        bench.learn(*accepted)
        bench.rows.forget_tree(root)
        bench.check(accepted, ())


def test_one_pass_equals_one_row_at_a_time(make: Callable[..., Bench]) -> None:
    nodes = [8, *range(9, 30)]
    tokens = []
    values = []
    for size in (len(nodes), 1):
        bench = make(range(9))
        random_tree(bench, np.random.default_rng(7), [8], nodes[1:])
        bench.learn(*range(8))
        bench.run(range(8), ())
        passes = [bench.run((), nodes[at : at + size], 5) for at in range(0, len(nodes), size)]
        tokens.append([row for done in passes for row in done.tokens])
        values.append(np.array([row for done in passes for row in done.values]))
    assert tokens[0] == tokens[1]
    assert np.abs(values[0] - values[1]).max() < 1e-4


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    crossed(["flowspec", "static_tree", "naive_pp"], [Sampling(), Sampling(1.0, seed=4)]),
)
def test_text_drafted_by_a_head_is_that_of_plain_decoding(
    family: Family, tmp_path: Path, strategy: str, sampling: Sampling
) -> None:
    """The last stage's rows reach the head, and the text is the target's own."""
    target = family("llama")
    prompt = tuple(range(30, 47))
    limits = Limits(2, target.context, target.vocabulary, target.eos, hidden=True)
    nodes: dict[Address, tuple[object, object]] = {
        DRAFT: (DraftMachine(limits, build), load_head(save_head(tmp_path), target))
    }
    for stage, layers in enumerate(layer_ranges(target.layers, 2), start=1):
        nodes[stage_address(stage)] = (StageMachine(stage, 2), load_stage(target, layers))
    simulation = Simulation(nodes)  # type: ignore[arg-type]
    simulation.submit(
        "j",
        JobSpec(prompt_ids=prompt, max_new_tokens=24, strategy=strategy, sampling=sampling),
    )
    simulation.run()
    assert tuple(simulation.jobs["j"].tokens) == Reference(target).decode(prompt, 24, sampling)


def test_what_is_remembered_is_bounded(make: Callable[..., Bench]) -> None:
    bench = make(range(9))
    bench.learn(*range(9))
    bench.check(range(9), ())
    above = 8
    for first in range(9, 249, 6):
        bench.parent[first] = above
        bench.token[first] = 7
        bench.rows.forget_tree(first)
        random_tree(bench, np.random.default_rng(first), [first], range(first + 1, first + 6))
        bench.run((), range(first, first + 6))
        bench.learn(*range(first, first + 6))
        bench.rows.forget_tree(first + 6)
        bench.run([first], ())
        above = first
    state = bench.drafter._runs[RUN]
    assert len(state.true) + len(state.predicted) <= 12
    bench.drafter.learn(RUN, [3], np.zeros((1, HIDDEN), dtype=np.float32))
    assert 3 not in state.true


def test_only_embedding_and_lm_head_of_the_target_are_needed(
    llama_copy: Path, tmp_path: Path
) -> None:
    head = save_head(tmp_path / "head")
    target = open_directory(str(llama_copy))
    prefixes = target_needs(str(head.path))(target)
    needed = {file for name, file in target.weight_files.items() if name.startswith(prefixes)}
    for file in set(target.weight_files.values()) - needed:
        file.unlink()
    assert len(list(llama_copy.glob("*.safetensors"))) == len(needed)
    check_sources(target, str(head.path))
    assert load_head(head, target).wants_hidden


def test_what_is_no_head_for_the_target_is_refused(family: Family, tmp_path: Path) -> None:
    target = family("llama")
    with pytest.raises(ModelError, match="no EAGLE head: it has no tensor fc"):
        load_head(target, target)
    with pytest.raises(ModelError, match="hidden size 128, the target 64"):
        load_head(save_head(tmp_path / "wide", hidden=128), target)
    with pytest.raises(ModelError, match=r"has no tensor layers.0.mlp.up_proj.weight"):
        load_head(save_head(tmp_path / "cut", drop=["layers.0.mlp.up_proj.weight"]), target)
    with pytest.raises(ModelError, match=r"fc.weight has shape \(64, 192\); expected \(64, 128\)"):
        load_head(save_head(tmp_path / "three", fc=3), target)


def test_wrong_features_are_refused(make: Callable[..., Bench]) -> None:
    bench = make(range(9))
    with pytest.raises(StateError, match="features of shape"):
        bench.drafter.learn(RUN, [0, 1], np.zeros((1, HIDDEN), dtype=np.float32))
    with pytest.raises(StateError, match="node 7 has no feature"):
        bench.run((), [8])
