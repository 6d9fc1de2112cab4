"""The benchmarks run on small inputs and print the tables of the results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowspec.core.run.history import History
from flowspec.emulation.profiles import load
from flowspec.model.drafter_choice import ChoiceDrafter
from flowspec.testbed.memo import MemoDrafter
from flowspec.testbed.prompts import Prompt
from ops.bench import emulation, hop, simulation_speed
from ops.bench.emulation import Comparison, ratio_table, simulated
from ops.bench.random_model import Shape, random_model
from ops.bench.report import Quantiles
from ops.bench.trace import TraceBench
from ops.bench.way import in_turn
from tests.addresses import S3

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
def test_rows_through_the_broker_pay_three_more_latencies_a_token_on_four_stages() -> None:
    head, _, *rows = printed(
        *("ops.bench.way", "--profiles", "wan-25ms,jetson-7b", "--temperatures", "0"),
        *("--strategies", "chain", "--draft", "ngram", "--tokens", "8", "--count", "1"),
    )
    found = [dict(zip(head, row, strict=True)) for row in rows]
    assert [(row["profile"], row["strategy"]) for row in found] == [
        (profile, strategy)
        for profile in ("wan-25ms", "jetson-7b")
        for strategy in ("autoregressive", "chain")
    ]
    far = found[0]
    more = float(far["through the broker, ms"]) - float(far["straight, ms"])
    assert more == pytest.approx(3 * 25, abs=3), "and the bytes of rows on three more links"


def test_prompts_are_taken_from_their_sets_in_turn() -> None:
    sets = [Prompt(name, str(number)) for name in "ab" for number in range(2)]
    taken = [(prompt.set, prompt.text) for prompt in in_turn(sets)]
    assert taken == [("a", "0"), ("b", "0"), ("a", "1"), ("b", "1")]


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
def test_ragged_passes_are_measured_and_checked(tmp_path: Path) -> None:
    shape = Shape(64, 96, layers=2, heads=4, key_heads=2, head_dim=16, vocabulary=4200, context=256)
    model = random_model(shape, tmp_path / "tiny")
    words = ("--jobs", "3", "--rows", "1,4", "--rounds", "2", "--model", str(model))
    found = [row for row in printed("ops.bench.ragged", *words) if row[0] in ("1", "4")]
    assert len(found) == 2
    assert all(float(cell) > 0 for row in found for cell in row)


@pytest.mark.heavy
def test_stores_of_rows_are_measured_and_checked(tmp_path: Path) -> None:
    shape = Shape(64, 96, layers=2, heads=4, key_heads=2, head_dim=16, vocabulary=4200, context=256)
    model = random_model(shape, tmp_path / "tiny")
    words = ("--contexts", "40", "--jobs", "1,2", "--rounds", "2", "--shared", "90", "--mixed", "9")
    rows = printed("ops.bench.kv", *words, "--rows", "3", "--model", str(model))
    figures = [row for row in rows if row[0] in ("40", "keep", "begin")]
    assert len(figures) == 4
    assert all(float(cell) > 0 for row in figures for cell in row[1:])
    (shared,) = (row for row in rows if row[0] == "8 jobs share 90 rows")
    assert float(shared[3]) < float(shared[1])


@pytest.mark.heavy
def test_shared_passes_of_drafters_are_measured_and_checked() -> None:
    words = ("--jobs", "3", "--nodes", "1,4", "--rounds", "1", "--sources", "head,ngram")
    found = [row for row in printed("ops.bench.ragged_drafts", *words) if row[1] in ("1", "4")]
    assert [row[0] for row in found] == ["head", "head", "ngram", "ngram"]
    assert all(float(cell) > 0 for row in found for cell in row[1:])


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


def test_a_bench_of_drafts_to_choose_from_charges_who_does_not_choose_for_the_first_alone() -> None:
    profile = load("jetson-7b")
    one = TraceBench("ngram", 8, 1, count=1)
    several = TraceBench("ngram:head", 8, 1, count=1)
    assert isinstance(several.drafter, ChoiceDrafter)
    assert all(isinstance(drafter, MemoDrafter) for drafter in several.drafter.drafters)
    assert one.run("chain", profile, 3)[0] == several.run("chain", profile, 3)[0]
    seconds = [
        simulated(bench.texts, "chain", profile, 3, bench.source, History())
        for bench in (one, several)
    ]
    assert seconds[0] == seconds[1]
    auto = several.run("auto", profile, 3)[1][0], one.run("auto", profile, 3)[1][0]
    each = [trace.kept[S3] / trace.messages[S3] for trace in auto]
    assert each[0] > 2 * each[1], "the last stage sends hidden rows, whoever drafts"


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


@pytest.mark.heavy
def test_the_spread_of_live_runs_has_a_row_per_strategy() -> None:
    words = ("--repeats", "2", "--tokens", "6", "--strategies", "autoregressive specpipe")
    head, _, *rows = printed("ops.bench.variance", *words)
    assert [row[0] for row in rows] == ["autoregressive", "specpipe"]
    for row in rows:
        found = dict(zip(head, row, strict=True))
        least, most = map(float, found["least to most"].split(" to "))
        assert 0 < least <= float(found["ms per token, median"]) <= most
        assert float(found["most over least"]) == pytest.approx(most / least, abs=0.02)
