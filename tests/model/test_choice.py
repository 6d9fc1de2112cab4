"""Every pass goes to the drafter it names, and none of the others misses what all have to know."""

from __future__ import annotations

import numpy as np
import pytest

from flowspec.core.experience import Experience
from flowspec.core.machine import Draft, Part
from flowspec.core.messages import Returns
from flowspec.core.sampling import Sampling
from flowspec.errors import ConfigError, StateError
from flowspec.model.choice import ChoiceDrafter, wanting_hidden
from flowspec.model.directory import default_pair, open_directory
from flowspec.model.sources import load_sources
from flowspec.testbed.memo import MemoDrafter
from flowspec.testbed.profiles import load
from flowspec.testbed.simulate import profile_costs, simulate
from flowspec.testbed.texts import texts
from tests.model.test_hybrid import Scripted

PART = Part("j", 1, -1, (0,), (0,), (5,), (), 0, 0, None, (-1,), (0,))


def test_a_pass_goes_to_the_drafter_it_names_and_all_hold_the_job() -> None:
    plain, head = Scripted([[(1, -0.1)]]), Scripted([[(2, -0.2)]], wants_hidden=True)
    choice = ChoiceDrafter((plain, head))
    choice.allocate("j", 9, Sampling(), Returns())
    assert choice.run(Draft(PART, 1, drafter=1)).tokens == ((2,),)
    assert choice.run(Draft(PART, 1)).tokens == ((1,),)
    choice.learn("j", (0,), np.zeros((1, 4), np.float32))
    choice.release("j")
    assert [call[0] for call in plain.calls if isinstance(call, tuple)] == ["allocate", "release"]
    assert [call[0] for call in head.calls if isinstance(call, tuple)] == ["allocate", "learn", "release"]
    assert choice.wants_hidden
    assert wanting_hidden(choice) == (False, True)
    assert wanting_hidden(plain) == (False,)


def test_what_it_cannot_do_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no drafters to choose from"):
        ChoiceDrafter(())
    with pytest.raises(StateError, match="names drafter 1; there are 1"):
        ChoiceDrafter((Scripted(),)).run(Draft(PART, 1, drafter=1))
    with pytest.raises(StateError, match="hidden rows"):
        ChoiceDrafter((Scripted(),)).learn("j", (), np.zeros((0, 4), np.float32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_has_caught_up_proposes_what_it_would_have_proposed_anyway(temperature: float) -> None:
    """Both drafters, remembering by paths, beside the same two that keep rows: all proposals are alike."""
    target, profile = open_directory(default_pair()[0]), load("jetson-7b")
    (text,) = texts(["Why is the sky blue?"], [Sampling(temperature, seed=1)], 72, target, hidden=True)
    costs = profile_costs(profile, 4, "slm:head", hidden=True)
    rows, memos = Watched(), Watched()
    for watched, wrapped in ((rows, lambda drafter: drafter), (memos, MemoDrafter)):
        watched.inner = load_sources("draft:head", target, wrapped)  # type: ignore[arg-type]
        ran = simulate(text, "auto", 4, target, watched.inner_choice(), costs, experience=Experience())
        chosen = [entry["drafter"] for entry in ran.stats["decisions"] if "drafter" in entry]
        assert set(chosen) == {0, 1}
    assert len(rows.proposals) > 50
    assert {drafter for drafter, _ in rows.proposals} == {0, 1}
    assert rows.proposals == memos.proposals


class Watched:
    """Remembers what every drafter proposed first, in order."""

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
