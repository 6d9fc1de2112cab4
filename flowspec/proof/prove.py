"""The proof itself: a pipeline of the user's models against plain decoding and the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from flowspec.core.run.sampling import Floats, Sampling, gumbel, survivors
from flowspec.errors import ConfigError
from flowspec.model.base import DraftExecutor, RowArray
from flowspec.model.layers.architecture import read_config
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.layers.tap_shares import TapShares
from flowspec.model.layers.taps import Taps
from flowspec.model.layers.trial import TOLERANCE, try_small
from flowspec.model.memory import available_bytes
from flowspec.model.rows.attention import EXACT_DEVICES
from flowspec.model.stage import ModelStage
from flowspec.model.weights.directory import ModelDirectory, all_tensors, fetch_weights
from flowspec.proof import library, plain
from flowspec.proof.depth import acceptance_by_depth
from flowspec.proof.plain import Logits, PlainText
from flowspec.rehearse.compare.simulate import simulate_stages
from flowspec.rehearse.compare.texts import Text
from flowspec.rehearse.simulator import UNIT

#: Rows of a pass that are compared in bits with passes of one row.
WIDTH = 16
#: Drafts in a row whose acceptance is reported.
DEPTH = 6
#: Two candidates closer than this are a near tie in float32: a rounding decides between them.
TIE = 1e-4
#: Steps of the rows' type that rounding may move a row by where the library's own is not known.
#: SmolLM2's rows move by 8 of them in the mean, in bfloat16 and in float32.
_STEPS = 128
#: Texts of the default proof: greedy, sampled, and from a nucleus.
SAMPLINGS = (Sampling(), Sampling(1.0, seed=1), Sampling(0.7, top_k=50, top_p=0.9, seed=2))

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ProofPlan:
    """What is proved: ``strategies`` on ``stages`` blocks, ``tokens`` after each prompt."""

    strategies: tuple[str, ...] = ("autoregressive", "flowspec", "pipedec", "auto")
    stages: int = 3
    tokens: int = 32
    samplings: tuple[Sampling, ...] = SAMPLINGS


@dataclass(frozen=True, slots=True)
class Difference:
    """A run whose token ``at`` is ``ours`` where plain decoding has ``theirs``.

    ``gap``: how far plain decoding is from choosing ``ours``, in logits. ``tie``: whether a
    rounding may decide that.
    """

    strategy: str
    sampling: Sampling
    at: int
    ours: int
    theirs: int
    gap: float
    tie: bool


@dataclass(frozen=True, slots=True)
class RowCheck:
    """Rows of shared passes beside the same rows alone.

    ``equal`` of ``rows`` have the same bits; ``flips`` have another best token. ``difference``: of
    their logits, the largest; ``divergence``: of the distributions of one row, the largest, nats.
    ``unknown``: most of it that may be rounding where the library's own is not known. ``parts``:
    kernels and shapes whose rows depend on their company in a test of their own.
    """

    rows: int
    equal: int
    flips: int
    difference: float
    divergence: float
    unknown: float
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Everything that was found.

    ``structure``: largest difference between a small random copy of the model in two stages and
    the library's, in float32, relative to the largest logit. ``compared``: tokens of pipelined runs
    that were compared, over ``runs`` runs. ``against_library``: None if there was no memory for the
    library's whole model, then ``skipped`` says what it needs.
    ``acceptance``: of the first 1, 2, ... drafts in a row, greedy and sampled.
    """

    facts: tuple[dict[str, object], ...]
    structure: float
    rows: RowCheck
    runs: int
    compared: int
    differences: tuple[Difference, ...]
    against_library: library.AgainstLibrary | None
    skipped: str
    acceptance: tuple[tuple[float, ...], tuple[float, ...]]

    @property
    def same_model(self) -> bool:
        """Whether stages compute what the library does, and our logits are its but for rounding.

        The latter counts only if it was compared.
        """
        alike = self.against_library is None or self.against_library.same_model
        return self.structure < TOLERANCE and alike

    @property
    def same_rows(self) -> bool:
        """Whether rows of shared passes differ from lone ones by no more than rounding explains."""
        compared = self.against_library
        if compared is None:
            return self.rows.divergence <= self.rows.unknown
        return self.rows.divergence <= library.MOST_TIMES * compared.worst_rounding

    @property
    def holds(self) -> bool:
        """Whether model and rows are the same, and texts differ in near ties alone."""
        ties = all(difference.tie for difference in self.differences)
        return self.same_model and self.same_rows and ties


