"""A drafter without a model: proposes what followed earlier occurrences of the last tokens.

The text of an answered row is the context and the row's path in the tree. Where the last
``longest`` tokens of this text, or fewer, occurred in it before, the tokens that followed are
proposed. Source: prompt lookup decoding (docs/algorithms.md#draft-sources), with the tree path as
part of the text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import numpy as np

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Kept, Part
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling, gumbel
from flowspec.errors import ConfigError, StateError
from flowspec.model.base import DraftsAlone, RowArray
from flowspec.model.rows.placement import settling

#: Most recent occurrences of an n-gram that count; bounds the work for frequent tokens.
RECENT = 64
#: Expected acceptance of a row's first candidate by match length, from 1; the last entry serves all
#: longer matches. Chosen between the rates of greedy text, which loops, and of sampled text, both
#: of a small target.
SHARES = (0.25, 0.5, 0.6, 0.7)
#: Factor on the share of every candidate after the first: if the first is wrong, so is usually the
#: match.
LATER = 0.3

#: Candidates best first: token -> value.
_Candidates = dict[int, float]


class _SeenText:
    """One run's tokens: context, tree rows, and an index of the n-grams in the context."""

    def __init__(self, sampling: Sampling, longest: int) -> None:
        self.sampling = sampling
        self._longest = longest
        self._context: list[int] = []
        self._tree: dict[int, tuple[int, int]] = {}  # id -> token, the parent's id
        # n-gram -> the context's indices right after its occurrences, ascending
        self._followed: dict[tuple[int, ...], list[int]] = {}

    def begin_pass(self, part: Part) -> None:
        """Apply the part's prune and add its rows."""
        if part.pruned is not None:
            self._extend(self._tree[node][0] for node in part.pruned.accepted)
            self._tree = {node: self._tree[node] for node in part.pruned.live}
        rows = zip(part.ids, part.tokens, part.parents, strict=True)
        self._extend(token for _, token, _ in islice(rows, part.context))
        self._tree.update((node, (token, parent)) for node, token, parent in rows)

    def _extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens`` to the context and index the n-grams that end before each."""
        context = self._context
        for token in tokens:
            place = len(context)
            for first in range(max(0, place - self._longest), place):
                self._followed.setdefault(tuple(context[first:place]), []).append(place)
            context.append(token)

    def kept(self, run: RunKey, wanted: Kept) -> tuple[int, ...]:
        """The tokens of the ``wanted`` rows, which are those of ``run``."""
        self.begin_pass(settling(run, wanted.pruned))
        return tuple(self._context[: wanted.rows])

    def resume(self, tokens: Sequence[int]) -> None:
        """Begin with context ``tokens``."""
        self._extend(tokens)

    def path(self, node: int) -> list[int]:
        """Tokens of the tree path from the context to row ``node``, which is included."""
        found = []
        while node in self._tree:
            token, node = self._tree[node]
            found.append(token)
        return found[::-1]

    def candidates(self, path: Sequence[int], enough: int | None) -> _Candidates:
        """Distinct tokens that followed suffixes of the text that ends with ``path``.

        Longer matches come first; within a length the more frequent tokens, then the more recent.
        Shorter matches are skipped once there are ``enough``; None: no match is skipped.
        """
        found: _Candidates = {}
        left = 0.0
        for length, followers in self._matches(path):
            share = SHARES[min(length, len(SHARES)) - 1]
            for token, _ in Counter(followers).most_common():
                if token not in found:
                    taken = share * LATER if found else share
                    found[token] = left + math.log(taken)
                    left += math.log1p(-taken)
            if enough is not None and len(found) >= enough:
                break
        return found

    def _matches(self, path: Sequence[int]) -> Iterator[tuple[int, Iterator[int]]]:
        """Per match length, longest first: the tokens that followed, most recent first."""
        first = min(len(self._context), self._longest)
        tail = [*self._context[len(self._context) - first :], *path]
        inside = [
            (_agreeing(tail, at, self._longest), tail[at])
            for at in range(len(tail) - 1, first - 1, -1)
        ]
        for length in range(min(self._longest, len(tail)), 0, -1):
            places = self._followed.get(tuple(tail[-length:]), ())
            in_path = [token for agreeing, token in inside if agreeing >= length]
            yield (
                length,
                islice(
                    chain(in_path, (self._context[place] for place in reversed(places))), RECENT
                ),
            )


def _agreeing(tail: Sequence[int], at: int, most: int) -> int:
    """Length of the common suffix of ``tail[:at]`` and ``tail``, at most ``most``."""
    count = 0
    while count < min(at, most) and tail[at - 1 - count] == tail[-1 - count]:
        count += 1
    return count


class NgramDrafter(DraftsAlone):
    """Proposes the tokens that followed suffixes of a row's text, of ``longest`` tokens down to 1.

    A value is the log of a prior by match length and rank. Of the probability left by the
    candidates before it, a candidate gets the share of its match length (``SHARES``; times
    ``LATER`` unless it is the first), so the acceptances of a row decrease with rank and add up to
    less than 1. A coupled draft adds the job's noise to the values and ranks by the sums. A row
    may have fewer than ``work.width`` candidates, or none.
    """

    wants_hidden = False

    def __init__(self, vocabulary: int, longest: int = 4) -> None:
        """``vocabulary``: number of token ids. ConfigError unless both are at least 1."""
        if vocabulary < 1 or longest < 1:
            raise ConfigError(
                f"n-grams of {longest} over {vocabulary} tokens; expected at least 1 of both"
            )
        self._vocabulary = vocabulary
        self._longest = longest
        self._runs: dict[RunKey, _SeenText] = {}
        self._kept: dict[RunKey, tuple[int, ...]] = {}

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._runs[run] = _SeenText(sampling, self._longest)

    def release(self, run: RunKey) -> None:
        self._runs.pop(run, None)

    def keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        """See ``KeepsRows``; so too below. What is kept are the tokens."""
        (wanted,) = caches
        if wanted.rows:
            self._kept[run] = self._runs[run].kept(run, wanted)

    def resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        (rows,) = held
        known = self._kept.get(source, ())
        if len(known) < rows:
            raise StateError(f"{rows} tokens of {source} are not kept here")
        self._runs[run].resume(known[:rows])

    def evict(self, run: RunKey) -> None:
        self._kept.pop(run, None)

    def run(self, work: Draft) -> DraftDone:
        """As ``DraftExecutor.run``; StateError for a token outside the vocabulary."""
        part = work.part
        if part.tokens and not 0 <= min(part.tokens) <= max(part.tokens) < self._vocabulary:
            raise StateError(
                f"job {part.run.job} has tokens outside the vocabulary of {self._vocabulary}"
            )
        seen = self._runs[part.run]
        seen.begin_pass(part)
        rows = [self._propose(seen, work, row) for row in part.answers]
        return DraftDone(
            tuple(tuple(row) for row in rows), tuple(tuple(row.values()) for row in rows)
        )

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        raise StateError("an n-gram drafter drafts from tokens alone")

    @staticmethod
    def _propose(seen: _SeenText, work: Draft, row: int) -> _Candidates:
        path = seen.path(work.part.ids[row])
        if not work.coupled:
            return dict(islice(seen.candidates(path, work.width).items(), work.width))
        # The noise can put any candidate first, so none is cut before it is added.
        found = seen.candidates(path, None)
        return _perturbed(found, seen.sampling.seed, work.part.positions[row] + 1, work.width)


def _perturbed(found: _Candidates, seed: int, index: int, width: int) -> _Candidates:
    """The ``width`` best by value plus the noise at absolute ``index``, with gaps to the best."""
    tokens = np.fromiter(found, np.int64, len(found))
    scores = np.fromiter(found.values(), np.float64, len(found)) + gumbel(seed, index, tokens)
    best = np.argsort(-scores, kind="stable")[:width]
    return dict(
        zip(
            tokens[best].tolist(),
            (scores[best] - scores.max(initial=-np.inf)).tolist(),
            strict=True,
        )
    )
