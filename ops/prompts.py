"""Public prompts of benchmarks: the last of each set, which trainings here leave out."""

from __future__ import annotations

from pathlib import Path

from flowspec.cli.generate import read_prompts
from flowspec.rehearse.compare.prompts import Prompt

#: Prompts at the end of every file that ``ops.train.answers`` leaves out.
HELD_OUT = 8


def last_of_sets(folder: Path, per_file: int = HELD_OUT) -> dict[str, list[str]]:
    """The last ``per_file`` prompts of every ``.jsonl`` file of ``folder``, by its name.

    More than ``HELD_OUT`` suit only drafters that were not trained on these files: about the texts
    of its training a drafter is right far more often.
    """
    files = sorted(folder.glob("*.jsonl"))
    return {file.stem: read_prompts(file)[-per_file:] for file in files}


def last_prompts(folder: Path, per_file: int = HELD_OUT) -> list[Prompt]:
    """As ``last_of_sets``, one set behind another."""
    sets = last_of_sets(folder, per_file)
    return [Prompt(name, text) for name, texts in sets.items() for text in texts]
