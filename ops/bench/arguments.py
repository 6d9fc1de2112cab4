"""Types of command-line arguments of benchmarks; wrong values give one line each."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path


def count(text: str) -> int:
    """An integer above 0."""
    with contextlib.suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of at least 1")


def counts(text: str) -> list[int]:
    """Integers above 0, by commas."""
    return [count(part) for part in text.split(",")]


def temperatures(text: str) -> list[float]:
    """Numbers of 0 or more, by commas."""
    return _numbers(text, float("inf"), "numbers of 0 or more")


def latencies(text: str) -> list[float]:
    """Latencies below a second, in milliseconds, by commas."""
    return _numbers(text, 1e3, "milliseconds from 0 to below 1000")


def prompt_sets(text: str) -> Path:
    """A folder with ``.jsonl`` files."""
    folder = Path(text)
    if folder.is_dir() and any(folder.glob("*.jsonl")):
        return folder
    raise argparse.ArgumentTypeError(f"{text!r}, expected a folder of .jsonl files of prompts")


def _numbers(text: str, limit: float, expected: str) -> list[float]:
    """Numbers from 0 to below ``limit``."""
    with contextlib.suppress(ValueError):
        found = [float(part) for part in text.split(",")]
        if all(0 <= number < limit for number in found):
            return found
    raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}, by commas")
