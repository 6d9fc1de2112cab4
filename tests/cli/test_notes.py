"""An unexpected default is reported in one line on stderr; nothing else is."""

from __future__ import annotations

import json

import pytest

from flowspec.cli.notes import alone, cut, first_of_several, unused_middles, why_waiting
from flowspec.strategies import STRATEGIES, build
from flowspec.transport.base import BROKER_FULL, CONTEXT
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


def test_an_answer_that_does_not_fit_is_told_before_it_is_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = {"draft": {CONTEXT: 1024}}
    cut(1023, workers)
    cut(5000, {})
    assert capsys.readouterr().err == ""
    cut(5000, workers)
    said = capsys.readouterr().err
    assert said.startswith(
        "note: the answer has fewer than 5000 tokens: the pipeline's context is 1024"
    )


COMMANDS = {
    "scheduler": "`flowspec up`, or `python -m workers.scheduler` with the pipeline's models",
    "draft": "`python -m workers.draft`",
    "verify-1": "`python -m workers.verify --stage 1`",
    "verify-2": "`python -m workers.verify --stage 2`",
    "middle-1": "`python -m workers.middle --model 1`",
}


def test_the_first_role_without_a_worker_is_named_with_the_command_that_starts_it() -> None:
    record = {"stages": "2", "middles": '["medium"]'}
    workers: dict[str, dict[str, object]] = {role: {} for role in COMMANDS}
    assert why_waiting(record, workers, []) == ""
    for role, command in reversed(COMMANDS.items()):
        del workers[role]
        assert why_waiting(record, workers, []) == (
            f"{role} is not started, or still starting: jobs wait for it; start it by {command}"
        )
        assert why_waiting(record, workers, [role]) == (
            f"{role} was lost: jobs wait until it is started again, by {command}"
        )


def test_a_broker_that_takes_no_writes_is_named_before_workers_that_it_has_cost() -> None:
    full = "the broker at h is out of memory; raise maxmemory or wait for jobs to end"
    workers = {"scheduler": {BROKER_FULL: full}}
    assert why_waiting({"stages": "2"}, workers, []) == f"jobs wait: {full}"
    for odd in (7, "two\nlines", ""):
        workers = {"scheduler": {BROKER_FULL: odd}}
        assert why_waiting({"stages": "2"}, workers, []).startswith("draft is not started"), odd


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
