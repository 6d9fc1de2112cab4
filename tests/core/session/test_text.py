from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.session.text import RunText

TOKENS = st.lists(st.integers(0, 63), max_size=8)


@given(TOKENS.filter(bool), TOKENS, st.lists(TOKENS, max_size=5), st.integers(0, 40))
def test_the_text_is_the_prompt_and_what_was_committed_in_order(
    prompt: list[int], committed: list[int], verdicts: list[list[int]], budget: int
) -> None:
    text = RunText(prompt, budget, committed)
    written = [*prompt, *committed]
    for tokens in verdicts:
        assert text.prefix == tuple(written)
        assert text.context == len(written) - 1, "the last token is the root"
        assert text.left == budget - (len(written) - len(prompt))
        text.output += tokens
        written += tokens
    assert text.prompt == tuple(prompt)
    assert text.output == written[len(prompt) :]


def test_neither_prompt_nor_earlier_output_is_the_callers_list() -> None:
    prompt = [1, 2]
    committed = [3]
    text = RunText(prompt, 5, committed)
    text.output.append(4)
    prompt.append(9)
    assert (committed, text.prefix) == ([3], (1, 2, 3, 4))
