"""Sums over tapped layers: in one process or over stages, under trees and prunes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Open, Prune, Returns, Segment
from flowspec.core.protocol.row_types import ROW_TYPES
from flowspec.core.protocol.work import Pass
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage.stage_run import Slowest, StageRun, onward, rows_of
from flowspec.errors import ConfigError, ModelError
from flowspec.model.base import RowArray
from flowspec.model.drafters.sources import recorded_taps, taps_of
from flowspec.model.layers.placing import Placing
from flowspec.model.layers.taps import Taps, beside, elements, parted
from flowspec.model.reference import Reference
from flowspec.model.stage import ModelStage, load_stage
from flowspec.model.weights.directory import ModelDirectory, layer_ranges
from flowspec.start.models import open_tapping
from tests.marks import crossed
from tests.model.eagle3_heads import Shape, save_eagle3

Family = Callable[..., ModelDirectory]
RUN = RunKey("j", 1)
PROMPT = tuple(range(20, 31))


class Pipeline:
    """Stages that return rows for a head, fed by hand."""

    def __init__(
        self,
        target: ModelDirectory,
        head: ModelDirectory,
        ranges: Sequence[range],
        *,
        placings: Sequence[Placing] = (),
        hidden: bool = True,
    ) -> None:
        taps = taps_of(str(head.path), target)
        assert taps is not None
        self.taps = taps
        places = placings or [Placing()] * len(ranges)
        self.stages = [
            load_stage(target, layers, placing=place, taps=taps, drafter=head)
            for layers, place in zip(ranges, places, strict=True)
        ]
        opened = Open(RUN, len(PROMPT), 128, Sampling(), Returns(hidden=hidden))
        self.runs = []
        for number, stage in enumerate(self.stages, 1):
            self.runs.append(StageRun(number, opened, last=number == len(self.stages)))
            stage.allocate(RUN, opened.capacity, opened.sampling, opened.returns)
        self.number = 0
        self.place = {-1: -1}  # positions by node
        self.widths: list[int] = []  # elements of the rows between stages

    def feed(self, ids: Sequence[int], parents: Sequence[int], tokens: Sequence[int]) -> RowArray:
        """The rows that the last stage returns for a segment's live rows."""
        for node, parent in zip(ids, parents, strict=True):
            self.place[node] = self.place[parent] + 1
        placed = tuple(self.place[node] for node in ids)
        segment = Segment(RUN, self.number, 1, tuple(ids), tuple(parents), placed, tuple(tokens))
        self.number += 1
        rows: RowArray | None = None
        self.widths = []
        for stage, run in zip(self.stages, self.runs, strict=True):
            kept = run.live_part(segment)
            segment = rows_of(segment, kept)
            _, (rows,) = stage.run(Pass((run.begin_pass(segment, kept),)), [rows])
            self.widths.append(rows.shape[1])
            segment = onward(segment, range(len(segment.ids)), Slowest(0.0, 0))
        assert rows is not None
        return rows

    def prune(self, offset: int, accepted: Sequence[int], root: int, kept: Sequence[int]) -> None:
        for run in self.runs:
            run.prune(Prune(RUN, offset, tuple(accepted), root, tuple(kept)))


def sums_of(reference: Reference, taps: Taps, tokens: Sequence[int]) -> np.ndarray:
    """By the library's own list of hidden states, and the matrix as a whole."""
    from safetensors.torch import load_file

    matrix = load_file(Path(taps.drafter) / "model.safetensors")[taps.weight]
    with torch.inference_mode():
        seen = reference._model.model(torch.tensor([list(tokens)]), output_hidden_states=True)
        joined = torch.cat([seen.hidden_states[layer][0] for layer in taps.layers], dim=-1)
        return (joined @ matrix.T).numpy()


@pytest.mark.parametrize(
    ("name", "stages", "layers"),
    crossed(["llama", "gemma2"], [1, 2, 4], [(1, 3, 5), (0, 2, 3), (2, 4), (1, 2, 3, 4, 5)]),
)
def test_stages_return_the_sums_of_the_whole_model(
    family: Family, tmp_path: Path, name: str, stages: int, layers: tuple[int, ...]
) -> None:
    """Over a prompt in two chunks, a tree, a prune that drops a branch, and what follows."""
    target = family(name)
    head = save_eagle3(tmp_path, target, Shape(layers=layers))
    pipeline = Pipeline(target, head, layer_ranges(target.layers, stages))
    reference = Reference(target)
    last = len(PROMPT) - 1
    chunks = [
        pipeline.feed(range(first, end), range(first - 1, end - 1), PROMPT[first:end])
        for first, end in ((0, 4), (4, last))
    ]
    wanted = sums_of(reference, pipeline.taps, PROMPT)
    assert np.allclose(np.concatenate(chunks), wanted[:last], atol=1e-4)
    # A root with two children, of which the second has one.
    found = pipeline.feed((last, 11, 12, 13), (last - 1, last, last, 12), (PROMPT[-1], 7, 8, 9))
    for row, path in enumerate(((), (7,), (8,), (8, 9))):
        exact = sums_of(reference, pipeline.taps, (*PROMPT, *path))[-1]
        assert np.allclose(found[row], exact, atol=1e-4), path
    pipeline.prune(last, (last,), 12, (12, 13))
    found = pipeline.feed((14, 15), (13, 11), (3, 4))  # the second row's branch is gone
    exact = sums_of(reference, pipeline.taps, (*PROMPT, 8, 9, 3))[-1]
    assert found.shape == (1, 64)
    assert np.allclose(found[0], exact, atol=1e-4)


