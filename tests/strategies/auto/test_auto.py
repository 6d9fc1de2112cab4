"""``auto`` finds the best segment width for given costs, from the second job on at once.

The toy drafter ranks the target's token among its candidates in four of five cases and drafts in no
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.machine import Input, Output, Send
from flowspec.core.protocol.messages import Envelope, Segment
from flowspec.core.protocol.work import Pass, Work
from flowspec.core.run.history import History
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.rehearse.compare.hits import HitDrafter, Kind
from flowspec.rehearse.compare.simulate import JOB, profile_costs, simulate
from flowspec.rehearse.compare.texts import Text
from flowspec.rehearse.devices.profiles import load
from flowspec.rehearse.simulator import Costs
from flowspec.strategies.auto.cost_history import CostHistory
from flowspec.strategies.auto.decisions import tokens_by_drafter, with_drafter_names
from flowspec.strategies.auto.drafter_bandit import PLAIN, DrafterSpeed
from flowspec.strategies.auto.segment_sizing import MOST_DECISIONS
from flowspec.strategies.auto.strategy import Auto, AutoParams
from tests.addresses import D0
from tests.marks import crossed
from tests.toy import PROMPT, TARGET, pipeline

PROMPTS = (PROMPT, *(tuple((first + at * 3) % 60 + 2 for at in range(10)) for first in (7, 21)))
GREEDY = Sampling()
SAMPLED = Sampling(temperature=1.0, seed=3)
COUNT = 40
STAGES = 4
UNIT = 0.01


def priced(passes: Callable[[int], float], row: float = 0.0) -> Costs:
    """A pass over n rows takes ``passes(n)``; a row occupies a link between stages for ``row``.

    Units of 10 ms, so that the longest queue of a slow link is not a stall.
    """

    def work(node: Address, work: Work) -> float:
        return UNIT * (
            passes(sum(len(part.ids) for part in work.parts)) if isinstance(work, Pass) else 0.05
        )

    def occupy(source: Address, target: Address, envelope: Envelope) -> float:
        message = envelope.message
        return (
            UNIT * row * len(message.ids) if isinstance(message, Segment) and source != D0 else 0.0
        )

    return Costs(work, occupy=occupy)


COSTS = {
    "rows are free": priced(lambda rows: 1.0),
    "a second row costs four times": priced(lambda rows: 1.0 if rows == 1 else 4.0),
    "each row costs a little": priced(lambda rows: 1.0 + 0.05 * rows),
    "a slow link": priced(lambda rows: 1.0, 0.5),
    "a link slower than the stages": priced(lambda rows: 1.0, 2.0),
}
#: Those under which experience is compared in every run; the others with the heavy tests.
EXPERIENCED = ("a slow link",)


@dataclass
class Ran:
    """A job: seconds and tokens from its first token to its last, and its segments' rows."""

    seconds: float
    tokens: int
    rows: list[int] = field(default_factory=list)
    decided: list[int] = field(default_factory=list)


