"""Bytes of stages: every weight once, KV rows for the context, the head in its precision."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.cluster import Cluster, Setup
from flowspec.core.run.limits import MOST_KEPT_ROWS, TREE_ROWS
from flowspec.model import memory
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.shapes import LayerShapes, ModelShapes, shapes_of
from flowspec.plan.needs import BARE_BYTES, HEAD, StageNeeds, drafter_bytes
from flowspec.transport.base import FREE, NEEDS
from tests.precisions import SERVED
from workers import verify

LAYER = LayerShapes(((64, 64), (256, 64), (64, 256)), 130)
EXPERTS = LayerShapes(((4, 256, 64), (4, 64, 128)), 130)


def shapes(*, tied: bool, layers: int = 6) -> ModelShapes:
    every = (LAYER, *[EXPERTS] * (layers - 1))
    return ModelShapes(every, (1000, 64), tied, 64, 32, 2048, 4, 2)


@given(st.sampled_from(sorted(PRECISIONS)), st.lists(st.integers(1, 5), max_size=4), st.booleans())
def test_stages_add_up_to_the_model(name: str, cuts: list[int], tied: bool) -> None:
    """A tied head too is a copy, in its kernel's layout."""
    precision = PRECISIONS[name]
    model = shapes(tied=tied)
    needs = StageNeeds(model, precision, 100)
    bounds = (0, *sorted(set(cuts)), 6)
    stages = [needs.weights(range(*pair)) for pair in itertools.pairwise(bounds)]
    assert sum(stages) == needs.weights(range(6))


@pytest.mark.parametrize("name", SERVED)
def test_a_block_takes_what_is_planned(name: str) -> None:
    """The packaged target, whose head is tied."""
    target = open_directory(default_pair()[0])
    whole = range(target.layers)
    block = LayerBlock(target, whole, first=True, last=True, placing=Placing(name))
    planned = StageNeeds(shapes_of(target), PRECISIONS[name], 100).weights(whole)
    assert block.nbytes == pytest.approx(planned, rel=0.07)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_unquantised_weights_are_their_count_times_their_size(name: str) -> None:
    model = shapes(tied=False)
    count = sum(
        sum(math.prod(shape) for shape in layer.matrices) + layer.values for layer in model.layers
    )
    values = count + 2 * 1000 * 64 + 64
    needs = StageNeeds(model, PRECISIONS[name], 100)
    assert needs.weights(range(6)) == values * PRECISIONS[name].row_bytes("cpu")


def test_the_head_of_a_quantised_model_has_its_own_precision() -> None:
    model = shapes(tied=False)
    needs = StageNeeds(model, PRECISIONS["nf4"], 100)
    with_head = needs.weights(range(5, 6)) - needs.weights(range(4, 5))
    assert with_head == PRECISIONS[HEAD].weight_bytes((1000, 64)) + 64 * 2


@given(st.integers(1, 10**5), st.integers(1, 8))
def test_rows_grow_with_context_and_jobs(context: int, jobs: int) -> None:
    needs = StageNeeds(shapes(tied=True), PRECISIONS["bfloat16"], context, jobs)
    rows = (context + TREE_ROWS) * jobs + min(2 * context, MOST_KEPT_ROWS)
    assert needs.rows(range(2, 5)) == 3 * rows * 32 * 2
    parts = needs.rows(range(2, 5)) + needs.weights(range(2, 5)) + BARE_BYTES
    assert needs.stage(range(2, 5)) > parts


def test_a_drafter_holds_the_whole_small_model() -> None:
    model = shapes(tied=True)
    precision = PRECISIONS["float32"]
    whole = StageNeeds(model, precision, 10).weights(range(6))
    assert drafter_bytes(model, precision, 10) > whole


@pytest.mark.parametrize(("free", "warns"), [(8 << 30, False), (1 << 20, True)])
def test_a_stage_says_what_it_needs_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], free: int, warns: bool
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    target = open_directory(default_pair()[0])
    record = {"most_rows": "2500", "context": "1024", "kept_rows": "100"}
    found = verify._memory(target, range(4, 8), ("float32", "cpu"), record)
    shapes = shapes_of(target)
    needs = StageNeeds(shapes, PRECISIONS["float32"], 1024).stage(range(4, 8), 2600)
    assert found == {NEEDS: needs, FREE: free, "device": "cpu"}
    rows = 4 * 2600 * shapes.kv_values * 4
    assert needs == StageNeeds(shapes, PRECISIONS["float32"], 0).stage(range(4, 8), 0) + rows
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "loading layers 4 to 7 of" in said
    assert ("the system may end it" in said) == warns


def test_what_stages_need_together_is_told_once_if_it_is_much() -> None:
    said: list[str] = []
    cluster = Cluster(Setup("target", "ngram", 3), say=said.append)
    stages = [{NEEDS: 3 << 30, FREE: 8 << 30, "device": "cpu"} for _ in range(3)]
    cluster._weigh(stages[:2])
    cluster._weigh([*stages[:2], {}])
    assert said == []
    for _ in range(2):
        cluster._weigh(stages)
    (line,) = said
    assert line.startswith(
        "the stages on cpu need 9.0 GiB together (stage 1 3.0 GiB, stage 2 3.0 GiB, stage 3 3.0 "
        "GiB), and 8.0 GiB were free: "
    )
    elsewhere = Cluster(Setup("target", "ngram", 3), say=said.append)
    elsewhere._weigh([*stages[:2], {**stages[2], "device": "cuda:0"}])
    assert said[1:] == [
        "loading stages on cpu, with their programs and KV rows stage 1 3.0 GiB, stage 2 3.0 GiB; "
        "8.0 GiB are free",
        "loading stages on cuda:0, with their programs and KV rows stage 3 3.0 GiB; "
        "8.0 GiB are free",
    ]
    small = Cluster(Setup("target", "ngram", 1), say=said.append)
    small._weigh([{NEEDS: 1 << 20, FREE: 8 << 30, "device": "cpu"}])
    assert len(said) == 3
