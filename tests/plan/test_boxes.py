"""Boxes from a line of text."""

from __future__ import annotations

import pytest

from flowspec.errors import ConfigError
from flowspec.plan.boxes import DescribedBox, parse_boxes


def test_boxes_are_counted_and_numbered() -> None:
    assert parse_boxes("nano:2x8GiB@50GB/s+6TFLOPS, desk:24GB@900.5GB/s") == (
        DescribedBox("nano-1", 8 * 2.0**30, 50e9, 6e12),
        DescribedBox("nano-2", 8 * 2.0**30, 50e9, 6e12),
        DescribedBox("desk", 24e9, 900.5e9),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--boxes has ''"),
        (
            "nano:8GiB",
            "--boxes has 'nano:8GiB'; expected a name, memory and the memory's bandwidth",
        ),
        ("nano:4x8GB@50", "with units, like nano:4x8GiB@50GB/s"),
        ("nano:8@50GB/s", "with units"),
        ("nano:0x8GiB@50GB/s", "with a zero"),
        ("nano:8GiB@0GB/s", "with a zero"),
        ("nano:8GiB@50GB/s,nano:16GiB@50GB/s", "--boxes names nano twice"),
        ("nano-1:8GiB@50GB/s,nano:2x16GiB@50GB/s", "--boxes names nano-1 twice"),
        ("nano:8GiB@50GB/s+6", "with units"),
    ],
)
def test_other_text_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="--boxes") as raised:
        parse_boxes(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
