"""The papers' tables: printed ratios follow from the papers' figures, and all rows run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError
from flowspec.model.drafters.sources import load_sources
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.rehearse.compare.hits import HitDrafter, Kind, geometric
from flowspec.rehearse.compare.simulate import JOB
from flowspec.rehearse.compare.texts import Text, texts
from flowspec.rehearse.devices import profiles
from flowspec.rehearse.devices.way import NO_BROKER
from flowspec.strategies import build
from ops.compare import tables as module
from ops.compare.tables import names, run
from ops.compare.tables.columns import COLUMNS, Shown, step_seconds
from ops.compare.tables.contents import Block, Oracle, PaperRow, Table, load
from ops.compare.tables.figures import at_hit_rate, cluster
from ops.compare.tables.ranks import AT, hit_at
from tests.marks import crossed

BLOCKS = [(name, block) for name in names() for block in load(name).blocks]


def tokens_a_round(
    rates: tuple[float, ...], width: int = 10, layers: int = 7, nodes: int = 80
) -> float:
    """Tokens per round of an EAGLE-2 tree: 1 plus the best nodes' probabilities."""
    base: list[float] = []
    beam = [1.0]
    for _ in range(layers):
        layer = sorted((score * rate for score in beam for rate in rates[:width]), reverse=True)
        base = base + layer
        beam = layer[:width]
    return 1 + sum(sorted(base, reverse=True)[:nodes])


def test_every_paper_has_its_tables() -> None:
    found = set(names())
    assert found >= {"flowspec-1", "flowspec-2", "flowspec-3", "flowspec-bandwidth"}
    assert found >= {"pipedec-3", "pipedec-4", "pipedec-5", "pipedec-6"}
    assert found >= {"specpipe-7", "specpipe-9", "specpipe-10", "specpipe-11", "specpipe-memory"}
    assert found >= {"pipespec-2", "pipespec-7b", "pipespec-13b", "pipespec-lengths"}


@pytest.mark.parametrize("name", ["flowspec-1", "flowspec-2", "flowspec-3"])
def test_flowspecs_rates_give_the_tokens_a_round_of_its_naive_pipeline(name: str) -> None:
    table = load(name)
    for block in table.blocks:
        tokens = profiles.load(block.profile).anchors["naive_pp_output_tokens"]
        on_jetson = block.profile == "jetson-7b"
        round_seconds = 0.653 if on_jetson else 3.068
        prefill = 0.511 if on_jetson else 2.6
        printed = block.rows[0].paper
        assert printed is not None
        expected = tokens * round_seconds / (tokens / printed - prefill)
        (kind,) = table.oracles[block.oracles[0]].kinds["head"]
        assert tokens_a_round(kind.rates) == pytest.approx(expected, rel=0.02)


def test_specpipes_rates_are_the_printed_hit_ratios_or_what_its_baselines_time_implies() -> None:
    table = load("specpipe-11")
    (printed,) = table.oracles["printed hit ratios"].kinds["slm"]
    assert printed.rates[0] == 0.81
    assert sum(printed.rates[:8]) == pytest.approx(0.99, abs=1e-3) == sum(printed.rates)
    (implied,) = table.oracles["SpecInfer's ms"].kinds["slm"]
    reach = list(
        itertools.accumulate(
            (sum(implied.rates[:n]) for n in (1, 1, 3, 1, 1, 1, 1, 1)), lambda a, b: a * b
        )
    )
    assert 1 + sum(reach) == pytest.approx((8 * 17 + 302.4) / 117.92, rel=0.01)
    for name in names():
        for key in table.oracles.keys() & load(name).oracles.keys():
            assert load(name).oracles[key] == table.oracles[key]


