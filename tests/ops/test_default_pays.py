"""``auto`` over plain decoding on a live pipeline: a row for every place, of equal texts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ops.bench import default_pays

pytestmark = pytest.mark.live


def test_a_place_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, texts in (("a", ["One", "Two"]), ("b", ["Three", "Four"])):
        lines = [f'{{"prompt": "{text}"}}\n' for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    assert default_pays.spread(tmp_path, 3) == ["One", "Three", "Two"]
    words = ["--prompts", str(tmp_path), "--stages", "2", "--latencies", "0", "--dtypes", "float32"]
    words += ["--strategies", "auto chain:window=2", "--count", "2", "--tokens", "6"]
    monkeypatch.setattr(sys, "argv", ["default_pays", *words])
    default_pays.main()
    printed = capsys.readouterr().out.splitlines()[-2:]
    rows = [line.strip("| ").split(" | ") for line in printed]
    assert [row[:4] for row in rows] == [
        ["float32", "2", "0", "`auto`"],
        ["float32", "2", "0", "`chain:window=2`"],
    ]
    assert all(float(cell) > 0 for row in rows for cell in (*row[4:7], *row[7].split(", ")))
