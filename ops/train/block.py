"""Train a block drafter for any local target, to load with
``flowspec.model.drafters.block_drafter``.

    python -m ops.train.block --target DIR --tokens train.bin --out DIR --minutes 25 [--resume]

``train.bin``: as for ``ops.train.head``. The drafter is in DFlash's layout (arXiv 2602.06036): each
block is placed at a random position of a text, sees the target's rows before it, and has known
tokens and then masked ones. DFlash's blocks have one known token. Here half of them have up to
``--known``, because in a pipeline the tokens in flight are drafted upon before their rows are back.
The loss is the cross-entropy with the target's own distribution at every masked position, weighted
by ``exp(-(level - 1) / --decay)`` as published. Half of the texts are the target's own, greedy and
sampled, as for ``ops.train.head``.

The learning rate decays to zero over the given minutes; a checkpoint is written every few minutes.
At the end, prints how often the target's most likely token is the drafter's first, by level, on the
target's own continuations of held-out text.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as packed
from torch.nn.functional import cross_entropy, linear
from transformers import DynamicCache, Qwen3Config

from flowspec.errors import ModelError
from flowspec.model.drafters.block_drafter import BlockLayers, read_layers
from flowspec.model.drafters.block_layout import FC, BlockLayout, check_block_drafter, spread_layers
from flowspec.model.drafters.drafter_weights import read_checked
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import ModelDirectory, open_directory
from ops.parser import Parser
from ops.train.head import (
    CHECKPOINT_SECONDS,
    FRESH,
    GO_ON,
    HELD_OUT,
    WRITING_SHARE,
    read_text,
)
from ops.train.pair import descend, optimizers
from ops.train.teaching import Material, Teacher, trainer_parser

#: The final norm's scale at the start.
FIRST_SCALE = 0.1
#: The class and the table of a drafter in DFlash's layout
#: (``flowspec.model.drafters.block_layout``).
_CLASS = "DFlashDraftModel"
_SETTINGS = "dflash_config"


class Trainee(torch.nn.Module):
    """The drafter's layers and ``fc``, which reads the target's layers that ``layout`` names."""

    def __init__(self, layers: BlockLayers, fc: torch.nn.Linear, layout: BlockLayout) -> None:
        super().__init__()
        self.layers = layers
        self.fc = fc
        self.mask = layout.mask
        self.levels = layout.levels
        self.taps = tuple(layer + 1 for layer in layout.layers)  # named by the layer they enter

    def forward(self, tapped: torch.Tensor, embedded: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """The masked rows of ``blocks``, ``[batch, blocks * levels, hidden]``.

        ``embedded``: the blocks' tokens, ``[batch, rows, hidden]``.
        """
        batch, length = tapped.shape[:2]
        cache = DynamicCache()
        positions = torch.arange(length, device=tapped.device).expand(batch, -1)
        self.layers.add_context(self.fc(tapped), positions, cache)
        rows: torch.Tensor = self.layers(
            embedded, blocks.mask(length), blocks.positions.expand(batch, -1), cache
        )
        return rows[:, blocks.asked]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks in one sequence of rows; each sees the text before it and itself.

    Per row: ``known`` (else masked), its ``positions`` in the text, the ``first`` position of its
    block, and the number of its block. ``asked``: the masked rows.
    """

    known: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor
    number: torch.Tensor

    @property
    def asked(self) -> torch.Tensor:
        return (~self.known).nonzero()[:, 0]

    def mask(self, length: int) -> torch.Tensor:
        """``[1, 1, rows, length + rows]``."""
        text = torch.arange(length, device=self.first.device)[None] < self.first[:, None]
        own = self.number[:, None] == self.number[None]
        return torch.cat((text, own), dim=1)[None, None]


def place_blocks(
    rng: np.random.Generator, count: int, known: int, levels: int, length: int, device: str
) -> Blocks:
    """``count`` blocks at random places of a text; half of them have one known token.

    The others have 2 to ``known``.
    """
    sizes = np.where(rng.random(count) < 0.5, 1, rng.integers(1, known + 1, size=count))
    firsts = rng.integers(1, length - sizes - levels + 1)
    columns = [
        (at < size, first + at, first, number)
        for number, (size, first) in enumerate(zip(sizes.tolist(), firsts.tolist(), strict=True))
        for at in range(size + levels)
    ]
    is_known, positions, first, number = (
        torch.tensor(one, device=device) for one in zip(*columns, strict=True)
    )
    return Blocks(is_known, positions, first, number)


