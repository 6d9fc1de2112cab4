"""Models with settable hit rates: a paper's acceptance in a simulation, without its models.

They know the target's text. At every position of it, one draw (a hash of seed and position)
decides which of them are right: the drafter has the true next token at the rank into whose share
the draw falls, and a middle model chooses it if the draw is below its rate. So all strategies use
the same random draws, and hits are nested: where a model is right, a better one is right too. Two
models that are both wrong, or both on a wrong path, choose the same token, like models of one
family that share their errors. A chain's middle model therefore corrects exactly the drafts on
which it is right and the drafter is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Choice, Draft, DraftDone, Part, Pass, PassDone, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError, StateError
from flowspec.model.base import DraftsAlone, RowArray
from flowspec.rehearse.compare.oracle import OracleStage

#: Expected acceptance of a proposal at a rank that is never right.
LEAST = 1e-6
_MASK = (1 << 64) - 1
_RANK, _KIND, _OTHER = range(3)


@dataclass(frozen=True, slots=True)
class Kind:
    """Positions of one kind, a ``share`` of all: each rank has the true token at its rate.

    A drafter distinguishes kinds, as the confidence of a calibrated one does. ConfigError for
    ``rates`` that increase with rank, are outside 0 to 1, or add up to more than 1.
    """

    rates: tuple[float, ...]
    share: float = 1.0

    def __post_init__(self) -> None:
        rising = any(low < high for low, high in zip(self.rates, self.rates[1:], strict=False))
        if (
            not self.rates
            or rising
            or min(self.rates) < 0
            or math.fsum(self.rates) > 1 + 1e-9
            or not self.share > 0
        ):
            raise ConfigError(
                f"rates {self.rates} of a share {self.share}; "
                "expected descending ones that add up to at most 1"
            )


def geometric(first: float, ratio: float, ranks: int = 32) -> tuple[float, ...]:
    """Rates that begin with ``first``, each one ``ratio`` times the one before."""
    return tuple(first * ratio**rank for rank in range(ranks))


def _draw(seed: int, what: int, position: int, token: int = 0) -> float:
    """A number in [0, 1) from these keys: SplitMix64's finaliser over each in turn."""
    state = seed
    for key in (what, position, token):
        state = (state + key + 0x9E3779B97F4A7C15) & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def right(position: int, rate: float, *, seed: int = 0) -> bool:
    """Whether a model that is right at ``rate`` has the token after ``position`` of the text.

    For a drafter: at its first rank, with all positions of one kind.
    """
    return _draw(seed, _RANK, position) < rate


class HitDrafter(DraftsAlone):
    """Drafts for known texts (``sequences``: prompt and output by job), at the rates of ``kinds``.

    Kinds are drawn alike on and off the path, so they do not reveal whether a node is on it.
    Values are the logs of the rates, so they are calibrated, and equal for all nodes of a kind.
    ``vocabulary`` must be larger than any requested width. ``wants_hidden``: behave like a draft
    head, which learns true rows before it drafts; they are not used. ConfigError if the kinds'
    shares do not add up to 1.
    """

    def __init__(
        self,
        sequences: Mapping[str, Sequence[int]],
        kinds: Sequence[Kind],
        vocabulary: int,
        *,
        seed: int = 0,
        wants_hidden: bool = False,
    ) -> None:
        if abs(math.fsum(kind.share for kind in kinds) - 1) > 1e-6:
            raise ConfigError(f"the shares of {list(kinds)} do not add up to 1")
        self.wants_hidden = wants_hidden
        self._sequences = sequences
        self._vocabulary = vocabulary
        self._seed = seed
        self._limits = tuple(accumulate(kind.share for kind in kinds))
        self._cumulated = [tuple(accumulate(kind.rates)) for kind in kinds]
        self._logs = [tuple(math.log(max(LEAST, rate)) for rate in kind.rates) for kind in kinds]
        self._path = OracleStage(sequences)  # finds which rows are on the path

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._path.allocate(run, capacity, sampling, Returns())

    def release(self, run: RunKey) -> None:
        self._path.release(run)

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        """As ``DraftExecutor.learn``; StateError unless the drafter ``wants_hidden``."""
        if not self.wants_hidden:
            raise StateError("this drafter drafts from tokens alone")

    def run(self, work: Draft) -> DraftDone:
        """As ``DraftExecutor.run``; StateError for a coupled draft, since no noise is used."""
        if work.coupled:
            raise StateError(
                "a drafter of settable rates does not draft coupled; give the job temperature 0"
            )
        part = work.part
        _, (true,) = self._path.run(Pass((replace(part, answers=()),)), [None])
        on_path = true.tolist()
        answers = [self._propose(part, row, on_path[row], work.width) for row in part.answers]
        return DraftDone(
            tuple(tokens for tokens, _ in answers), tuple(values for _, values in answers)
        )

    def _propose(
        self, part: Part, row: int, on_path: bool, width: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        position = part.positions[row]
        token = part.tokens[row]
        drawn = _draw(self._seed, _KIND, position, token)
        kind = min(sum(limit <= drawn for limit in self._limits), len(self._limits) - 1)
        logs = self._logs[kind][:width]
        values = logs + (math.log(LEAST),) * (width - len(logs))
        sequence = self._sequences[part.run.job]
        if not on_path or position + 1 >= len(sequence):
            first = _other(self._seed, position, token, self._vocabulary)
            return self._run_from(first, width), values
        truth = sequence[position + 1]
        luck = _draw(self._seed, _RANK, position)
        rank = sum(limit <= luck for limit in self._cumulated[kind])
        others = self._run_from(truth + 1, width)
        if rank >= min(width, len(self._cumulated[kind])):
            return others, values
        return (*others[:rank], truth, *others[rank : width - 1]), values

    def _run_from(self, first: int, count: int) -> tuple[int, ...]:
        return tuple([(first + at) % self._vocabulary for at in range(count)])


class HitStage:
    """A middle model that knows the texts and is right at their rows with probability ``rate``.

    The module's docstring relates its hits to those of a drafter with the same ``seed``.
    ConfigError for a rate outside 0 to 1.
    """

    def __init__(
        self, sequences: Mapping[str, Sequence[int]], rate: float, vocabulary: int, *, seed: int = 0
    ) -> None:
        if not 0 <= rate <= 1:
            raise ConfigError(f"a middle model is right at rate {rate}; expected 0 to 1")
        self._rate = rate
        self._vocabulary = vocabulary
        self._seed = seed
        self._path = OracleStage(sequences)
        self.allocate = self._path.allocate
        self.release = self._path.release

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        done, rows = self._path.run(work, inputs)
        parts = zip(work.parts, done.choices, rows, strict=True)
        return PassDone(
            tuple(self._choose(part, choice, true) for part, choice, true in parts)
        ), rows

    def _choose(self, part: Part, choice: Choice | WorkFailed, true: RowArray) -> Choice:
        assert isinstance(choice, Choice)
        said = []
        for row, truth in zip(part.answers, choice.tokens, strict=True):
            position = part.positions[row]
            if not true[row]:
                truth = _other(self._seed, position, part.tokens[row], self._vocabulary)
            elif not right(position, self._rate, seed=self._seed):
                truth = (truth + 1) % self._vocabulary
            said.append(truth)
        return Choice(tuple(said))


def _other(seed: int, position: int, token: int, vocabulary: int) -> int:
    """The choice of every model after ``token`` at ``position`` of a wrong path."""
    return int(_draw(seed, _OTHER, position, token) * vocabulary)
