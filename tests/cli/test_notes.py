"""An unexpected default is reported in one line on stderr; nothing else is."""

from __future__ import annotations

import json

import pytest

from flowspec.cli.notes import alone, first_of_several, missing_roles, unused_middles, without
from flowspec.strategies import STRATEGIES, build
from tests.cli.conftest import Command


@pytest.mark.parametrize(("stages", "idle"), [(12, 0), (15, 2)])
def test_stages_without_a_layer_are_counted_on_stderr(
    command: Command, stages: int, idle: int
) -> None:
    run = (
        "simulate",
        "hi",
        "--profile",
        "laptop-cpu",
        "--draft",
        "ngram",
        "--strategy",
        "chain",
        "--json",
    )
    status, out, err = command(*run, "--max-new-tokens", "2", "--stages", str(stages))
    assert status == 0 and out.startswith("{")
    said = (
        f"note: {idle} of {stages} stages have no layer and pass rows on: "
        "the model of profile laptop-cpu has 12 layers"
    )
    assert err.splitlines() == ([said] if idle else [])


def test_roles_without_a_worker_are_named_with_the_command_that_starts_the_first() -> None:
    record = {"stages": "2", "middles": '["medium"]'}
    roles = ["scheduler", "draft", "verify-1", "verify-2", "middle-1"]
    assert missing_roles(record, dict.fromkeys(roles)) == []
    assert missing_roles(record, dict.fromkeys(["draft", "verify-1"])) == [
        "scheduler",
        "verify-2",
        "middle-1",
    ]
    commands = [without([role]).partition(" by ")[2] for role in roles[1:]]
    assert commands == [
        "`python -m workers.draft`",
        "`python -m workers.verify --stage 1`",
        "`python -m workers.verify --stage 2`",
        "`python -m workers.middle --model 1`",
    ]
    assert "`flowspec up`" in without(["scheduler"])


QUICK = ("--profile", "laptop-cpu", "--stages", "2")


@pytest.mark.parametrize("draft", ["ngram:draft", "ngram"])
@pytest.mark.parametrize("strategy", ["chain:window=2", "auto", "autoregressive"])
def test_a_simulated_strategy_that_does_not_choose_says_what_it_uses(
    command: Command, strategy: str, draft: str
) -> None:
    run = ("simulate", "hi", *QUICK, "--max-new-tokens", "6", "--json")
    status, out, err = command(*run, "--draft", draft, "--strategy", strategy)
    assert status == 0
    (row,) = json.loads(out)["rows"]
    silent = strategy in ("auto", "autoregressive") or draft == "ngram"
    said = (
        "note: chain:window=2 does not choose between drafts: it uses ngram, the first of "
        "ngram:slm; "
        "put another one first, or use auto\n"
    )
    assert err == ("" if silent else said)
    choosing = strategy == "auto" and draft == "ngram:draft"
    assert row["drafts"] == ({"ngram": row["tokens"] - 1, "slm": 0} if choosing else {})


def test_a_comparison_names_them_in_one_line_and_what_was_chosen_below_its_table(
    command: Command,
) -> None:
    run = (
        "bench",
        *QUICK,
        "--tokens",
        "8",
        "--half",
        "tuning",
        "--strategies",
        "auto,chain,specpipe",
    )
    status, out, err = command(*run, "--draft", "ngram:slm,ngram,ngram:slm+ngram")
    assert status == 0
    used = "ngram, the first of ngram:slm, and ngram, the first of ngram:slm+ngram"
    assert err == (
        f"note: chain, specpipe do not choose between drafts: they use {used}; put another one "
        "first, or use auto\n"
    )
    _, below = out.split("by the draft used:\n\n")
    first, second, *_ = below.splitlines()
    assert first.startswith("- auto with ngram:slm on 2 stages")
    assert second.startswith("- auto with ngram:slm+ngram on 2 stages")


def test_only_who_drafts_and_does_not_choose_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    first_of_several(STRATEGIES, [("head", "slm")])
    named = (
        capsys.readouterr().err.removeprefix("note: ").partition(" do not choose")[0].split(", ")
    )
    for stages in (1, 4, 21):
        built = {name: build(name, stages) for name in STRATEGIES}
        assert set(named) == {
            name for name in built if built[name].draft_width and not built[name].chooses_drafter
        }
    first_of_several(STRATEGIES, [("head",), ("slm",)])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("middles", "running", "said"),
    [
        ([], False, ""),
        (["m"], False, "note: chain uses no middle models: m is not started; "),
        (["m", "n"], False, "note: chain uses no middle models: m, n are not started; "),
        (["m"], True, "note: chain uses no middle models: m runs unused; "),
        (["m", "n"], True, "note: chain uses no middle models: m, n run unused; "),
    ],
)
def test_middle_models_of_no_use_are_named(
    capsys: pytest.CaptureFixture[str], middles: list[str], running: bool, said: str
) -> None:
    unused_middles("chain", middles, running=running)
    assert capsys.readouterr().err == (said and said + "pipespec and speculative use them\n")


@pytest.mark.parametrize(
    ("strategy", "is_alone"),
    [
        ("auto", False),
        ("pipedec", True),
        ("pipedec:barrier=off", False),
        ("flowspec", False),
        ("flowspec:lockstep=on", True),
    ],
)
def test_a_strategy_that_runs_alone_says_so(
    capsys: pytest.CaptureFixture[str], strategy: str, is_alone: bool
) -> None:
    alone(strategy)
    said = capsys.readouterr().err
    assert said.startswith(f"note: {strategy} runs alone: ") is is_alone
    assert said.count("\n") == is_alone


def test_the_list_names_the_strategies_that_run_alone(command: Command) -> None:
    listed = command("strategies")[1].split("\n    runs alone: ")
    assert [part.splitlines()[-3].split()[0] for part in listed[:-1]] == ["pipedec", "pipedec_head"]
    entries = [json.loads(line) for line in command("strategies", "--json")[1].splitlines()]
    assert [one["name"] for one in entries if one["runs_alone"]] == ["pipedec", "pipedec_head"]


def test_every_strategy_that_uses_middle_models_is_named_in_the_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in STRATEGIES:
        unused_middles(name, ["m"], running=False)
        silent = build(name, 1).uses_middles
        assert (capsys.readouterr().err == "") is silent
        assert silent is (name in ("pipespec", "speculative"))
