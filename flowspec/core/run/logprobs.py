"""Log-probabilities of a job's tokens: what is checked, and how it stands in the job's output.

They are those of the target's distribution before temperature, top-k and top-p. An entry of the
output has one item per token, as JSON: ``[chosen, [alternative, ...]]``, where the chosen token and
each alternative are ``[id, log-probability, bytes as hex]``, with a 1 behind them if the token is a
special one, which is no part of the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowspec.errors import ProtocolError

#: Most alternatives that a job may ask for.
MOST_ALTERNATIVES = 20
#: Stands for a probability of 0 in JSON, which has no infinity; OpenAI's.
LEAST = -9999.0

Pairs = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class TokenWritten:
    """A token as text: its bytes, and whether it is special, as the end of a text is."""

    data: bytes
    special: bool = False


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, its log-probability, and how it is written."""

    id: int
    logprob: float
    written: TokenWritten


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """An output token, and the best ones in its place, best first."""

    chosen: ScoredToken
    top: tuple[ScoredToken, ...]


def asked_pairs(logprobs: int | None) -> int:
    """How many best pairs a stage returns with every row for a job that asks for ``logprobs``."""
    return 0 if logprobs is None else max(1, logprobs)


def check_pairs(tokens: Sequence[int], top: Sequence[Pairs], count: int, vocabulary: int) -> None:
    """ProtocolError unless ``top`` has for each of ``tokens`` the pairs that were asked for.

    These are the ``count`` best ones, or all of the ``vocabulary``, and the chosen one's if it is
    not among them.
    """
    if len(top) != len(tokens):
        raise ProtocolError("an answer lacks the log-probabilities that were asked for")
    least = min(count, vocabulary)
    for token, pairs in zip(tokens, top, strict=True):
        known = {known for known, _ in pairs}
        sound = token in known and all(0 <= one < vocabulary for one in known)
        if not sound or len(known) != len(pairs) or not least <= len(pairs) <= count + 1:
            raise ProtocolError("an answer has the log-probabilities of other tokens")
        if not all(logprob <= 0 for _, logprob in pairs):
            raise ProtocolError("an answer has a log-probability above 0")


def scored(
    token: int, pairs: Pairs, count: int, write: Callable[[int], TokenWritten]
) -> TokenLogprobs:
    """The log-probabilities of ``token`` and of the ``count`` best ones, from checked ``pairs``."""
    by_rank = [ScoredToken(one, max(value, LEAST), write(one)) for one, value in pairs]
    chosen = next(one for one in by_rank if one.id == token)
    return TokenLogprobs(chosen, tuple(by_rank[:count]))


def logprobs_text(found: Sequence[TokenLogprobs]) -> str:
    """``found`` as in the job's output."""
    items = [[_item(one.chosen), [*map(_item, one.top)]] for one in found]
    return json.dumps(items, separators=(",", ":"))


def read_logprobs(text: str) -> tuple[TokenLogprobs, ...]:
    """The inverse of ``logprobs_text``; ValueError or TypeError if ``text`` is none of its."""
    return tuple(
        TokenLogprobs(_read(chosen), tuple(map(_read, top))) for chosen, top in json.loads(text)
    )


def _item(one: ScoredToken) -> list[object]:
    special = [1] if one.written.special else []
    return [one.id, one.logprob, one.written.data.hex(), *special]


def _read(item: list[object]) -> ScoredToken:
    token, logprob, data, *special = item
    if not isinstance(token, int) or not isinstance(logprob, float | int):
        raise TypeError
    return ScoredToken(token, float(logprob), TokenWritten(bytes.fromhex(str(data)), bool(special)))