@pytest.mark.parametrize(
    ("name", "block"), BLOCKS, ids=[f"{name}, {block.name}" for name, block in BLOCKS]
)
def test_every_block_is_sound(name: str, block: Block) -> None:
    table = load(name)
    profile = profiles.load(block.profile)
    assert block.stages in profile.stages
    assert set(table.columns) <= set(COLUMNS)
    assert set(block.oracles) <= set(table.oracles)
    width = sum(len(COLUMNS[name].heads) for name in table.columns)
    for row in block.rows:
        draft = row.draft or table.draft
        if row.strategy:
            build(row.strategy, block.stages)
            assert block.pair or any(draft in table.oracles[name].kinds for name in block.oracles)
            assert not row.printed
        else:
            assert row.paper or len(row.printed) in (width, 0)
            assert row.paper or row.printed
        assert row.middles <= len(profile.middles)
    assert len({row.system for row in block.rows}) == len(block.rows)
    rows = {(other.name, row.system) for other in table.blocks for row in other.rows}
    assert {side for ratio in table.ratios for side in (ratio.of, ratio.over)} <= rows


def ratio(table: Table, block: Block, of: str, over: str, count: int = 3) -> float:
    """Ratio of two systems of a block at its first oracle's rates."""
    found = {row.system: row for row in block.rows}
    oracle = table.oracles[block.oracles[0]]
    values = [at_hit_rate(table, block, found[name], oracle, count).value for name in (of, over)]
    return table.speedup(*values)


def test_plain_decoding_takes_the_time_the_papers_print() -> None:
    for name, system in (
        ("specpipe-11", "PP"),
        ("specpipe-7", "PP"),
        ("pipespec-2", "AR"),
        ("pipespec-7b", "AR"),
        ("pipespec-13b", "AR"),
    ):
        table = load(name)
        block = table.blocks[0]
        row = next(row for row in block.rows if row.system == system)
        figure = at_hit_rate(table, block, row, table.oracles[block.oracles[0]], 1)
        assert figure.value == pytest.approx(row.paper, rel=0.01)
        assert figure.hit_rate == 0


@pytest.mark.heavy
def test_every_system_is_faster_than_the_one_it_was_compared_with() -> None:
    for name, of, over in (
        ("flowspec-1", "FlowSpec", "Naive PP"),
        ("specpipe-11", "SpecPipe", "SpecInfer"),
        ("specpipe-9", "SpecPipe", "SpecInfer"),
        ("pipespec-13b", "async {68M, 7B, 13B}", "async {68M, 13B}"),
        ("pipespec-2", "async {1B, 8B, 70B}", "sync {1B, 8B, 70B}"),
    ):
        table = load(name)
        assert ratio(table, table.blocks[0], of, over) > 1.2


@pytest.mark.heavy
def test_a_table_is_told_as_markdown_with_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEXTS", 1)
    lines: list[str] = []
    run("specpipe-11", lines.append, prompts=["What is a list?"], tokens=12)
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 4 and len({line.count("|") for line in rows}) == 1
    assert "302.39" in rows[1] and "54.67" in rows[3]
    assert lines[-1].startswith("Why they differ.")


@pytest.mark.heavy
@pytest.mark.parametrize("name", crossed(names(), keep=3))
def test_every_table_can_be_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(load(name), prompt_tokens=6, output_tokens=8, texts=1)
    blocks = tuple(
        replace(block, seeds=block.seeds[:1], rows=block.rows[:4]) for block in small.blocks[:2]
    )
    told = {(block.name, row.system) for block in blocks for row in block.rows}
    ratios = tuple(ratio for ratio in small.ratios if {ratio.of, ratio.over} <= told)
    small = replace(small, blocks=blocks, ratios=ratios)
    monkeypatch.setattr(module, "load", lambda _: small)
    lines: list[str] = []
    run(name, lines.append, prompts=["What is a list?"], tokens=6)
    for block in blocks:
        start = next(at for at, line in enumerate(lines) if line.startswith(f"### {block.name}:"))
        rows = lines[start + 1 : start + 3 + len(block.rows)]
        assert len({line.count("|") for line in rows}) == 1 and rows[0].count("|") > 2
        for row, line in zip(block.rows, rows[2:], strict=True):
            assert line.startswith(f"| {row.system} |")
            assert not row.strategy or any(cell.strip(" -") for cell in line.split("|")[3:])
    assert lines[-1] == small.why.strip()


