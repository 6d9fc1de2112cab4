"""A toy target and drafter: integers in place of tensors, exact, fast, and wrong when a mask is
wrong.

A row's state is a 64-bit integer. Each layer adds up a hash of every row it may see and mixes
the sum in, so a row that sees one row too many, or misses one, or holds a stale slot, ends in
another state and hence another token. Logits are a hash of the final state. The drafter runs the
same layers and therefore knows the target's choice; it proposes it with probability ``hit_rate``
and otherwise leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.machine import Choice, Draft, DraftDone, Part, Pass, PassDone
from flowspec.core.protocol.messages import Returns
from flowspec.core.run.sampling import Sampling, choose
from flowspec.errors import StateError
from flowspec.model.base import RowArray
from flowspec.model.masks import tree_mask

State = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1


def _mix(x: State) -> State:
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


def _unsigned(values: Sequence[int]) -> State:
    return np.array([value & _MASK for value in values], dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class ToyTarget:
    """``layers`` layers over a vocabulary of ``vocabulary`` tokens; token 1 ends a sequence."""

    layers: int = 12
    vocabulary: int = 64
    context: int = 512

    @property
    def eos(self) -> frozenset[int]:
        return frozenset({1})

    def embed(self, tokens: Sequence[int]) -> State:
        """States of token ids before the first layer, ``[rows]``."""
        return _mix(_unsigned(tokens) + np.uint64(0x51ED))

    def entries(self, layer: int, states: State, positions: Sequence[int]) -> State:
        """What rows of ``states`` show to the rows that see them in ``layer``: the toy's keys and
        values.
        """
        salt = np.uint64((layer * 0x9E3779B97F4A7C15 + 1) & _MASK)
        return _mix(states ^ _mix(_unsigned(positions) + salt))

    def logits(self, state: int) -> npt.NDArray[np.float64]:
        """One row of logits, ``[vocabulary]``, from a final state."""
        bits = _mix(
            np.uint64(state)
            + np.arange(self.vocabulary, dtype=np.uint64) * np.uint64(0x2545F4914F6CDD1D)
        )
        return 6.0 * (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def decode(self, prompt: Sequence[int], count: int, sampling: Sampling) -> tuple[int, ...]:
        """Plain decoding in one process, one token at a time over the whole sequence:
        the oracle.
        """
        tokens = list(prompt)
        with np.errstate(over="ignore"):
            while len(tokens) - len(prompt) < count and len(tokens) < self.context:
                states = self.embed(tokens)
                for layer in range(self.layers):
                    seen = np.cumsum(
                        self.entries(layer, states, range(len(tokens))), dtype=np.uint64
                    )
                    states = _mix(states ^ seen)
                tokens.append(choose(self.logits(int(states[-1])), sampling, len(tokens)))
                if tokens[-1] in self.eos:
                    break
        return tuple(tokens[len(prompt) :])


class _Rows:
    """KV rows of one job: ``[layers, capacity]`` entries."""

    def __init__(self, layers: int, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self.entries = np.zeros((layers, capacity), dtype=np.uint64)
        self.sampling = sampling
        self.returns = returns


class ToyLayers:
    """Layers ``first`` to ``last`` of the toy target (from 0, end excluded), with
    slots and masks.
    """

    def __init__(self, target: ToyTarget, first: int, last: int) -> None:
        self._target = target
        self._range = range(first, last)
        self._jobs: dict[str, _Rows] = {}

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._jobs[job] = _Rows(len(self._range), capacity, sampling, returns)

    def release(self, job: str) -> None:
        self._jobs.pop(job, None)

    @property
    def jobs(self) -> tuple[str, ...]:
        """Jobs that hold rows."""
        return tuple(self._jobs)

    def forward(self, part: Part, rows: RowArray | None) -> State:
        """States of the part's rows after these layers, ``[rows]``."""
        kept = self._jobs[part.job].entries
        if part.moves is not None:
            start = part.moves.start
            sources = list(part.moves.sources)
            kept[:, start : start + len(sources)] = kept[:, sources]
        count = len(part.ids)
        end = part.held + len(part.ids)
        if rows is None:
            states = self._target.embed(part.tokens)
        else:
            states = np.asarray(rows, dtype=np.uint64)[list(part.offsets)]
        mask = tree_mask(part.parents, count)
        with np.errstate(over="ignore"):
            for at, layer in enumerate(self._range):
                kept[at, part.held : end] = self._target.entries(layer, states, part.positions)
                tree = np.where(mask, kept[at, part.context : end], np.uint64(0)).sum(
                    axis=1, dtype=np.uint64
                )
                states = _mix(states ^ (kept[at, : part.context].sum(dtype=np.uint64) + tree))
        return states

    def choose(self, part: Part, states: State) -> Choice:
        """The target's choice at the part's answered rows."""
        held = self._jobs[part.job]
        logits = [self._target.logits(int(states[row])) for row in part.answers]
        indices = [part.positions[row] + 1 for row in part.answers]
        tokens = tuple(
            choose(row, held.sampling, index) for row, index in zip(logits, indices, strict=True)
        )
        return Choice(
            tokens,
            (),
            tuple(_best(row, held.returns.top) for row in logits) if held.returns.top else (),
        )


