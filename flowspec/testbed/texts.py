"""What the target says to a prompt, computed once by plain decoding: the truth every simulated run
must give.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowspec.core.run.sampling import Sampling
from flowspec.model.directory import ModelDirectory


@dataclass(frozen=True)
class Text:
    """A prompt and what the target makes of it, as token ids.

    ``hidden``: the target's rows after its final norm ``[tokens, hidden]``, float32, if they
    were asked for.
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
) -> list[Text]:
    """The target's own text of ``count`` tokens for every prompt and sampling; prompts it has no
    room for are left out.
    """
    import torch

    from flowspec.model.reference import Reference
    from flowspec.model.text import Tokenizer

    torch.set_num_threads(1)
    reference = Reference(target)
    tokenizer = Tokenizer(target)
    encoded = [tokenizer.encode(prompt, raw=False) for prompt in prompts]
    found = []
    for sampling in samplings:
        for prompt in encoded:
            if len(prompt) + count <= target.context:
                output = reference.decode(prompt, count, sampling)
                rows = reference.hidden((*prompt, *output)) if hidden else None
                found.append(Text(prompt, output, sampling, rows))
    return found
