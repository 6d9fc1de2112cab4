"""Retrain the packaged pair: a byte-level BPE, a 12-layer target, a 2-layer distilled draft.

    python -m ops.train.pair prepare CODE_DIR DOCS_DIR GSM8K.jsonl --out WORK
    python -m ops.train.pair target --out WORK --minutes 90
    python -m ops.train.pair draft --out WORK --minutes 110
    python -m ops.train.pair draft --out WORK --minutes 110 --from DRAFT_DIR

The first writes WORK/tokenizer and WORK/train.bin, the second WORK/target, the third WORK/draft
from WORK/target; the last continues from a trained draft.

Text: Python sources (``*.py``), their documentation (``*.rst`` or ``*.rst.txt``) and GSM8K's
training problems with the calculator marks removed. The last 100,000 tokens are held out; losses
on them are printed at the end. The learning rate decays over the given minutes.

The packaged models: Python 3.11's standard library and documentation (PSF licence) and GSM8K
(MIT), about 8 million tokens. The target took about 90 minutes on two cores. The draft was
distilled with 256 tokens per row, then continued with ``draft --minutes 110 --from``: held-out loss
at 256 tokens 3.62, then 3.10.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from flowspec.model.weights.directory import default_pair
from ops.parser import Parser

VOCABULARY = 4096
CONTEXT = 1024
HELD_OUT = 100_000
#: Width of the model, its feed-forward width, layers, heads, key and value heads.
SHAPES = {"target": (192, 512, 12, 6, 2), "draft": (128, 344, 2, 4, 1)}
#: Peak learning rates of Muon and AdamW: for an untrained and for a trained model.
FRESH = (0.02, 3e-3)
GO_ON = (0.01, 1.5e-3)
#: Muon's.
MOMENTUM = 0.95
DECAY = 0.01
#: Weight of the text's loss beside the distance to the target's distribution.
TEXT_WEIGHT = 0.05


def documents(code: Path, docs: Path, problems: Path, rng: random.Random) -> list[str]:
    """The training documents, shuffled."""
    skip = ("site-packages", "/test", "idlelib", "encodings", "lib2to3", "pydoc_data")
    sources = [
        file for file in sorted(code.rglob("*.py")) if not any(part in str(file) for part in skip)
    ]
    texts = [
        text
        for file in sources
        if 400 < len(text := file.read_text(errors="ignore", encoding="utf-8")) < 200_000
    ]
    pages = [*docs.rglob("*.rst"), *docs.rglob("*.rst.txt")]
    texts += sorted(
        {
            file.read_text(errors="ignore", encoding="utf-8")
            for file in pages
            if "changelog" not in str(file)
        }
    )
    rows = [json.loads(line) for line in problems.read_text(encoding="utf-8").splitlines()]
    asked = [
        (row["question"].strip(), re.sub(r"<<.*?>>", "", row["answer"]).strip()) for row in rows
    ]
    answered = [f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in asked]
    rng.shuffle(answered)
    texts += ["".join(answered[at : at + 10]) for at in range(0, len(answered), 10)]
    rng.shuffle(texts)
    return texts


def prepare(code: Path, docs: Path, problems: Path, out: Path) -> None:
    """Write ``out/tokenizer`` and ``out/train.bin`` (uint16 token ids)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = documents(code, docs, problems, random.Random(0))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    marks = ["<s>", "</s>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=marks, initial_alphabet=alphabet
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.model_max_length = CONTEXT
    tokenizer.chat_template = (Path(default_pair()[0]) / "chat_template.jinja").read_text(
        encoding="utf-8"
    )
    tokenizer.save_pretrained(out / "tokenizer")
    encoded = [token for text in bpe.encode_batch(texts) for token in (0, *text.ids, 1)]
    np.array(encoded, dtype=np.uint16).tofile(out / "train.bin")
    print(f"{len(encoded)} tokens in {out / 'train.bin'}")


def fresh(name: str) -> LlamaForCausalLM:
    """An untrained model of the packaged one's shape."""
    width, inner, layers, heads, kv_heads = SHAPES[name]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    )


