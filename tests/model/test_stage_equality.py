"""Stages against the whole model: equal logits on every path, equal text by every strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.messages import Open, Returns, Segment
from flowspec.core.protocol.work import Pass
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_run import StageRun
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.model.base import ROW
from flowspec.model.drafters.language_model import load_drafter
from flowspec.model.layers.block import LayerBlock
from flowspec.model.reference import Reference
from flowspec.model.stage import ModelStage, load_stage
from flowspec.model.weights.directory import ModelDirectory, layer_ranges
from flowspec.model.weights.tensor_files import TensorEntry
from flowspec.rehearse.simulator import Simulation
from flowspec.strategies import EXACT, STRATEGIES, build
from tests.marks import examples
from tests.model.families import FAMILIES
from tests.model.stages import RUN, StageByStage

Family = Callable[..., ModelDirectory]
PROMPT = tuple(int(token) for token in np.random.default_rng(5).integers(2, 120, 21))
_FEW = ("flowspec", "autoregressive", "auto")
#: Families whose text is compared in every run; the others with the heavy tests.
_ALWAYS = ("llama", "gemma3", "gpt-oss")
RANGES = [range(2), range(2, 3), range(3, 6)]


@pytest.mark.parametrize("ranges", [[range(6)], RANGES], ids=["1 stage", "3 stages"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_path_gets_the_whole_models_logits(
    family: Family, name: str, ranges: list[range]
) -> None:
    """A prompt in two chunks, a tree in two segments, a prune, a lone row."""
    directory = family(name)
    whole = AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.float32).eval()

    def truth(tokens: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            return whole(input_ids=torch.tensor([list(tokens)])).logits[0, -1].numpy()

    length = len(PROMPT)
    stages = StageByStage(directory, ranges, length)
    stages.feed(range(8), range(-1, 7), range(8), PROMPT[:8])
    logits = stages.feed(range(8, length), range(7, length - 1), range(8, length), PROMPT[8:])
    assert np.abs(logits[-1].numpy() - truth(PROMPT)).max() < 1e-4
    stages.prune(length - 1, [length - 1], length, [])

    tokens = {length: 7, 22: 9, 23: 11, 24: 7, 25: 30, 26: 31, 27: 32, 28: 33}
    parents = {length: length - 1, 22: length, 23: length, 24: 22, 25: 23, 26: 24, 27: 25, 28: 27}

    def path(node: int) -> list[int]:
        return [*path(parents[node]), tokens[node]] if node in tokens else list(PROMPT)

    def check(ids: Sequence[int], logits: np.ndarray) -> None:
        for node, row in zip(ids, logits, strict=True):
            assert np.abs(row - truth(path(node))).max() < 1e-4, f"node {node}"

    def feed(*ids: int) -> None:
        rows = [len(path(node)) - 1 for node in ids]
        fed = stages.feed(ids, [parents[n] for n in ids], rows, [tokens[n] for n in ids])
        check(ids, fed.numpy())

    feed(length, 22, 23, 24)
    feed(25, 26)
    stages.prune(length, [length, 23], 25, [25])
    feed(27)  # a lone row, with pruned cousins gone from its cache
    feed(28)


def simulate(
    target: ModelDirectory, draft: ModelDirectory, stages: int, spec: JobSpec
) -> tuple[int, ...]:
    limits = Limits(stages, target.context, target.vocabulary, target.eos)
    nodes: dict[Address, tuple[object, object]] = {
        DRAFT: (DraftMachine(limits, build), load_drafter(draft))
    }
    for stage, layers in enumerate(layer_ranges(target.layers, stages), start=1):
        nodes[stage_address(stage)] = (StageMachine(stage, stages), load_stage(target, layers))
    simulation = Simulation(nodes)  # type: ignore[arg-type]
    simulation.submit("j", spec)
    simulation.run()
    record = simulation.jobs["j"]
    assert record.finish is not None
    assert record.finish.error == ""
    return tuple(record.tokens)


@pytest.mark.parametrize(
    "name",
    [name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.heavy) for name in FAMILIES],
)
def test_greedy_text_is_that_of_generate(family: Family, name: str) -> None:
    """Against the library's ``generate``; the target drafts for itself, so paths are long.

    What strategies add to each other does not depend on the family: one family runs them all. A
    tree and a prune of every family are compared row by row above.
    """
    directory = family(name)
    whole = AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.float32).eval()
    expected = whole.generate(
        torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    wanted = tuple(expected[0, len(PROMPT) :].tolist())
    every = EXACT[:: 3 - examples(2)]  # a third of them in `make test`
    for at, strategy in enumerate(every if name == "llama" else _FEW):
        spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=24, strategy=strategy)
        stages = 1 if at == 1 else 3
        assert simulate(directory, directory, stages, spec) == wanted, strategy


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        pytest.param(
            "llama",
            Sampling(0.6, top_k=80, top_p=0.9, seed=1),
            id="llama-nucleus",
            marks=pytest.mark.heavy,
        ),
        pytest.param("qwen3", Sampling(1.0, seed=3), id="qwen3-T=1"),
    ],
)
def test_sampled_text_is_that_of_plain_decoding(
    family: Family, name: str, sampling: Sampling
) -> None:
    target = family(name)
    draft = family(name, seed=9)
    wanted = Reference(target).decode(PROMPT, 12, sampling)
    for at, strategy in enumerate(EXACT[:: 3 - examples(2)]):  # every third one in `make test`
        spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=12, strategy=strategy, sampling=sampling)
        assert simulate(target, draft, 1 + at % 2, spec) == wanted, strategy


def test_a_stage_reads_its_own_weights_and_no_others(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = family("llama3-rope-tied")
    read: list[str] = []
    found = ModelDirectory.tensor

    def spy(self: ModelDirectory, name: str) -> TensorEntry:
        read.append(name)
        return found(self, name)

    monkeypatch.setattr(ModelDirectory, "tensor", spy)
    load_stage(directory, range(2, 4))
    assert {name.split(".")[2] for name in read} == {"2", "3"}
    assert all(name.startswith("model.layers.") for name in read)
    read.clear()
    load_stage(directory, range(4, 6))
    assert {name for name in read if not name.startswith("model.layers.")} == {
        "model.norm.weight",
        "model.embed_tokens.weight",
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stage_has_tried_a_row_before_it_serves(family: Family, name: str) -> None:
    for layers in RANGES:
        stage = load_stage(family(name), layers, blocks=8)
        tried = stage.facts()[ROW]
        assert isinstance(tried, float)
        assert tried > 0
        kept: Any = stage.room()["kv"]
        assert kept["free"] == kept["blocks"]


def test_other_stages_shard_files_need_not_be_there(family: Family, llama_copy: object) -> None:
    from flowspec.model.weights.directory import open_directory

    directory = open_directory(str(llama_copy))
    own = {
        file for name, file in directory.weight_files.items() if name.startswith("model.layers.2.")
    }
    for file in set(directory.weight_files.values()) - own:
        file.unlink()
    load_stage(directory, range(2, 3))


def test_answers_carry_log_probabilities_when_a_job_asks(family: Family) -> None:
    directory = family("llama")
    stage = ModelStage(LayerBlock(directory, range(6), first=True, last=True))
    returns = Returns(top=3, hidden=True)
    stage.allocate(RUN, 64, Sampling(), returns)
    run = StageRun(1, Open(RUN, 4, 64, Sampling(), returns), last=True)
    segment = Segment(RUN, 0, 0, (0, 1, 2, 3), (-1, 0, 1, 2), (0, 1, 2, 3), (5, 6, 7, 8))
    done, outputs = stage.run(Pass((run.begin_pass(segment, [0, 1, 2, 3]),)), [None])
    whole = AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.float32).eval()
    with torch.inference_mode():
        result = whole(input_ids=torch.tensor([[5, 6, 7, 8]]), output_hidden_states=True)
    expected = torch.log_softmax(result.logits[0], dim=-1)
    choice = done.choices[0]
    assert choice.tokens == tuple(expected.argmax(-1).tolist())
    for row, pairs in enumerate(choice.top):
        best = torch.topk(expected[row], 3)
        assert [token for token, _ in pairs] == best.indices.tolist()
        assert [value for _, value in pairs] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert np.abs(outputs[0] - result.hidden_states[-1][0].numpy()).max() < 1e-4


@pytest.mark.parametrize("strategy", sorted(set(STRATEGIES) - set(EXACT)))
def test_a_lossy_mode_runs_on_a_vocabulary_smaller_than_what_it_asks_for(
    family: Family, strategy: str
) -> None:
    """It requests the target's 256 best tokens per row; this vocabulary has about 120."""
    directory = family("llama")
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=20, strategy=strategy)
    assert 1 <= len(simulate(directory, directory, 2, spec)) <= 20
