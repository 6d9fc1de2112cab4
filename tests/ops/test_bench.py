"""The benchmarks run on small inputs and print the tables of the results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench import emulation, hop, simulation_speed
from ops.bench.emulation import Comparison, ratio_table
from ops.bench.random_model import Shape, random_model
from ops.bench.report import Quantiles

ROOT = Path(__file__).parent.parent.parent
PROMPTS = ROOT / "tests" / "data" / "prompts.jsonl"


def printed(*words: str) -> list[list[str]]:
    """The cells of every table row that ``python -m ops.bench...`` prints."""
    command = [sys.executable, "-m", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in done.stdout.splitlines()
        if line[:1] == "|"
    ]


@pytest.mark.heavy
def test_hop_prints_every_row_with_its_medians() -> None:
    rows = {row[0]: row[1:] for row in printed("ops.bench.hop", "--rounds", "60")}
    places = [f"{size}, {by}" for size in ("16 KB", "128 KB") for by in ("unix socket", "TCP")]
    hops = ("bare", "ours, straight", "ours, broker", "ours, round trips")
    for name in (*(f"{way}, {place}" for way in hops for place in places), "our commit, 4 stages"):
        assert 0 < float(rows[name][0]) <= float(rows[name][1])
    assert float(rows["our prune, 80 rows to 12"][0]) > float(
        rows["in-place copy of the same 12 rows"][0]
    )
    for part in ("machine (message in, pass out)", "places of the rows", "mask"):
        assert float(rows[f"receiver: {part}"][0]) > 0


def test_several_runs_give_the_median_p50_and_the_worst_p99() -> None:
    runs = iter([([1.0], [4.0, 4.0]), ([3.0], [5.0, 5.0]), ([2.0], [9.0, 9.0])])
    assert hop.repeated(3, lambda _: next(runs)) == [Quantiles(2.0, 3.0), Quantiles(5.0, 9.0)]


def test_emulated_ratios_have_a_column_per_cluster_and_temperature() -> None:
    columns = ("jetson-7b, 4, T = 0", "jetson-7b, 4, T = 1")
    found = [
        Comparison(strategy, column, "", f"1.0{at}{strategy}")
        for at, column in enumerate(columns)
        for strategy in ("chain", "auto")
    ]
    assert ratio_table(found) == [
        "| strategy | jetson-7b, 4, T = 0 | jetson-7b, 4, T = 1 |",
        "|---|---|---|",
        "| chain | 1.00chain | 1.01chain |",
        "| auto | 1.00auto | 1.01auto |",
    ]


@pytest.mark.heavy
def test_the_account_of_a_pass_has_a_row_per_part_and_adds_up(tmp_path: Path) -> None:
    shape = Shape(64, 96, layers=4, heads=4, key_heads=2, head_dim=16, vocabulary=4200, context=256)
    model = random_model(shape, tmp_path / "tiny")
    rows = printed(
        *("ops.bench.pass_account", "--rounds", "8", "--rows", "1,3", "--model", str(model))
    )
    heads = [at for at, row in enumerate(rows) if row[0] == "part"]
    tables = [rows[at + 2 : end] for at, end in zip(heads, [*heads[1:], None], strict=True)]
    assert len(tables) == 4, "two stages and two drafters"
    for number, lines in enumerate(tables):
        found = {line[0]: [float(cell) for cell in line[1:-1]] for line in lines}
        parts = ("machine", "codec, write", "loop") if number < 2 else ("proposals",)
        for part in (*parts, "mask", "layers", "KV rows", "linears", "attention", "measured"):
            assert min(found[part]) > 0, (number, part)


@pytest.mark.heavy
def test_simulation_speed_computes_no_pass_twice() -> None:
    words = (
        "--tokens",
        "12",
        "--stages",
        "2,5",
        "--strategies",
        "flowspec,pipedec,chain",
        "--temperature",
        "1",
    )
    rows = printed("ops.bench.simulation_speed", *words)
    assert rows[0] == ["strategy, tokens/s", "2 stages", "5 stages"]
    assert [row[0] for row in rows[2:]] == ["flowspec", "pipedec", "chain"]
    assert all(float(cell) > 0 for row in rows[2:] for cell in row[1:])


@pytest.mark.heavy
def test_ablation_checks_the_text_and_orders_the_strategies(tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(PROMPTS.read_text().splitlines()[8:10]))
    rows = printed("ops.bench.ablation", "--tokens", "16", "--seeds", "1", "--prompts", str(few))
    greedy = {row[0]: row[1:] for row in rows[2:9]}
    assert greedy["autoregressive"][0] == "0.2500"
    assert float(greedy["flowspec whole"][0]) > float(greedy["pruned_pp"][0]) > 0.25
    assert len(rows) == 18


@pytest.mark.heavy
def test_systems_checks_the_text_and_agrees_with_the_formulas(tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(PROMPTS.read_text().splitlines()[8:10]))
    chosen = "autoregressive,pipedec,specpipe,static_tree,speculative,chain"
    rows = printed(
        "ops.bench.systems",
        "--tokens",
        "16",
        "--stages",
        "4",
        "--temperatures",
        "0",
        "--sources",
        "slm,ngram",
        "--strategies",
        chosen,
        "--prompts",
        str(few),
    )
    table = {(row[0], row[1]): row for row in rows[2:]}
    assert len(table) == 11, "plain decoding drafts nothing: one row"
    assert table["autoregressive", "slm"][3] == "0.250"
    for strategy in ("pipedec", "specpipe", "static_tree", "speculative"):
        assert 0.97 <= float(table[strategy, "slm"][8]) <= 1.03
        assert float(table[strategy, "slm"][3]) > 0.25


def test_simulation_speed_knows_every_drafters_passes() -> None:
    bench = simulation_speed.SpeedBench("ngram:draft", 8, 0.0)
    assert bench.speed("auto", 2, times=1) > 0
    assert bench.passes > 0


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--strategies", "nosuch", "unknown strategy 'nosuch'"),
        ("--profiles", "nosuch", "there is no profile 'nosuch'"),
        ("--draft", "head:", "has an empty name"),
        ("--count", "0", "--count is 0; expected 1 to 24 prompts"),
        ("--count", "25", "--count is 25; expected 1 to 24 prompts"),
    ],
)
def test_what_the_emulation_bench_cannot_run_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    value: str,
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["emulation", flag, value])
    with pytest.raises(SystemExit, match=f"flowspec: .*{said}"):
        emulation.main()
    assert capsys.readouterr().out == ""


@pytest.mark.heavy
def test_real_workers_on_emulated_devices_take_the_simulators_time() -> None:
    words = (
        "--strategies",
        "chain,auto",
        "--draft",
        "slm:head",
        "--tokens",
        "36",
        "--count",
        "1",
        "--stretch",
        "4",
    )
    rows = printed("ops.bench.emulation", *words, "--free")
    assert [row[0] for row in rows[2:]] == ["chain", "auto"]
    assert all(0.99 <= float(row[6]) <= 1.01 for row in rows[2:]), rows
