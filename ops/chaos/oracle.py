"""The texts that jobs must have, by transformers and plain decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from ops.chaos.pipeline import PAIR, TOKENS, JobText, Pipeline, SentJob

PROMPTS = (
    "Describe how to open a text file in Python.",
    "Once upon a time there was a small town by the sea.",
    "Write down three reasons to get up early.",
)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Token ids of the prompts, by the tokenizer's own package."""
    return tuple(tuple(_tokenizer().encode(text).ids) for text in PROMPTS)


def text_of(ids: Sequence[int]) -> str:
    """The text of token ids, by the tokenizer's own package."""
    said: str = _tokenizer().decode(ids)
    return said


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))


@cache
def _target() -> Any:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)


@cache
def greedy(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The target's own greedy text after ``ids``, by the library's ``generate``."""
    import torch

    given = torch.tensor([ids])
    found = _target().generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=TOKENS
    )
    return tuple(found[0].tolist()[len(ids) :])


def expected(pipeline: Pipeline) -> dict[JobText, tuple[int, ...]]:
    """Every prompt's text; of those at a temperature what plain decoding says before any fault."""
    found = {JobText(ids, 0.0): greedy(ids) for ids in prompts()}
    jobs = [pipeline.submit(JobText(ids, 1.0), "autoregressive") for ids in prompts()]
    pipeline.wait(jobs)
    return found | {job.prompt: tuple(job.ids) for job in jobs}


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
