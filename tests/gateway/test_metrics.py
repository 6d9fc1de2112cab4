"""Figures in Prometheus' format, as its own parser reads them."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from flowspec.gateway import metrics as metrics_module
from flowspec.gateway.metrics import (
    _COUNTERS,
    _GAUGES,
    _HISTOGRAMS,
    Histogram,
    Metrics,
    accepted_tokens,
)
from flowspec.results import Stats

STATS = Stats(
    tokens=11,
    hit_rate=0.7,
    rounds=3,
    queue_seconds=0.1,
    rows={"useful": 5, "wasted": 6, "void": None},
)


def samples(text: str) -> dict[str, float]:
    """Values by name and labels other than the common ones."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {
                name: value
                for name, value in sample.labels.items()
                if name not in ("engine", "model_name")
            }
            assert sample.labels["engine"] == "0"
            found[sample.name + (str(sorted(labels.items())) if labels else "")] = sample.value
    return found


def test_counters_gauges_and_histograms() -> None:
    metrics = Metrics()
    metrics.count("vllm:generation_tokens_total", 11)
    metrics.count("vllm:request_success_total", finished_reason="stop")
    metrics.count("vllm:request_success_total", finished_reason="stop")
    metrics.observe("vllm:inter_token_latency_seconds", 0.03, times=4)
    metrics.observe("vllm:inter_token_latency_seconds", 99.0)
    metrics.count_stats(STATS)
    found = samples(metrics.text('a "model"\\', {"vllm:num_requests_running": 2}))
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:generation_tokens_total"] == 11
    assert found["vllm:request_success_total[('finished_reason', 'stop')]"] == 2
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 7
    assert found["flowspec:decoded_tokens_total"] == 10
    assert found["flowspec:rounds_total"] == 3
    assert found["flowspec:rows_total[('fate', 'wasted')]"] == 6
    assert "flowspec:rows_total[('fate', 'void')]" not in found
    latency = "vllm:inter_token_latency_seconds"
    assert found[f"{latency}_bucket[('le', '0.025')]"] == 0
    assert found[f"{latency}_bucket[('le', '0.05')]"] == 4
    assert found[f"{latency}_bucket[('le', '2.5')]"] == 4
    assert found[f"{latency}_bucket[('le', '+Inf')]"] == 5
    assert found[f"{latency}_count"] == 5
    assert abs(found[f"{latency}_sum"] - 99.12) < 1e-9


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    assert histogram.counts == [1, 0, 0]


def test_accepted_tokens_are_not_invented() -> None:
    assert accepted_tokens(STATS) == 7
    assert accepted_tokens(Stats(tokens=5, hit_rate=None)) is None
    assert accepted_tokens(Stats(tokens=0, hit_rate=0.0)) == 0


def test_every_figure_that_is_declared_is_counted_somewhere() -> None:
    folder = Path(metrics_module.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    declared = (*_COUNTERS, *_GAUGES, *_HISTOGRAMS)
    assert [name for name in declared if source.count(f'"{name}"') < 2] == []
