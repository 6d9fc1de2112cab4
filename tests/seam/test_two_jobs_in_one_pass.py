"""Seam: passes with rows of several runs, and pipelines with several jobs, change no job."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import Address, Role
from flowspec.core.protocol.machine import Compute, Input, Output
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Choice, Part, Pass, Pruned, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.errors import ModelError
from flowspec.model.base import RowArray, StageExecutor
from flowspec.model.drafters.sources import taps_of
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import place
from flowspec.model.rows.ragged import for_layers
from flowspec.model.stage import load_stage
from flowspec.model.weights.directory import open_directory
from tests.core.tree.random_runs import RandomRun, RandomStage
from tests.marks import every, examples, heavy
from tests.model.eagle3_heads import Shape, save_eagle3
from tests.model.families import FAMILIES, save
from tests.precisions import FOUR_BITS
from tests.toy import TARGET, pipeline
from tests.toy_model import ToyMiddle, ToyStage

#: A run of each kind; two of them are of one job.
RUNS = {
    RunKey("a", 1): (Sampling(), Returns()),
    RunKey("b", 1): (Sampling(temperature=1.0, seed=4), Returns(top=2)),
    RunKey("b", 2): (Sampling(temperature=0.7, top_k=5, seed=4), Returns()),
}
STAGES = 3
#: Families without a short path, of every kind of attention and feed-forward part.
BY_LIBRARY = ("gemma2", "gemma3", "phi3", "mixtral", "qwen3-moe", "gpt-oss", "mistral-sliding")


def toy_stages() -> list[StageExecutor]:
    return [ToyStage(TARGET, stage, STAGES) for stage in range(1, STAGES + 1)]


def toy_middle() -> list[StageExecutor]:
    return [ToyMiddle(TARGET, 0.5)]


def stages_of(path: Path, dtype: str) -> list[StageExecutor]:
    directory = open_directory(str(path))
    placing = place(dtype, "cpu", directory.config)
    return [load_stage(directory, range(at, at + 2), placing) for at in (0, 2, 4)]


class Pipeline:
    """Stages whose passes are given by hand; ``hidden``: runs that return hidden rows."""

    def __init__(self, stages: list[StageExecutor], hidden: Sequence[RunKey] = ()) -> None:
        self.stages = stages
        for stage in stages:
            for run, (sampling, returns) in RUNS.items():
                wanted = replace(returns, hidden=run in hidden)
                stage.allocate(run, 128, sampling, wanted)

    def run(self, parts: Sequence[Part]) -> Iterator[tuple[RowArray, Choice]]:
        """Rows and choices of every part; all parts go through all stages in one pass each."""
        rows: list[RowArray | None] = [None] * len(parts)
        for at, stage in enumerate(self.stages):
            last = at == len(self.stages) - 1
            given = tuple(part_at(part, first=at == 0, last=last) for part in parts)
            done, outputs = stage.run(Pass(given), rows)
            rows = list(outputs)
        return zip(outputs, done.choices, strict=True)

    def release(self) -> None:
        for stage in self.stages:
            for run in RUNS:
                stage.release(run)


def part_at(part: Part, *, first: bool, last: bool) -> Part:
    """``part`` for a stage: rows instead of tokens; only the last stage answers."""
    return replace(
        part,
        tokens=part.tokens if first else (),
        offsets=() if first else tuple(range(len(part.ids))),
        answers=part.answers if last else (),
    )


def check_that_runs_cannot_tell(together: Pipeline, alone: Pipeline, data: st.DataObject) -> None:
    """Run random runs with their passes combined randomly, and each alone; compare."""
    queues = []
    for key in RUNS:
        run = RandomRun(data)
        queues.append(RandomStage(run, run.lateness(data), key).parts)
    while any(queues):
        waiting = [queue for queue in queues if queue]
        chosen = data.draw(st.lists(st.sampled_from(range(len(waiting))), min_size=1, unique=True))
        parts = [waiting[at].pop(0) for at in chosen]
        for part, (rows, choice) in zip(parts, together.run(parts), strict=True):
            ((rows_alone, choice_alone),) = alone.run([part])
            assert np.array_equal(rows, rows_alone)
            assert choice == choice_alone
            assert len(choice.tokens) == len(part.answers)


@pytest.mark.parametrize("stages", [toy_stages, toy_middle])
def test_a_pass_of_several_runs_gives_each_what_a_pass_of_its_own_would(
    stages: Callable[[], list[StageExecutor]],
) -> None:
    @given(st.data())
    @settings(max_examples=examples(60), deadline=None)
    def check(data: st.DataObject) -> None:
        check_that_runs_cannot_tell(Pipeline(stages()), Pipeline(stages()), data)

    check()


@pytest.mark.parametrize(
    ("family", "dtype", "layers"),
    [
        ("llama", "float32", "lean"),
        heavy("llama", "float32", "library"),
        ("qwen2", "bfloat16", "lean"),
        ("qwen3", FOUR_BITS, "lean"),
        ("mistral", "int8", "lean"),
        *every(2, ((name, "float32", "library") for name in BY_LIBRARY)),
    ],
)
def test_a_models_pass_of_several_runs_gives_each_what_a_pass_of_its_own_would(
    family: str,
    dtype: str,
    layers: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLOWSPEC_LAYERS", layers)
    path = save(FAMILIES[family], tmp_path)
    executors = (stages_of(path, dtype), stages_of(path, dtype))

    @given(st.data())
    @settings(max_examples=examples(6), deadline=None)
    def check(data: st.DataObject) -> None:
        together, alone = map(Pipeline, executors)
        check_that_runs_cannot_tell(together, alone, data)
        together.release()
        alone.release()

    check()


@pytest.mark.parametrize("layers", ["lean", "library"])
def test_runs_with_a_drafters_sums_beside_their_rows_share_passes_with_others(
    layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWSPEC_LAYERS", layers)
    target = open_directory(str(save(FAMILIES["llama"], tmp_path / "target")))
    head = save_eagle3(tmp_path / "head", target, Shape(layers=(1, 2, 5)))
    taps = taps_of(str(head.path), target)
    executors: list[list[StageExecutor]] = [
        [load_stage(target, range(at, at + 2), taps=taps, drafter=head) for at in (0, 2, 4)]
        for _ in range(2)
    ]

    @given(st.data())
    @settings(max_examples=examples(12), deadline=None)
    def check(data: st.DataObject) -> None:
        hidden = data.draw(st.lists(st.sampled_from(tuple(RUNS)), min_size=1, unique=True))
        together, alone = (Pipeline(stages, hidden) for stages in executors)
        check_that_runs_cannot_tell(together, alone, data)
        together.release()
        alone.release()

    check()


def test_of_a_family_that_hands_nothing_through_the_parts_run_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untested family is tried at start: here once as it is, once by code that drops it."""
    monkeypatch.setattr("flowspec.model.layers.block.TESTED_FAMILIES", ())
    path = save(FAMILIES["gemma2"], tmp_path)
    directory = open_directory(str(path))
    assert load_stage(directory, range(2)).block.joins

    def dropping(*jobs: Any) -> dict[str, Any]:
        return {name: value for name, value in for_layers(*jobs).items() if name != "ragged"}

    monkeypatch.setattr("flowspec.model.layers.block.for_layers", dropping)
    executors = [stages_of(path, "float32") for _ in range(2)]
    assert not any(stage.block.joins for stage in executors[0])  # type: ignore[attr-defined]

    @given(st.data())
    @settings(max_examples=2, deadline=None)
    def check(data: st.DataObject) -> None:
        together, alone = map(Pipeline, executors)
        check_that_runs_cannot_tell(together, alone, data)
        together.release()
        alone.release()

    check()


