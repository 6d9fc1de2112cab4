"""Train an EAGLE-1 head for any local target, to load with ``flowspec.model.eagle.load_head``.

    python -m ops.train.head --target DIR --tokens train.bin --out DIR --minutes 40 [--resume]

``train.bin``: token ids of the target's tokenizer, uint16 (``--id-bytes 4``: uint32); the last
100,000 are held out. The head learns the target's feature and distribution at every position, in
the text and in the target's own greedy and sampled continuations, generated during training: those
are a head's inputs at inference. As in training-time test (EAGLE-3, arXiv 2503.01840; HASS, arXiv
2408.15766) every row is also computed from the head's own predictions, ``--steps`` deep: row t
of step s sees the true rows up to t-s and predicted ones after them.

The learning rate decays to zero over the given minutes. A checkpoint is written every few minutes;
``--resume`` continues from the one in ``--out``. At the end, prints how often the target's most
likely token is the head's first, or among its first four, on the target's own continuations of
held-out text; step 1 drafts from a true feature, step 2 from the head's prediction, and so on.

For the packaged target, 40 minutes on one core (3,600 steps of 4 rows) give at each of steps 1 to 3
.87 / .97 on greedy text, two thirds of it repeated 4-grams (.71 / .92 outside them), and .58 / .82
on sampled text.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as packed
from torch.nn.functional import linear, smooth_l1_loss
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from flowspec.core.job.stats import repeated_4grams
from flowspec.errors import ModelError
from flowspec.model.directory import open_directory
from flowspec.model.eagle import EagleHead, read_head
from ops.parser import Parser
from ops.train.pair import descend, optimizers

HELD_OUT = 100_000
#: Peak learning rates of Muon (the layer's matrices) and AdamW (the rest).
FRESH = (0.02, 5e-3)
GO_ON = (0.01, 2e-3)
#: Half the width of the uniform noise on true features, as in EAGLE.
NOISE = 0.1
#: Weight of the features' smooth L1 beside the distance to the target's distribution.
FEATURE_WEIGHT = 0.1
#: Factor of the weight of each further unrolled step.
STEP_DECAY = 0.8
#: Share of the time spent generating the target's own text, rows per batch, rows kept.
WRITING_SHARE = 0.12
WRITTEN_ROWS = 32
POOL_ROWS = 4096
CHECKPOINT_SECONDS = 180.0


class Teacher:
    """The target, frozen: features after its final norm, float32, and its embedding and LM head."""

    def __init__(self, folder: Path, device: str) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model: Any = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
        )
        self.model.requires_grad_(False)
        self.embedding = self.model.get_input_embeddings().weight.float()
        self.lm_head = self.model.get_output_embeddings().weight.float()
        self.device = device

    @torch.no_grad()
    def features(self, ids: torch.Tensor) -> torch.Tensor:
        """Features ``[batch, length, hidden]`` of ``ids`` ``[batch, length]``."""
        hidden: torch.Tensor = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden.float()

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
            logits = output.logits[:, -1].float()
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
            inputs = (logits + temperatures[:, None] * noise).argmax(-1, keepdim=True)
            ids = torch.cat((ids, inputs), dim=1)
        return ids


def fresh(teacher: Teacher) -> EagleHead:
    """An untrained head of the target's shape: a Llama layer for any target family."""
    told = {
        key: value
        for key, value in teacher.model.config.to_dict().items()
        if key in LlamaConfig().to_dict()
    }
    told.update(
        num_hidden_layers=1,
        model_type="llama",
        attention_bias=False,
        mlp_bias=False,
        dtype="float32",
    )
    config = LlamaConfig(**{**told, "architectures": ["LlamaForCausalLMEagle"]})
    config._attn_implementation = "sdpa"
    head = EagleHead(config)
    hidden = config.hidden_size
    # Embeddings are far smaller than features; scale both to contribute equally at the start. The
    # sum stays small, since a peaked wrong distribution takes many steps to correct.
    with torch.no_grad():
        for half, scale in (
            (slice(hidden), teacher.embedding.std().item()),
            (slice(hidden, None), 2.0),
        ):
            head.fc.weight[:, half].normal_(0.0, 0.2 / (scale * hidden**0.5))
    return head


