"""Every pass goes to the drafter it names; all drafters get what they need to stay in sync."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from flowspec.core.drafting import drafter_cache
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Part
from flowspec.core.run.history import History
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, StateError
from flowspec.model.base import DraftsAlone, RowArray
from flowspec.model.drafters.drafter_choice import ChoiceDrafter, wanting_hidden
from flowspec.model.drafters.eagle import EagleDrafter
from flowspec.model.drafters.sources import load_sources
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.rehearse.compare.memo import MemoDrafter
from flowspec.rehearse.compare.simulate import profile_costs, simulate
from flowspec.rehearse.compare.texts import texts
from flowspec.rehearse.devices.profiles import load
from flowspec.strategies.auto.drafter_bandit import DrafterBandit
from tests.model.test_hybrid import Scripted
from tests.model.test_ngram import RUN

PART = Part(RUN, -1, (0,), (-1,), (0,), (5,), (), answers=(0,))


def calls(drafter: Scripted) -> list[str]:
    return [call[0] if isinstance(call, tuple) else "run" for call in drafter.calls]


def test_a_pass_goes_to_the_drafter_it_names_and_rows_to_all_that_want_them() -> None:
    plain = Scripted([[(1, -0.1)]])
    head = Scripted([[(2, -0.2)]], wants_hidden=True)
    choice = ChoiceDrafter((plain, head))
    choice.allocate(RUN, 9, Sampling(), Returns(hidden=True))
    choice.learn(RUN, (0,), np.zeros((1, 4), np.float32))
    assert choice.run(Draft(PART, 1)).tokens == ((1,),)
    assert choice.run(Draft(PART, 1, drafter=1)).tokens == ((2,),)
    choice.release(RUN)
    assert calls(plain) == ["allocate", "run", "release"]
    assert calls(head) == ["allocate", "learn", "run", "release"]
    assert choice.wants_hidden
    assert wanting_hidden(choice) == (False, True)
    assert wanting_hidden(plain) == (False,)


def test_only_drafters_with_a_part_in_a_job_hold_rows_of_it() -> None:
    first = Scripted([[(1, -0.1)]])
    unused = Scripted(wants_hidden=True)
    late = Scripted([[(3, -0.3)]])
    choice = ChoiceDrafter((first, unused, late))
    for turn in range(2):  # the second time as if there had been no first
        choice.allocate(RUN, 9 + turn, Sampling(), Returns())
        for drafter in (0, 0, 2, 0, 2):
            choice.run(Draft(PART, 1, drafter=drafter))
        choice.release(RUN)
        choice.release(RUN)
    made = [("allocate", RUN, 9 + turn, Sampling(), Returns()) for turn in range(2)]
    assert calls(first) == ["allocate", "run", "run", "run", "release"] * 2
    assert calls(late) == ["allocate", "run", "run", "release"] * 2
    assert [
        call for call in late.calls if isinstance(call, tuple) and call[0] == "allocate"
    ] == made
    assert unused.calls == []


def test_what_it_cannot_do_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no drafters to choose from"):
        ChoiceDrafter(())
    with pytest.raises(StateError, match="names drafter 1; there are 1"):
        ChoiceDrafter((Scripted(),)).run(Draft(PART, 1, drafter=1))
    with pytest.raises(StateError, match="hidden rows"):
        ChoiceDrafter((Scripted(),)).learn(RUN, (), np.zeros((0, 4), np.float32))


@pytest.mark.parametrize(
    ("temperature", "at_most"),
    [(0.0, 8), pytest.param(1.0, drafter_cache.CATCH_UP_ROWS, marks=pytest.mark.heavy)],
)
def test_a_drafter_that_has_caught_up_proposes_what_it_would_have_proposed_anyway(
    monkeypatch: pytest.MonkeyPatch, temperature: float, at_most: int
) -> None:
    """Two drafters that keep rows propose the same as two that memoize by path.

    Also where the head catches up, ``at_most`` rows per pass, while the other one drafts.
    """
    monkeypatch.setattr(drafter_cache, "CATCH_UP_ROWS", at_most)
    target = open_directory(default_pair()[0])
    profile = load("jetson-7b")
    (text,) = texts(
        ["Why is the sky blue?"], [Sampling(temperature, seed=1)], 48, target, hidden=True
    )
    costs = profile_costs(profile, 4, "slm:head", hidden=True)
    rows = Watched()
    memos = Watched()
    for watched, wrapped in ((rows, lambda drafter: drafter), (memos, MemoDrafter)):
        watched.inner = load_sources("draft:head", target, wrapped)  # type: ignore[arg-type]
        ran = simulate(text, "auto", 4, target, watched.inner_choice(), costs, history=History())
        chosen = [entry["drafter"] for entry in ran.stats["decisions"] if "drafter" in entry]
        assert set(chosen) == {0, 1}
    assert len(rows.proposals) > 50
    assert {drafter for drafter, _ in rows.proposals} == {0, 1}
    assert rows.proposals == memos.proposals


def test_what_a_head_keeps_while_another_drafts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head never drafts but catches up; it also drops the rejected rows in between."""
    monkeypatch.setattr(drafter_cache, "CATCH_UP_ROWS", 16)
    monkeypatch.setattr(DrafterBandit, "update", lambda bandit, tokens, seconds: 0)
    target = open_directory(default_pair()[0])
    (text,) = texts(["Why is the sky blue?"], [Sampling()], 96, target, hidden=True)
    choice = load_sources("ngram:head", target)
    assert isinstance(choice, ChoiceDrafter)
    head = Measured(choice.drafters[1])  # type: ignore[arg-type]
    costs = profile_costs(load("jetson-7b"), 4, "ngram:head", hidden=True)
    ran = simulate(text, "auto", 4, target, ChoiceDrafter((choice.drafters[0], head)), costs)
    assert ran.stats["tokens"] == len(text.output)
    assert [len(work.part.ids) for work in head.passes] == [16] * (
        (len(text.prompt) + len(text.output) - 1) // 16
    )
    assert not any(work.part.answers for work in head.passes)
    assert head.learnt > 2 * max(head.kept)


class Measured(DraftsAlone):
    """A head that records its passes, the number of rows learnt, and the number kept each time."""

    wants_hidden = True

    def __init__(self, inner: EagleDrafter) -> None:
        self.inner = inner
        self.passes = list[Draft]()
        self.learnt = 0
        self.kept = list[int]()
        self.allocate = inner.allocate
        self.release = inner.release

    def run(self, work: Draft) -> DraftDone:
        self.passes.append(work)
        return self.inner.run(work)

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        self.inner.learn(run, ids, rows)
        self.learnt += len(ids)
        state = self.inner._runs[run]
        self.kept.append(len(state.true) + len(state.predicted))


class Watched:
    """Records every drafter's first proposals, in order."""

    def __init__(self) -> None:
        self.inner: object = None
        self.proposals: list[tuple[int, tuple[int, ...]]] = []

    def inner_choice(self) -> ChoiceDrafter:
        choice = self.inner
        assert isinstance(choice, ChoiceDrafter)
        run = choice.run

        def watching(work: Draft):  # type: ignore[no-untyped-def]
            done = run(work)
            self.proposals += [(work.drafter, tokens[:2]) for tokens in done.tokens]
            return done

        choice.run = watching  # type: ignore[method-assign]
        return choice
