"""The EAGLE-3 head against the published formula over whole paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.work import Draft, Part
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling, perturbed
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import ModelError
from flowspec.model.drafters.draft_vocabulary import DraftVocabulary
from flowspec.model.drafters.eagle3 import load_eagle3
from flowspec.model.drafters.sources import check_sources, load_sources, taps_of, target_needs
from flowspec.model.layers import lean
from flowspec.model.layers.placing import Placing
from flowspec.model.reference import Reference
from flowspec.model.stage import load_stage
from flowspec.model.weights.directory import ModelDirectory, layer_ranges, open_directory
from flowspec.rehearse.simulator import Simulation
from flowspec.strategies import build
from tests.marks import crossed
from tests.model.eagle3_heads import Published, Shape, save_eagle3
from tests.model.heads import RUN, Bench, feed, predictions, random_tree
from tests.precisions import FOUR_BITS

Family = Callable[..., ModelDirectory]

SHAPES = {
    "authors": Shape(),
    "speculators": Shape(nested=True, normed=True),
    "whole vocabulary": Shape(vocabulary=120),
    "other width": Shape(hidden=48, embeds=True),
    "linear rope": Shape(extra={"rope_scaling": {"type": "linear", "factor": 4.0}}),
}


@pytest.fixture
def make(family: Family, tmp_path: Path) -> Callable[..., Bench]:
    def bench(prompt: list[int] | range, shape: str = "authors") -> Bench:
        target = family("llama")
        head = save_eagle3(tmp_path / "head", target, SHAPES[shape])
        return Bench(load_eagle3(head, target), Published(head, target), prompt)

    return bench


@pytest.mark.parametrize("shape", SHAPES)
def test_true_features_give_the_published_pass(make: Callable[..., Bench], shape: str) -> None:
    bench = make(range(5, 17), shape)
    bench.learn(*range(12))
    bench.check(range(7), ())
    bench.check(range(7, 11), [11])


@pytest.mark.parametrize("shape", ["authors", "speculators"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", FOUR_BITS])
def test_the_short_path_gives_the_librarys_bits(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, dtype: str
) -> None:
    target = family("llama")
    folder = save_eagle3(tmp_path / "head", target, SHAPES[shape])
    placing = Placing(dtype)
    head: Any = load_eagle3(folder, target, placing)._head
    assert head.lean is not None
    found = predictions(head, placing.rows)
    head.lean = None
    assert all(map(torch.equal, found, predictions(head, placing.rows)))
    monkeypatch.setenv(lean.VARIABLE, "library")
    assert load_eagle3(folder, target, placing)._head.lean is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", ["authors", "speculators"])
@pytest.mark.parametrize("seed", range(4))
def test_any_tree_in_several_steps_equals_its_paths(
    make: Callable[..., Bench], seed: int, shape: str
) -> None:
    """The head's own rows are the features of the levels below, until the target's arrive."""
    rng = np.random.default_rng(seed)
    bench = make(rng.integers(120, size=9).tolist(), shape)
    bench.learn(*range(8))
    bench.check(range(8), ())
    root = 8
    fresh = 9
    for _ in range(3):
        nodes = range(fresh, fresh + 12)
        random_tree(bench, rng, [root], nodes)
        feed(bench, rng, [root, *nodes])
        fresh = nodes.stop
        path = bench.path(int(rng.choice(nodes)))
        accepted = path[path.index(root) : -1]
        root = path[-1]
        bench.learn(*accepted)
        bench.rows.forget_tree(root)
        bench.check(accepted, ())


def test_a_coupled_draft_ranks_by_the_noise_of_the_targets_tokens(
    make: Callable[..., Bench],
) -> None:
    bench = make(range(9))
    sampling = Sampling(0.8, top_p=0.9, seed=11)
    bench.drafter.release(RUN)
    bench.drafter.allocate(RUN, 40, sampling, None)  # type: ignore[arg-type]
    bench.learn(*range(8))
    ids = tuple(range(9))
    part = Part(RUN, -1, ids, tuple(i - 1 for i in ids), ids, ids, (), context=9, answers=(8,))
    given = [torch.zeros(64), *(bench.true[node] for node in range(8))]
    predicted = bench.plain.last(ids[1:], given[1:])
    done = bench.drafter.run(Draft(part, 6, coupled=True))
    wanted, _ = perturbed(bench.plain.scores(predicted).double().numpy(), sampling, 9, 6)
    assert done.tokens[0] == wanted
    every = bench.drafter._propose(  # more are asked for than there are
        torch.randn(1, 50), Draft(part, 120, coupled=True), sampling
    )
    assert len(set(every.tokens[0])) == 50
    assert np.isfinite(every.values[0]).all()


def test_only_the_embedding_of_the_target_is_needed(llama_copy: Path, tmp_path: Path) -> None:
    target = open_directory(str(llama_copy))
    head = save_eagle3(tmp_path / "head", target)
    needs = target_needs(str(head.path))(target)
    assert needs == ("model.embed_tokens.",)
    needed = {file for name, file in target.weight_files.items() if name.startswith(needs)}
    for file in set(target.weight_files.values()) - needed:
        file.unlink()
    check_sources(target, str(head.path))
    assert load_sources(str(head.path), target).wants_hidden


@pytest.mark.parametrize(
    ("strategy", "sampling"),
    crossed(["flowspec", "naive_pp", "auto"], [Sampling(), Sampling(1.0, seed=4)]),
)
def test_text_drafted_by_a_head_is_that_of_plain_decoding(
    family: Family, tmp_path: Path, strategy: str, sampling: Sampling
) -> None:
    target = family("llama")
    head = save_eagle3(tmp_path, target)
    taps = taps_of(str(head.path), target)
    prompt = tuple(range(30, 47))
    limits = Limits(3, target.context, target.vocabulary, target.eos, hidden=True)
    drafter = load_sources(str(head.path), target)
    nodes: dict[Address, tuple[object, object]] = {DRAFT: (DraftMachine(limits, build), drafter)}
    for stage, layers in enumerate(layer_ranges(target.layers, 3), start=1):
        executor = load_stage(target, layers, taps=taps, drafter=head)
        nodes[stage_address(stage)] = (StageMachine(stage, 3), executor)
    simulation = Simulation(nodes)  # type: ignore[arg-type]
    simulation.submit(
        "j",
        JobSpec(prompt_ids=prompt, max_new_tokens=24, strategy=strategy, sampling=sampling),
    )
    simulation.run()
    assert tuple(simulation.jobs["j"].tokens) == Reference(target).decode(prompt, 24, sampling)


@pytest.mark.parametrize(
    "offsets", [[0, 0, 200], [-1, 0, 0], [0, -1, 0], []], ids=["beyond", "before", "twice", "none"]
)
def test_offsets_that_name_no_tokens_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ModelError, match="does not name ascending tokens of a vocabulary of 120"):
        DraftVocabulary(torch.tensor(offsets, dtype=torch.int64), 120)


def test_a_head_of_wrong_shapes_is_refused(family: Family, tmp_path: Path) -> None:
    target = family("llama")
    head = save_eagle3(tmp_path, target)
    narrow = replace(head, config={**head.config, "intermediate_size": 32})
    with pytest.raises(ModelError, match=r"mlp.gate_proj.weight has shape \(96, 64\); expected"):
        load_eagle3(narrow, target)
    fewer = replace(head, config={**head.config, "draft_vocab_size": 49})
    with pytest.raises(ModelError, match=r"draft_vocab_size is 49, and lm_head.weight has 50 rows"):
        load_eagle3(fewer, target)
