"""Drafts in a row by prompt set: a row for each set, temperature and drafter, and for all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flowspec.model.weights.directory import default_pair
from ops.bench import depth


def test_every_set_temperature_and_drafter_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        lines = [json.dumps({"prompt": f"{name} {word}"}) for word in ("left out", "Why?")]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = ["--target", default_pair()[0], "--prompts", str(tmp_path), "--drafts", "ngram"]
    monkeypatch.setattr(sys, "argv", ["depth", *words, "--hold-out", "1", "--tokens", "12"])
    depth.main()
    first, _, head, _, *rows = capsys.readouterr().out.splitlines()
    assert first.endswith(", 2 prompts, up to 12 tokens")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:3] for row in cells] == [
        [name, temperature, "`ngram`"] for name in ("one", "two", "all") for temperature in "01"
    ]
    assert {len(row) for row in cells} == {head.count("|") - 1}
    for row in cells:
        right = [float(cell) for cell in row[3:-1]]
        assert right == sorted(right, reverse=True)
        assert float(row[-1]) == pytest.approx(1 + sum(right[: depth.ROUND]), abs=0.02)
