"""Halves of prompt sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.rehearse.compare.prompts import Prompt, halve


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_halves_are_disjoint_whole_and_even_in_every_set(sets: list[str]) -> None:
    prompts = [Prompt(name, str(at)) for at, name in enumerate(sets)]
    tuning = halve(prompts, "tuning")
    measuring = halve(prompts, "measuring")
    assert (
        sorted([*tuning, *measuring], key=lambda prompt: int(prompt.text))
        == prompts
        == halve(prompts, "all")
    )
    for name in set(sets):
        counts = [sum(prompt.set == name for prompt in half) for half in (tuning, measuring)]
        assert counts[0] - counts[1] in (0, 1)