def loss_of(model: Any, teacher: Any, ids: torch.Tensor) -> torch.Tensor:
    """Next-token loss of ids [batch, length]; with a teacher, mostly distance from it."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits = model(ids).logits.float()
        text = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if teacher is None:
            return text
        with torch.no_grad():
            wanted = teacher(ids).logits.float().log_softmax(-1)
        distance: torch.Tensor = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).mean()
        return distance + TEXT_WEIGHT * text


def batches(text: np.ndarray, length: int, size: int, device: str) -> Iterator[torch.Tensor]:
    """Endless batches of random rows of the text: int64 [size, length]."""
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(text) - length - 1, size=size)
        yield torch.from_numpy(
            np.stack([text[at : at + length] for at in starts]).astype(np.int64)
        ).to(device)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov's momentum, in float32.

    torch's computes in bfloat16, which takes a CPU without instructions for it 20 times as long.
    """

    def __init__(self, matrices: Iterable[torch.Tensor], rate: float) -> None:
        super().__init__(matrices, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - MOMENTUM)
                update = orthogonal(weight.grad.lerp(momentum, MOMENTUM))
                longer = max(1.0, weight.shape[0] / weight.shape[1])
                weight.mul_(1 - group["lr"] * DECAY)
                weight.add_(update, alpha=-group["lr"] * longer**0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` with singular values near 1, by Muon's five Newton-Schulz steps."""
    if len(matrix) > matrix.shape[1]:
        return orthogonal(matrix.T).mT
    found: torch.Tensor = matrix / torch.linalg.matrix_norm(matrix).clamp(min=1e-7)
    for _ in range(5):
        gram = found @ found.T
        gram = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        found = torch.addmm(found, gram, found, beta=3.4445)
    return found


def optimizers(
    model: torch.nn.Module, layers: torch.nn.Module, rates: tuple[float, float]
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the model's ``layers``, AdamW for the rest."""
    matrices = [weight for weight in layers.parameters() if weight.ndim == 2]
    known = {id(weight) for weight in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in known]
    return [
        Muon(matrices, rates[0]),
        adam(rest, rates[1]),
    ]


def adam(weights: Iterable[torch.Tensor], rate: float = 0.0) -> torch.optim.Optimizer:
    """AdamW over ``weights``; ``descend`` sets the rate of every step."""
    return torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)


def descend(
    model: torch.nn.Module,
    loss: torch.Tensor,
    using: Sequence[torch.optim.Optimizer],
    rates: Sequence[float],
) -> None:
    """One step of all optimizers, each at its rate, with gradients clipped to norm 1."""
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, rate in zip(using, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()


def train(
    model: Any,
    teacher: Any,
    rows: Iterator[torch.Tensor],
    rates: tuple[float, float],
    minutes: float,
) -> None:
    """Train for ``minutes`` of wall time: short warm-up, constant rate, linear decay to 2%."""
    using = optimizers(model, model.model.layers, rates)
    began = time.monotonic()
    step = 0
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
        scale = min(1.0, (step + 1) / 50) * min(1.0, max(0.02, (1 - done) / 0.6))
        loss = loss_of(model, teacher, next(rows))
        descend(model, loss, using, [rate * scale for rate in rates])
        step += 1
        if step % 50 == 0:
            print(
                f"step {step}, {time.monotonic() - began:.0f} s, loss {loss.item():.3f}", flush=True
            )


def held_out_loss(model: Any, text: np.ndarray, length: int, device: str) -> float:
    """Mean next-token loss in nats over 40 times 1,024 held-out tokens, in pieces of ``length``."""
    pieces = text[-HELD_OUT:][: 40 * 1024].reshape(-1, length).astype(np.int64)
    total = 0.0
    with torch.no_grad():
        for piece in pieces:
            ids = torch.from_numpy(piece)[None].to(device)
            total += float(cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:]))
    return total / len(pieces)


def save(model: Any, tokenizer: Path, folder: Path) -> None:
    """Save the model in bfloat16 with its tokenizer; it declares that it computes in float32."""
    model.to(torch.bfloat16).save_pretrained(folder)
    config = folder / "config.json"
    declared = json.loads(config.read_text(encoding="utf-8")) | {"dtype": "float32"}
    config.write_text(json.dumps(declared, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for file in tokenizer.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)


def make(given: argparse.Namespace) -> None:
    """Train ``given.what`` and save it."""
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = given.out / "tokenizer"
    text = np.fromfile(given.out / "train.bin", dtype=np.uint16)
    load: Callable[..., Any] = LlamaForCausalLM.from_pretrained
    model = (load(given.go_on, dtype=torch.float32) if given.go_on else fresh(given.what)).to(
        device
    )
    teacher = (
        load(given.out / "target", dtype=torch.bfloat16).eval().to(device)
        if given.what == "draft"
        else None
    )
    rows = batches(text[:-HELD_OUT], given.length, given.batch, device)
    train(model.train(), teacher, rows, GO_ON if given.go_on else FRESH, given.minutes)
    losses = [held_out_loss(model.eval(), text, length, device) for length in (256, 1024)]
    print(f"held-out loss at 256 / 1,024 tokens: {losses[0]:.3f} / {losses[1]:.3f} nats")
    save(model, tokenizer, given.out / given.what)


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(description="Retrain the packaged pair; see this file's head.")
    commands = parser.add_subparsers(dest="what", required=True)
    text = commands.add_parser("prepare", help="collect the text and train the tokenizer")
    for name in ("code", "docs", "problems"):
        text.add_argument(name, type=Path)
    for name in SHAPES:
        model = commands.add_parser(name, help=f"train the {name}")
        model.add_argument("--minutes", type=float, required=True)
        model.add_argument(
            "--from", dest="go_on", type=Path, help="continue from this trained model"
        )
        model.add_argument("--length", type=int, default=512, help="tokens per row")
        model.add_argument("--batch", type=int, default=8, help="rows per step")
        model.add_argument("--threads", type=int, default=2)
    for command in commands.choices.values():
        command.add_argument(
            "--out", type=Path, required=True, help="folder of all inputs and results"
        )
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.what == "prepare":
        prepare(given.code, given.docs, given.problems, given.out)
    else:
        make(given)


if __name__ == "__main__":
    main()
