"""``python -m ops.compare``: tuning, charts and the papers' tables as their users call them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.compare import tables
from ops.compare.__main__ import main

QUICK = ("--stages", "2", "--tokens", "8")


def refused(*words: str) -> str:
    """The one line that refuses ``words``."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    return str(ended.value.code)


def test_strategies_are_tuned_on_one_half_and_measured_on_the_other(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"Who was number {n}?"}) + "\n" for n in range(4))
    )
    out = tmp_path / "run.json"
    text = tmp_path / "run.md"
    given = "speculative auto static_tree:shape=1-1 pipespec"
    where = ("--prompts", str(file), "--out", str(out), "--markdown", str(text))
    words = ("--strategies", given, "--draft", "ngram", "--baseline", "pipespec")
    main(["tune", *QUICK, *where, *words])
    report = json.loads(out.read_text())
    tuning = report["tuning"]
    assert (report["prompts"]["half"], report["prompts"]["count"]) == ("measuring", 2)
    assert (tuning["prompts"]["half"], tuning["prompts"]["count"]) == ("tuning", 2)
    assert report["prompts"]["digest"] != tuning["prompts"]["digest"]
    rows = {row["strategy"]: row for row in tuning["rows"]}
    assert rows.keys() == {"speculative", "static_tree:shape=1-1"}, "of two references"
    assert rows["static_tree:shape=1-1"]["configurations"] == 2, "with and without overlap"
    measured = {row["strategy"] for row in report["rows"]}
    found = {row["found"] for row in rows.values()}
    assert measured == {"pipespec", "auto", *rows, *found}, "the defaults beside what was found"
    assert "found over auto (95%)" in text.read_text()
    assert "`python -m ops.compare tune --stages 2" in text.read_text()


def test_charts_are_drawn_beside_a_plain_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"prompt": "Who wrote the first computer program?"}) + "\n")
    folder = tmp_path / "charts"
    words = ("--strategies", "chain", "--half", "tuning", "--sweep", "latency=25")
    main(["charts", *QUICK, *words, "--prompts", str(file), "--plots", str(folder)])
    assert "jetson-7b, simulated" in capsys.readouterr().out
    assert {file.name for file in folder.iterdir()} == {
        "tbt-2-stages-T0.svg",
        "speedup-2-stages-T0.svg",
        "rows-2-stages-T0.svg",
        "sweep-latency-2-stages-T0.svg",
        "timeline-autoregressive.svg",
        "timeline-chain.svg",
    }


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--strategies", "autoregressive"), "autoregressive is the baseline"),
        (("--strategies", "auto"), "auto is what the others are compared with"),
        (
            ("--strategies", "specpipe", "--against", "specpipe"),
            "specpipe is what the others are compared with",
        ),
        (
            ("--strategies", "auto:delay=1,alternative=2", "--against", "specpipe"),
            "auto:delay=1,alternative=2 has no option left, "
            "specpipe is what the others are compared with",
        ),
    ],
)
def test_tuning_is_refused_where_no_option_can_be_searched(
    flags: tuple[str, ...], why: str
) -> None:
    said = f"compare: tune has no option to search: {why}; name another strategy, like specpipe"
    assert refused("tune", *flags) == said


def test_tuning_needs_a_prompt_of_either_half(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text('{"prompt": "One?"}\n')
    assert "tune has no prompt to measure on: " in refused("tune", "--prompts", str(file))


def test_the_names_of_the_papers_tables_are_listed_with_their_titles(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["table", "list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == tables.names()
    assert all(tables.title(line.split()[0]) in line for line in lines)
    assert "there is no table 'none'" in refused("table", "none")
