"""Arguments of benchmarks: accepted values, and what a wrong one is told."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from ops.bench.arguments import count, latencies, prompt_sets, temperatures


def test_values_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    assert count("3") == 3
    assert temperatures("0,0.6,1") == [0.0, 0.6, 1.0]
    assert latencies("0,2.5,999") == [0.0, 2.5, 999.0]
    assert prompt_sets(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        *((count, text, "an integer of at least 1") for text in ("0", "-2", "1.5", "many", "")),
        *(
            (temperatures, text, "numbers of 0 or more, by commas")
            for text in ("x", "0,,1", "-1", "nan", "inf", "")
        ),
        *(
            (latencies, text, "milliseconds from 0 to below 1000, by commas")
            for text in ("x", "0,,1", "-1", "nan", "1000", "")
        ),
        *(
            (prompt_sets, text, "a folder of .jsonl files of prompts")
            for text in ("no/such/folder", __file__, str(Path(__file__).parent))
        ),
    ],
)
def test_others_are_refused_with_what_is_expected(
    kind: Callable[[str], object], text: str, expected: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as raised:
        kind(text)
    assert str(raised.value) == f"{text!r}, expected {expected}"
