"""A user's own target: a drafter is refused, any other model drafts with n-grams."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.cli.groups import ModelFlags
from flowspec.cli.places import draft_for, setup_of
from flowspec.errors import ModelError
from tests.cli.conftest import Command


@pytest.mark.parametrize("flags", [["generate", "hi"], ["up"], ["profile"]])
@pytest.mark.parametrize(("name", "kind"), [("ngram", "ngram"), ("head", "an EAGLE head")])
def test_what_can_only_draft_is_no_target(
    command: Command, flags: list[str], name: str, kind: str
) -> None:
    status, out, err = command(*flags, "--target", name)
    assert (status, out) == (1, "")
    assert err.startswith(
        f"flowspec: the target is {name}, and {kind} can only draft; expected a language model"
    )


def test_any_other_target_without_a_draft_drafts_by_its_n_grams_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert draft_for(None, None, "draft") == "draft"
    # models are checked together when they are opened
    assert draft_for("ngram", "head", "draft") == "head"
    assert capsys.readouterr() == ("", "")
    assert draft_for("medium", None, "draft") == "ngram"
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("note: no --draft is given for medium: drafting with n-grams")
    assert said.err.count("\n") == 1
    assert draft_for("medium", None, "draft", "autoregressive") == "ngram"
    assert capsys.readouterr() == ("", ""), "nothing is drafted"
    setup = setup_of(ModelFlags(target="medium"))
    assert (setup.target, setup.draft) == ("medium", "ngram")


def test_a_folder_of_that_name_is_what_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ngram").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json"):
        draft_for("ngram", None, "draft")
