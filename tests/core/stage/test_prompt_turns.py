"""The share of a stage's time that prompts get while other runs wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.stage.prompt_turns import DEAR, PROMPT_SHARE, PromptTurns


@given(st.floats(0.001, 1.0), st.lists(st.booleans(), max_size=40))
def test_a_prompt_is_always_due_where_its_rows_cost_little(
    seconds: float, passes: list[bool]
) -> None:
    turns = PromptTurns()
    for with_prompt in passes:
        turns.note(seconds * (DEAR if with_prompt else 1), with_prompt=with_prompt)
        assert turns.is_due


@given(st.floats(0.001, 1.0), st.floats(DEAR + 0.1, 8.0))
def test_a_dear_prompt_gets_its_share_of_the_time_while_others_wait(
    plain: float, factor: float
) -> None:
    turns = PromptTurns()
    turns.note(plain, with_prompt=False)
    spent = {True: 0.0, False: 0.0}
    for _ in range(200):
        with_prompt = turns.is_due
        seconds = plain * factor if with_prompt else plain
        turns.note(seconds, with_prompt=with_prompt)
        spent[with_prompt] += seconds
    share = spent[True] / sum(spent.values())
    # A pass is not divided: each turn of the others lasts for up to one pass longer.
    least = factor / (factor / PROMPT_SHARE + 1)
    assert least - 0.05 <= share <= PROMPT_SHARE + 0.05


def test_without_a_pass_of_decoding_rows_nothing_is_owed() -> None:
    turns = PromptTurns()
    turns.note(1.0, with_prompt=True)
    assert turns.is_due
    turns.note(0.1, with_prompt=False)
    turns.note(1.0, with_prompt=True)
    assert not turns.is_due
    turns.note(1.0 * (1 / PROMPT_SHARE - 1), with_prompt=False)
    assert turns.is_due