def loss_of(
    trainee: Trainee, teacher: Teacher, ids: torch.Tensor, blocks: Blocks, decay: float
) -> torch.Tensor:
    """Weighted cross-entropy with the target's distributions; ``ids`` is ``[batch, length]``."""
    features, tapped = teacher.rows(ids, trainee.taps)
    rows = trainee(tapped, teacher.embedding[_tokens(trainee, ids, blocks)], blocks)
    guessed = linear(rows, teacher.lm_head).float()
    # The distribution of the token at a position is that of the row before it.
    wanted = (
        linear(features[:, blocks.positions[blocks.asked] - 1], teacher.lm_head).float().softmax(-1)
    )
    found = cross_entropy(guessed.flatten(0, 1), wanted.flatten(0, 1), reduction="none")
    level = torch.arange(len(blocks.asked), device=ids.device) % trainee.levels
    weights = torch.exp(-level / decay).expand(len(ids), -1).flatten()
    total: torch.Tensor = (found * weights).sum() / weights.sum()
    return total


def _tokens(trainee: Trainee, ids: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The tokens of the blocks' rows, ``[batch, rows]``."""
    return torch.where(blocks.known, ids[:, blocks.positions], trainee.mask)


def train(
    trainee: Trainee, teacher: Teacher, material: Material, given: argparse.Namespace
) -> None:
    """Train for ``given.minutes`` of wall time: a short warm-up, then a cosine to zero."""
    rates = GO_ON if given.resume else FRESH
    using = optimizers(trainee, trainee.layers.body.layers, rates)
    rng = np.random.default_rng(1)
    began = time.monotonic()
    step = 0
    writing = 0.0
    saved = 0.0
    while (spent := time.monotonic() - began) < 60 * given.minutes:
        if writing <= WRITING_SHARE * spent:
            material.write()
            writing += time.monotonic() - began - spent
        done = spent / (60 * given.minutes)
        scale = min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * done)) / 2
        blocks = place_blocks(
            rng, given.blocks, given.known, trainee.levels, given.length, teacher.device
        )
        with torch.autocast(teacher.device, dtype=torch.bfloat16):
            loss = loss_of(trainee, teacher, material.batch(given.batch), blocks, given.decay)
        descend(trainee, loss, using, [rate * scale for rate in rates])
        step += 1
        if step % 50 == 0:
            print(f"step {step}, {spent:.0f} s, loss {loss.item():.3f}", flush=True)
        if spent - saved > CHECKPOINT_SECONDS:
            save(trainee, given.out)
            saved = spent


@torch.no_grad()
def agreement(
    trainee: Trainee, teacher: Teacher, ids: torch.Tensor, first: int, known: int
) -> list[float]:
    """By level, how often the target's most likely token is the drafter's first.

    Blocks of ``known`` known tokens, one at every fourth position from ``first`` on.
    """
    starts = range(first, ids.shape[1] - known - trainee.levels, 4)
    hits = []
    features, tapped = teacher.rows(ids, trainee.taps)
    for start in starts:
        at = torch.arange(known + trainee.levels, device=ids.device)
        same = torch.zeros_like(at)
        blocks = Blocks(at < known, start + at, same + start, same)
        rows = trainee(tapped, teacher.embedding[_tokens(trainee, ids, blocks)], blocks)
        before = features[:, blocks.positions[blocks.asked] - 1]
        guessed = linear(rows, teacher.lm_head).argmax(-1)
        hits.append((guessed == linear(before, teacher.lm_head).argmax(-1)).float().mean(0))
    return [round(share, 3) for share in torch.stack(hits).mean(0).tolist()]


