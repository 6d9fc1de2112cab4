"""A toy target and drafter on integers: exact and fast; any error in a mask changes the text.

A row's state is a 64-bit integer. Each layer sums a hash of every row that the row attends to and
mixes the sum into the state, so one row too many, one missing or one stale slot leads to another
state and another token. Logits are a hash of the final state. The drafter runs the same layers, so
it can compute the target's choice; it proposes it with probability ``hit_rate`` and otherwise
leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Choice, Draft, DraftDone, Kept, Part, Pass, PassDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling, choose
from flowspec.errors import StateError
from flowspec.model.base import DraftsAlone, RowArray
from flowspec.model.rows.masks import tree_mask
from flowspec.model.rows.placement import Placement, row_store, settling

State = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1


_SHIFT = np.uint64(33)
_FACTORS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))


def _mix(x: State) -> State:
    x = x ^ (x >> _SHIFT)
    for factor in _FACTORS:
        x *= factor
        x ^= x >> _SHIFT
    return x


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

    def places(self, layers: Iterable[int], positions: Sequence[int]) -> State:
        """What ``positions`` add to rows in ``layers``, ``[layers, rows]``."""
        salts = _unsigned([layer * 0x9E3779B97F4A7C15 + 1 for layer in layers])
        return _mix(_unsigned(positions) + salts[:, np.newaxis])

    @staticmethod
    def entries(states: State, places: State) -> State:
        """The toy's keys and values in a layer: what other rows read of rows with ``states``."""
        return _mix(states ^ places)

    @lru_cache(maxsize=1 << 14)  # noqa: B019 - a value; a target and a draft ask for the same ones
    def logits(self, state: int) -> npt.NDArray[np.float64]:
        """One row of logits, ``[vocabulary]``, from a final state."""
        bits = _mix(
            np.uint64(state)
            + np.arange(self.vocabulary, dtype=np.uint64) * np.uint64(0x2545F4914F6CDD1D)
        )
        row = 6.0 * (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
        row.flags.writeable = False
        return row

    def decode(self, prompt: Sequence[int], count: int, sampling: Sampling) -> tuple[int, ...]:
        """The oracle: plain decoding in one process, over the whole sequence for each token."""
        return self._decode(tuple(prompt), count, sampling)

    @lru_cache(maxsize=1 << 12)  # noqa: B019 - a value
    def _decode(self, prompt: tuple[int, ...], count: int, sampling: Sampling) -> tuple[int, ...]:
        tokens = list(prompt)
        with np.errstate(over="ignore"):
            while len(tokens) - len(prompt) < count and len(tokens) < self.context:
                states = self.embed(tokens)
                for places in self.places(range(self.layers), range(len(tokens))):
                    seen = np.cumsum(self.entries(states, places), dtype=np.uint64)
                    states = _mix(states ^ seen)
                tokens.append(choose(self.logits(int(states[-1])), sampling, len(tokens)))
                if tokens[-1] in self.eos:
                    break
        return tuple(tokens[len(prompt) :])


class _ToyCache:
    """KV rows of one run, ``[layers, capacity]`` entries, and their layout."""

    def __init__(self, layers: int, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self.entries = np.zeros((layers, capacity), dtype=np.uint64)
        self.rows = row_store()
        self.sampling = sampling
        self.returns = returns

    def kept(self, run: RunKey, wanted: Kept) -> State:
        """A copy of the ``wanted`` rows, which are those of ``run``, ``[layers, rows]``."""
        if self.begin_pass(settling(run, wanted.pruned)).context < wanted.rows:
            raise StateError("more rows are to be kept than are context")
        return self.entries[:, : wanted.rows].copy()

    def resume(self, rows: State) -> None:
        """Begin with context ``rows``, ``[layers, rows]``."""
        held = rows.shape[1]
        self.entries[:, :held] = rows
        self.rows = row_store(held)

    def begin_pass(self, part: Part) -> Placement:
        """Apply the part's prune and make room for its rows."""
        placement = self.rows.place(part)
        if placement.moves is not None:
            start = placement.moves.start
            sources = list(placement.moves.sources)
            self.entries[:, start : start + len(sources)] = self.entries[:, sources]
        return placement


class ToyLayers:
    """Layers ``first`` to ``last`` of the toy target (from 0, end excluded), with their KV rows."""

    def __init__(self, target: ToyTarget, first: int, last: int) -> None:
        self._target = target
        self._range = range(first, last)
        self._runs: dict[RunKey, _ToyCache] = {}
        self._kept: dict[RunKey, State] = {}

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._runs[run] = _ToyCache(len(self._range), capacity, sampling, returns)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        """See ``KeepsRows``; so too below."""
        (wanted,) = caches
        if wanted.rows:
            self._kept[run] = self._runs[run].kept(run, wanted)

    def resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        (rows,) = held
        if rows:
            self._runs[run].resume(self._kept[source][:, :rows])

    def evict(self, run: RunKey) -> None:
        self._kept.pop(run, None)

    @property
    def kept(self) -> tuple[RunKey, ...]:
        """Ended runs whose rows are kept."""
        return tuple(self._kept)

    @property
    def runs(self) -> tuple[RunKey, ...]:
        """Runs that hold rows."""
        return tuple(self._runs)

    def forward(self, part: Part, rows: RowArray | None) -> State:
        """States of the part's rows after these layers, ``[rows]``."""
        cache = self._runs[part.run]
        placement = cache.begin_pass(part)
        kept = cache.entries
        context = placement.context
        end = placement.held + len(part.ids)
        if rows is None:
            states = self._target.embed(part.tokens)
        else:
            states = np.asarray(rows, dtype=np.uint64)[list(part.offsets)]
        mask = tree_mask(placement.parents, len(part.ids)).astype(np.uint64)
        sums = kept[:, :context].sum(axis=1, dtype=np.uint64)
        with np.errstate(over="ignore"):
            for at, places in enumerate(self._target.places(self._range, part.positions)):
                kept[at, placement.held : end] = self._target.entries(states, places)
                states = _mix(states ^ (sums[at] + mask @ kept[at, context:end]))
        return states

    def choose(self, part: Part, states: State) -> Choice:
        """The target's choice at the part's answered rows."""
        held = self._runs[part.run]
        logits = [self._target.logits(int(states[row])) for row in part.answers]
        indices = [part.positions[row] + 1 for row in part.answers]
        tokens = tuple(
            choose(row, held.sampling, index) for row, index in zip(logits, indices, strict=True)
        )
        return Choice(
            tokens,
            tuple(_best(*row, held.returns.top) for row in zip(logits, tokens, strict=True))
            if held.returns.top
            else (),
        )


def _best(
    logits: npt.NDArray[np.float64], chosen: int, count: int
) -> tuple[tuple[int, float], ...]:
    logprobs = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-logits, kind="stable")[:count].tolist()
    named = order if chosen in order else [*order, chosen]
    return tuple((token, float(logprobs[token])) for token in named)


class ToyStage:
    """Stage ``stage`` of ``stages`` over near-equal blocks of the toy target's layers."""

    def __init__(self, target: ToyTarget, stage: int, stages: int) -> None:
        bounds = [target.layers * at // stages for at in range(stages + 1)]
        self.layers = ToyLayers(target, bounds[stage - 1], bounds[stage])
        self.allocate = self.layers.allocate
        self.release = self.layers.release
        self.keep = self.layers.keep
        self.resume = self.layers.resume
        self.evict = self.layers.evict

    def run(self, work: Pass, inputs: Sequence[RowArray | None]) -> tuple[PassDone, list[RowArray]]:
        outputs = [
            self.layers.forward(part, rows) for part, rows in zip(work.parts, inputs, strict=True)
        ]
        choices = tuple(
            self.layers.choose(part, rows) for part, rows in zip(work.parts, outputs, strict=True)
        )
        return PassDone(choices), list(outputs)


@lru_cache(maxsize=1 << 16)  # many tests draft for one text
def _proposed(
    vocabulary: int, hit_rate: float, ranks: tuple[int, ...], state: int, choice: int, width: int
) -> tuple[int, ...]:
    """Tokens that a toy drafter proposes where the target chooses ``choice``, likeliest first."""
    bits = int(_mix(_unsigned([state ^ 0xD1B54A32D192ED03]))[0])
    others = [(choice + 1 + (bits + at * 7) % (vocabulary - 1)) for at in range(width)]
    tokens = list(dict.fromkeys(token % vocabulary for token in others))
    tokens += [token for token in range(vocabulary) if token not in tokens and token != choice]
    if (bits >> 20) % 10_000 < hit_rate * 10_000:
        tokens.insert(min(width - 1, ranks[(bits >> 50) % len(ranks)]), choice)
    return tuple(tokens[:width])


class ToyDrafter(DraftsAlone):
    """Proposes the target's choice with probability ``hit_rate``, at one of ``ranks`` (from 0)."""

    wants_hidden = False

    def __init__(
        self, target: ToyTarget, hit_rate: float, ranks: Sequence[int] = (0, 0, 0, 0, 0, 1, 1, 2)
    ) -> None:
        self._target = target
        self._hit_rate = hit_rate
        self._ranks = tuple(ranks)
        self._layers = ToyLayers(target, 0, target.layers)
        self.allocate = self._layers.allocate
        self.release = self._layers.release
        self.keep = self._layers.keep
        self.resume = self._layers.resume
        self.evict = self._layers.evict

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

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        raise StateError("the toy drafter drafts from tokens alone")

    def _propose(self, state: int, choice: int, width: int) -> tuple[int, ...]:
        vocabulary = self._target.vocabulary
        return _proposed(vocabulary, self._hit_rate, self._ranks, state, choice, width)


class ToyMiddle:
    """A middle model: the whole toy target, with the target's choice at a rate ``agreement``."""

    def __init__(self, target: ToyTarget, agreement: float) -> None:
        self._target = target
        self._agreement = agreement
        self.layers = ToyLayers(target, 0, target.layers)
        self.allocate = self.layers.allocate
        self.release = self.layers.release
        self.keep = self.layers.keep
        self.resume = self.layers.resume
        self.evict = self.layers.evict

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
