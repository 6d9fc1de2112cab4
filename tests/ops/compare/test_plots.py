"""Charts are written to the given place in the given format; timelines match the simulation."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.machine import Input, Output, Send
from flowspec.core.protocol.messages import Meter, StageReport
from flowspec.core.run.spec import JobSpec
from flowspec.errors import ConfigError
from flowspec.rehearse.compare.report import BenchReport, Estimate
from ops.compare import plots
from ops.compare.plots import Interval, Timeline, charts, require, save, sweep, tbt, timeline
from tests.addresses import D0, S1, S2, S3
from tests.rehearse.compare.test_report import HEADER, row
from tests.toy import PROMPT, pipeline

ROWS = (
    row("autoregressive", 1.0, source="-"),
    row("flowspec"),
    row("flowspec", 1.5, swept="latency", latency_ms=25.0),
    row("flowspec", 1.5, swept="mbit", mbit=10.0, tokens_per_second=Estimate(1.5)),
    row("flowspec", 3.0, stages=8),
)
SETS = {str(at): "chat" if at % 2 else "code" for at in range(6)}
REPORT = BenchReport({**HEADER, "prompts": {**HEADER["prompts"], "sets": SETS}}, ROWS)
MAGIC = {".svg": b"<?xml", ".png": b"\x89PNG"}


def taken(stages: int = 3) -> Timeline:
    return taken_with_meters(stages)[0]


def taken_with_meters(stages: int) -> tuple[Timeline, dict[int, Meter]]:
    """A job's timeline, and the meter of each stage."""
    seen = Timeline()
    meters: dict[int, Meter] = {}

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        seen(node, now, event, outputs)
        for output in outputs:
            if isinstance(output, Send) and isinstance(output.envelope.message, StageReport):
                meters[output.envelope.message.stage] = output.envelope.message.meter

    simulation = pipeline(stages, tap=tap)
    simulation.submit("j", JobSpec(prompt_ids=PROMPT, max_new_tokens=24, strategy="flowspec"))
    simulation.run()
    return seen, meters


@pytest.mark.parametrize("suffix", sorted(MAGIC))
def test_every_chart_is_written_as_its_name_says(tmp_path: Path, suffix: str) -> None:
    drawn = dict(charts(REPORT))
    assert set(drawn) == {
        "tbt-4-stages-T0",
        "speedup-4-stages-T0",
        "rows-4-stages-T0",
        "sweep-latency-4-stages-T0",
        "sweep-mbit-4-stages-T0",
        "tbt-8-stages-T0",
        "speedup-8-stages-T0",
        "rows-8-stages-T0",
    }
    name = "speedup-4-stages-T0" if suffix == ".png" else "sweep-mbit-4-stages-T0"
    save(drawn[name](), tmp_path / f"x{suffix}")
    assert (tmp_path / f"x{suffix}").read_bytes().startswith(MAGIC[suffix])


def test_every_chart_says_that_it_is_simulated() -> None:
    for name, draw in charts(REPORT):
        assert "simulated" in draw().axes[0].get_title(loc="left"), name
    assert "simulated" in timeline(taken(), len(PROMPT), 10.0, "x").axes[0].get_xlabel()


def test_bars_are_as_long_as_what_they_show() -> None:
    axes = tbt(ROWS[:2], "t").axes[0]
    assert [bar.get_width() for bar in axes.patches] == [500.0, 500.0]  # type: ignore[attr-defined]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "autoregressive",
        "flowspec, slm",
    ]


def test_rows_are_counted_a_stage_and_a_decoded_token() -> None:
    widths = [bar.get_width() for bar in plots.fates(ROWS[1:2], "t").axes[0].patches]  # type: ignore[attr-defined]
    assert widths == pytest.approx([192 / 42 / 4, 400 / 42 / 4, 10 / 42 / 4])


def test_a_sweep_goes_through_the_profiles_own_link() -> None:
    assert list(sweep([ROWS[1], ROWS[2]], "latency", "t").axes[0].lines[0].get_xdata()) == [
        0.3,
        25.0,
    ]
    axes = sweep([ROWS[1], ROWS[3]], "mbit", "t").axes[0]
    assert list(axes.lines[0].get_xdata()) == [10.0, 1000.0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "1000"]


@pytest.mark.parametrize("name", ["x.pdf", "x", "nowhere/x.svg"])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        save(tbt(ROWS[:1], "t"), tmp_path / name)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        require()


def test_a_timeline_has_every_pass_once_and_no_device_does_two_at_a_time() -> None:
    seen = taken()
    by_node: dict[Address, list[Interval]] = {}
    for span in seen.spans:
        by_node.setdefault(span.node, []).append(span)
    assert set(by_node) == {D0, S1, S2, S3}
    for node, spans in by_node.items():
        assert all(one.end <= other.start for one, other in itertools.pairwise(spans)), node
        assert all(span.draft == (node == D0) for span in spans)
    assert seen.commits == sorted(seen.commits) and seen.commits


def test_useful_rows_of_a_stage_are_those_its_meter_counts() -> None:
    seen, meters = taken_with_meters(3)
    first = len(PROMPT) - 1
    for node in (S1, S2, S3):
        rows = [
            number
            for span in seen.spans
            if span.node == node
            for number in span.ids
            if number > first
        ]
        useful = [number for number in rows if number in seen.useful]
        assert len(rows) == len(set(rows))
        meter = meters[node.number]
        assert (len(useful), len(rows) - len(useful)) == (meter.useful, meter.wasted)
        assert meter.wasted > 0


def test_shares_of_a_pass_add_up_to_one() -> None:
    seen = taken()
    for span in seen.spans:
        shares = seen.fates(span, len(PROMPT))
        assert sum(shares.values()) == pytest.approx(1) and min(shares.values()) >= 0
        assert set(shares) == ({"draft"} if span.draft else {"prompt", "useful", "wasted"})


def test_lanes_are_in_the_order_of_the_pipeline() -> None:
    labels = timeline(taken(), len(PROMPT), 10.0, "x").axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["draft", "stage 1", "stage 2", "stage 3"]
    assert plots.FORMATS == (".svg", ".png")