def _best(logits: npt.NDArray[np.float64], count: int) -> tuple[tuple[int, float], ...]:
    logprobs = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-logits, kind="stable")[:count]
    return tuple(zip(order.tolist(), logprobs[order].tolist(), strict=True))


class ToyStage:
    """Stage ``stage`` of ``stages`` over near-equal blocks of the toy target's layers."""

    def __init__(self, target: ToyTarget, stage: int, stages: int) -> None:
        bounds = [target.layers * at // stages for at in range(stages + 1)]
        self.layers = ToyLayers(target, bounds[stage - 1], bounds[stage])
        self.allocate = self.layers.allocate
        self.release = self.layers.release

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        outputs = [
            self.layers.forward(part, rows) for part, rows in zip(work.parts, inputs, strict=True)
        ]
        choices = tuple(
            self.layers.choose(part, rows) for part, rows in zip(work.parts, outputs, strict=True)
        )
        return PassDone(choices), list(outputs)


class ToyDrafter:
    """Proposes the target's own choice with probability ``hit_rate``, at one of
    ``ranks`` (from 0).
    """

    wants_hidden = False

    def __init__(
        self, target: ToyTarget, hit_rate: float, ranks: Sequence[int] = (0, 0, 0, 0, 0, 1, 1, 2)
    ) -> None:
        self._target = target
        self._hit_rate = hit_rate
        self._ranks = ranks
        self._layers = ToyLayers(target, 0, target.layers)
        self.allocate = self._layers.allocate
        self.release = self._layers.release

    def run(self, work: Draft) -> DraftDone:
        part = work.part
        states = self._layers.forward(part, None)
        choices = self._layers.choose(part, states).tokens
        proposals = [
            self._propose(int(states[row]), choice, work.width)
            for row, choice in zip(part.answers, choices, strict=True)
        ]
        values = tuple(float(np.log(0.6 * 0.4**rank)) for rank in range(work.width))
        return DraftDone(tuple(proposals), tuple(values[: len(tokens)] for tokens in proposals))

    def learn(self, job: str, ids: Sequence[int], rows: RowArray) -> None:
        raise StateError("the toy drafter drafts from tokens alone")

    def _propose(self, state: int, choice: int, width: int) -> tuple[int, ...]:
        bits = int(_mix(_unsigned([state ^ 0xD1B54A32D192ED03]))[0])
        others = [
            (choice + 1 + (bits + at * 7) % (self._target.vocabulary - 1)) for at in range(width)
        ]
        tokens = list(dict.fromkeys(token % self._target.vocabulary for token in others))
        tokens += [t for t in range(self._target.vocabulary) if t not in tokens and t != choice]
        if (bits >> 20) % 10_000 < self._hit_rate * 10_000:
            rank = min(width - 1, self._ranks[(bits >> 50) % len(self._ranks)])
            tokens.insert(rank, choice)
        return tuple(tokens[:width])


class ToyMiddle:
    """A middle model: the whole toy target, which says what the target says in ``agreement`` of the
    cases.
    """

    def __init__(self, target: ToyTarget, agreement: float) -> None:
        self._target = target
        self._agreement = agreement
        self.layers = ToyLayers(target, 0, target.layers)
        self.allocate = self.layers.allocate
        self.release = self.layers.release

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        outputs = [
            self.layers.forward(part, rows) for part, rows in zip(work.parts, inputs, strict=True)
        ]
        return PassDone(tuple(map(self._choose, work.parts, outputs))), list(outputs)

    def _choose(self, part: Part, states: State) -> Choice:
        right = self.layers.choose(part, states).tokens
        agrees = [int(states[row]) % 1000 < self._agreement * 1000 for row in part.answers]
        pairs = zip(right, agrees, strict=True)
        return Choice(
            tuple(token if same else (token + 1) % self._target.vocabulary for token, same in pairs)
        )