def test_a_part_that_does_not_continue_its_run_fails_alone(tmp_path: Path) -> None:
    (first, *_) = stages_of(save(FAMILIES["llama"], tmp_path), "float32")
    sound, other, _ = RUNS
    for run in (sound, other):
        first.allocate(run, 64, Sampling(), Returns())
    good = Part(sound, 0, (0, 1), (-1, 0), (0, 1), (4, 5), (0, 1), 2)
    bad = replace(good, run=other, pruned=Pruned((9,), ()))
    done, (empty, rows) = first.run(Pass((bad, good)), [None, None])
    failed, choice = done.choices
    assert isinstance(failed, WorkFailed)
    assert "row 9 is to be kept" in failed.reason
    assert choice == Choice()
    assert len(empty) == 0
    assert rows.shape == (2, 64)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "the device cpu is out of memory"),
        (IndexError("index out of range in self\nmore"), "IndexError: index out of range in self"),
    ],
)
def test_a_pass_that_cannot_be_computed_fails_the_run_that_is_to_blame_alone(
    error: Exception, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(FAMILIES["llama"], tmp_path)
    (stage, *_), (twin, *_) = (stages_of(path, "float32") for _ in range(2))
    whole = LayerBlock.run_together
    sound, blamed, _ = RUNS
    for run in RUNS:
        for each in (stage, twin):
            each.allocate(run, 64, Sampling(), Returns())
    part = Part(sound, 0, (0, 1), (-1, 0), (0, 1), (4, 5), (0, 1), 2)
    parts = tuple(replace(part, run=run) for run in RUNS)
    _, wanted = twin.run(Pass(parts), [None] * 3)

    def failing(self: LayerBlock, parts: Sequence[Part], *more: Any) -> Any:
        found = whole(self, parts, *more)  # what it wrote before it failed does no harm
        if any(part.run == blamed for part in parts):
            raise error
        return found

    monkeypatch.setattr(LayerBlock, "run_together", failing)
    done, rows = stage.run(Pass(parts), [None] * 3)
    failed = done.choices[1]
    assert isinstance(failed, WorkFailed)
    assert failed.reason.startswith(says)
    assert "\n" not in failed.reason
    assert (done.choices[0], done.choices[2]) == (Choice(), Choice())
    assert np.array_equal(rows[0], wanted[0])
    assert np.array_equal(rows[2], wanted[2])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("stage", [1, 2])
def test_rows_that_are_not_finite_fail_their_run_alone(
    stage: int, value: float, tmp_path: Path
) -> None:
    """At a stage in the middle, and at the last, which would choose tokens by them."""
    stages = stages_of(save(FAMILIES["llama"], tmp_path), "float32")
    sound, blamed, _ = RUNS
    for run in (sound, blamed):
        stages[stage].allocate(run, 64, Sampling(), Returns())
    answers = (1,) if stage == 2 else ()
    part = Part(sound, 0, (0, 1), (-1, 0), (0, 1), (), (0, 1), 2, None, answers)
    rows = np.ones((2, 64), dtype=np.float32)
    wrong = rows.copy()
    wrong[1, 7] = value
    done, _ = stages[stage].run(Pass((part, replace(part, run=blamed))), [rows, wrong])
    choice, failed = done.choices
    assert isinstance(choice, Choice)
    assert len(choice.tokens) == len(answers)
    assert isinstance(failed, WorkFailed)
    said = "rows came from the stage before that are NaN or infinite"
    assert failed.reason.startswith(said)
    alone = Pass((replace(part, run=blamed),))
    with pytest.raises(ModelError, match=said):
        stages[stage].run(alone, [wrong])
    with torch.no_grad():
        cast(Any, stages[stage]).block.body.layers[0].post_attention_layernorm.weight.fill_(value)
    with pytest.raises(
        ModelError, match=r"a pass gave rows that are NaN or infinite in torch\.float32"
    ):
        stages[stage].run(alone, [rows])


def test_rows_beyond_a_stages_own_type_were_not_altered_on_the_way(tmp_path: Path) -> None:
    """A stage in float16 after one in float32; on a GPU, so the check alone is asked here."""
    stage: Any = stages_of(save(FAMILIES["llama"], tmp_path), "float32")[1]
    stage.block.dtype = torch.float16
    rows = np.full((1, 64), 7e4, dtype=np.float32)
    with pytest.raises(ModelError, match=r"a pass gave rows .* in torch\.float16: their range is"):
        stage._check_finite(torch.full((1, 64), torch.inf, dtype=torch.float16), [rows])


def test_a_sum_out_of_range_is_no_row_out_of_range(tmp_path: Path) -> None:
    """Infinities of both signs have a sum that is NaN, and are found as well."""
    stage: Any = stages_of(save(FAMILIES["llama"], tmp_path), "float32")[1]
    large = torch.full((2, 64), 6e4, dtype=torch.float16)
    for rows in (large, -large):
        stage._check_finite(rows, [None, None])
    large[1, :2] = torch.tensor([torch.inf, -torch.inf])
    with pytest.raises(ModelError, match="rows that are NaN or infinite"):
        stage._check_finite(large, [None, None])


JOBS = {
    "a": JobSpec(prompt_ids=(2, 3, 4), max_new_tokens=40, strategy="flowspec"),
    "b": JobSpec(
        prompt_ids=(9, 8, 7, 6),
        max_new_tokens=40,
        strategy="naive_pp",
        sampling=Sampling(temperature=1.0, seed=4),
    ),
    "c": JobSpec(prompt_ids=(30,), max_new_tokens=20, strategy="autoregressive"),
}


@pytest.mark.parametrize("names", [*itertools.combinations(JOBS, 2), tuple(JOBS)])
@pytest.mark.parametrize("stages", [1, 3])
def test_jobs_share_one_pipeline_and_keep_their_own_text(
    stages: int, names: tuple[str, ...]
) -> None:
    passes: list[str] = []
    shared: set[int] = set()

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Compute) and node.role is Role.VERIFY:
                assert isinstance(output.work, Pass)
                passes.extend(part.run.job for part in output.work.parts)
                shared.add(len(output.work.parts))

    simulation = pipeline(stages, tap=tap)
    for name in names:
        simulation.submit(name, JOBS[name])
    simulation.run()
    for name in names:
        spec = JOBS[name]
        record = simulation.jobs[name]
        assert tuple(record.tokens) == TARGET.decode(
            spec.prompt_ids or (), spec.max_new_tokens, spec.sampling
        )
        assert record.finish is not None
        assert record.finish.error == ""
        alone = pipeline(stages)
        alone.submit(name, spec)
        alone.run()
        assert record.tokens == alone.jobs[name].tokens
    for one, other in itertools.pairwise(names):
        first = passes.index(other)
        assert one in passes[first:], "the jobs never alternated"
    assert max(shared) == len(names), "they never shared a pass"