def unrolled(
    head: EagleHead, embedded: torch.Tensor, features: torch.Tensor, steps: int
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


def loss_of(head: EagleHead, teacher: Teacher, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """Distance to the target's distributions and features over all steps; ids [batch, length]."""
    features = teacher.features(ids)
    wanted = linear(features[:, 1:], teacher.lm_head).log_softmax(-1)
    noisy = features[:, :-1] + (torch.rand_like(features[:, :-1]) * 2 - 1) * NOISE
    total = torch.zeros((), device=ids.device)
    for step, predicted in enumerate(unrolled(head, teacher.embedding[ids[:, 1:]], noisy, steps)):
        guessed = linear(predicted[:, step:], teacher.lm_head).log_softmax(-1)
        distance = (wanted[:, step:].exp() * (wanted[:, step:] - guessed)).sum(-1).mean()
        apart = smooth_l1_loss(predicted[:, step:], features[:, 1 + step :])
        total = total + STEP_DECAY**step * (distance + FEATURE_WEIGHT * apart)
    return total


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

    def batch(self, rows: int) -> torch.Tensor:
        """``[rows, length]`` ids, half of them the target's own once it has written some."""
        own = (
            [self._pool[at] for at in self._rng.integers(0, len(self._pool), size=rows // 2)]
            if self._pool
            else []
        )
        return torch.cat((self.text(rows - len(own), self._length), *(row[None] for row in own)))


def train(head: EagleHead, teacher: Teacher, material: Material, given: argparse.Namespace) -> None:
    """Train for ``given.minutes`` of wall time: a short warm-up, then a cosine to zero."""
    rates = GO_ON if given.resume else FRESH
    # AdamW also trains fc, since its two halves differ in scale.
    using = optimizers(head, head.body, rates)
    began = time.monotonic()
    step = 0
    writing = 0.0
    saved = 0.0
    while (spent := time.monotonic() - began) < 60 * given.minutes:
        if writing <= WRITING_SHARE * spent:
            material.write()
            writing += time.monotonic() - began - spent
        scale = (
            min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * spent / (60 * given.minutes))) / 2
        )
        with torch.autocast(teacher.device, dtype=torch.bfloat16):
            loss = loss_of(head, teacher, material.batch(given.batch), given.steps)
        descend(head, loss, using, [rate * scale for rate in rates])
        step += 1
        if step % 50 == 0:
            print(f"step {step}, {spent:.0f} s, loss {loss.item():.3f}", flush=True)
        if spent - saved > CHECKPOINT_SECONDS:
            save(head, given.out)
            saved = spent


@torch.no_grad()
def agreement(
    head: EagleHead, teacher: Teacher, ids: torch.Tensor, first: int, steps: int
) -> list[tuple[float, float]]:
    """Per step, how often the head agrees with the target on ``ids`` [batch, length].

    Shares of the positions from ``first`` on at which the target's most likely next token is the
    head's first, and among its first four.
    """
    features = teacher.features(ids)
    wanted = linear(features[:, first:], teacher.lm_head).argmax(-1, keepdim=True)
    found = []
    for predicted in unrolled(head, teacher.embedding[ids[:, 1:]], features[:, :-1], steps):
        best = linear(predicted[:, first - 1 :], teacher.lm_head).topk(4, dim=-1).indices
        hits = best == wanted
        found.append((float(hits[..., 0].float().mean()), float(hits.any(-1).float().mean())))
    return found


def save(head: EagleHead, folder: Path) -> None:
    """Save the head in the authors' layout, in bfloat16; replaces the weights atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name.removeprefix("body."): value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in head.named_parameters()
    }
    part = folder / "model.safetensors.part"
    part.write_bytes(packed(tensors, metadata={"format": "pt"}))
    part.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(head.config.to_dict(), indent=2, sort_keys=True) + "\n"
    )


def read_text(given: argparse.Namespace, vocabulary: int) -> np.ndarray:
    """The token ids in ``given.tokens``; ModelError if they are too few or not the target's."""
    text = np.fromfile(given.tokens, dtype=f"<u{given.id_bytes}")
    if len(text) <= HELD_OUT + given.length:
        raise ModelError(
            f"{given.tokens} has {len(text)} tokens; give more than {HELD_OUT + given.length}"
        )
    if text.max() >= vocabulary:
        raise ModelError(
            f"{given.tokens} has token {text.max()}; the target's vocabulary has {vocabulary}"
        )
    return text


def report(head: EagleHead, teacher: Teacher, text: np.ndarray, given: argparse.Namespace) -> None:
    """Print the agreement on greedy and sampled continuations of held-out ``text``."""
    first = given.length // 4
    prompts = Material(text, teacher, given.length).text(8 * given.batch, first)
    for temperature in (0.0, 1.0):
        temperatures = torch.full((len(prompts),), temperature, device=teacher.device)
        ids = teacher.written(prompts, given.length, temperatures)
        repeated = np.mean([repeated_4grams(row) for row in ids[:, first:].tolist()])
        found = agreement(head, teacher, ids, first, given.steps)
        shown = ", ".join(
            f"step {at}: {one:.3f} / {four:.3f}" for at, (one, four) in enumerate(found, start=1)
        )
        print(
            f"held out, T={temperature:g}, {repeated:.2f} repeated 4-grams, agreement top-1 / "
            f"top-4: {shown}"
        )


def arguments() -> Parser:
    """The command line's parser."""
    parser = Parser(description="Train an EAGLE head; see this file's head.")
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument(
        "--tokens", type=Path, required=True, help="token ids, the last 100,000 held out"
    )
    parser.add_argument(
        "--id-bytes", type=int, choices=(2, 4), default=2, help="bytes of a token id in --tokens"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--resume", action="store_true", help="continue from the head in --out")
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--batch", type=int, default=4, help="rows per step")
    parser.add_argument("--steps", type=int, default=3, help="unrolled steps")
    parser.add_argument("--threads", type=int, default=1)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    given = arguments().parse_args(words)
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    target = open_directory(str(given.target))
    text = read_text(given, target.vocabulary)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = Teacher(given.target, device)
    head = read_head(open_directory(str(given.out)), target) if given.resume else fresh(teacher)
    head.to(device).requires_grad_(True)
    train(head.train(), teacher, Material(text[:-HELD_OUT], teacher, given.length), given)
    save(head, given.out)
    report(head.eval(), teacher, text[-HELD_OUT:], given)


if __name__ == "__main__":
    try:
        main()
    except ModelError as error:
        raise SystemExit(str(error)) from None