def test_the_end_of_the_last_layer_is_tapped_before_the_final_norm(
    family: Family, tmp_path: Path
) -> None:
    target = family("llama")
    head = save_eagle3(tmp_path, target, Shape(layers=(0, 3, 6)))
    pipeline = Pipeline(target, head, layer_ranges(target.layers, 2))
    last = len(PROMPT) - 1
    found = pipeline.feed(range(last), range(-1, last - 1), PROMPT[:last])
    wanted = Reference(target).returned(PROMPT[:last], pipeline.taps)
    assert np.allclose(found, wanted, atol=1e-4)


def test_rows_carry_a_sum_only_behind_the_first_tap_and_only_if_a_job_wants_it(
    family: Family, tmp_path: Path
) -> None:
    target = family("llama")
    head = save_eagle3(tmp_path, target, Shape(layers=(2, 4, 5)))
    ranges = layer_ranges(target.layers, 3)
    last = len(PROMPT) - 1
    for hidden, widths in ((True, [64, 128, 64]), (False, [64, 64, 64])):
        pipeline = Pipeline(target, head, ranges, hidden=hidden)
        rows = pipeline.feed(range(last), range(-1, last - 1), PROMPT[:last])
        assert pipeline.widths == widths
        plain = Reference(target).hidden(PROMPT[:last])
        assert np.allclose(rows, plain, atol=1e-4) != hidden


def test_the_sums_of_a_pipeline_in_16_bits_are_those_of_its_rows_in_32(
    family: Family, tmp_path: Path
) -> None:
    """Nothing is lost between stages: one stage and four have the same bits."""
    target = family("llama")
    head = save_eagle3(tmp_path, target)
    last = len(PROMPT) - 1
    found = []
    for stages in (1, 4):
        ranges = layer_ranges(target.layers, stages)
        pipeline = Pipeline(target, head, ranges, placings=[Placing("bfloat16")] * stages)
        found.append(pipeline.feed(range(last), range(-1, last - 1), PROMPT[:last]))
        assert found[-1].dtype == np.float32
    assert found[0].tobytes() == found[1].tobytes()
    wanted = sums_of(Reference(target), pipeline.taps, PROMPT[:last])
    assert np.abs(found[0] - wanted).max() < 0.05 * np.abs(wanted).max()


def test_stages_may_differ_in_precision(family: Family, tmp_path: Path) -> None:
    target = family("llama")
    head = save_eagle3(tmp_path, target)
    last = len(PROMPT) - 1
    places = [Placing("bfloat16"), Placing(), Placing("int8")]
    pipeline = Pipeline(target, head, layer_ranges(target.layers, 3), placings=places)
    found = pipeline.feed(range(last), range(-1, last - 1), PROMPT[:last])
    wanted = sums_of(Reference(target), pipeline.taps, PROMPT[:last])
    assert np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ROW_TYPES)
@given(
    count=st.integers(0, 4), hidden=st.integers(1, 5), width=st.integers(1, 5), seed=st.integers(0)
)
def test_what_lies_beside_rows_comes_back_bit_for_bit(
    kind: str, count: int, hidden: int, width: int, seed: int
) -> None:
    drawn = np.random.default_rng(seed)
    dtype = ROW_TYPES[kind]
    size = count * hidden * dtype.itemsize
    rows = np.frombuffer(drawn.bytes(size), dtype).reshape(count, hidden)
    sums = np.frombuffer(drawn.bytes(4 * count * width), "<f4").reshape(count, width)
    joined = beside(rows, sums)
    assert joined.shape == (count, hidden + elements(width, dtype))
    again, carried = parted(joined, width)
    assert again.tobytes() == rows.tobytes()
    assert carried.tobytes() == sums.tobytes()
    assert carried.shape == sums.shape


def test_a_worker_refuses_another_head_than_the_pipelines(family: Family, tmp_path: Path) -> None:
    """Its folder may be elsewhere on this machine; its values must be the same."""
    target = family("llama")
    head = save_eagle3(tmp_path / "head", target)
    same = save_eagle3(tmp_path / "elsewhere", target)
    other = save_eagle3(tmp_path / "other", target, Shape(vocabulary=60))
    taps = Taps.read(recorded_taps(str(head.path), target))
    assert open_tapping(taps, taps.drafter).path == head.path
    assert open_tapping(taps, str(same.path)).path == same.path
    with pytest.raises(ConfigError, match="is not the one the pipeline was set up with"):
        open_tapping(taps, str(other.path))


def test_a_stage_without_its_head_is_refused(family: Family, tmp_path: Path) -> None:
    target = family("llama")
    head = save_eagle3(tmp_path, target, Shape(layers=(1, 2)))
    taps = taps_of(str(head.path), target)
    assert isinstance(load_stage(target, range(3, 6), taps=taps), ModelStage)
    with pytest.raises(ModelError, match=r"layer 1 is tapped, and the drafter .* is not here"):
        load_stage(target, range(3), taps=taps)
    narrow = Taps(str(head.path), "fc.weight", (1, 2), 32)
    with pytest.raises(ModelError, match=r"fc.weight has shape \(64, 128\); expected \(32, 128\)"):
        load_stage(target, range(3), taps=narrow, drafter=head)
