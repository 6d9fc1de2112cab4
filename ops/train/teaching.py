"""What the training of every form of head shares: the target, its text, unrolled steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import linear
from transformers import DynamicCache, LlamaConfig

from flowspec.errors import ModelError
from flowspec.model.drafters.eagle3_layout import default_taps
from flowspec.model.layers.architecture import library_model
from flowspec.model.layers.placing import choose_precision
from flowspec.model.weights.directory import ModelDirectory, open_directory
from flowspec.model.weights.precision import declared
from ops.parser import Parser

#: Factor of the weight of each further unrolled step.
STEP_DECAY = 0.8
#: Rows per batch of the target's own text, rows kept.
WRITTEN_ROWS = 32
POOL_ROWS = 4096
#: Unrolled steps of the report.
DEPTH = 5
#: Tokens among which the report looks for the target's.
GUESSES = 4


@dataclass(frozen=True)
class Seen:
    """Rows of text, and what the target computes for them.

    ``ids``: ``[batch, length]``. ``tapped``: the rows that enter a head's tapped layers side by
    side, ``[batch, length, taps x hidden]``. ``features``: those after the final norm. ``best``:
    the most likely token after each, ``[batch, length]``. ``counted``: of which tokens the
    successor is to be learned, ``[batch, length]``.
    """

    ids: torch.Tensor
    tapped: torch.Tensor
    features: torch.Tensor
    best: torch.Tensor
    counted: torch.Tensor


class Teacher:
    """The target, frozen: its rows in float32, and its embedding and LM head.

    It computes in bfloat16 on CUDA, and on a CPU that has instructions for it if that is what the
    config declares.
    """

    def __init__(self, folder: Path, device: str) -> None:
        directory = open_directory(str(folder))
        plain = {"dtype": "bfloat16" if device == "cuda" else declared(directory.config)}
        narrow = choose_precision("auto", device, plain) == "bfloat16"
        self.model: Any = library_model(directory, torch.bfloat16 if narrow else torch.float32).to(
            device
        )
        self.model.requires_grad_(False)
        self.embedding = self.model.get_input_embeddings().weight.float()
        self.lm_head = self.model.get_output_embeddings().weight.float()
        self.device = device

    @torch.no_grad()
    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """``[batch, length, hidden]`` after the final norm, of ``ids`` ``[batch, length]``."""
        hidden: torch.Tensor = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.float()

    @torch.no_grad()
    def rows(
        self, ids: torch.Tensor, layers: Sequence[int], **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``features``, and those that enter ``layers`` side by side; ``more``: for the model."""
        found = self.model.model(input_ids=ids, use_cache=False, output_hidden_states=True, **more)
        tapped = torch.cat([found.hidden_states[layer] for layer in layers], dim=-1)
        return found.last_hidden_state.float(), tapped.float()

    def seen(self, ids: torch.Tensor, layers: Sequence[int]) -> Seen:
        """All of ``ids`` ``[batch, length]``, with the rows that enter ``layers``."""
        features, tapped = self.rows(ids, layers) if layers else (self.features(ids),) * 2
        best = linear(features, self.lm_head).argmax(-1)
        return Seen(ids, tapped, features, best, torch.ones_like(ids, dtype=torch.bool))

    @torch.no_grad()
    def written(
        self, prompts: torch.Tensor, length: int, temperatures: torch.Tensor
    ) -> torch.Tensor:
        """Continue ``prompts`` ``[batch, n]`` to ``length`` tokens.

        ``temperatures``: per row, 0 (greedy) or 1 (sampled).
        """
        ids = prompts
        inputs = prompts
        cache = DynamicCache()
        while ids.shape[1] < length:
            output = self.model(
                input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            inputs = drawn(output.logits[:, -1].float(), temperatures)[:, None]
            ids = torch.cat((ids, inputs), dim=1)
        return ids


def drawn(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """A token for each of ``logits`` ``[rows, vocabulary]``; where a temperature is 0, greedily."""
    best = logits.argmax(-1)
    sampled = temperatures > 0
    if sampled.any():
        below = (logits[sampled] / temperatures[sampled][:, None]).softmax(-1).cumsum(-1)
        # Torch's multinomial draws a number per token of the vocabulary: a sixth of a pass.
        at = (1 - torch.rand(len(below), 1, device=logits.device)) * below[:, -1:]
        best[sampled] = torch.searchsorted(below, at)[:, 0]
    return best


def taps_of(told: str | None, layers: int) -> tuple[int, ...]:
    """The layers that ``--taps`` names, of a target with ``layers``; None: the authors'."""
    found = default_taps(layers) if told is None else tuple(map(int, told.split(",")))
    if list(found) != sorted(set(found)) or found[0] < 0 or found[-1] >= layers:
        raise ModelError(
            f"the taps are {list(found)}; give ascending layers below {layers} by --taps"
        )
    return found


class Form(Protocol):
    """A kind of head: how it starts, what it is trained towards, and how it is stored."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers of the target whose inputs a head reads."""
        ...

    def fresh(self, teacher: Teacher, text: np.ndarray) -> Any:
        """An untrained head of the target's shape; ``text``: what it will be trained on."""
        ...

    def read(
        self, directory: ModelDirectory, target: ModelDirectory, teacher: Teacher, text: np.ndarray
    ) -> Any:
        """A head that was saved, to train it further on ``text``."""
        ...

    def optimizers(
        self, head: Any, rates: tuple[float, float]
    ) -> list[tuple[torch.optim.Optimizer, float]]:
        """The optimizers and their peak rates; ``rates``: Muon's and AdamW's."""
        ...

    def loss(self, head: Any, teacher: Teacher, seen: Seen, steps: int) -> torch.Tensor:
        """What is minimised over all unrolled steps."""
        ...

    def guesses(
        self, head: Any, teacher: Teacher, seen: Seen, steps: int
    ) -> Iterator[torch.Tensor]:
        """Per step, the best ``GUESSES`` tokens of the rows from row 1 on, best first."""
        ...

    def stored(self, head: Any) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
        """Tensors and config of the published layout."""
        ...


def layer_config(teacher: Teacher, architecture: str) -> LlamaConfig:
    """The config of one Llama layer of the target's shape, whatever the target's family."""
    told = {
        key: value
        for key, value in teacher.model.config.to_dict().items()
        if key in LlamaConfig().to_dict() and not key.startswith("_")  # paths of this machine
    }
    told.update(
        num_hidden_layers=1,
        model_type="llama",
        attention_bias=False,
        mlp_bias=False,
        dtype="float32",
    )
    config = LlamaConfig(**{**told, "architectures": [architecture]})
    config._attn_implementation = "sdpa"
    return config


def unrolled(
    head: Any, embedded: torch.Tensor, features: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """Per step, the predicted features ``[batch, rows, hidden]`` of a text's rows from row 1 on.

    ``embedded``: embeddings of their tokens; ``features``: those of the preceding rows. In step s
    the first s rows have too few predecessors and must be ignored.
    """
    rows = embedded.shape[1]
    positions = torch.arange(1, rows + 1, device=embedded.device).unsqueeze(0)
    row = positions.T - 1
    column = positions - 1
    cache = DynamicCache()
    above = features
    for step in range(steps):
        diagonals = [column == row - step + at for at in range(1, step + 1)]
        mask = torch.cat([column <= row - step, *diagonals], dim=1)[None, None]
        predicted = head(embedded, above, mask, positions, cache)
        yield predicted
        above = torch.cat((features[:, :1], predicted[:, :-1]), dim=1)


class Material:
    """Rows of ids to train on: from the text, and the target's own continuations."""

    def __init__(self, text: np.ndarray, teacher: Teacher, length: int) -> None:
        self._text = text
        self._teacher = teacher
        self._length = length
        self._rng = np.random.default_rng(0)
        self._pool: list[torch.Tensor] = []

    def text(self, rows: int, length: int) -> torch.Tensor:
        """Random rows of the text: int64 ``[rows, length]``."""
        starts = self._rng.integers(0, len(self._text) - length, size=rows)
        chosen = np.stack([self._text[at : at + length] for at in starts]).astype(np.int64)
        return torch.from_numpy(chosen).to(self._teacher.device)

    def write(self) -> None:
        """Let the target continue parts of the text, every other row greedily."""
        prompts = self.text(WRITTEN_ROWS, int(self._rng.integers(8, max(9, self._length // 2))))
        temperatures = (torch.arange(WRITTEN_ROWS, device=self._teacher.device) % 2).float()
        self._pool = [*self._pool, *self._teacher.written(prompts, self._length, temperatures)][
            -POOL_ROWS:
        ]

    def seen(self, rows: int, taps: Sequence[int]) -> Seen:
        """A batch as the target sees it."""
        return self._teacher.seen(self.batch(rows), taps)

    def batch(self, rows: int) -> torch.Tensor:
        """``[rows, length]`` ids, half of them the target's own once it has written some."""
        own = (
            [self._pool[at] for at in self._rng.integers(0, len(self._pool), size=rows // 2)]
            if self._pool
            else []
        )
        return torch.cat((self.text(rows - len(own), self._length), *(row[None] for row in own)))


@torch.no_grad()
def agreement(
    form: Form, head: Any, teacher: Teacher, texts: Iterable[Seen], steps: int
) -> list[tuple[float, float]]:
    """Per step, how often the head agrees with the target.

    Shares of the counted positions of all texts at which the target's most likely next token is the
    head's first, and among its first four.
    """
    found: list[list[torch.Tensor]] = [[] for _ in range(steps)]
    for seen in texts:
        for step, best in enumerate(form.guesses(head, teacher, seen, steps)):
            hits = best == seen.best[:, 1:, None]
            found[step].append(hits[:, step:][seen.counted[:, 1 + step :]])
    joined = [torch.cat(hits).float() for hits in found]
    return [(float(hits[:, 0].mean()), float(hits.amax(-1).mean())) for hits in joined]


def trainer_parser(description: str, *, answers: bool = False) -> Parser:
    """A parser with the arguments that every trainer of a drafter has.

    ``answers``: it can do without a text, on what ``ops.train.answers`` wrote.
    """
    parser = Parser(description=description)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--tokens", type=Path, help="token ids, the last 100,000 held out")
    if answers:
        text.add_argument("--answers", type=Path, help="folder of ops.train.answers")
    parser.add_argument(
        "--id-bytes", type=int, choices=(2, 4), default=2, help="bytes of a token id in --tokens"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--resume", action="store_true", help="continue from --out")
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--batch", type=int, default=4, help="rows per step")
    parser.add_argument("--threads", type=int, default=1)
    return parser
