"""Log-probabilities in OpenAI's two forms, along with the text that is passed on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from flowspec.core.run.logprobs import ScoredToken, TokenLogprobs, TokenWritten


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token of an answer; its text begins at character ``start`` of the answer."""

    start: int
    token: TokenLogprobs


class TokensOfText:
    """Passes tokens on with the text to which they belong, which may be held back or cut.

    A token goes with the text if its own text begins in it; one that brings none with the text
    behind it. Special tokens, which are no part of the text, are left out.
    """

    def __init__(self) -> None:
        self._waiting: deque[PlacedToken] = deque()
        self._come = 0
        self._passed = 0

    def push(self, tokens: Sequence[TokenLogprobs], sizes: Sequence[int]) -> None:
        """Take the next tokens of the answer, and the characters that each added to the text."""
        for token, size in zip(tokens, sizes, strict=True):
            if not token.chosen.written.special:
                self._waiting.append(PlacedToken(self._come, token))
            self._come += size

    def passed(self, text: str) -> tuple[PlacedToken, ...]:
        """The tokens that go with ``text``, which is passed on now."""
        self._passed += len(text)
        found = []
        while self._waiting and self._waiting[0].start < self._passed:
            found.append(self._waiting.popleft())
        return tuple(found)

    def rest(self) -> tuple[PlacedToken, ...]:
        """Those that are left at the end of a text that was not cut."""
        found = tuple(self._waiting)
        self._waiting.clear()
        return found


def chat_logprobs(tokens: Sequence[PlacedToken]) -> dict[str, object]:
    """The form of chats."""
    content = [
        {
            **_entry(one.token.chosen),
            "top_logprobs": [_entry(other) for other in one.token.top],
        }
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[PlacedToken]) -> dict[str, object]:
    """The form of completions; the chosen token is added to the best ones."""
    return {
        "tokens": [name_of_token(one.token.chosen.written) for one in tokens],
        "token_logprobs": [one.token.chosen.logprob for one in tokens],
        "top_logprobs": [
            {
                name_of_token(other.written): other.logprob
                for other in (one.token.chosen, *one.token.top)
            }
            for one in tokens
        ],
        "text_offset": [one.start for one in tokens],
    }


def _entry(one: ScoredToken) -> dict[str, object]:
    return {
        "token": name_of_token(one.written),
        "logprob": one.logprob,
        "bytes": list(one.written.data),
    }


def name_of_token(written: TokenWritten) -> str:
    """A token as text; its bytes in hexadecimal if they are no whole characters."""
    try:
        return written.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written.data)