def load_blocks(
    target: ModelDirectory, ranges: Sequence[range], placing: Placing
) -> list[LayerBlock]:
    """The blocks of a pipeline, all in this process, which gets one torch thread."""
    torch.set_num_threads(1)
    return [
        LayerBlock(
            target,
            layers,
            first=layers.start == 0,
            last=layers.stop == target.layers,
            placing=placing,
        )
        for layers in ranges
    ]


def load_tap_shares(
    blocks: Sequence[LayerBlock], ranges: Sequence[range], taps: Taps | None
) -> list[TapShares]:
    """The blocks' shares of a drafter's sum; empty: it reads no hidden rows inside the target."""
    if taps is None:
        return []
    drafter = fetch_weights(taps.drafter, all_tensors)
    pairs = zip(blocks, ranges, strict=True)
    return [TapShares(block, layers, taps, drafter) for block, layers in pairs]


def prove(
    target: ModelDirectory,
    blocks: Sequence[LayerBlock],
    drafter: DraftExecutor,
    prompts: Sequence[Sequence[int]],
    plan: ProofPlan,
    tell: Tell = lambda what: None,
    shares: Sequence[TapShares] = (),
) -> Proof:
    """Prove the pair on ``prompts``; ConfigError if none of them leaves room for the tokens.

    ``shares``: by block, if the drafter reads hidden rows inside the target.
    """
    usable = [prompt for prompt in prompts if len(prompt) + plan.tokens <= target.context]
    if not usable:
        raise ConfigError(
            f"no prompt leaves room for {plan.tokens} tokens in the target's context of "
            f"{target.context}; use shorter prompts or fewer tokens"
        )
    tell("comparing a small copy of the model with the library's")
    structure = try_small(read_config(target))
    tell("decoding plainly, one row a pass")
    texts = [
        plain.decode(blocks, target, prompt, plan.tokens, sampling)
        for prompt in usable
        for sampling in plan.samplings
    ]
    tell("comparing rows of shared passes with rows alone")
    shared = [plain.together(blocks, text, WIDTH) for text in texts]
    rows = _row_check(blocks, texts, shared)
    tie = _tie(blocks[0], rows)
    stages = [
        ModelStage(block, share)
        for block, share in zip(blocks, shares or (None,) * len(blocks), strict=True)
    ]
    runs = list(_runs(target, stages, drafter, texts, plan, tell))
    differences = [_difference(run, text, tie) for run, text in runs]
    found = tuple(difference for difference in differences if difference is not None)
    compared, skipped = _against_library(target, blocks[0].placing, texts, shared, tell)
    tell("counting the drafts that are right")
    drafted = [as_returned(text, blocks, shares) for text in texts]
    greedy = [text for text in drafted if text.sampling.temperature == 0]
    sampled = [text for text in drafted if text.sampling.temperature > 0]
    return Proof(
        facts=tuple(block.facts() for block in blocks),
        structure=structure,
        rows=rows,
        runs=len(runs),
        compared=sum(len(text.output) for _, text in runs),
        differences=found,
        against_library=compared,
        skipped=skipped,
        acceptance=(
            acceptance_by_depth(drafter, greedy, DEPTH),
            acceptance_by_depth(drafter, sampled, DEPTH),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    strategy: str
    output: tuple[int, ...]


def _runs(
    target: ModelDirectory,
    stages: Sequence[ModelStage],
    drafter: DraftExecutor,
    texts: Sequence[PlainText],
    plan: ProofPlan,
    tell: Tell,
) -> Iterator[tuple[_Run, PlainText]]:
    for number, text in enumerate(texts, 1):
        for strategy in plan.strategies:
            tell(f"text {number} of {len(texts)} by {strategy}")
            known = Text(text.prompt, text.output, text.sampling)
            _, output = simulate_stages(known, strategy, stages, target, drafter, UNIT)
            yield _Run(strategy, output), text


def as_returned(
    text: PlainText, blocks: Sequence[LayerBlock], shares: Sequence[TapShares]
) -> PlainText:
    """``text`` with the rows that a drafter gets in the place of its last ones."""
    return replace(text, hidden=plain.returned(shares, blocks, text)) if shares else text


def _tie(block: LayerBlock, rows: RowCheck) -> float:
    """How close two candidates may be for a rounding to decide between them.

    0 where rows are independent: nothing is excused there.
    """
    if rows.equal == rows.rows and not rows.parts and block.device.type in EXACT_DEVICES:
        return 0.0
    return max(TIE, 2 * rows.difference)


def _difference(run: _Run, text: PlainText, tie: float) -> Difference | None:
    """The first difference of a run from plain decoding; None: equal."""
    if run.output == text.output:
        return None
    pairs = list(zip(run.output, text.output, strict=False))
    at = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    if at == len(pairs):
        return Difference(run.strategy, text.sampling, at, -1, -1, float("inf"), tie=False)
    ours, theirs = pairs[at]
    gap = _gap(text, at, ours, theirs)
    return Difference(run.strategy, text.sampling, at, ours, theirs, gap, gap < tie)


def _gap(text: PlainText, at: int, ours: int, theirs: int) -> float:
    """How far plain decoding is from ``ours`` at output position ``at``, in logits.

    A token may be chosen as its score passes the other's, as it comes into the top-k or nucleus, or
    as the other leaves it.
    """
    sampling, logits = text.sampling, text.logits[at].astype(np.float64)
    pair = np.array([ours, theirs])
    scores = logits[pair]
    if sampling.temperature > 0:
        scores += sampling.temperature * gumbel(sampling.seed, len(text.prompt) + at, pair)
    apart = float(abs(scores[0] - scores[1]))
    if sampling.temperature == 0:
        return apart
    if ours not in survivors(logits, sampling)[0]:
        return _to_come_in(logits, sampling, ours)
    return min(apart, _to_leave(logits, sampling, theirs))


def _to_come_in(logits: Floats, sampling: Sampling, token: int) -> float:
    """How far ``token`` is from top-k and nucleus: passing others, which get less likely."""
    scores, shares, at = _ranked(logits, sampling, token)
    before = np.maximum(np.cumsum(shares) - shares, np.finfo(float).tiny)
    far = np.maximum(scores[: len(shares)] - scores[at], np.log(before / sampling.top_p))
    return sampling.temperature * max(0.0, float(far[: at + 1].min()))


def _to_leave(logits: Floats, sampling: Sampling, token: int) -> float:
    """How far ``token``, which is in top-k and nucleus, is from leaving them."""
    scores, shares, at = _ranked(logits, sampling, token)
    far = [float("inf"), *(scores[at] - scores[len(shares) :])]
    if sampling.top_p < 1:
        others = np.maximum(np.cumsum(shares) - shares[at], np.finfo(float).tiny)
        steps = np.maximum(scores[at] - scores[: len(shares)], np.log(sampling.top_p / others))
        far.append(steps[at:].min())
    return sampling.temperature * max(0.0, float(min(far)))


def _ranked(logits: Floats, sampling: Sampling, token: int) -> tuple[Floats, Floats, int]:
    """All scores, best first; the shares of those in top-k; the place of ``token``."""
    ids, scores = survivors(logits, Sampling(sampling.temperature))
    shares = np.exp(scores[: sampling.top_k or None] - scores[0])
    return scores, shares / shares.sum(), int(np.flatnonzero(ids == token)[0])


def _row_check(
    blocks: Sequence[LayerBlock],
    texts: Sequence[PlainText],
    shared: Sequence[tuple[RowArray, Logits]],
) -> RowCheck:
    rows = equal = flips = 0
    difference = 0.0
    pairs = []
    for text, (hidden, logits) in zip(texts, shared, strict=True):
        rows += len(hidden)
        equal += sum(
            mine.tobytes() == other.tobytes()
            for mine, other in zip(hidden, text.hidden, strict=True)
        )
        answered = logits[len(text.prompt) - 1 :]
        flips += int((answered.argmax(axis=-1) != text.logits.argmax(axis=-1)).sum())
        difference = max(difference, float(np.abs(answered - text.logits).max()))
        pairs.append((answered, text.logits))
    divergence = library.agreement(*zip(*pairs, strict=True)).worst
    unknown = (_STEPS * torch.finfo(blocks[0].dtype).eps) ** 2
    parts = tuple(dict.fromkeys(part for block in blocks for part in block.dependent_parts()))
    return RowCheck(rows, equal, flips, difference, divergence, unknown, parts)


def _against_library(
    target: ModelDirectory,
    placing: Placing,
    texts: Sequence[PlainText],
    shared: Sequence[tuple[RowArray, Logits]],
    tell: Tell,
) -> tuple[library.AgainstLibrary | None, str]:
    tokens = [(*text.prompt, *text.output)[: len(text.hidden)] for text in texts]
    needed = library.bytes_needed(target, placing, [*map(len, tokens)])
    available = available_bytes()
    if needed > available:
        return None, (
            f"the library's whole model needs {needed / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} are free"
        )
    tell("comparing with the library's whole model")
    return library.compare(target, placing, tokens, [logits for _, logits in shared]), ""
