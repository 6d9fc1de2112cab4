"""Public prompts of benchmarks: the last of each set, which trainings here leave out."""

from __future__ import annotations

from pathlib import Path

from flowspec.cli.generate import read_prompts
from flowspec.rehearse.compare.prompts import Prompt

#: Prompts at the end of every file that ``ops.train.answers`` leaves out.
HELD_OUT = 8


def last_prompts(folder: Path, per_file: int = HELD_OUT) -> list[Prompt]:
    """The last ``per_file`` prompts of every ``.jsonl`` file of ``folder``.

    More than ``HELD_OUT`` suit only drafters that were not trained on these files: about the texts
    of its training a drafter is right far more often.
    """
    return [
        Prompt(file.stem, text)
        for file in sorted(folder.glob("*.jsonl"))
        for text in read_prompts(file)[-per_file:]
    ]
