"""A measured profile is read back unchanged, and its parts add up to its whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.cli.profile import profile
from flowspec.errors import ConfigError, ModelError
from flowspec.model.weights.directory import default_pair, local_path
from flowspec.rehearse.devices.profiles import load
from flowspec.rehearse.measure import MeasurementPlan, as_toml, measure
from tests.precisions import FOUR_BITS

TARGET, DRAFT = default_pair()
PLAN = MeasurementPlan(rows=(1, 32), repeats=5, latency_ms=3.0, mbit=50.0)


def test_a_measured_profile_is_read_back_as_it_was(tmp_path: Path) -> None:
    told: list[str] = []
    found = measure(TARGET, "draft+head+ngram", PLAN, told.append)
    path = tmp_path / "measured.toml"
    path.write_text(as_toml(found, PLAN))
    read = load(str(path))
    assert (read.layers, read.hidden, read.value_bytes, read.stages) == (12, 192, 4, (4,))
    assert (read.summary, read.source) == (found.summary, found.source)
    assert (read.link.latency, read.link.bandwidth) == (3e-3, 50e6 / 8)
    assert set(read.drafters) == {"slm", "head", "ngram"}
    pairs = [(read.layer, found.layer), (read.head, found.head)]
    pairs += [(read.drafters[kind], times) for kind, times in found.drafters.items()]
    for ours, theirs in pairs:
        for rows in PLAN.rows:
            assert ours.at(rows) == pytest.approx(theirs.at(rows), rel=1e-3)
    assert len(told) == 4


def test_a_profile_of_another_precision_says_so_and_has_rows_of_16_bits() -> None:
    plan = MeasurementPlan(rows=(1,), repeats=1, dtype=FOUR_BITS, draft_dtype="bfloat16")
    found = measure(TARGET, "draft", plan)
    assert found.value_bytes == 2
    assert f"target in {FOUR_BITS}" in found.summary
    with pytest.raises(ConfigError, match="dtype 'fp8' is unknown"):
        MeasurementPlan(dtype="fp8")


def test_the_parts_make_up_the_whole() -> None:
    found = measure(TARGET, "ngram", MeasurementPlan(rows=(1,), repeats=9))
    parts = found.anchors["last_stage_layers"] * found.layer.at(1) + found.head.at(1)
    # Few repeats, since the machine runs other tests too.
    assert parts * 1e3 == pytest.approx(found.anchors["last_stage_ms"], rel=0.5)
    assert found.drafters["ngram"].at(1) < found.layer.at(1)


def test_more_rows_cost_more_and_a_layer_is_a_share_of_a_block() -> None:
    found = measure(TARGET, DRAFT, MeasurementPlan(rows=(1, 64), repeats=5))
    assert set(found.drafters) == {"slm"}
    assert found.layer.at(64) > found.layer.at(1) > 0
    assert found.drafters["slm"].at(64) > found.drafters["slm"].at(1)


def test_the_command_writes_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.toml"
    profile(None, "ngram", "4,1", 2, 1, 0.5, 10, out)
    captured = capsys.readouterr()
    assert captured.out == "" and str(out) in captured.err
    read = load(str(out))
    assert (read.name, read.stages, list(read.drafters)) == ("mine", (2,), ["ngram"])
    assert [rows for rows, _ in read.layer.points] == [1, 4]
    assert read.link.latency == 0.5e-3


def test_a_target_without_a_draft_is_measured_with_its_n_grams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.toml"
    profile(TARGET, None, "1", 12, 1, 0.2, 1000, out)
    assert list(load(str(out)).drafters) == ["ngram"]
    assert f"note: no --draft is given for {TARGET}: " in capsys.readouterr().err


def test_a_profile_names_its_models_unless_they_are_the_packaged_ones(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    profile(DRAFT, "ngram", "1", 2, 1, 0.2, 1000, out)
    assert load(str(out)).models == {"target": "draft"}
    profile(TARGET, "ngram", "1", 2, 1, 0.2, 1000, out)
    assert load(str(out)).models == {}
    profile("target", "draft+ngram", "1", 2, 1, 0.2, 1000, out)
    assert load(str(out)).models == {}
    profile("target", "medium", "1", 2, 1, 0.2, 1000, out)
    assert load(str(out)).models == {"target": "target", "slm": "medium"}


def test_a_profile_can_be_read_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").symlink_to(DRAFT)
    monkeypatch.chdir(tmp_path)
    profile("mine", "ngram", "1", 2, 1, 0.2, 1000, tmp_path / "mine.toml")
    assert load("mine.toml").models == {"target": str(tmp_path / "mine")}


def test_without_a_file_the_profile_is_all_that_is_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile(None, "ngram", "1", 12, 1, 0.2, 1000, None)
    path = tmp_path / "printed.toml"
    path.write_text(capsys.readouterr().out)
    assert load(str(path)).stages == (12,)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"rows": "1,x"}, "--rows"),
        ({"rows": "0"}, "rows"),
        ({"repeats": 0}, "repeats"),
        ({"mbit": 0.0}, "bytes/s"),
        ({"latency_ms": -1.0}, "latency"),
        ({"out": Path("mine.txt")}, "--out"),
        ({"out": Path("/nowhere/mine.toml")}, "no folder"),
        ({"draft": "draft+medium"}, "of kind slm"),
        ({"draft": "head+head"}, "no list of drafters"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_timed(
    flags: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(*_: object) -> None:
        raise AssertionError("it began to measure")

    monkeypatch.setattr("flowspec.rehearse.measure._stage_times", timed)
    given = {
        "target": None,
        "draft": None,
        "rows": "1",
        "stages": 4,
        "repeats": 1,
        "latency_ms": 1.0,
        "mbit": 1.0,
    }
    with pytest.raises(ConfigError, match=said):
        profile(**{**given, "out": None, **flags})  # type: ignore[arg-type]


@pytest.mark.parametrize(("stages", "draft"), [(13, "ngram"), (0, "ngram"), (4, "/nowhere/draft")])
def test_what_the_model_rules_out_is_refused(stages: int, draft: str) -> None:
    with pytest.raises(ModelError):
        measure(TARGET, draft, MeasurementPlan(rows=(1,), stages=stages, repeats=1))


def test_more_rows_than_half_the_context_are_measured_too() -> None:
    assert local_path(TARGET) is not None
    found = measure(TARGET, "ngram", MeasurementPlan(rows=(200,), repeats=1))
    assert found.layer.at(200) > 0
