"""A draft worker that knows the text is right as often as it is told to be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.rehearse.compare.hits import HitDrafter, Kind, right
from ops.bench.oracle_draft import OracleDrafter, TextOracle, read

VOCABULARY = 200
RUN = RunKey("job", 1)
TEXT = tuple(range(50, 90))


def work(at: int) -> Draft:
    """Draft two continuations of the text's token ``at``, after all before it."""
    rows = tuple(range(at + 1))
    part = Part(
        RUN,
        *(0, rows, tuple(row - 1 for row in rows), rows, TEXT[: at + 1], rows),
        context=len(rows),
        answers=(at,),
    )
    return Draft(part, 2)


@given(rate=st.floats(0, 1))
def test_rates_begin_with_the_given_one_and_are_those_of_a_kind(rate: float) -> None:
    rates = TextOracle(rate=rate).rates
    assert rates[0] == rate
    assert Kind(rates).rates == rates


@given(rate=st.floats(0.3, 0.9), seed=st.integers(0, 1000), at=st.integers(0, len(TEXT) - 2))
def test_right_tells_when_the_first_rank_has_the_next_token(
    rate: float, seed: int, at: int
) -> None:
    drafter = HitDrafter({"job": TEXT}, [Kind(TextOracle(rate=rate).rates)], VOCABULARY, seed=seed)
    drafter.allocate(RUN, 64, Sampling(), Returns())
    ((best, _),) = drafter.run(work(at)).tokens
    assert (best == TEXT[at + 1]) == right(at, rate, seed=seed)


def test_a_run_has_the_oracle_of_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "oracle.json"
    assert read(file) == TextOracle()
    drafter = OracleDrafter(file, VOCABULARY)
    drafter.allocate(RUN, 64, Sampling(), Returns())
    unknown = drafter.run(work(5)).tokens[0]
    drafter.release(RUN)
    TextOracle(TEXT, 1.0).write(file)
    drafter.allocate(RUN, 64, Sampling(), Returns())
    TextOracle((), 0.0).write(file)
    assert drafter.run(work(5)).tokens[0][0] == TEXT[6]
    assert TEXT[6] not in unknown


def test_a_pass_takes_the_seconds_that_are_given(tmp_path: Path) -> None:
    file = tmp_path / "oracle.json"
    TextOracle(TEXT, 1.0, 0, 3.0).write(file)
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    drafter = OracleDrafter(file, VOCABULARY, clock)
    drafter.allocate(RUN, 64, Sampling(), Returns())
    began = now[0]
    drafter.run(work(5))
    assert 3.0 <= now[0] - began <= 4.0


@pytest.mark.heavy
def test_a_pipeline_drafts_by_the_oracle(tmp_path: Path) -> None:
    file = tmp_path / "oracle.json"
    programs = {"draft": ("ops.bench.oracle_draft", "--oracle", str(file))}
    with (
        Cluster(Setup("target", "ngram", 2), programs=programs) as cluster,
        Client(cluster.url) as client,
    ):

        def decoded(strategy: str) -> tuple[tuple[int, ...], float]:
            done = client.submit("Why is it so?", max_new_tokens=16, strategy=strategy).result()
            text = (*done.prompt_token_ids, *done.token_ids)
            return text, float(done.stats["hit_rate"])

        text, _ = decoded("autoregressive")
        assert decoded("flowspec") == (text, 0.0)
        TextOracle(text, 1.0).write(file)
        known, hit_rate = decoded("flowspec")
    assert known == text
    assert hit_rate > 0.9
