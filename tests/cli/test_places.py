"""A target of one's own: what can only draft is told so, anything else asks for a draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.cli.places import check_target
from flowspec.errors import ConfigError, ModelError
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


def test_any_other_target_needs_a_draft() -> None:
    check_target(None, None)
    check_target("ngram", "draft")  # the models are judged together where they are opened
    with pytest.raises(ConfigError, match="--target needs --draft"):
        check_target("medium", None)


def test_a_folder_of_that_name_is_what_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ngram").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json"):
        check_target("ngram", None)
