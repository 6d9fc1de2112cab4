"""A scripted case: the target's text, a drafter's guesses and all costs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Pairs of a time in seconds and the number of tokens committed then.
Commits = list[tuple[float, int]]
#: By option name: a number, or a word such as "on".
Options = Mapping[str, int | str]
#: A path's state before its first token.
EMPTY_PATH = 0
#: Log-probabilities are multiples of this, so that sums are exact and equal scores are equal.
GRAIN = 1 / 16


def follow_path(state: int, token: int) -> int:
    """The state of a path that continues the path of ``state`` by ``token``."""
    return hash((state, token))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a pass of each stage, of a draft pass, and of a message on any link.

    ``per_growth``: a growth's first draft pass costs ``draft``, its further ones nothing.
    """

    stages: tuple[float, ...]
    draft: float
    link: float = 0.0
    per_growth: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A text of ``prompt`` + ``budget`` tokens, and a drafter that guesses by the whole path.

    At a true path the target's token is among the drafter's candidates with the probability
    ``hits``, at rank 0 more often than later. ``candidates``: how many a path has; if ``uneven``,
    some have fewer, and a few none.
    """

    seed: int
    costs: Costs
    budget: int = 24
    prompt: int = 2
    hits: float = 0.8
    candidates: int = 4
    vocabulary: int = 40
    uneven: bool = True
    text: tuple[int, ...] = ()
    _next: dict[int, int] = field(default_factory=dict, repr=False)
    _proposals: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        text = tuple(rng.randrange(self.vocabulary) for _ in range(self.prompt + self.budget))
        object.__setattr__(self, "text", text)
        state = EMPTY_PATH
        for token, after in itertools.pairwise(text):
            state = follow_path(state, token)
            self._next[state] = after

    def propose(self, state: int) -> tuple[tuple[int, float], ...]:
        """Tokens after the path of ``state`` and their log-probabilities, best first."""
        if state not in self._proposals:
            self._proposals[state] = self._draw(random.Random(self.seed * 1_000_003 + state))
            true = self._next.get(state)
            if true is not None:
                self._proposals[state] = self._with(true, self._proposals[state], state)
        return self._proposals[state]

    def _draw(self, rng: random.Random) -> tuple[tuple[int, float], ...]:
        fewer = (max(1, self.candidates - 1), 1, 0) if self.uneven else ()
        count = rng.choice((*[self.candidates] * 8, *fewer))
        tokens = rng.sample(range(self.vocabulary), count)
        steps, value = [], 0
        for _ in range(count):
            value += rng.choice((0, 0, 1, 3, 8, 20))
            steps.append(-value * GRAIN)
        return tuple(zip(tokens, steps, strict=True))

    def _with(
        self, true: int, drawn: tuple[tuple[int, float], ...], state: int
    ) -> tuple[tuple[int, float], ...]:
        """The candidates with the target's token among them, or surely not."""
        rng = random.Random(self.seed * 1_000_033 + state)
        tokens = [token if token != true else self.vocabulary for token, _ in drawn]
        if tokens and rng.random() < self.hits:
            rank = min(rng.choice((0, 0, 0, 0, 1, 1, 2, 3)), len(tokens) - 1)
            tokens[rank] = true
        return tuple((token, value) for token, (_, value) in zip(tokens, drawn, strict=True))
