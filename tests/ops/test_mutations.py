"""The mutations match the code, and the program tells caught from surviving ones."""

from __future__ import annotations

import ast
import functools
from collections.abc import Sequence
from pathlib import Path

import pytest

from ops import mutations
from ops.mutations import ROOT, Mutation, attempt, load, mirror, stages, summary

MUTATIONS = load()


def test_there_are_enough_and_each_has_a_rule_of_its_own() -> None:
    rules = [mutation.breaks for mutation in MUTATIONS]
    assert len(rules) >= 60
    assert sorted(set(rules)) == sorted(rules)


def misfit(mutation: Mutation) -> str:
    """Why a mutation breaks nothing; empty if it does."""
    before = (ROOT / mutation.file).read_text()
    try:
        after = mutation.apply(before)
    except ValueError as error:
        return str(error)
    if mutation.file.endswith(".py") and parsed(after) == parsed(before):
        return f"{mutation.breaks}: the code is the same"
    return "" if after != before else f"{mutation.breaks}: the text is the same"


@functools.lru_cache(maxsize=8)
def parsed(text: str) -> str:
    return ast.dump(ast.parse(text))


def test_all_fit_the_code() -> None:
    found = list(filter(None, map(misfit, sorted(MUTATIONS, key=lambda one: one.file))))
    assert not found, "\n".join(found)


def test_a_text_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 times"):
        Mutation("a rule", "x.py", "old", "new").apply("text")
    with pytest.raises(ValueError, match="2 times"):
        Mutation("a rule", "x.py", "old", "new").apply("old, old")


def test_the_test_module_that_mirrors_a_file_is_tried_first() -> None:
    assert mirror("flowspec/core/run/ended.py") == ("tests/core/run/test_ended.py",)
    assert mirror("lua/include/fence.lua") == ("tests/lua",)
    assert mirror("pyproject.toml") == ()
    core, other = (
        next(one for one in MUTATIONS if one.file == file)
        for file in ("flowspec/core/run/ended.py", "flowspec/transport/wire/keys.py")
    )
    assert stages(core) == [("tests/core/run/test_ended.py",), mutations.PURE]
    assert stages(other)[-1][0] == "tests"


def test_a_mutation_may_name_the_test_that_must_catch_it() -> None:
    named = [one for one in MUTATIONS if one.test]
    assert named
    for one in named:
        assert stages(one) == [(one.test,)]
        assert (ROOT / one.test).is_file()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "lib.py").write_text("def double(n):\n    return n + n\n")
    (tmp_path / "test_lib.py").write_text(
        "from lib import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
    )
    return tmp_path


def _judge(copy: Path, arguments: Sequence[str]) -> str:
    return mutations.run_tests(copy, ["test_lib.py", "-p", "no:randomly"])


def test_a_mutation_that_a_test_sees_is_caught_and_undone(project: Path) -> None:
    before = (project / "lib.py").read_text()
    outcome = attempt(Mutation("sum", "lib.py", "n + n", "n - n"), project, _judge)
    assert outcome.caught_by == "test_lib.py::test_double"
    assert (project / "lib.py").read_text() == before
    assert summary([outcome]) == "1 of 1 mutations caught, 0 by pure tests, 1 by others"


def test_a_mutation_that_no_test_sees_survives(project: Path) -> None:
    outcome = attempt(Mutation("sum", "lib.py", "n + n", "n * n"), project, _judge)
    assert outcome.caught_by == ""
    assert summary([outcome]).startswith("0 of 1")


def test_an_empty_choice_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutations.main(["--only", "no such rule"]) == 2
    assert "no mutation contains" in capsys.readouterr().err


def test_the_list_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutations.main(["--list", "--only", "run/ended"]) == 0
    assert capsys.readouterr().out.count("\n") == sum("run/ended" in one.file for one in MUTATIONS)
