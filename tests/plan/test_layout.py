"""Layouts: nothing beyond a box's memory, the draft counted, profiles with the layout's costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.run.limits import TREE_ROWS
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.shapes import LayerShapes, ModelShapes
from flowspec.plan.boxes import DescribedBox, TimedBox
from flowspec.plan.estimate import drafter_times, timed
from flowspec.plan.layout import Layout, grouped, layouts
from flowspec.plan.needs import BARE_BYTES, StageNeeds
from flowspec.rehearse.devices.profile import LinkShape, Times

GIB = 2.0**30
SHAPES = ModelShapes(
    (LayerShapes(((4096, 4096), (11008, 4096), (4096, 11008)), 8192),) * 8,
    (32000, 4096),
    False,
    4096,
    2048,
    4096,
)
HALF = PRECISIONS["bfloat16"]
NEEDS = StageNeeds(SHAPES, HALF, 2048)
DRAFT = int(0.2 * GIB)
LINK = LinkShape(0.0002, 125e6)


def box(name: str, memory: float, speed: float = 50.0) -> TimedBox:
    described = DescribedBox(name, memory * GIB, speed * 1e9)
    return timed(described, SHAPES, HALF, {"slm": Times(((1, 1.0 / speed),))})


@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, 1.5, 3.0]), st.sampled_from([20.0, 50.0])),
        min_size=1,
        max_size=4,
    )
)
def test_every_layout_fits(kinds: list[tuple[float, float]]) -> None:
    boxes = [box(f"b{at}", *kind) for at, kind in enumerate(kinds)]
    for count, options in layouts(boxes, NEEDS, "slm", DRAFT).items():
        for layout in options:
            assert layout.boxes == count <= len(boxes)
            check_fits(layout)


def check_fits(layout: Layout) -> None:
    names = [stage.box.name for stage in layout.stages]
    assert len(set(names)) == len(names)
    assert [layer for stage in layout.stages for layer in stage.layers] == list(range(8))
    for at, stage in enumerate(layout.stages, start=1):
        draft = layout.draft_needs if layout.beside == at else 0
        assert stage.needs == NEEDS.stage(stage.layers) + draft <= stage.box.memory
    assert layout.draft_needs == BARE_BYTES + DRAFT <= layout.draft.memory


def test_one_large_box_may_do_everything() -> None:
    (options,) = layouts([box("a", 64)], NEEDS, "slm", DRAFT).values()
    (layout,) = options
    assert layout.beside == 1
    assert layout.boxes == 1


def test_nothing_fits_nowhere() -> None:
    assert layouts([box("a", 0.5)], NEEDS, "slm", DRAFT) == {}


def test_rows_for_a_longer_context_take_the_place_of_layers() -> None:
    """4 layers and their rows fit on a box; with eight times the rows, fewer do."""
    boxes = [box(f"b-{at}", 3.0) for at in range(4)]
    short = layouts(boxes, StageNeeds(SHAPES, HALF, 2048), "ngram", 0)
    long = layouts(boxes, StageNeeds(SHAPES, HALF, 200_000), "ngram", 0)
    assert min(short) < min(long)
    assert TREE_ROWS < 200_000


def test_boxes_are_grouped_by_what_they_are() -> None:
    boxes = [box("a", 8), box("b", 8), box("c", 16)]
    assert [[one.name for one in group] for group in grouped(boxes)] == [["a", "b"], ["c"]]


def test_a_draft_on_a_stages_box_slows_both_while_it_drafts() -> None:
    (options,) = layouts([box("a", 64)], NEEDS, "slm", DRAFT).values()
    plain = options[0].profile(4096, 2, LINK, drafting=False)
    drafting = options[0].profile(4096, 2, LINK, drafting=True)
    assert drafting.stage_seconds(1, 1, 1) == pytest.approx(2 * plain.stage_seconds(1, 1, 1))
    assert drafting.draft_seconds("slm", 1) == pytest.approx(2 * plain.draft_seconds("slm", 1))


def test_a_lookup_beside_a_stage_slows_nothing() -> None:
    ngram = replace(box("a", 64), drafters={"ngram": Times(((1, 1e-4),))})
    (options,) = layouts([ngram], NEEDS, "ngram", 0).values()
    plain = options[0].profile(4096, 2, LINK, drafting=False)
    assert options[0].profile(4096, 2, LINK, drafting=True) == plain


def test_a_profile_has_the_layouts_costs() -> None:
    boxes = [box("a", 3, 50), box("b", 3, 25), box("c", 3, 100)]
    for options in layouts(boxes, NEEDS, "slm", DRAFT).values():
        for layout in options:
            profile = layout.profile(4096, 2, LINK, drafting=False)
            count = len(layout.stages)
            for at, stage in enumerate(layout.stages, start=1):
                seconds = sum(stage.box.layers[layer].at(16) for layer in stage.layers)
                seconds += stage.box.embedding.at(16) if at == 1 else 0.0
                seconds += stage.box.head.at(16) if at == count else 0.0
                assert profile.stage_seconds(at, count, 16) == pytest.approx(seconds)


# ---- estimates -----------------------------------------------------------------------------------


def test_a_pass_takes_its_bytes_over_the_bandwidth_or_its_arithmetic() -> None:
    """jetson-7b's arithmetic: 404.8 MB a layer at 50 GB/s, 2 operations a weight at 6 TFLOPS."""
    layer = LayerShapes(((4096, 4096),) * 4 + ((11008, 4096),) * 3, 0)
    model = replace(SHAPES, layers=(layer,) * 32)
    found = timed(DescribedBox("nano", 8 * GIB, 50e9, 6e12), model, HALF, {})
    assert found.layers[0].at(1) == pytest.approx(8.10e-3, rel=1e-2)
    assert found.layers[0].at(64) == pytest.approx(8.10e-3, rel=1e-2)
    assert found.layers[0].at(256) == pytest.approx(2 * 202.4e6 * 256 / 6e12, rel=1e-2)
    assert found.head.at(1) == pytest.approx(5.24e-3, rel=1e-2)


def test_few_rows_read_few_experts() -> None:
    layer = LayerShapes(((8, 4096, 4096),), 0)
    model = replace(SHAPES, layers=(layer,), experts=8, experts_used=2)
    found = timed(DescribedBox("a", GIB, 50e9), model, HALF, {}).layers[0]
    whole = 8 * 4096 * 4096 * 2 / 50e9
    assert found.at(1) == pytest.approx(whole * 2 / 8)
    assert whole * 0.98 < found.at(16) < whole
    assert found.at(256) == pytest.approx(whole)


def test_a_drafters_pass_has_its_head() -> None:
    described = DescribedBox("a", GIB, 50e9)
    with_head = drafter_times(described, SHAPES, HALF).at(1)
    layers = sum(times.at(1) for times in timed(described, SHAPES, HALF, {}).layers)
    assert with_head == pytest.approx(layers + 32000 * 4096 * 2 / 50e9)
