"""What a CUDA device computes, where there is one: near a CPU's rows, and its memory's end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Part, Pass, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.model.base import HasFacts
from flowspec.model.drafters.sources import load_sources
from flowspec.model.kernels import served
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing, choose_device, place
from flowspec.model.memory import available_bytes
from flowspec.model.sampling.choice import choose_rows, perturbed_rows, top_logprobs
from flowspec.model.stage import load_stage
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.timing import time_layer
from flowspec.model.weights.directory import ModelDirectory, default_pair, open_directory
from flowspec.model.weights.precision import PRECISIONS
from tests.model.stages import StageByStage
from tests.model.test_drafts_together import Listening, decoded, folders, with_tokenizer
from tests.model.test_low_precision import proposals

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
TARGET = open_directory(default_pair()[0])
PROMPT = Tokenizer(TARGET).encode("Tom has 5 apples and buys 7 more. Then he", raw=False)
GPU = torch.device("cuda", 0)


@pytest.fixture
def precision(request: pytest.FixtureRequest) -> str:
    """One that runs on the device here."""
    found = str(request.param)
    if not served(found, "cuda"):
        pytest.skip(f"no {found} on CUDA here")
    return found


def logits(placing: Placing) -> torch.Tensor:
    """Of the prompt and a small tree below it, over two stages."""
    middle = TARGET.layers // 2
    stages = StageByStage(
        TARGET, [range(middle), range(middle, TARGET.layers)], len(PROMPT), placing
    )
    length = len(PROMPT)
    rows = list(range(length))
    prompt = stages.feed(rows, [-1, *rows[:-1]], rows, PROMPT)
    tree = stages.feed(
        [length, length + 1, length + 2],
        [length - 1, length - 1, length],
        [length, length, length + 1],
        [7, 90, 91],
    )
    return torch.cat([prompt, tree]).float().cpu()


@pytest.mark.parametrize("precision", PRECISIONS, indirect=True)
def test_logits_are_near_those_of_a_cpu(precision: str) -> None:
    if not served(precision, "cpu"):
        pytest.skip("the CPU has no kernel to compare with")
    ours = logits(Placing(precision, GPU))
    exact = logits(Placing(precision))
    error = (ours - exact).norm() / exact.norm()
    assert error < (1e-5 if precision == "float32" else 3e-2)


@pytest.mark.parametrize("precision", PRECISIONS, indirect=True)
def test_rows_do_not_depend_on_others_but_in_attention(precision: str) -> None:
    block = LayerBlock(TARGET, range(2), first=True, last=True, placing=Placing(precision, GPU))
    assert block.dependent_parts() == ("attention",)


@pytest.mark.parametrize("precision", PRECISIONS, indirect=True)
@pytest.mark.parametrize("source", ["draft", "head"])
def test_drafters_propose_nearly_what_they_do_on_a_cpu(source: str, precision: str) -> None:
    drafter = load_sources(source, TARGET, dtype=precision, device="cuda")
    assert isinstance(drafter, HasFacts)
    assert drafter.facts()["device"] == "cuda:0"
    pairs = list(zip(proposals(drafter), proposals(load_sources(source, TARGET)), strict=True))
    common = sum(len({*ours} & {*exact}) for ours, exact in pairs)
    assert common >= 0.7 * sum(len(exact) for _, exact in pairs)


@pytest.mark.parametrize("source", ["slm", "head", "eagle3", "block", "slm+ngram", "slm:head"])
def test_texts_with_every_kind_of_drafter_are_those_of_a_cpu(
    family: Callable[..., ModelDirectory], tmp_path: Path, source: str
) -> None:
    target = with_tokenizer(family("llama"), tmp_path / "target")
    draft = folders(source, family, tmp_path)
    there = Listening(load_sources(draft, target, dtype="float32", device="cuda"))
    here = Listening(load_sources(draft, target, dtype="float32"))
    ours = decoded(there, draft, target, Placing(device=GPU))
    assert ours == decoded(here, draft, target)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.7, top_p=0.9, seed=3),
        Sampling(temperature=1.5, top_k=40, seed=3),
        Sampling(temperature=1.3, top_k=500, top_p=0.99, seed=3),
    ],
    ids=str,
)
def test_the_same_logits_give_the_same_choices(sampling: Sampling, kind: torch.dtype) -> None:
    """A wide row, flat ones, a peaked one, and ties, over a large vocabulary."""
    source = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.0, 0.01, 1.0, 3.0, 8.0, 30.0])[:, None]
    rows = (torch.randn((6, 50_000), generator=source) * scales).to(kind)
    indices = range(10, 16)
    there = rows.to(GPU)
    assert choose_rows(there, sampling, indices) == choose_rows(rows, sampling, indices)
    if sampling.temperature:
        ours = perturbed_rows(there, sampling, indices, 8)
        assert ours == perturbed_rows(rows, sampling, indices, 8)
    best = top_logprobs(there, 5)
    for (ids, values), (wanted, exact) in zip(best, top_logprobs(rows, 5), strict=True):
        assert ids == wanted
        assert values == pytest.approx(exact, abs=1e-9)


def test_auto_is_the_gpu_and_its_memory_and_time_are_read() -> None:
    assert choose_device("auto") == GPU
    assert place("auto", "auto", TARGET.config).device == GPU
    assert 0 < available_bytes("cuda:0") <= torch.cuda.get_device_properties(0).total_memory
    found = time_layer(TARGET.config, (1, 16), 3, device="cuda:0")
    times = (found.layer, found.each, found.head, found.embedding)
    assert all(0 < seconds < 1 for by_rows in times for seconds in by_rows.values())


@pytest.fixture
def little_memory() -> Iterator[None]:
    """No more than what is held already, and 512 MiB."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (512 << 20)) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_a_job_without_memory_for_its_pass_fails_alone(little_memory: None) -> None:
    """An attention over 6,000 rows asks for more than there is; the small job is answered."""
    stage = load_stage(TARGET, range(TARGET.layers), placing=Placing(device=GPU))
    small, large = RunKey("small", 1), RunKey("large", 1)
    for run, rows in ((small, 64), (large, 6000)):
        stage.allocate(run, rows, Sampling(), Returns())
    parts = tuple(
        Part(
            run=run,
            segment=0,
            ids=tuple(range(count)),
            parents=tuple(range(-1, count - 1)),
            positions=tuple(range(count)),
            tokens=(5,) * count,
            offsets=(),
            context=count,
            pruned=None,
            answers=(count - 1,),
        )
        for run, count in ((small, 8), (large, 6000))
    )
    done, _ = stage.run(Pass(parts), [None, None])
    choice, failed = done.choices
    assert isinstance(failed, WorkFailed)
    assert failed.reason.startswith("the device cuda:0 is out of memory")
    assert not isinstance(choice, WorkFailed)
    assert len(choice.tokens) == 1
