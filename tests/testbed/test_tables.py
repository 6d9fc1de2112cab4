"""The papers' tables: printed ratios follow from the papers' figures, and all rows run."""

from __future__ import annotations

import itertools

import pytest

from flowspec.emulation import profiles
from flowspec.errors import ConfigError
from flowspec.strategies import build
from flowspec.testbed import tables as module
from flowspec.testbed.tables import names, run
from flowspec.testbed.tables.contents import Block, Table, load
from flowspec.testbed.tables.figures import at_hit_rate

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


def test_the_tables_of_the_issue_are_there() -> None:
    assert names() == ["flowspec-1", "flowspec-2", "pipedec-5", "pipespec-2", "specpipe-11"]


@pytest.mark.parametrize("name", ["flowspec-1", "flowspec-2"])
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
    assert table.oracles == load("pipedec-5").oracles


@pytest.mark.parametrize(
    ("name", "block"), BLOCKS, ids=[f"{name}, {block.name}" for name, block in BLOCKS]
)
def test_every_block_is_sound(name: str, block: Block) -> None:
    table = load(name)
    profile = profiles.load(block.profile)
    assert block.stages in profile.stages
    for row in block.rows:
        build(row.strategy, block.stages)
        assert all(
            (row.draft or table.draft) in table.oracles[oracle].kinds for oracle in block.oracles
        )
        assert row.middles <= len(profile.middles)
    rows = {(other.name, row.system) for other in table.blocks for row in other.rows}
    assert {side for ratio in table.ratios for side in (ratio.of, ratio.over)} <= rows


def ratio(table: Table, block: Block, of: str, over: str, count: int = 3) -> float:
    """Ratio of two systems of a block at its first oracle's rates."""
    found = {row.system: row for row in block.rows}
    oracle = table.oracles[block.oracles[0]]
    values = [at_hit_rate(table, block, found[name], oracle, count).value for name in (of, over)]
    return table.speedup(*values)


def test_plain_decoding_takes_the_time_the_papers_print() -> None:
    for name, system in (("specpipe-11", "PP"), ("pipespec-2", "AR")):
        table = load(name)
        (block,) = table.blocks
        row = next(row for row in block.rows if row.system == system)
        figure = at_hit_rate(table, block, row, table.oracles[block.oracles[0]], 1)
        assert figure.value == pytest.approx(row.paper, rel=0.01)
        assert figure.hit_rate == 0


def test_every_system_is_faster_than_the_one_it_was_compared_with() -> None:
    for name, of, over in (
        ("flowspec-1", "FlowSpec", "Naive PP"),
        ("specpipe-11", "SpecPipe", "SpecInfer"),
        ("pipespec-2", "async {1B, 8B, 70B}", "sync {1B, 8B, 70B}"),
    ):
        table = load(name)
        assert ratio(table, table.blocks[0], of, over) > 1.2


def test_a_table_is_told_as_markdown_with_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEXTS", 1)
    lines: list[str] = []
    run("specpipe-11", lines.append, prompts=["What is a list?"], tokens=12)
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 4 and len({line.count("|") for line in rows}) == 1
    assert "302.39" in rows[1] and "54.67" in rows[3]
    assert lines[-1].startswith("Why they differ.")


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of: flowspec-1"):
        run("flowspec-9", print)
    with pytest.raises(ConfigError, match="at least one"):
        run("specpipe-11", print, prompts=[])
