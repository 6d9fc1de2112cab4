"""The benchmark of sampling: its logits, its medians, its tables."""

from __future__ import annotations

import sys

import pytest
import torch

from ops.bench import sampling as program
from ops.bench.sampling import LastPass, Setting, flat_logits, measured, model_logits, table


def test_a_table_has_a_row_per_setting_and_the_share_of_the_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rows", "3", "--vocabulary", "700", "--hidden", "32", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["sampling", *words])
    program.main()
    model, flat = capsys.readouterr().out.strip().split("\n\n")
    names = [line.split(" | ")[0].removeprefix("| ") for line in model.splitlines()[2:]]
    assert names == [setting.name for setting in program.settings()]
    assert len(flat.splitlines()) == 2 + len(program.TARGETS)


def test_shares_are_of_bfloat16_logits() -> None:
    text = table("x", {"greedy": [0.5, 0.02, 0.04]}, 0.4)
    assert text.splitlines()[-1] == "| greedy | 500.0 | 20.0 | 40.0 | 400.0 | 10.0% |"


def test_every_variant_gets_indices_of_its_own() -> None:
    seen: list[int] = []

    def noted(logits: torch.Tensor, indices: object) -> None:
        seen.extend(indices)  # type: ignore[arg-type, call-overload]

    settings = [Setting("one", noted, noted), Setting("two", noted, noted)]
    medians, _ = measured(settings, model_logits(4, 100), LastPass(4, 16, 100), 2)
    assert list(medians) == ["one", "two"]
    assert len(set(seen)) == len(seen) == 2 * 3 * 3 * 4


@pytest.mark.parametrize(("logits", "least"), [(model_logits, 8.0), (flat_logits, 0.0)])
def test_the_best_logits_of_the_two_shapes(logits: program.Shape, least: float) -> None:
    best = logits(5, 2000).amax(1)
    assert (best > least).all()
    assert (best < 100).all() if least else (best < 0.1).all()
