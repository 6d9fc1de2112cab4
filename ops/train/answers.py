"""Write a target's own answers, and what a head learns from them, to train on by ``--answers``.

    python -m ops.train.answers --target DIR --out DIR --minutes 35 [--prompts FILE.jsonl ...]

Prompts are the first of ``turns`` in every line of the files but the last ``--hold-out`` of each,
which ``--test`` takes instead. Every prompt is answered greedily and ``--sampled`` times at
temperature 1. In the remaining time the target writes the user's turn too, after the chat
template's opening of one (Magpie, arXiv 2406.08464), and answers every other of these greedily.

After ``--minutes`` of processor time no text is begun; those that are go on to their ends.

Texts are decoded together, each at its own length, and one that has ended makes room for the next.
``--out`` then holds, token for token:

tokens.bin  int32 ``[tokens, 3]``: the token, the target's most likely next one, and in a prompt 0,
            in a greedy answer 1, in a sampled one 2
rows.bin    bfloat16 ``[tokens, (taps + 1) x hidden]``: the rows that enter the tapped layers,
            and the row after the final norm
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from flowspec.errors import ModelError
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import open_directory
from ops.parser import Parser
from ops.prompts import HELD_OUT
from ops.train.teaching import Seen, Teacher, drawn, taps_of

TOKENS = "tokens.bin"
ROWS = "rows.bin"
FACTS = "answers.json"


@dataclass
class WrittenText:
    """A prompt and what follows it.

    ``temperature``: the answer's. ``closing``: the tokens from the end of the user's turn to the
    answer, if the target has to write that turn first.
    """

    ids: list[int]
    temperature: float
    closing: tuple[int, ...] = ()
    #: Where the turn that is written begins.
    begun: int = field(init=False)
    #: Tokens that the target has read.
    read: int = 0

    def __post_init__(self) -> None:
        self.begun = len(self.ids)


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values of several texts; every pass adds a row to each at its length."""

    is_sliding = False

    def __init__(
        self, slots: int, heads: int, capacity: int, size: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.keys = torch.zeros(slots, heads, capacity, size, dtype=dtype)
        self.values = torch.zeros(slots, heads, capacity, size, dtype=dtype)
        self.lengths = torch.zeros(slots, dtype=torch.int64)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the storage is allocated up front."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep ``[slots, heads, 1, size]``; return views up to the longest text."""
        each = torch.arange(len(self.keys))
        self.keys[each, :, self.lengths] = key_states[:, :, 0]
        self.values[each, :, self.lengths] = value_states[:, :, 0]
        rows = self.get_seq_length() + 1
        return self.keys[:, :, :rows], self.values[:, :, :rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return int(self.lengths.max())

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class Writer:
    """Decodes ``slots`` texts together on the CPU and keeps the rows of each.

    ``ends``: tokens that end a turn. ``limit``: tokens of a turn. ``capacity``: tokens of a text.
    """

    def __init__(
        self,
        teacher: Teacher,
        taps: Sequence[int],
        ends: frozenset[int],
        *,
        slots: int,
        limit: int,
        capacity: int,
    ) -> None:
        config = teacher.model.config
        heads, size = config.num_key_value_heads, teacher.model.model.layers[0].self_attn.head_dim
        self._teacher = teacher
        self._taps = tuple(taps)
        self._ends = ends
        self._limit = limit
        self._layers = [
            SlotLayer(slots, heads, capacity, size, teacher.model.dtype)
            for _ in range(config.num_hidden_layers)
        ]
        width = (len(taps) + 1) * config.hidden_size
        self._rows = torch.zeros(slots, capacity, width, dtype=torch.bfloat16)
        self._best = torch.zeros(slots, capacity, dtype=torch.int32)
        self._prompt: list[int] = []  # the one that was read last, its rows, its keys and values
        self._prompt_rows = torch.zeros(0)
        self._prompt_cache = DynamicCache()

    def write(self, texts: Iterator[WrittenText]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What both files hold of each text, as they end; without texts that got no answer."""
        slots: list[WrittenText | None] = [None] * len(self._rows)
        while True:
            for at, text in enumerate(slots):
                if text is None and (fresh := next(texts, None)) is not None:
                    self._begin(at, fresh)
                    slots[at] = fresh
            if not any(slots):
                return
            chosen = self._step(slots)
            for at, text in enumerate(slots):
                if text is not None and self._ended(text, chosen[at]):
                    if not text.closing:
                        yield self._found(at, text)
                    slots[at] = None

    @torch.no_grad()
    def _begin(self, at: int, text: WrittenText) -> None:
        """Read all of a prompt but its last token."""
        known = text.ids[:-1]
        text.read = len(known)
        if known != self._prompt:
            self._prompt = known
            self._prompt_cache = DynamicCache()
            found = self._teacher.rows(
                torch.tensor([known]), self._taps, past_key_values=self._prompt_cache
            )
            self._prompt_rows = _joined(*found)[0]
        self._rows[at, : len(known)] = self._prompt_rows
        for layer, read in zip(self._layers, self._prompt_cache.layers, strict=True):
            layer.keys[at, :, : len(known)] = read.keys[0]
            layer.values[at, :, : len(known)] = read.values[0]

    @torch.no_grad()
    def _step(self, slots: Sequence[WrittenText | None]) -> list[int]:
        """Read a token of every text; what the target says after each."""
        lengths = torch.tensor([text.read if text else 0 for text in slots])
        for layer in self._layers:
            layer.lengths = lengths
        unseen = torch.arange(int(lengths.max()) + 1) > lengths[:, None]
        mask = torch.zeros(unseen.shape, dtype=self._teacher.model.dtype)
        features, tapped = self._teacher.rows(
            torch.tensor([[text.ids[text.read] if text else 0] for text in slots]),
            self._taps,
            past_key_values=Cache(layers=self._layers),
            position_ids=lengths[:, None],
            attention_mask=mask.masked_fill(unseen, -torch.inf)[:, None, None],
        )
        logits = linear(features[:, 0], self._teacher.lm_head)
        each = torch.arange(len(slots))
        self._rows[each, lengths] = _joined(features, tapped)[:, 0]
        self._best[each, lengths] = logits.argmax(-1).int()
        heats = [(1.0 if text.closing else text.temperature) if text else 0.0 for text in slots]
        found: list[int] = drawn(logits, torch.tensor(heats)).tolist()
        return found

    def _ended(self, text: WrittenText, chosen: int) -> bool:
        """Continue a text by ``chosen`` unless it has ended, or its next token is known."""
        text.read += 1
        if text.read < len(text.ids):
            return False
        written = len(text.ids) - text.begun
        if written and text.closing and text.ids[-1] == text.closing[0]:
            text.ids += text.closing[1:]
            text.closing = ()
            text.begun = len(text.ids)
            return False
        if written == self._limit or (written and text.ids[-1] in self._ends):
            return True
        text.ids.append(chosen)
        return False

    def _found(self, at: int, text: WrittenText) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(text.ids, dtype=torch.int32)
        answer = (torch.arange(len(ids)) >= text.begun).int() * (1 + (text.temperature > 0))
        tokens = torch.stack((ids, self._best[at, : len(ids)], answer), dim=1)
        return tokens, self._rows[at, : len(ids)].clone()


def _joined(features: torch.Tensor, tapped: torch.Tensor) -> torch.Tensor:
    return torch.cat((tapped, features), dim=-1).bfloat16()


class Answers:
    """The texts in ``folder``, to train on ``length`` tokens of each: an answer and its context.

    Texts that are written meanwhile are taken up when all have been seen.
    """

    def __init__(self, folder: Path, length: int, seed: int = 0) -> None:
        told = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        self.taps: tuple[int, ...] = tuple(told["taps"])
        self._hidden = int(told["hidden"])
        self._folder = folder
        self._length = length
        self._rng = np.random.default_rng(seed)
        self._order: list[int] = []
        self._read()

    def _read(self) -> None:
        tokens = self._folder / TOKENS
        rows = self._folder / ROWS
        count = tokens.stat().st_size // 12
        width = (len(self.taps) + 1) * self._hidden
        if not count or rows.stat().st_size < 2 * count * width:
            raise ModelError(f"{rows} is not the rows of {tokens}: write the answers again")
        self._tokens = np.fromfile(tokens, np.int32, 3 * count).reshape(count, 3)
        self._rows = np.memmap(rows, np.int16, "r", shape=(count, width))
        kind = self._tokens[:, 2]
        (begins,) = np.nonzero((kind > 0) & (np.append(0, kind[:-1]) == 0))
        (ends,) = np.nonzero((kind > 0) & (np.append(kind[1:], 0) == 0))
        firsts = [0, *(ends[:-1] + 1).tolist()]
        self._texts = [*zip(firsts, begins.tolist(), (ends + 1).tolist(), strict=True)]

    @property
    def text(self) -> np.ndarray:
        """The tokens of all answers."""
        found: np.ndarray = self._tokens[self._tokens[:, 2] > 0, 0]
        return found

    def seen(self, rows: int, _taps: Sequence[int] = ()) -> Seen:
        """Random texts, each from its beginning or, of a long prompt, from its last part.

        What is left of ``length`` has the beginning of another text.
        """
        while len(self._order) < rows:
            self._read()
            self._order += self._rng.permutation(len(self._texts)).tolist()
        chosen = [self._texts[at] for at in self._order[:rows]]
        self._order = self._order[rows:]
        last = max(0, len(self._tokens) - self._length)
        starts = [max(first, begin - self._length // 2) for first, begin, _ in chosen]
        return self._between([(min(at, last), min(at, last) + self._length) for at in starts])

    def whole(self, *, sampled: bool) -> Iterator[Seen]:
        """Every text alone, of those with greedy or with ``sampled`` answers."""
        for first, begin, end in self._texts:
            if self._tokens[begin, 2] == 1 + sampled:
                yield self._between([(first, end)])

    def _between(self, ranges: Sequence[tuple[int, int]]) -> Seen:
        tokens = torch.from_numpy(np.stack([self._tokens[slice(*one)] for one in ranges])).long()
        packed = torch.from_numpy(np.stack([self._rows[slice(*one)] for one in ranges]))
        tapped, features = packed.view(torch.bfloat16).float().tensor_split([-self._hidden], dim=-1)
        ids, best, kind = tokens.unbind(-1)
        counted = torch.nn.functional.pad(kind[:, 1:] > 0, (0, 1))
        return Seen(ids, tapped, features, best, counted)


def asked(
    tokenizer: Tokenizer, files: Sequence[Path], which: slice, longest: int, sampled: int
) -> list[WrittenText]:
    """The texts that answer the prompts in ``files``, in ``which`` lines, short prompts first."""
    prompts = []
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines()[which]:
            prompts.append(tokenizer.encode(json.loads(line)["turns"][0], raw=False))
    prompts.sort(key=len)
    return [
        WrittenText(list(prompt), temperature)
        for prompt in prompts
        if len(prompt) <= longest
        for temperature in (0.0, *[1.0] * sampled)
    ]


def own(tokenizer: Tokenizer) -> Iterator[WrittenText]:
    """Endless texts of which the target writes the user's turn, every other answered greedily."""
    one, other = (tokenizer.encode(word, raw=False) for word in ("x", "y"))
    at = next(at for at, (left, right) in enumerate(zip(one, other, strict=True)) if left != right)
    for count in itertools.count():
        yield WrittenText(list(one[:at]), float(count % 2), one[at + 1 :])


def keep(
    folder: Path,
    taps: Sequence[int],
    hidden: int,
    found: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Write the texts that ``Writer.write`` has ``found`` as they come."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"hidden": hidden, "taps": list(taps)}
    (folder / FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    tokens = answered = 0
    with (folder / ROWS).open("wb") as rows_file, (folder / TOKENS).open("wb") as tokens_file:
        for number, (read, rows) in enumerate(found, start=1):
            rows_file.write(rows.contiguous().view(torch.int16).numpy().tobytes())
            rows_file.flush()
            tokens_file.write(read.int().numpy().tobytes())
            tokens_file.flush()
            tokens += len(read)
            answered += int((read[:, 2] > 0).sum())
            if number % 50 == 0:
                spent = f"{time.process_time():.0f} s"
                print(
                    f"{number} texts, {tokens} tokens, {answered} in answers, {spent}", flush=True
                )


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(description="Write a target's own answers; see this file's head.")
    parser.add_argument("--target", type=Path, required=True, help="folder or file of the target")
    parser.add_argument("--out", type=Path, required=True, help="folder of the answers")
    parser.add_argument("--minutes", type=float, required=True, help="of processor time")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="files of prompts")
    parser.add_argument(
        "--hold-out", type=int, default=HELD_OUT, help="prompts left out of each file"
    )
    parser.add_argument("--test", action="store_true", help="answer those prompts and no others")
    parser.add_argument("--sampled", type=int, default=2, help="sampled answers to a prompt")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--limit", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--slots", type=int, default=64, help="texts that are written together")
    parser.add_argument("--taps", help="layers whose input is kept (default: the authors')")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(words)
    torch.manual_seed(given.seed)
    torch.set_num_threads(given.threads)
    target = open_directory(str(given.target))
    tokenizer = Tokenizer(target)
    if not tokenizer.has_chat_template:
        raise ModelError(f"{given.target} has no chat template: it answers nobody")
    taps = taps_of(given.taps, target.layers)
    writer = Writer(
        Teacher(given.target, "cpu"),
        taps,
        tokenizer.eos,
        slots=given.slots,
        limit=given.limit,
        capacity=max(given.longest, given.limit + 128) + given.limit,
    )
    which = slice(-given.hold_out, None) if given.test else slice(0, -given.hold_out or None)
    public = asked(tokenizer, given.prompts, which, given.longest, given.sampled)

    began = time.process_time()

    def texts() -> Iterator[WrittenText]:
        for text in itertools.chain(public, () if given.test else own(tokenizer)):
            if time.process_time() - began > 60 * given.minutes * given.threads:
                return
            yield text

    keep(given.out, taps, target.hidden_size, writer.write(texts()))


if __name__ == "__main__":
    try:
        main()
    except ModelError as error:
        raise SystemExit(str(error)) from None
