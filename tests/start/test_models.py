"""Where a worker finds the models that the pipeline's record names."""

from __future__ import annotations

import pytest

from flowspec.errors import ModelError
from flowspec.model.weights.directory import default_pair
from flowspec.start.models import located


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