def shown(strategy: str, oracle: tuple[Kind, ...], **changes: object) -> Shown:
    """A row of a block of specpipe-7 at the rates ``oracle``, over three texts."""
    table = replace(load("specpipe-7"), kv_bytes=4096, output_tokens=48)
    row = PaperRow("x", strategy)
    block = replace(table.blocks[0], rows=(row,), **changes)
    figure = at_hit_rate(table, block, row, Oracle({"slm": oracle}), 3)
    return Shown(table, block, row, figure, figure)


def cells(name: str, given: Shown) -> list[float]:
    """A column's cells as numbers; percents as shares."""
    found = COLUMNS[name].cells(given)
    return [float(cell.rstrip("%")) / (100 if "%" in cell else 1) for cell in found]


def test_verdicts_add_up_to_the_tokens_after_the_first() -> None:
    given = shown("naive_pp", (Kind((0.7, 0.1)),))
    for done in given.figure.runs:
        assert sum(done.lengths) == done.after == 47
    mean, *shares = cells("lengths", given)
    assert sum(shares) == pytest.approx(1, abs=0.05)
    assert 1 < mean < 8


def test_plain_decoding_keeps_one_stage_busy_at_a_time_and_holds_one_tree_row() -> None:
    given = shown("autoregressive", (Kind((0.7,)),))
    drafter, middle, stages = cells("busy", given)
    assert (drafter, middle) == (0, 0)
    assert stages == pytest.approx(1 / 8, abs=0.006)
    rows, tree, total = cells("memory", given)
    layers = max(profiles.load("rtx3090-70b").stage_layers(stage, 8) for stage in range(1, 9))
    assert rows == 1
    assert tree == pytest.approx(layers * 4096 / 2**20, abs=0.05)
    assert total == pytest.approx((200 + 48 - 1) * layers * 4096 / 2**20, rel=0.01)


def test_the_expected_time_without_misses_is_that_of_the_slowest_step() -> None:
    given = shown("specpipe:width=1", (Kind((1.0,)),))
    with_n, with_less = cells("expected", given)
    slowest = max(step_seconds(profiles.load("rtx3090-70b"), 8, 1))
    assert given.figure.hit_rate == 1
    assert with_n == with_less == pytest.approx(slowest * 1e3, abs=0.01)
    # After the first token the pipeline is filled once: seven steps more, over 47 tokens.
    assert given.figure.value == pytest.approx(with_n * (47 + 7) / 47, rel=0.02)


def test_three_runs_surround_their_mean() -> None:
    figure = shown("specpipe", (Kind((0.7, 0.1)),)).figure
    assert len(figure.thirds) == 3
    assert min(figure.thirds) <= figure.value <= max(figure.thirds)
    assert figure.thirds == figure.values


def test_no_block_charges_a_broker() -> None:
    for name in names():
        assert {cluster(block).way for block in load(name).blocks} == {NO_BROKER}


@pytest.mark.heavy
def test_a_slower_link_is_that_of_the_block() -> None:
    kinds = (Kind((0.7, 0.1)),)
    fast, slow = (shown("specpipe", kinds, mbit=mbit).figure.value for mbit in (10000, 100))
    far = shown("specpipe", kinds, latency_ms=20.0).figure.value
    assert fast < slow and fast < far


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_is_right_at_its_first_proposal(temperature: float) -> None:
    target = open_directory(default_pair()[0])
    (text,) = texts(["What is a list?"], [Sampling(temperature, seed=3)], 12, target)
    tokens, hits = hit_at(text, load_sources("target", target), coupled=temperature > 0)
    assert (tokens, hits) == (11, (11,) * len(AT))


def test_hits_at_k_are_the_rates_of_the_drafter() -> None:
    rates = geometric(0.5, 0.5)
    output = tuple((at * 7919 + 11) % 300 for at in range(3000))
    text = Text((1, 2, 3), output, Sampling())
    drafter = HitDrafter({JOB: (*text.prompt, *output)}, [Kind(rates)], 300)
    tokens, hits = hit_at(text, drafter, coupled=False)
    for k, count in zip(AT, hits, strict=True):
        assert count / tokens == pytest.approx(sum(rates[:k]), abs=0.04)


@pytest.mark.heavy
def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of: accepted-lengths, flowspec-1"):
        run("flowspec-9", print)
    with pytest.raises(ConfigError, match="at least one"):
        run("specpipe-11", print, prompts=[])
