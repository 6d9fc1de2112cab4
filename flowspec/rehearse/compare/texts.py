"""The target's texts, computed once by plain decoding; every simulated run must reproduce them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec.core.run.sampling import Sampling
from flowspec.model.drafters.sources import taps_of
from flowspec.model.weights.directory import PACKAGED_HEAD, ModelDirectory


@dataclass(frozen=True)
class Text:
    """A prompt and the target's output for it, as token ids.

    ``hidden``: the rows that a head drafts from, ``[tokens, values]``, float32, if requested.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sampling: Sampling
    hidden: Any = None


def texts(
    prompts: Iterable[str],
    samplings: Sequence[Sampling],
    count: int,
    target: ModelDirectory,
    *,
    hidden: bool = False,
    head: str = PACKAGED_HEAD,
) -> list[Text]:
    """The target's own text of up to ``count`` tokens for every sampling and prompt.

    ``hidden``: with the rows that ``head`` drafts from.
    Prompts that leave no room for ``count`` tokens are left out.
    """
    import torch

    from flowspec.model.reference import Reference
    from flowspec.model.text.tokenizer import Tokenizer

    torch.set_num_threads(1)
    reference = Reference(target)
    taps = taps_of(head, target) if hidden else None
    tokenizer = Tokenizer(target)
    encoded = [tokenizer.encode(prompt, raw=False) for prompt in prompts]
    found = []
    for sampling in samplings:
        for prompt in encoded:
            if len(prompt) + count <= target.context:
                output = reference.decode(prompt, count, sampling)
                rows = reference.returned((*prompt, *output), taps) if hidden else None
                found.append(Text(prompt, output, sampling, rows))
    return found
