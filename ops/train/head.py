"""Train an EAGLE head for any local target, to draft with by ``--draft``.

    python -m ops.train.head --target DIR --tokens train.bin --out DIR --minutes 40 [--resume]
                             [--form eagle3 [--taps 2,6,9] [--vocabulary 2048]]
    python -m ops.train.head --target DIR --answers DIR --out DIR --minutes 40 [--test DIR] ...

``train.bin``: token ids of the target's tokenizer, uint16 (``--id-bytes 4``: uint32); the last
100,000 are held out. The head learns from every position, in the text and in the target's own
greedy and sampled continuations, generated during training: those are a head's inputs at inference.
As in training-time test (EAGLE-3, arXiv 2503.01840; HASS, arXiv 2408.15766) every row is also
computed from the head's own predictions, ``--steps`` deep: row t of step s sees the true rows up to
t-s and predicted ones after them. ``--grow`` unrolls one step at first and all of them in the last
part of the time, so that there is time for more steps of training. The forms are in
``ops.train.eagle1`` and ``ops.train.eagle3``.

With ``--answers`` it learns from what ``ops.train.answers`` wrote, at the positions of answers
alone, and the target is not run; ``--test`` reports on answers to other prompts.

The learning rate decays to zero over the given minutes, of processor time of each thread, so that
other work on the machine takes no training away. A checkpoint is written every few minutes;
``--resume`` continues from the one in ``--out``. At the end, prints how often the target's most
likely token is the head's first, or among its first four, on the target's own continuations of
held-out text; step 1 drafts from a true feature, step 2 from the head's prediction, and so on.

For the packaged target, 40 minutes on one core (3,600 steps of 4 rows) give at each of steps 1 to 3
.87 / .97 on greedy text, two thirds of it repeated 4-grams (.71 / .92 outside them), and .58 / .82
on sampled text. An EAGLE-3 head with 25 minutes on half a core (2,100 steps) is as good at steps 1
and 2, .88 / .97 and .56 / .80, and worse from step 4 on, which three unrolled steps do not train;
it then makes 2 to 7% fewer tokens a step than the packaged head.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as packed

from flowspec.core.session.stats import repeated_4grams
from flowspec.errors import ModelError
from flowspec.model.layers.placing import choose_precision
from flowspec.model.weights.directory import open_directory
from ops.parser import Parser
from ops.train.answers import Answers
from ops.train.eagle1 import Eagle1Form
from ops.train.eagle3 import Eagle3Form
from ops.train.pair import descend
from ops.train.teaching import (
    DEPTH,
    Form,
    Material,
    Seen,
    Teacher,
    agreement,
    taps_of,
    trainer_parser,
)

HELD_OUT = 100_000
#: Peak learning rates of Muon (the layer's matrices) and AdamW (the rest).
FRESH = (0.02, 5e-3)
GO_ON = (0.01, 2e-3)
#: Share of the time spent generating the target's own text.
WRITING_SHARE = 0.12
CHECKPOINT_SECONDS = 180.0


def train(
    form: Form,
    head: Any,
    teacher: Teacher,
    material: Material | Answers,
    given: argparse.Namespace,
) -> None:
    """Train for ``given.minutes`` of processor time: a short warm-up, then a cosine to zero."""
    found = form.optimizers(head, GO_ON if given.resume else FRESH)
    using = [optimizer for optimizer, _ in found]
    rates = [rate * given.rate for _, rate in found]
    narrow = choose_precision("auto", teacher.device, {"dtype": "bfloat16"}) == "bfloat16"
    began = worked(given)
    step = 0
    writing = 0.0
    saved = 0.0
    losses: list[float] = []
    while (spent := worked(given) - began) < 60 * given.minutes:
        if isinstance(material, Material) and writing <= WRITING_SHARE * spent:
            material.write()
            writing += worked(given) - began - spent
        done = spent / (60 * given.minutes)
        scale = min(1.0, (step + 1) / 50) * (1 + math.cos(math.pi * done)) / 2
        steps = 1 + int(done * given.steps) if given.grow else given.steps
        seen = material.seen(given.batch, form.taps)
        with torch.autocast(teacher.device, dtype=torch.bfloat16, enabled=narrow):
            loss = form.loss(head, teacher, seen, steps)
        descend(head, loss, using, [rate * scale for rate in rates])
        step += 1
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"step {step}, {spent:.0f} s, loss {np.mean(losses[-20:]):.3f}", flush=True)
        if spent - saved > CHECKPOINT_SECONDS:
            save(form, head, given.out)
            saved = spent


def worked(given: argparse.Namespace) -> float:
    """Seconds of processor time so far of each of ``given.threads``."""
    return time.process_time() / float(given.threads)


def save(form: Form, head: Any, folder: Path) -> None:
    """Save the head in the published layout, in bfloat16; replaces the weights atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = form.stored(head)
    stored = {
        name: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else None)
        for name, value in tensors.items()
    }
    part = folder / "model.safetensors.part"
    contiguous = {name: value.contiguous() for name, value in stored.items()}
    part.write_bytes(packed(contiguous, metadata={"format": "pt"}))
    part.replace(folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(dict(config), indent=2, sort_keys=True) + "\n", encoding="utf-8"
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


def report(
    form: Form, head: Any, teacher: Teacher, text: np.ndarray, given: argparse.Namespace
) -> None:
    """Print the agreement on greedy and sampled continuations of held-out ``text``."""
    first = given.length // 4
    prompts = Material(text, teacher, given.length).text(8 * given.batch, first)
    for temperature in (0.0, 1.0):
        temperatures = torch.full((len(prompts),), temperature, device=teacher.device)
        ids = teacher.written(prompts, given.length, temperatures)
        repeated = np.mean([repeated_4grams(row) for row in ids[:, first:].tolist()])
        seen = teacher.seen(ids, form.taps)
        seen.counted[:, :first] = False
        show(f"T={temperature:g}, {repeated:.2f} repeated 4-grams", form, head, teacher, [seen])


def show(what: str, form: Form, head: Any, teacher: Teacher, texts: Iterable[Seen]) -> None:
    """Print the agreement on held-out ``texts``."""
    found = agreement(form, head, teacher, texts, DEPTH)
    shown = ", ".join(
        f"step {at}: {one:.3f} / {four:.3f}" for at, (one, four) in enumerate(found, start=1)
    )
    print(f"held out, {what}, agreement top-1 / top-4: {shown}", flush=True)


def arguments() -> Parser:
    """The command line's parser."""
    parser = trainer_parser("Train an EAGLE head; see this file's head.", answers=True)
    parser.add_argument("--test", type=Path, help="answers to report on, of held-out prompts")
    parser.add_argument("--steps", type=int, default=3, help="unrolled steps")
    parser.add_argument("--grow", action="store_true", help="unroll one step at first, all at last")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on the learning rates")
    parser.add_argument(
        "--form", choices=("eagle1", "eagle3"), default="eagle1", help="default: %(default)s"
    )
    parser.add_argument("--taps", help="eagle3: layers whose input is read (default: the authors')")
    parser.add_argument(
        "--vocabulary", type=int, default=0, help="eagle3: most frequent tokens (default: all)"
    )
    return parser


def main(words: Sequence[str] | None = None) -> None:
    given = arguments().parse_args(words)
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    target = open_directory(str(given.target))
    answers = None if given.answers is None else Answers(given.answers, given.length)
    text = answers.text if answers else read_text(given, target.vocabulary)
    learned = text if answers else text[:-HELD_OUT]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = Teacher(given.target, device)
    form = form_of(given, target.layers, answers)
    if given.resume:
        head = form.read(open_directory(str(given.out)), target, teacher, learned)
    else:
        head = form.fresh(teacher, learned)
    head.to(device).requires_grad_(True)
    material = answers or Material(learned, teacher, given.length)
    train(form, head.train(), teacher, material, given)
    save(form, head, given.out)
    if not answers:
        report(form, head.eval(), teacher, text[-HELD_OUT:], given)
    if given.test:
        held = Answers(given.test, given.length)
        for kind in ("greedy", "sampled"):
            show(kind, form, head.eval(), teacher, held.whole(sampled=kind == "sampled"))


def form_of(given: argparse.Namespace, layers: int, answers: Answers | None = None) -> Form:
    """The form that ``given`` asks for, for ``layers`` of a target; ``answers`` have their taps."""
    if given.form == "eagle1":
        return Eagle1Form()
    taps = answers.taps if answers else taps_of(given.taps, layers)
    return Eagle3Form(taps, given.vocabulary)


if __name__ == "__main__":
    try:
        main()
    except ModelError as error:
        raise SystemExit(str(error)) from None
