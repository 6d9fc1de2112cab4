"""The oracle: plain decoding of the whole target in one process, by the library's own forward pass.

It shares no code with the pipeline except the keyed draw, which both must use. ``excuse`` decides
by a float64 pass of the whole model whether a difference is a near-tie in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from flowspec.core.run.sampling import Sampling, choose, gumbel, survivors
from flowspec.model.layers.architecture import library_model
from flowspec.model.layers.taps import Taps
from flowspec.model.rows.kv import CACHE
from flowspec.model.weights.directory import ModelDirectory, open_directory

#: Two candidates closer than this in a float64 pass may be chosen either way in float32.
TIE = 1e-4
#: The same for a token whose cumulative probability is this close to the edge of the nucleus.
NUCLEUS_TIE = 1e-6


@dataclass(frozen=True, slots=True)
class Excuse:
    """A position at which ``ours`` and ``theirs`` differ by no more than rounding."""

    index: int
    ours: int
    theirs: int
    gap: float


class Reference:
    """The whole model in ``directory``, float32 on the CPU."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._directory = directory
        self._model = self._load(torch.float32)
        self._double: Any = None

    def _load(self, dtype: torch.dtype) -> Any:
        return library_model(self._directory, dtype)

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], count: int, sampling: Sampling) -> tuple[int, ...]:
        """Up to ``count`` tokens after ``prompt``, one forward pass per token.

        An eos token or the end of the context ends the text early.
        """
        room = self._directory.context - len(prompt)
        tokens: list[int] = []
        inputs = torch.tensor([list(prompt)])
        cache = None
        for index in range(len(prompt), len(prompt) + min(count, room)):
            output = self._model(
                input_ids=inputs, **{CACHE: cache}, use_cache=True, logits_to_keep=1
            )
            tokens.append(choose(output.logits[0, -1].numpy(), sampling, index))
            if tokens[-1] in self._directory.eos:
                break
            inputs = torch.tensor([tokens[-1:]])
            cache = output[CACHE]
        return tuple(tokens)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """Greedy decoding by the library's own ``generate``."""
        room = min(count, self._directory.context - len(prompt))
        ids = torch.tensor([list(prompt)])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=room,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=sorted(self._directory.eos) or None,
        )
        return tuple(output[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Log-probabilities of all tokens after each of ``tokens``, ``[tokens, vocabulary]``."""
        logits = self._model(torch.tensor([list(tokens)])).logits[0]
        rows: np.ndarray[Any, Any] = torch.log_softmax(logits.double(), dim=-1).numpy()
        return rows

    @torch.inference_mode()
    def hidden(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """Hidden rows after the final norm, ``[tokens, hidden]``, float32, as draft heads get."""
        rows: np.ndarray[Any, Any] = (
            self._model.model(torch.tensor([list(tokens)])).last_hidden_state[0].numpy()
        )
        return rows

    @torch.inference_mode()
    def returned(self, tokens: Sequence[int], taps: Taps | None) -> np.ndarray[Any, Any]:
        """The rows that a pipeline returns to a head with ``taps``, float32; None: ``hidden``."""
        if taps is None:
            return self.hidden(tokens)
        matrix = load_file(open_directory(taps.drafter).weight_files[taps.weight])[taps.weight]
        seen: dict[int, torch.Tensor] = {}
        readers = [*self._model.model.layers, self._model.model.norm]

        def keep(layer: int) -> Callable[[Any, Any], None]:
            return lambda module, given: seen.update({layer: given[0][0]})

        hooks = [readers[at].register_forward_pre_hook(keep(at)) for at in taps.layers]
        self.hidden(tokens)
        for hook in hooks:
            hook.remove()
        joined = torch.cat([seen[layer] for layer in taps.layers], dim=-1)
        sums = joined @ matrix.float().T
        rows: np.ndarray[Any, Any] = sums.numpy()
        return rows

    @torch.inference_mode()
    def excuse(
        self, prefix: Sequence[int], ours: int, theirs: int, sampling: Sampling
    ) -> Excuse | None:
        """The excuse if float64 allows both tokens after ``prefix``; None: a real difference."""
        if self._double is None:
            self._double = self._load(torch.float64)
        logits = self._double(input_ids=torch.tensor([list(prefix)])).logits[0, -1].numpy()
        index = len(prefix)
        if sampling.temperature == 0:
            gap = abs(float(logits[ours] - logits[theirs]))
            return (
                Excuse(index, ours, theirs, gap)
                if gap < TIE and max(logits) - logits[ours] < TIE
                else None
            )
        if _at_nucleus_edge(logits, sampling, (ours, theirs)):
            return Excuse(index, ours, theirs, NUCLEUS_TIE)
        pair = np.array([ours, theirs])
        scores = logits[pair] / sampling.temperature + gumbel(sampling.seed, index, pair)
        gap = abs(float(scores[0] - scores[1]))
        return Excuse(index, ours, theirs, gap) if gap < TIE else None


def _at_nucleus_edge(
    logits: np.ndarray[Any, Any], sampling: Sampling, tokens: tuple[int, int]
) -> bool:
    """Whether rounding can move one of ``tokens`` into or out of the nucleus or the top-k."""
    if sampling.top_p >= 1 and not sampling.top_k:
        return False
    loose = Sampling(
        sampling.temperature, sampling.top_k and sampling.top_k + 1, 1.0, sampling.seed
    )
    ids, scores = survivors(logits, loose)
    shares = np.exp(scores - scores[0])
    before = (np.cumsum(shares) - shares) / shares[: sampling.top_k or None].sum()
    for token in tokens:
        (at,) = np.nonzero(ids == token)
        if at.size and sampling.top_p < 1 and abs(before[at[0]] - sampling.top_p) < NUCLEUS_TIE:
            return True
        if (
            sampling.top_k
            and at.size
            and at[0] >= sampling.top_k - 1
            and scores.size > sampling.top_k
        ):
            return bool(scores[sampling.top_k - 1] - scores[sampling.top_k] < TIE)
    return False