class Bench:
    """Consecutive jobs on one pipeline; every text is compared with the target's."""

    def __init__(self, costs: str, stages: int = STAGES) -> None:
        self._rows: list[int] = []
        self._simulation = pipeline(stages, costs=COSTS[costs], tap=self._tap)

    def _tap(self, node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        sent = [
            output.envelope.message for output in outputs if isinstance(output, Send) and node == D0
        ]
        self._rows += [
            len(message.ids) for message in sent if isinstance(message, Segment) and message.round
        ]

    def run(
        self,
        strategy: str = "auto",
        prompt: tuple[int, ...] = PROMPT,
        sampling: Sampling = GREEDY,
        record: bool = False,
    ) -> Ran:
        simulation = self._simulation
        job = f"j{len(self._simulation.jobs)}"
        self._rows.clear()
        spec = JobSpec(
            prompt_ids=prompt,
            max_new_tokens=COUNT,
            sampling=sampling,
            strategy=strategy,
            record=record,
        )
        simulation.submit(job, spec, simulation.now)
        simulation.run()
        made = simulation.jobs[job]
        assert made.finish is not None and made.finish.error == ""
        assert tuple(made.tokens) == TARGET.decode(prompt, COUNT, sampling)
        (start, before) = made.committed_at[0]
        (end, after) = made.committed_at[-1]
        decisions = cast(list[dict[str, Any]], made.finish.stats.get("decisions", []))
        decided = [entry["rows"] for entry in decisions if "rows" in entry]
        return Ran(end - start, after - before, self._rows.copy(), decided)


@cache
def two(
    costs: str, prompt: tuple[int, ...] = PROMPT, sampling: Sampling = GREEDY
) -> tuple[Ran, Ran]:
    """A job and a second one like it."""
    bench = Bench(costs)
    return bench.run(prompt=prompt, sampling=sampling), bench.run(prompt=prompt, sampling=sampling)


def grown(ran: Ran) -> list[int]:
    """Rows of the segments after the first round's root, which is always sent alone."""
    return ran.rows[1:]


def test_a_first_job_sends_lone_rows_until_it_knows_what_one_takes() -> None:
    first, second = two("rows are free")
    assert set(first.rows[:STAGES]) == {1}
    assert first.decided[0] == 1
    assert second.decided[0] > 1
    assert max(first.rows) > 1, "and then learns from its own answers"


def test_where_rows_are_free_segments_are_wide() -> None:
    first, second = two("rows are free")
    assert median(first.rows) >= 32
    assert median(grown(second)[:8]) >= 64, "from the beginning"


def test_where_a_second_row_costs_four_times_as_much_a_second_job_sends_none() -> None:
    first, second = two("a second row costs four times")
    assert median(first.rows) == 1
    assert set(second.rows) == {1}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize(
    ("costs", "most"),
    [
        ("rows are free", 0.5),
        ("each row costs a little", 0.75),
        ("a second row costs four times", 1.0),
    ],
)
def test_on_a_single_stage_a_root_takes_rows_along_where_they_pay(
    costs: str, most: float, sampling: Sampling
) -> None:
    bench = Bench(costs, stages=1)
    plain = Bench(costs, stages=1).run("autoregressive", sampling=sampling)
    bench.run(sampling=sampling)
    ran = bench.run(sampling=sampling)
    assert ran.seconds <= (most + 0.01) * plain.seconds
    if most < 1:
        assert max(ran.rows) > 1
    else:
        assert set(ran.rows) == {1}


def test_the_slower_the_link_the_narrower_the_segments() -> None:
    """Passes take the same time for any number of rows; the links set the cost."""
    free, slow, slower = (
        median(grown(two(costs)[1]))
        for costs in ("rows are free", "a slow link", "a link slower than the stages")
    )
    assert free > 10 * slow
    assert slow >= slower == 1
    assert max(two("a slow link")[1].rows) <= 4


@pytest.mark.parametrize("costs", crossed(COSTS))
def test_a_second_job_is_not_slower_than_the_first(costs: str) -> None:
    first, second = (sum(two(costs, prompt)[at].seconds for prompt in PROMPTS) for at in (0, 1))
    assert second <= first


@pytest.mark.parametrize(
    "costs",
    [
        costs if costs in EXPERIENCED else pytest.param(costs, marks=pytest.mark.heavy)
        for costs in COSTS
    ],
)
def test_a_job_with_experience_is_nearly_as_fast_as_with_the_best_given_rows(costs: str) -> None:
    """On the same prompts, against fixed widths."""
    seconds = {}
    for rows in (1, 2, 8, 32):
        ran = [Bench(costs).run(f"auto:rows={rows}", prompt) for prompt in PROMPTS]
        seconds[rows] = sum(one.seconds for one in ran) / sum(one.tokens for one in ran)
    bench = Bench(costs)
    for prompt in (*PROMPTS, *PROMPTS):
        bench.run(prompt=prompt)
    own = [bench.run(prompt=prompt) for prompt in PROMPTS]
    assert sum(one.seconds for one in own) / sum(one.tokens for one in own) <= 1.04 * min(
        seconds.values()
    ), seconds


@pytest.mark.parametrize("costs", crossed(COSTS))
def test_the_text_is_the_targets_at_a_temperature_too(costs: str) -> None:
    """The runs compare it; a different text shows that they sampled."""
    first, second = two(costs, PROMPT, SAMPLED)
    assert first.tokens == second.tokens > 0
    assert TARGET.decode(PROMPT, COUNT, SAMPLED) != TARGET.decode(PROMPT, COUNT, GREEDY)


def test_a_higher_price_of_delay_makes_narrower_segments() -> None:
    def widest(strategy: str) -> int:
        bench = Bench("each row costs a little")
        # The second job may be synchronous where wide segments lose.
        return max(max(bench.run(strategy).rows) for _ in range(2))

    assert widest("auto:delay=20") < widest("auto") < widest("auto:delay=0")


def test_an_alternative_that_needs_less_is_sent_sooner() -> None:
    def seconds(alternative: str) -> float:
        bench = Bench("a second row costs four times")
        return sum(bench.run(f"auto:alternative={alternative}").seconds for _ in range(2))

    assert seconds("1") != seconds("1000")


def test_a_recorded_job_does_what_it_does_on_a_pipeline_nobody_has_used() -> None:
    used = Bench("rows are free")
    fresh = Bench("rows are free")
    used.run()
    recorded = used.run(record=True)
    alone = fresh.run(record=True)
    assert (recorded.rows, recorded.decided) == (alone.rows, alone.decided)
    assert fresh.run().rows == two("rows are free")[0].rows, "nor does it leave a history"
    assert used.run().decided[0] > 1, "other jobs keep their history"


@pytest.mark.parametrize(
    ("pipeline", "right"),
    crossed(
        [("rtx3090-70b", 8), ("a100-70b", 4), ("jetson-7b", 4), ("jetson-7b", 1), ("a100-13b", 1)],
        [0.001, 0.04, 0.1],
    ),
)
def test_where_the_drafter_knows_next_to_nothing_it_is_no_slower_than_plain_decoding(
    pipeline: tuple[str, int], right: float
) -> None:
    name, stages = pipeline
    profile = load(name)
    target = open_directory(default_pair()[0])
    text = Text(tuple(range(10, 40)), tuple((at * 7919 + 11) % 4000 for at in range(COUNT)), GREEDY)
    costs = profile_costs(profile, stages, "slm")
    seconds = {}
    for strategy in ("auto", "autoregressive"):
        rates = (right, right / 4, right / 8)
        drafter = HitDrafter({JOB: (*text.prompt, *text.output)}, [Kind(rates)], target.vocabulary)
        known = History()
        for _ in range(2):
            ran = simulate(text, strategy, stages, target, drafter, costs, history=known)
        seconds[strategy] = ran.stats["decode_seconds"]
    assert seconds["auto"] <= 1.01 * seconds["autoregressive"]


def test_a_job_that_drafts_nothing_says_so() -> None:
    history = History()
    speeds = history.get(CostHistory).speeds[False, False, True]
    speeds[0] = DrafterSpeed(100, 200, warm=True, tried=True)
    speeds[PLAIN] = DrafterSpeed(100, 100, warm=True, tried=True)
    strategy = Auto(AutoParams(), STAGES)
    strategy.use_history(history)
    assert strategy.decisions == [{"tokens": 0, "drafter": PLAIN}]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=200))
