"""A drafter without a model: what followed the last few tokens when they were seen before.

Every answered row ends a text, context and its path in the tree. Where that text's last
``longest`` tokens, or fewer, occurred in it before, the tokens that followed are proposed.
Source: prompt lookup decoding (the n-gram source of ``algorithms.md`` 4.1), with a tree's path
as part of the text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np

from flowspec.core.protocol.machine import Draft, DraftDone, Part
from flowspec.core.protocol.messages import Returns
from flowspec.core.run.sampling import Sampling, gumbel
from flowspec.errors import ConfigError, StateError
from flowspec.model.base import RowArray

#: Occurrences of one n-gram that are looked at, the most recent ones: a frequent token has no end
#: of them.
RECENT = 64
#: Expected acceptance of a row's first candidate by the length of its match, from 1; longer ones
#: share the last. Between what greedy text (it loops) and sampled text of a small target showed.
SHARES = (0.25, 0.5, 0.6, 0.7)
#: Every later candidate takes this part of its share of what those before it left: where the first
#: is wrong, mostly the match is.
LATER = 0.3

#: Candidates best first: token -> value.
_Candidates = dict[int, float]


class _SeenText:
    """The tokens of one job by slot, and where in the context every n-gram was followed by
    something.
    """

    def __init__(self, sampling: Sampling, longest: int) -> None:
        self.sampling = sampling
        self._longest = longest
        self._tokens: list[int] = []
        self._context = 0
        self._followed: dict[
            tuple[int, ...], list[int]
        ] = {}  # n-gram -> slots right behind it, ascending

    def carry_out(self, part: Part) -> None:
        """Move and add rows as the part's plan says, and index what has become context."""
        tokens = self._tokens
        if part.moves is not None:
            start = part.moves.start
            sources = part.moves.sources
            tokens[start : start + len(sources)] = [tokens[source] for source in sources]
        del tokens[part.held :]
        tokens += part.tokens
        for slot in range(self._context, part.context):
            for first in range(max(0, slot - self._longest), slot):
                self._followed.setdefault(tuple(tokens[first:slot]), []).append(slot)
        self._context = part.context

    def path(self, part: Part, row: int) -> list[int]:
        """Tokens behind the context up to the part's row ``row``."""
        at = part.held - part.context + row
        found = []
        while at >= 0:
            found.append(self._tokens[part.context + at])
            at = part.parents[at]
        return found[::-1]

    def candidates(self, path: Sequence[int], enough: int | None) -> _Candidates:
        """Distinct followers of the text that ends with ``path``: of longer matches first, of one
        length the more frequent first, then the more recent. Shorter matches are left out once
        there are ``enough``.
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
        """By length, the longest first: the tokens that followed, the most recent first."""
        first = min(self._context, self._longest)
        tail = [*self._tokens[self._context - first : self._context], *path]
        inside = [
            (_agreeing(tail, at, self._longest), tail[at])
            for at in range(len(tail) - 1, first - 1, -1)
        ]
        for length in range(min(self._longest, len(tail)), 0, -1):
            slots = self._followed.get(tuple(tail[-length:]), ())
            in_path = [token for agreeing, token in inside if agreeing >= length]
            yield (
                length,
                islice(chain(in_path, (self._tokens[slot] for slot in reversed(slots))), RECENT),
            )


def _agreeing(tail: Sequence[int], at: int, most: int) -> int:
    """How many tokens before ``at`` are those ``tail`` ends with, up to ``most``."""
    count = 0
    while count < min(at, most) and tail[at - 1 - count] == tail[-1 - count]:
        count += 1
    return count


class NgramDrafter:
    """Proposes what followed the longest suffixes of a row's text, ``longest`` tokens at most, down
    to one.

    A value is the log of a prior by matched length and rank: a candidate takes the share of its
    match's length (``SHARES``; times ``LATER`` unless it is the first) of what the candidates
    before it left, so a row's acceptances fall with rank and add up to less than 1. A coupled
    draft adds the job's noise to the values and ranks anew. A row has as many candidates as its
    text gives: fewer than ``work.width``, or none.
    """

    wants_hidden = False

    def __init__(self, vocabulary: int, longest: int = 4) -> None:
        """``vocabulary``: token ids lie below it. ConfigError unless both are at least 1."""
        if vocabulary < 1 or longest < 1:
            raise ConfigError(
                f"n-grams of {longest} over {vocabulary} tokens; expected at least 1 of both"
            )
        self._vocabulary = vocabulary
        self._longest = longest
        self._jobs: dict[str, _SeenText] = {}

    def allocate(self, job: str, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._jobs[job] = _SeenText(sampling, self._longest)

    def release(self, job: str) -> None:
        self._jobs.pop(job, None)

    def run(self, work: Draft) -> DraftDone:
        """As ``DraftExecutor.run``; StateError if a token is not of the vocabulary."""
        part = work.part
        if part.tokens and not 0 <= min(part.tokens) <= max(part.tokens) < self._vocabulary:
            raise StateError(
                f"job {part.job} has tokens outside the vocabulary of {self._vocabulary}"
            )
        job = self._jobs[part.job]
        job.carry_out(part)
        rows = [self._propose(job, work, row) for row in part.answers]
        return DraftDone(
            tuple(tuple(row) for row in rows), tuple(tuple(row.values()) for row in rows)
        )

    def learn(self, job: str, ids: Sequence[int], rows: RowArray) -> None:
        raise StateError("an n-gram drafter drafts from tokens alone")

    @staticmethod
    def _propose(job: _SeenText, work: Draft, row: int) -> _Candidates:
        path = job.path(work.part, row)
        if not work.coupled:
            return dict(islice(job.candidates(path, work.width).items(), work.width))
        # The noise may lift any candidate, so all of them take part.
        found = job.candidates(path, None)
        return _perturbed(found, job.sampling.seed, work.part.positions[row] + 1, work.width)


def _perturbed(found: _Candidates, seed: int, index: int, width: int) -> _Candidates:
    """The ``width`` best by value plus the target's noise at absolute ``index``, as gaps to the
    best one.
    """
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
