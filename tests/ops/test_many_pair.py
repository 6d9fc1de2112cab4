"""Loops of the packaged pair: so many jobs at once, their figures, and texts that are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from flowspec.core.run.sampling import Sampling
from flowspec.errors import ClusterError
from flowspec.rehearse.compare.texts import Text
from flowspec.rehearse.devices.profiles import load
from ops.bench.emulate import EmulatedCluster, EmulatedJob
from ops.bench.loops import jobs_of
from ops.bench.many_pair import EmulatedLoop, Pairing, own_texts, table
from tests.ops.test_bench import PROMPTS

#: Seconds between the tokens of every job.
TBT = 0.5


class SteadyCluster:
    """Commits a token of every job each ``TBT`` seconds; ``wrong``: jobs whose text differs."""

    def __init__(self, wrong: frozenset[int] = frozenset()) -> None:
        self._at = 7.0
        self._wrong = wrong
        self._jobs = 0
        self.most = 0

    def now(self) -> float:
        return self._at

    def submit(self, text: Text, strategy: str) -> str:
        assert strategy == "auto"
        self._jobs += 1
        return f"job-{self._jobs}"

    def read(self, jobs: Mapping[str, EmulatedJob]) -> None:
        self.most = max(self.most, len(jobs))
        self._at += TBT
        for name, job in jobs.items():
            wrong = int(name.partition("-")[2]) in self._wrong
            job.tokens.append(0 if wrong else job.text.output[len(job.tokens)])
            job.committed_at.append((self._at, len(job.tokens)))
            if len(job.tokens) == len(job.text.output):
                job.stats = {"ttft_seconds": TBT, "hit_rate": 0.75}


def loop(cluster: SteadyCluster) -> EmulatedLoop:
    texts = [Text((1, 2), tuple(range(first, first + 8)), Sampling()) for first in (5, 9, 13)]
    return EmulatedLoop(cast("EmulatedCluster", cluster), "auto", texts)


def test_an_emulated_loop_keeps_its_jobs_and_counts_between_its_ends() -> None:
    cluster = SteadyCluster()
    found = loop(cluster).closed(4)
    assert cluster.most == 4
    assert cluster._jobs == jobs_of(4)
    assert found.tokens_per_second == pytest.approx(4 / TBT, rel=0.1)
    assert found.tbt == pytest.approx(TBT)
    assert found.gap_p99 == pytest.approx(TBT)
    assert (found.ttft, found.hit_rate) == (TBT, 0.75)


def test_a_text_that_differs_is_an_error() -> None:
    with pytest.raises(ClusterError, match="the text of job-6 differs"):
        loop(SteadyCluster(frozenset({6}))).closed(4)


@pytest.mark.heavy
def test_the_pair_itself_is_faster_than_plain_decoding(tmp_path: Any) -> None:
    (tmp_path / "some.jsonl").write_bytes(PROMPTS.read_bytes())
    found = own_texts(tmp_path, 4, 12, 0.0)
    assert found
    plan = Pairing([load("jetson-7b")], [4], ["autoregressive", "auto"], found, 0.0)
    rows = [line.split(" | ") for line in table(plan)][2:]
    assert [row[2] for row in rows] == ["autoregressive", "auto"]
    assert [row[3] for row in rows] == ["", "2.8"]
    assert float(rows[1][5]) > 1.2