def test_every_token_is_counted_for_the_drafter_that_was_chosen_by_then(
    drafters: list[int],
) -> None:
    """One drafter per token after the first; ``decisions`` lists the changes."""
    changes = [
        (at, drafter)
        for at, drafter in enumerate(drafters)
        if at == 0 or drafters[at - 1] != drafter
    ]
    whole = len(changes) < MOST_DECISIONS
    decisions = [
        {"segments": 3, "rows": 1},
        *({"tokens": at, "drafter": drafter} for at, drafter in changes),
    ]
    stats = {
        "tokens": len(drafters) + 1,
        "decisions": decisions if whole else decisions[: MOST_DECISIONS + 1],
    }
    known = drafters if whole else drafters[: changes[MOST_DECISIONS - 1][0]]
    assert tokens_by_drafter(stats) == {drafter: known.count(drafter) for drafter in known}
    assert tokens_by_drafter(with_drafter_names(stats, "abc")) == {
        "abc"[drafter]: count for drafter, count in tokens_by_drafter(stats).items()
    }
    assert with_drafter_names(with_drafter_names(stats, "abc"), "abc") == with_drafter_names(
        stats, "abc"
    )
    assert with_drafter_names(stats, ()) == stats, "a pipeline without names has numbers"


def test_a_job_without_a_choice_counts_for_nobody() -> None:
    for stats in ({"tokens": 9}, {"tokens": 9, "decisions": [{"segments": 0, "rows": 1}]}):
        assert tokens_by_drafter(stats) == {}
        assert with_drafter_names(stats, ("a", "b")) == stats
    assert tokens_by_drafter({"tokens": 0, "decisions": [{"tokens": 0, "drafter": 1}]}) == {1: 0}, (
        "it failed before its first"
    )
