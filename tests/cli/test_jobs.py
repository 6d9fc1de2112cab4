"""A job without a prompt gets the same error by every interface: what is missing, what to give."""

from __future__ import annotations

import pytest

from flowspec.core.run.spec import parse
from flowspec.errors import JobError
from tests.cli.conftest import Command


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"max_new_tokens": "8"},
            "the job has no prompt; give it either 'prompt' or 'prompt_ids': a text, or a list",
        ),
        (
            {"prompt": "x", "prompt_ids": "[1]"},
            "the job has 'prompt' and 'prompt_ids'; leave out one",
        ),
        ({"prompt": ""}, "the prompt is empty; give it at least one character that is not a space"),
    ],
)
def test_fields_sent_by_hand(fields: dict[str, str], said: str) -> None:
    with pytest.raises(JobError) as refused:
        parse(fields)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("name", ["generate", "submit"])
def test_an_empty_prompt(command: Command, name: str) -> None:
    status, out, err = command(name, " \n")
    assert (status, out) == (1, "")
    assert (
        err == "flowspec: the prompt is empty; give it at least one character that is not a space\n"
    )