def report(trainee: Trainee, teacher: Teacher, text: np.ndarray, given: argparse.Namespace) -> None:
    """Print the agreement on greedy and sampled continuations of held-out ``text``."""
    first = given.length // 4
    prompts = Material(text, teacher, given.length).text(8 * given.batch, first)
    for temperature in (0.0, 1.0):
        temperatures = torch.full((len(prompts),), temperature, device=teacher.device)
        ids = teacher.written(prompts, given.length, temperatures)
        for known in sorted({1, 4, given.known}):
            found = agreement(trainee, teacher, ids, first, known)
            print(f"held out, T={temperature:g}, {known} known, top-1 by level: {found}")


def fresh(target: ModelDirectory, given: argparse.Namespace) -> Trainee:
    """An untrained drafter of the target's width."""
    layers = spread_layers(target.layers, given.taps)
    told = target.config
    heads = int(told["num_attention_heads"])
    config = Qwen3Config(
        vocab_size=target.vocabulary,
        hidden_size=target.hidden_size,
        intermediate_size=int(told["intermediate_size"]),
        num_hidden_layers=given.layers,
        num_attention_heads=heads,
        num_key_value_heads=int(told.get("num_key_value_heads") or heads),
        head_dim=int(told.get("head_dim") or target.hidden_size // heads),
        max_position_embeddings=target.context,
        rms_norm_eps=float(told.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=True,
        dtype="float32",
    )
    config.architectures = [_CLASS]
    config.block_size = given.levels + 1
    config.num_target_layers = target.layers
    config.dflash_config = {"mask_token_id": given.mask, "target_layer_ids": list(layers)}
    config._attn_implementation = "sdpa"
    fc = torch.nn.Linear(len(layers) * target.hidden_size, target.hidden_size, bias=False)
    trained = BlockLayers(config)
    # Small rows: a peaked wrong distribution takes many steps to correct.
    torch.nn.init.constant_(trained.body.norm.weight, FIRST_SCALE)
    return Trainee(trained, fc, BlockLayout(given.levels, given.mask, layers, predicts_next=False))


def continued(folder: ModelDirectory, target: ModelDirectory) -> Trainee:
    """The drafter in ``folder``, to train further."""
    layout = check_block_drafter(folder, target)
    hidden = target.hidden_size
    wide = len(layout.layers) * hidden
    fc = torch.nn.Linear(wide, hidden, bias=False)
    fc.weight = torch.nn.Parameter(read_checked(folder, FC, (hidden, wide), Placing()))
    return Trainee(read_layers(folder), fc, layout)


def save(trainee: Trainee, folder: Path) -> None:
    """Save in DFlash's layout, in bfloat16; replaces the weights atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {FC: trainee.fc.weight, **dict(trainee.layers.named_parameters())}
    tensors = {
        name.removeprefix("body."): value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in named.items()
    }
    part = folder / "model.safetensors.part"
    part.write_bytes(packed(tensors, metadata={"format": "pt"}))
    part.replace(folder / "model.safetensors")
    config = trainee.layers.config.to_dict()
    (folder / "config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def arguments() -> Parser:
    """The command line's parser."""
    parser = trainer_parser("Train a block drafter; see this file's head.")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--taps", type=int, default=5, help="layers of the target that are read")
    parser.add_argument("--levels", type=int, default=8, help="positions that a block proposes for")
    parser.add_argument("--known", type=int, default=12, help="most known tokens of a block")
    parser.add_argument("--mask", type=int, default=2, help="id of the mask token")
    parser.add_argument("--decay", type=float, default=4.0, help="levels until a weight is 1/e")
    parser.add_argument("--blocks", type=int, default=32, help="blocks per row of text")
    return parser


def main(words: Sequence[str] | None = None) -> None:
    given = arguments().parse_args(words)
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    target = open_directory(str(given.target))
    text = read_text(given, target.vocabulary)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = Teacher(given.target, device)
    trainee = (
        continued(open_directory(str(given.out)), target) if given.resume else fresh(target, given)
    )
    trainee.to(device).requires_grad_(True)
    train(trainee.train(), teacher, Material(text[:-HELD_OUT], teacher, given.length), given)
    save(trainee, given.out)
    report(trainee.eval(), teacher, text[-HELD_OUT:], given)


if __name__ == "__main__":
    try:
        main()
    except ModelError as error:
        raise SystemExit(str(error)) from None
