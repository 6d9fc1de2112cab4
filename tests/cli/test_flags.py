"""The error for a number out of range names the flag and its range, not an inner name."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Command


@pytest.mark.parametrize("name", ["generate", "submit"])
@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--max-new-tokens", "0", "1 to 1048576"),
        ("--temperature", "-1.5", "a number of 0 (greedy) or more"),
        ("--temperature", "nan", "a number of 0 (greedy) or more"),
        ("--top-k", "-1", "0 (off) or a number of tokens up to 2147483647"),
        ("--top-p", "2.5", "a share above 0 and at most 1 (off)"),
        ("--seed", "-1", "an integer from 0 to 9223372036854775807"),
    ],
)
def test_sampling(command: Command, name: str, flag: str, value: str, expected: str) -> None:
    assert command(name, "hi", flag, value) == (
        1,
        "",
        f"flowspec: {flag} is {value}; expected {expected}\n",
    )


@pytest.mark.parametrize(
    ("arguments", "flag", "value", "expected"),
    [
        (["generate", "hi"], "--stages", "0", "1 or more"),
        (["up"], "--stages", "-2", "1 or more"),
        (["profile"], "--stages", "0", "1 or more"),
        (["submit", "hi"], "--priority", "101", "-100 to 100"),
        (["submit", "hi"], "--wait-seconds", "-1", "0 to 86400"),
        (["submit", "hi"], "--logprobs", "21", "0 to 20"),
        (["profile"], "--repeats", "0", "1 or more"),
        (["profile"], "--latency-ms", "-1.5", "milliseconds from 0 to 999999"),
        (["profile"], "--mbit", "0.0", "Mbit/s, more than 0"),
        (["simulate", "hi"], "--stages", "0", "1 or more"),
        (["simulate", "hi"], "--max-new-tokens", "1", "2 to 1048576"),
        (["simulate", "hi"], "--temperature", "-1.0", "a number of 0 (greedy) or more"),
        (["bench"], "--tokens", "0", "2 to 1048576"),
        (["bench"], "--seed", "-1", "an integer from 0 to 9223372036854775807"),
        (["bench"], "--stages", "'4,0'", "counts of 1 or more, like 4,8"),
        (["bench"], "--temperatures", "'0,-1'", "numbers of 0 (greedy) or more, like 0,1"),
        (["bench"], "--temperatures", "'inf'", "numbers of 0 (greedy) or more, like 0,1"),
        *(
            ([*name], flag, value, expected)
            for name in (["simulate", "hi"], ["bench"])
            for flag, value, expected in (
                ("--broker", "'moon'", "draft, stage-N (like stage-2), own or none"),
                ("--broker", "'stage-0'", "draft, stage-N (like stage-2), own or none"),
                ("--rows", "'up'", "straight (to their receiver) or broker (through it)"),
            )
        ),
        (["profile"], "--rows", "'0,1'", "counts of 1 or more, like 1,4,16,64"),
    ],
)
def test_clusters(
    command: Command, arguments: list[str], flag: str, value: str, expected: str
) -> None:
    done = command(*arguments, f"{flag}={value.strip(chr(39))}")
    assert done == (1, "", f"flowspec: {flag} is {value}; expected {expected}\n")


@pytest.mark.parametrize("name", ["generate", "up", "profile", "simulate", "bench"])
@pytest.mark.parametrize("draft", ["", "  "])
def test_an_empty_draft(command: Command, name: str, draft: str) -> None:
    expected = "a name like draft, head or ngram, or several joined by + or :"
    assert command(name, f"--draft={draft}") == (
        1,
        "",
        f"flowspec: --draft is empty; expected {expected}\n",
    )


@pytest.mark.parametrize("name", [["simulate", "hi"], ["bench"]])
def test_a_broker_beside_a_stage_that_is_not_there(command: Command, name: list[str]) -> None:
    assert command(*name, "--broker", "stage-5") == (
        1,
        "",
        "flowspec: the broker is at 'stage-5', but there are 4 stages; "
        "expected draft, own, none, or a stage up to stage-4\n",
    )


@pytest.mark.parametrize("name", [["simulate", "hi"], ["bench"]])
def test_rows_through_a_broker_that_is_not_charged(command: Command, name: list[str]) -> None:
    assert command(*name, "--broker", "none", "--rows", "broker") == (
        1,
        "",
        "flowspec: rows is 'broker', but at is 'none'; expected a place for the broker, or "
        "straight rows\n",
    )


@pytest.mark.parametrize("sweep", ["latency=-1", "latency=5,1e9", "mbit=0"])
def test_links(command: Command, sweep: str) -> None:
    status, out, err = command("bench", "--sweep", sweep)
    assert (status, out) == (1, "")
    assert err.startswith(
        f"flowspec: --sweep is '{sweep}', but a link has a latency from 0 to 999999 ms and"
    )
