"""What a choice costs at a large vocabulary, beside the last stage's own pass over the rows.

    python -m ops.bench.sampling [--rows 64] [--vocabulary 151936] [--hidden 2048] [--repeats 7]

*definition*: the functions of the core, row by row; for log-probabilities the library's own over
the whole vocabulary. *now*: the functions that stages and drafters use, on logits of float32 and
of bfloat16. *pass*: the linear layers of four layers and the head, bfloat16, packed for the
processor. Every row has an index of its own, so that no noise is shared, which in a tree it is.
First logits as a model gives them (normal, a deviation of 3, and twenty likely tokens), then flat
ones, on which the drafters' functions do the same and are left out. Variants alternate; medians
over the repeats, one torch thread. Prints Markdown.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from flowspec.core.run.sampling import Sampling, choose, perturbed
from flowspec.model.sampling import choose_rows, perturbed_rows, top_logprobs
from ops.bench.arguments import count

LAYERS = 4
#: Width of a feed-forward layer over that of the hidden rows.
WIDER = 4
TARGETS = {
    "greedy": Sampling(),
    "T = 1": Sampling(1.0),
    "T = 0.6, top-p 0.9, top-k 20": Sampling(0.6, 20, 0.9),
    "T = 0.7, top-p 0.9": Sampling(0.7, 0, 0.9),
}
COUPLED = 8

Shape = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of a table: by the definition, and as stages and drafters do it.

    Both get logits ``[rows, vocabulary]`` and the rows' indices.
    """

    name: str
    definition: Callable[[torch.Tensor, Sequence[int]], object]
    now: Callable[[torch.Tensor, Sequence[int]], object]


class LastPass:
    """The linear layers of a last stage, packed."""

    def __init__(self, rows: int, hidden: int, vocabulary: int) -> None:
        wide = WIDER * hidden
        layer = [(hidden, hidden)] * 4 + [(wide, hidden)] * 2 + [(hidden, wide)]
        shapes = [*layer * LAYERS, (vocabulary, hidden)]
        self._weights = [_packed(shape, rows) for shape in shapes]
        self._inputs = {
            width: torch.full((rows, width), 0.5, dtype=torch.bfloat16) for width in (hidden, wide)
        }
        self._widths = [width for _, width in shapes]

    def run(self) -> None:
        for weight, width in zip(self._weights, self._widths, strict=True):
            torch.ops.mkldnn._linear_pointwise(self._inputs[width], weight, None, "none", [], "")


def _packed(shape: tuple[int, int], rows: int) -> torch.Tensor:
    weight = torch.full(shape, 0.01, dtype=torch.bfloat16)
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def settings() -> list[Setting]:
    """All settings: the target's first, then the drafters' and log-probabilities."""
    rows = [_target(name, sampling) for name, sampling in TARGETS.items()]
    coupled = Sampling(1.0)
    rows.append(
        Setting(
            f"coupled draft, T = 1, width {COUPLED}",
            lambda logits, indices: [
                perturbed(row, coupled, index, COUPLED)
                for row, index in zip(logits.numpy(), indices, strict=True)
            ],
            lambda logits, indices: perturbed_rows(logits, coupled, indices, COUPLED),
        )
    )
    return [*rows, _best("the drafter's top-8", 8), _best("log-probabilities, top-5", 5)]


def _target(name: str, sampling: Sampling) -> Setting:
    return Setting(
        name,
        lambda logits, indices: [
            choose(row, sampling, index) for row, index in zip(logits.numpy(), indices, strict=True)
        ],
        lambda logits, indices: choose_rows(logits, sampling, indices),
    )


def _best(name: str, best: int) -> Setting:
    return Setting(
        name,
        lambda logits, indices: torch.topk(torch.log_softmax(logits, dim=-1), best),
        lambda logits, indices: top_logprobs(logits, best),
    )


def model_logits(rows: int, vocabulary: int) -> torch.Tensor:
    """Normal, with a deviation of 3, and twenty likely tokens in each row."""
    random = np.random.default_rng(0)
    table = random.normal(size=(rows, vocabulary)) * 3
    likely = random.integers(0, vocabulary, size=(rows, 20))
    table[np.arange(rows)[:, None], likely] += 8 + random.exponential(5, size=(rows, 20))
    return torch.from_numpy(table.astype(np.float32))


def flat_logits(rows: int, vocabulary: int) -> torch.Tensor:
    """Normal, with a deviation of 0.01."""
    table = np.random.default_rng(1).normal(size=(rows, vocabulary)) * 0.01
    return torch.from_numpy(table.astype(np.float32))


def measured(
    settings: Sequence[Setting], logits: torch.Tensor, last: LastPass, repeats: int
) -> tuple[dict[str, list[float]], float]:
    """Median seconds by setting (definition, now, now in bfloat16) and of the pass."""
    small = logits.bfloat16()
    seconds: dict[str, list[list[float]]] = {setting.name: [[], [], []] for setting in settings}
    passes: list[float] = []
    for repeat in range(repeats + 1):
        for at, setting in enumerate(settings):
            first = (repeat * len(settings) + at) * len(logits)
            indices = range(first, first + len(logits))
            works = (
                lambda s=setting, i=indices: s.definition(logits, i),
                lambda s=setting, i=indices: s.now(logits, [n + (1 << 30) for n in i]),
                lambda s=setting, i=indices: s.now(small, [n + (1 << 31) for n in i]),
            )
            for series, work in zip(seconds[setting.name], works, strict=True):
                series.append(_seconds(work))
        passes.append(_seconds(last.run))
    medians = {
        name: [statistics.median(series[1:]) for series in found] for name, found in seconds.items()
    }
    return medians, statistics.median(passes[1:])


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def table(name: str, medians: dict[str, list[float]], pass_seconds: float) -> str:
    """Markdown; the share is that of bfloat16 logits, which a stage in bfloat16 has."""
    lines = [
        f"| {name}, ms | definition | now, float32 | now, bfloat16 | pass | now/pass |",
        "|---|---|---|---|---|---|",
    ]
    for setting, (definition, now, small) in medians.items():
        cells = [f"{1e3 * value:.1f}" for value in (definition, now, small, pass_seconds)]
        lines.append(f"| {setting} | {' | '.join(cells)} | {small / pass_seconds:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = Parser()
    parser.add_argument("--rows", type=count, default=64)
    parser.add_argument("--vocabulary", type=count, default=151_936)
    parser.add_argument("--hidden", type=count, default=2048)
    parser.add_argument("--repeats", type=count, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    every = settings()
    with torch.inference_mode():
        last = LastPass(given.rows, given.hidden, given.vocabulary)
        logits = model_logits(given.rows, given.vocabulary)
        print(table("model logits", *measured(every, logits, last, given.repeats)), flush=True)
        logits = flat_logits(given.rows, given.vocabulary)
        some = every[: len(TARGETS)]
        print(f"\n{table('flat logits', *measured(some, logits, last, given.repeats))}")


if __name__ == "__main__":
    main()
