"""Where a worker finds the models that the pipeline's record names."""

from __future__ import annotations

from argparse import Namespace
from typing import NoReturn

import pytest

from flowspec.errors import ModelError
from flowspec.model.layers.taps import Taps
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.start.models import located
from workers import draft, verify


@pytest.mark.parametrize("recorded", ["models/big", "./models/big.gguf"])
def test_a_place_that_only_the_schedulers_machine_has_is_told_as_one(recorded: str) -> None:
    with pytest.raises(ModelError, match=r"big.*; .* say by --target where it is on this machine"):
        located(None, recorded, "--target")
    assert located("here", recorded, "--target") == "here"
    target = default_pair()[0]
    assert located(None, target, "--target") == target


def test_a_model_that_is_here_and_damaged_is_no_matter_of_its_place(tmp_path: object) -> None:
    with pytest.raises(ModelError) as raised:
        located(None, str(tmp_path), "--target")
    assert "on this machine" not in str(raised.value)


def test_a_drafter_that_only_the_schedulers_machine_has_is_told_as_one() -> None:
    target = open_directory(default_pair()[0])
    given = Namespace(target=None, draft=None)
    record = {"draft": "models/head+ngram", "draft_fingerprint": ""}
    with pytest.raises(ModelError, match=r"say by --draft \(all drafts, joined as there\) where"):
        draft._load_models(refuse, given, record)
    taps = Taps("models/head", "", (0,), 1)
    with pytest.raises(ModelError, match=r"head.*; .* say by --draft where it is on this machine"):
        verify._tapping(taps, target, range(target.layers), None)


def refuse(*given: object) -> NoReturn:
    raise AssertionError(given)
