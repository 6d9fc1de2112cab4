"""The texts that jobs must have, by transformers, and by noise as docs/algorithms.md defines it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ops.chaos.pipeline import SEED, TOKENS, JobText, SentJob

_GOLDEN = 0x9E3779B97F4A7C15
PROMPTS = (
    "Describe how to open a text file in Python.",
    "Once upon a time there was a small town by the sea.",
    "Write down three reasons to get up early.",
)


@cache
def prompts(target: Path) -> tuple[tuple[int, ...], ...]:
    """Token ids of the prompts."""
    return tuple(tuple(_read(target)[1].encode(text)) for text in PROMPTS)


def text_of(target: Path, ids: Sequence[int]) -> str:
    said: str = _read(target)[1].decode(ids, skip_special_tokens=True)
    return said


@cache
def _read(target: Path) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer, as transformers reads a folder or a GGUF file."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    place, kind = (target, {}) if target.is_dir() else (target.parent, {"gguf_file": target.name})
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **kind)
    return model, transformers.AutoTokenizer.from_pretrained(place, **kind)


@cache
def text_after(target: Path, ids: tuple[int, ...], temperature: float = 0.0) -> tuple[int, ...]:
    """The target's own text after ``ids``, by the library's ``generate``.

    At a temperature it takes the best of scores to which the noise of docs/algorithms.md is added.
    """
    import torch
    import transformers

    def add_noise(found: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = _noise(found.shape[1], scores.shape[1])
        return scores.double() / temperature + torch.from_numpy(noise)

    given = torch.tensor([ids])
    found = _read(target)[0].generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=TOKENS,
        logits_processor=transformers.LogitsProcessorList([add_noise] if temperature else []),
    )
    return tuple(found[0].tolist()[len(ids) :])


def _noise(index: int, size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of every token at ``index``; "Keyed draw" in docs/algorithms.md."""
    key = _mix(_mix(SEED + _GOLDEN) ^ _mix(index * 0xD1B54A32D192ED03 + 1))
    bits = [_mix(key + (token + 1) * _GOLDEN) >> 11 for token in range(size)]
    drawn = np.minimum((np.array(bits, np.float64) + 0.5) * 2.0**-53, 1 - 2.0**-53)
    return -np.log(-np.log(drawn))


def _mix(x: int) -> int:
    x &= 2**64 - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def expected(target: Path) -> dict[JobText, tuple[int, ...]]:
    """Every prompt's text, at T = 0 and at T = 1."""
    texts = [JobText(ids, temperature) for ids in prompts(target) for temperature in (0.0, 1.0)]
    return {text: text_after(target, text.ids, text.temperature) for text in texts}


def problem_of(job: SentJob, wanted: tuple[int, ...], *, may_be_lost: bool) -> str:
    """What is wrong with how ``job`` has ended; empty: nothing."""
    if not job.ended:
        return f"has not ended after {time.monotonic() - job.since:.0f} s"
    if job.ended == "lost":
        return "" if may_be_lost else "was lost without a word"
    failed = job.ended == "error"
    if failed and (not job.error or "\n" in job.error):
        return f"ended with {job.error!r} in the place of one line"
    if may_be_lost and job.gap:
        return ""  # a part of its output was deleted under its reader's eyes
    if tuple(job.ids) == (wanted[: len(job.ids)] if failed else wanted):
        return ""
    return "has another text" + (" before its error" if failed else f" ({len(job.ids)} tokens)")
