"""``flowspec bench`` and ``simulate`` as their users call them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.cli.bench import Options, bench, compare, prompts_in, simulate, strategies_of
from flowspec.errors import ConfigError
from flowspec.strategies import EXACT

OPTIONS = Options(
    profile="jetson-7b",
    strategies=["chain"],
    draft="slm",
    temperatures="0",
    stages="2",
    tokens=8,
    prompts=None,
    half="tuning",
    no_loops=False,
    baseline="autoregressive",
    seed=1,
    sweep=[],
    out=None,
    markdown=None,
)
QUESTION = "Who wrote the first computer program?"


@pytest.fixture
def question(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"prompt": QUESTION}) + "\n")
    return file


def test_a_comparison_is_written_and_compared_with_itself(
    tmp_path: Path, question: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    text = tmp_path / "run.md"
    bench(replace(OPTIONS, prompts=question, sweep=["latency=25"], out=out, markdown=text))
    assert capsys.readouterr().out == ""
    assert {row["strategy"] for row in json.loads(out.read_text())["rows"]} == {
        "autoregressive",
        "chain",
    }
    assert "jetson-7b, simulated" in text.read_text()
    compare(out, out)
    assert "| chain | slm | 2 | 0 | 0.3 ms, 1000 Mbit/s |" in capsys.readouterr().out


def test_the_way_of_rows_is_said_charged_and_not_compared_with_another(
    tmp_path: Path, question: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = replace(OPTIONS, prompts=question, profile="wan-25ms", strategies=["autoregressive"])
    files = [tmp_path / "straight.json", tmp_path / "through.json"]
    bench(replace(options, out=files[0]))
    assert "The broker is beside the draft worker, rows go straight" in capsys.readouterr().out
    bench(replace(options, broker="own", rows="broker", out=files[1]))
    assert "The broker is on a box of its own, rows go through it" in capsys.readouterr().out
    straight, through = (json.loads(file.read_text())["rows"][0]["tbt"] for file in files)
    assert through["mean"] - straight["mean"] == pytest.approx(3 * 0.025, rel=0.02)
    with pytest.raises(ConfigError, match=r"differ in profile: .*straight.* and .*through it"):
        compare(*files)


def test_one_strategy_is_simulated_and_says_on_what(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(QUESTION, None, "jetson-7b", None, "chain", "ngram", 0.0, 1, 8, as_json=False)
    shown = capsys.readouterr().out
    assert "Simulated: jetson-7b, 4 stages" in shown and "NVIDIA's data sheet" in shown
    assert "The broker is beside the draft worker, rows go straight" in shown
    assert "tokens/s" in shown


def test_json_is_what_a_comparison_writes(
    question: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(None, question, "jetson-7b", 2, "chain", "ngram", 0.0, 1, 8, as_json=True)
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    assert (found["how"], row["strategy"], row["stages"], row["tokens"]) == (
        "simulated",
        "chain",
        2,
        8,
    )
    assert row["speedup"]["median"] > 0
    assert found["profile"]["name"] == "jetson-7b"


def test_several_strategies_come_in_any_of_the_usual_ways() -> None:
    wanted = ("auto", "chain:window=4,in_flight=2", "flowspec")
    for given in (
        ["auto", "chain:window=4,in_flight=2", "flowspec"],
        ["auto chain:window=4,in_flight=2 flowspec"],
        ["auto,chain:window=4,in_flight=2,flowspec"],
        ["auto, chain:window=4,in_flight=2", "flowspec", "auto"],
    ):
        assert strategies_of(given) == wanted
    assert strategies_of(["all"]) == EXACT
    assert strategies_of(["auto,all"])[0] == "auto" and set(strategies_of(["auto,all"])) == set(
        EXACT
    )


def test_packaged_prompts_are_of_six_kinds_of_two() -> None:
    sets = [prompt.set for prompt in prompts_in(None)]
    assert len(sets) == 12 and {sets.count(name) for name in sets} == {2}


def test_a_folders_sets_are_its_files(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(
            '{"turns": ["x"], "kind": "k"}\n\n{"prompt": "y"}\n'
        )
    assert [(prompt.set, prompt.text) for prompt in prompts_in(tmp_path)] == [
        ("a", "x"),
        ("a", "y"),
        ("b", "x"),
        ("b", "y"),
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"profile": "nowhere"}, "no profile 'nowhere'"),
        ({"strategies": ["quick"]}, "unknown strategy 'quick'"),
        ({"strategies": []}, "nothing to run"),
        ({"temperatures": "warm"}, "--temperatures is 'warm'"),
        ({"stages": "4,x"}, "--stages is '4,x'"),
        ({"tokens": 0}, "tokens is 0"),
        ({"sweep": ["speed=1"]}, "--sweep is 'speed=1'"),
        ({"sweep": ["mbit=0"]}, "a link has"),
        ({"out": Path("/nowhere/run.json")}, "there is no folder /nowhere"),
        ({"prompts": Path("/nowhere")}, "/nowhere cannot be read"),
        ({"half": "third"}, "the half is 'third'"),
    ],
)
def test_a_wrong_flag_is_one_line(change: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        bench(replace(OPTIONS, **change))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_prompt_and_a_file_of_prompts_exclude_each_other(question: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        simulate(QUESTION, question, "jetson-7b", 2, "chain", "slm", 0.0, 1, 8, as_json=False)
