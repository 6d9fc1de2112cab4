"""The fastest drafter drafts most, none is abandoned, and changes are rare."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.strategies.auto.drafter_bandit import (
    DECISION_INTERVAL,
    PLAIN,
    REMEMBERED_TOKENS,
    SETTLING_TOKENS,
    TRIAL_TOKENS,
    WARMUP_TOKENS,
    DrafterBandit,
    DrafterSpeed,
    synchronous,
)
from tests.marks import examples


def run(
    known: dict[int, DrafterSpeed], rates: list[float], tokens: int, luck: random.Random
) -> tuple[list[int], list[int]]:
    """One job: tokens per drafter, and the token counts at which it changed.

    Verdicts have 1 to 5 tokens, and their seconds vary by a factor of two.
    """
    bandit = DrafterBandit(len(rates), known)
    made = [0] * len(rates)
    changes = []
    decoded = 0
    seconds = 0.0
    while decoded < tokens:
        drafter = bandit.choice
        fresh = luck.randint(1, 5)
        made[drafter] += fresh
        decoded = decoded + fresh
        seconds = seconds + fresh / rates[drafter] * luck.uniform(0.5, 1.5)
        if bandit.update(decoded, seconds) != drafter:
            changes.append(decoded)
    return made, changes


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 1000), st.floats(1.3, 2.5), st.booleans())
def test_the_faster_drafts_most_and_the_slower_is_asked_again(
    seed: int, faster: float, first: bool
) -> None:
    known: dict[int, DrafterSpeed] = {}
    rates = [faster, 1.0] if first else [1.0, faster]
    jobs = [run(known, rates, 64, random.Random(seed + job))[0] for job in range(200)]
    late = [sum(made[drafter] for made in jobs[20:]) for drafter in (0, 1)]
    best = 0 if first else 1
    assert late[best] > 0.7 * sum(late)
    assert late[1 - best] > 0


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 1000))
def test_what_has_become_slow_is_left(seed: int) -> None:
    known: dict[int, DrafterSpeed] = {}
    luck = random.Random(seed)
    for _ in range(40):
        run(known, [2.0, 1.0], 64, luck)
    for _ in range(2 * REMEMBERED_TOKENS // 64):
        run(known, [0.5, 1.0], 64, luck)
    made, _ = run(known, [0.5, 1.0], 640, luck)
    assert made[1] > made[0]


@given(st.integers(0, 1000), st.integers(2, 4), st.integers(10, 300))
def test_changes_are_a_slice_apart(seed: int, count: int, tokens: int) -> None:
    known: dict[int, DrafterSpeed] = {}
    luck = random.Random(seed)
    rates = [luck.uniform(0.5, 2.0) for _ in range(count)]
    _, changes = run(known, rates, tokens, luck)
    assert all(
        later - earlier >= DECISION_INTERVAL for earlier, later in itertools.pairwise([0, *changes])
    )


def test_nobody_is_compared_before_it_was_tried() -> None:
    known: dict[int, DrafterSpeed] = {}
    used = []
    while min((speed.tokens for speed in known.values()), default=0.0) < TRIAL_TOKENS:
        bandit = DrafterBandit(3, known)
        used.append(bandit.choice)
        bandit.update(DECISION_INTERVAL - 1, 2.0)
    assert set(used) == {0, 1, 2}
    job = DECISION_INTERVAL - 1
    assert len(used) <= 3 * (2 + WARMUP_TOKENS // job + TRIAL_TOKENS // job)


def test_what_the_drafter_before_has_drafted_counts_for_nobody() -> None:
    known: dict[int, DrafterSpeed] = {}
    bandit = DrafterBandit(2, known)
    assert bandit.update(DECISION_INTERVAL, 3.0) == 1, "the other one was tried less often"
    assert known[0] == DrafterSpeed(DECISION_INTERVAL, 3.0)
    bandit.update(DECISION_INTERVAL + SETTLING_TOKENS - 1, 200.0)
    bandit.update(DECISION_INTERVAL + SETTLING_TOKENS, 201.0)
    assert known[1].tokens == 0
    bandit.update(DECISION_INTERVAL + SETTLING_TOKENS + 3, 202.0)
    assert known[1] == DrafterSpeed(3, 1.0)


@pytest.mark.parametrize(
    ("rates", "most"),
    [([1.0, 0.5], 0.02), ([0.35, 1.0], 0.02), ([0.5, 1.0, 0.2], 0.05), ([1.0, 0.95], 0.05)],
)
def test_what_trying_the_others_costs_in_the_long_run(rates: list[float], most: float) -> None:
    known: dict[int, DrafterSpeed] = {}
    luck = random.Random(1)
    made = [run(known, rates, 64, luck)[0] for _ in range(400)][40:]
    tokens = sum(map(sum, made))
    seconds = sum(count / rate for job in made for count, rate in zip(job, rates, strict=True))
    assert tokens / seconds >= (1 - most) * max(rates)


def test_jobs_shorter_than_a_slice_are_learnt_from_and_forgotten_too() -> None:
    known: dict[int, DrafterSpeed] = {}
    luck = random.Random(1)
    made = [run(known, [1.0, 3.0], 6, luck)[0] for _ in range(2000)]
    assert sum(speed.tokens for speed in known.values()) <= REMEMBERED_TOKENS
    assert sum(job[1] for job in made[100:]) > 0.9 * sum(map(sum, made[100:]))


def decode(
    known: dict[int, DrafterSpeed], speculative: float, plain: float, tokens: int, luck: float
) -> tuple[int, int]:
    """One job with one drafter: tokens by it, and plain ones. A lone row begins it."""
    bandit = DrafterBandit(1, known)
    made = {0: 0, PLAIN: 0}
    seconds = 0.0
    for decoded in range(1, tokens + 1):
        if decoded == 1:
            bandit.note_lone_row(luck / plain)
        seconds += 1 / (plain if bandit.choice == PLAIN else speculative)
        made[bandit.choice] += 1
        bandit.update(decoded, seconds)
    return made[0], made[PLAIN]


@settings(max_examples=examples(25), deadline=None)
@given(st.floats(0.2, 5), st.floats(0.9, 1.5), st.sampled_from([64, 256]))
def test_a_lone_drafter_costs_no_more_than_plain_decoding(
    speculative: float, luck: float, tokens: int
) -> None:
    """In the long run, whatever its speed, and however far lone rows are from plain decoding."""
    known: dict[int, DrafterSpeed] = {}
    jobs = [decode(known, speculative, 1.0, tokens, luck) for _ in range(6400 // tokens)]
    late = jobs[len(jobs) // 4 :]
    seconds = sum(drafted / speculative + plain for drafted, plain in late)
    assert seconds <= 1.03 * sum(map(sum, late)) / max(1.0, speculative)


def test_a_drafter_that_pays_is_not_left_for_a_trial_of_plain_decoding() -> None:
    known: dict[int, DrafterSpeed] = {}
    assert [decode(known, 2.0, 1.0, 64, 1.0) for _ in range(10)] == [(64, 0)] * 10


def test_plain_decoding_may_be_no_choice() -> None:
    """Beside other jobs, or with fixed rows."""
    known: dict[int, DrafterSpeed] = {}
    for _ in range(10):
        decode(known, 0.5, 1.0, 64, 1.0)
    assert DrafterBandit(1, known).choice == PLAIN
    bandit = DrafterBandit(1, known, may_be_plain=False)
    assert [bandit.update(tokens, 2.0 * tokens) for tokens in range(60)] == [0] * 60


def test_what_others_decoded_counts_for_nobody() -> None:
    known: dict[int, DrafterSpeed] = {}
    bandit = DrafterBandit(1, known)
    bandit.update(5, 5.0)
    bandit.resume(1000, 5000.0)
    bandit.update(1000 + SETTLING_TOKENS, 6000.0)
    assert known[0] == DrafterSpeed(5, 5.0)
    bandit.update(1003 + SETTLING_TOKENS, 6003.0)
    assert known[0] == DrafterSpeed(8, 8.0)


def test_without_lone_rows_plain_decoding_is_no_choice() -> None:
    known: dict[int, DrafterSpeed] = {}
    bandit = DrafterBandit(1, known)
    assert [bandit.update(tokens, float(tokens)) for tokens in range(1, 200)] == [0] * 199


def speculate(
    known: dict[int, DrafterSpeed],
    rates: dict[int, float],
    right: float,
    luck: random.Random,
    cold: dict[int, float] | None = None,
) -> dict[int, int]:
    """One job of 64 tokens with one drafter: tokens by choice; candidates are ``right`` so often.

    Its passes cost nothing, so that a synchronous round makes a token and the right one. ``cold``:
    the rates of choices that have made less than 32 tokens.
    """
    bandit = DrafterBandit(1, known)
    made = dict.fromkeys(rates, 0)
    seconds = 0.0
    for decoded in range(1, 65):
        if decoded == 1:
            bandit.note_lone_row(1 / rates[PLAIN])
        if bandit.choice != PLAIN:
            bandit.note_candidate(0, right=luck.random() < right, seconds=0.0)
        now = rates if cold is None or known[bandit.choice].warm else cold
        seconds += 1 / now[bandit.choice]
        made[bandit.choice] += 1
        bandit.update(decoded, seconds)
    return made


def test_a_drafter_that_begins_slowly_is_not_judged_by_its_beginning() -> None:
    known: dict[int, DrafterSpeed] = {}
    luck = random.Random(1)
    rates = {0: 2.5, PLAIN: 1.0, synchronous(0): 1.5}
    cold = {**rates, 0: 0.5}
    jobs = [speculate(known, rates, 0.5, luck, cold) for _ in range(40)]
    assert jobs[0][synchronous(0)] > 0
    assert sum(made[0] for made in jobs[8:]) > 0.9 * 64 * len(jobs[8:])


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(0, 1000), st.floats(0.3, 0.8), st.floats(0.3, 1.15))
def test_synchronous_speculation_is_chosen_where_it_is_faster(
    seed: int, right: float, ahead: float
) -> None:
    """Than drafting ahead, which makes ``ahead`` tokens while plain decoding makes one."""
    known: dict[int, DrafterSpeed] = {}
    luck = random.Random(seed)
    rates = {0: ahead, PLAIN: 1.0, synchronous(0): 1 + right}
    jobs = [speculate(known, rates, right, luck) for _ in range(60)]
    late = [sum(made[choice] for made in jobs[10:]) for choice in rates]
    seconds = sum(tokens / rates[choice] for tokens, choice in zip(late, rates, strict=True))
    assert seconds <= 1.06 * sum(late) / (1 + right)


def test_a_first_job_speculates_synchronously_as_soon_as_it_may_choose() -> None:
    rates = {0: 1.0, PLAIN: 1.0, synchronous(0): 1.5}
    made = speculate({}, rates, 0.5, random.Random(1))
    assert made[synchronous(0)] >= 64 - DECISION_INTERVAL / 2


@pytest.mark.parametrize("right", [0.1, 0.5, 0.9])
def test_synchronous_speculation_that_promises_less_is_not_tried(right: float) -> None:
    """With drafts of no cost it makes at most two tokens in the time of one."""
    known: dict[int, DrafterSpeed] = {}
    luck = random.Random(1)
    rates = {0: 2.5, PLAIN: 1.0, synchronous(0): 1.0}
    assert [speculate(known, rates, right, luck)[0] for _ in range(10)] == [64] * 10


def test_beside_other_jobs_nobody_speculates_synchronously() -> None:
    known: dict[int, DrafterSpeed] = {}
    speculate(known, {0: 1.0, PLAIN: 1.0, synchronous(0): 1.5}, 0.5, random.Random(1))
    assert DrafterBandit(1, known).choice == synchronous(0)
    assert DrafterBandit(1, known, may_be_plain=False).choice == 0


def test_an_outage_is_no_drafters_doing() -> None:
    """Fifteen seconds in which the broker was full made every later job decode plainly."""
    known: dict[int, DrafterSpeed] = {}
    bandit = DrafterBandit(1, known)
    tokens, seconds = 0, 0.0

    def decode(count: int) -> list[int]:
        nonlocal tokens, seconds
        choices = []
        for _ in range(count // 4):
            choices.append(bandit.choice)
            tokens += 4
            seconds += 4 / (60 if bandit.choice == PLAIN else 90)
            bandit.note_lone_row(1 / 60)
            bandit.update(tokens, seconds)
        return choices

    decode(400)
    seconds += 15.0
    decode(8)
    assert set(decode(400)) == {0}
    bandit, tokens, seconds = DrafterBandit(1, known), 0, 0.0
    assert set(decode(400)) == {0}
