"""Counters and histograms, written in Prometheus' text format under the names that vLLM uses.

What vLLM has no name for begins with ``flowspec:``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowspec.results import Stats

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Histogram:
    """Counts of observations by upper bound. ``bounds`` grow."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, seen ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


#: By name: its buckets and what it says.
_HISTOGRAMS: Mapping[str, tuple[Sequence[float], str]] = {
    "vllm:time_to_first_token_seconds": (_FIRST, "Time from a request to its first token."),
    "vllm:inter_token_latency_seconds": (_SHORT, "Time between tokens, spread over each arrival."),
    "vllm:e2e_request_latency_seconds": (_LONG, "Time from a request to the end of its answer."),
    "vllm:request_queue_time_seconds": (_LONG, "Time that an answer waited to begin."),
    "vllm:request_prompt_tokens": (_COUNTS, "Tokens of a prompt."),
    "vllm:request_generation_tokens": (_COUNTS, "Tokens of an answer."),
}
_COUNTERS: Mapping[str, str] = {
    "vllm:prompt_tokens_total": "Tokens of all prompts.",
    "vllm:generation_tokens_total": "Tokens of all answers.",
    "vllm:prefix_cache_queries_total": "Tokens of all prompts that could have been kept.",
    "vllm:prefix_cache_hits_total": "Tokens of prompts whose rows were kept of an earlier job.",
    "vllm:request_success_total": "Answers that ended, by reason.",
    "vllm:spec_decode_num_accepted_tokens_total": "Tokens guessed before the model chose.",
    "flowspec:decoded_tokens_total": "Tokens that could have been guessed.",
    "flowspec:rounds_total": "Times that drafting began again from a token it had not guessed.",
    "flowspec:rows_total": "Rows by fate, summed over the stages.",
    "flowspec:requests_failed_total": "Answers that failed, by the status they gave.",
    "flowspec:requests_cancelled_total": "Answers whose client went away.",
}
_GAUGES: Mapping[str, str] = {
    "vllm:num_requests_running": "Jobs that run in the pipeline.",
    "vllm:num_requests_waiting": "Jobs that wait in its queue.",
    "flowspec:open_answers": "Answers of this gateway under way.",
    "flowspec:pipeline_ready": "Whether all workers of the pipeline are there.",
}


class Metrics:
    """All figures of a gateway."""

    def __init__(self) -> None:
        self._histograms = {name: Histogram(found[0]) for name, found in _HISTOGRAMS.items()}
        self._counters: dict[str, dict[Labels, float]] = {name: {} for name in _COUNTERS}
        self.count("vllm:prompt_tokens_total", 0)
        self.count("vllm:generation_tokens_total", 0)

    def count(self, name: str, more: float = 1, **labels: str) -> None:
        """Add ``more`` to a counter."""
        values = self._counters[name]
        key = tuple(labels.items())
        values[key] = values.get(key, 0) + more

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Add ``value`` to a histogram, ``times`` times."""
        self._histograms[name].observe(value, times)

    def count_stats(self, stats: Stats) -> None:
        """Add what a job reported at its end."""
        decoded = max(0, stats.get("tokens", 0) - 1)
        accepted = accepted_tokens(stats)
        if accepted is not None:
            self.count("vllm:spec_decode_num_accepted_tokens_total", accepted)
            self.count("flowspec:decoded_tokens_total", decoded)
        self.count("flowspec:rounds_total", stats.get("rounds") or 0)
        for fate, rows in (stats.get("rows") or {}).items():
            if isinstance(rows, int):
                self.count("flowspec:rows_total", rows, fate=fate)
        queued = stats.get("queue_seconds")
        if queued is not None:
            self.observe("vllm:request_queue_time_seconds", queued)

    def text(self, model: str, gauges: Mapping[str, float]) -> str:
        """Everything in Prometheus' text format; ``gauges``: values of this moment, by name."""
        common = (("engine", "0"), ("model_name", model))
        lines: list[str] = []
        for name, value in gauges.items():
            lines += _header(name, "gauge", _GAUGES[name])
            lines.append(_line(name, common, value))
        for name, values in self._counters.items():
            lines += _header(name, "counter", _COUNTERS[name])
            lines += [_line(name, (*common, *key), value) for key, value in values.items()]
        for name, histogram in self._histograms.items():
            lines += _header(name, "histogram", _HISTOGRAMS[name][1])
            lines += _buckets(name, common, histogram)
        return "\n".join(lines) + "\n"


def accepted_tokens(stats: Stats) -> int | None:
    """How many tokens of an answer were in the tree when the model chose them; None: not known.

    The first token ends the prompt's pass and cannot be guessed.
    """
    rate = stats.get("hit_rate")
    return None if rate is None else round(rate * max(0, stats.get("tokens", 0) - 1))


def _header(name: str, kind: str, what: str) -> list[str]:
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]


def _buckets(name: str, labels: Labels, histogram: Histogram) -> list[str]:
    lines = []
    seen = 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        seen += count
        edge = "+Inf" if math.isinf(bound) else f"{bound:g}"
        lines.append(_line(f"{name}_bucket", (*labels, ("le", edge)), seen))
    lines.append(_line(f"{name}_sum", labels, histogram.total))
    lines.append(_line(f"{name}_count", labels, seen))
    return lines


def _line(name: str, labels: Labels, value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{name}{{{shown}}} {value:.17g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
