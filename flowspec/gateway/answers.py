"""The bodies of answers and the data of their events, in OpenAI's form."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowspec.gateway.choices import Finished, TextPiece
from flowspec.gateway.logprobs import chat_logprobs, text_logprobs

Body = dict[str, object]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What all parts of one answer share. ``chat``: of a chat, else of a completion.

    ``lossy``: the mode, if the text may differ from the model's own; empty: it is exact.
    ``logprobs``: those of its tokens are wanted.
    """

    model: str
    fingerprint: str
    chat: bool
    lossy: str = ""
    logprobs: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def _head(self, kind: str) -> Body:
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            **({"lossy": self.lossy} if self.lossy else {}),
        }

    def whole(self, said: Sequence[TextPiece], ends: Sequence[Finished], usage: Body) -> Body:
        """The body of an answer that is not streamed; ``said`` and ``ends`` by choice."""
        choices = [self._choice(piece, end.reason) for piece, end in zip(said, ends, strict=True)]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage}

    def _choice(self, piece: TextPiece, reason: str) -> Body:
        said: Body = (
            {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
            if self.chat
            else {"text": piece.text}
        )
        return _part(piece.index, said, reason, self._logprobs(piece))

    def _logprobs(self, piece: TextPiece) -> Body | None:
        if not self.logprobs:
            return None
        return chat_logprobs(piece.tokens) if self.chat else text_logprobs(piece.tokens)

    # ---- events ------------------------------------------------------------------------------

    def _event(self, choices: list[Body]) -> Body:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices}

    def begun(self, index: int) -> Body:
        """The event with which a choice of a chat begins."""
        delta = {"role": "assistant", "content": ""}
        return self._event([_part(index, {"delta": delta})])

    def piece(self, piece: TextPiece) -> Body:
        """The event of a piece of text."""
        said: Body = {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
        return self._event([_part(piece.index, said, logprobs=self._logprobs(piece))])

    def ended(self, end: Finished) -> Body:
        """The event of a choice's end."""
        said: Body = {"delta": {}} if self.chat else {"text": ""}
        return self._event([_part(end.index, said, end.reason)])

    def used(self, usage: Body) -> Body:
        """The event of the usage, the last one."""
        return {**self._event([]), "usage": usage}


def _part(index: int, said: Body, reason: str | None = None, logprobs: Body | None = None) -> Body:
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}


def usage_of(ends: Sequence[Finished], choices: int) -> Body:
    """The usage of an answer; ``choices``: how many there are of each prompt, which counts once.

    The choices of a prompt run at once, in any order: the one with the fewest rows kept is the one
    that computed the prompt for the others.
    """
    prompt = sum(end.prompt_tokens for end in ends[::choices])
    by_prompt = [ends[first : first + choices] for first in range(0, len(ends), choices)]
    cached = sum(min(end.cached for end in same) for same in by_prompt)
    tokens = sum(end.tokens for end in ends)
    accepted = [end.accepted for end in ends]
    known = None if None in accepted else sum(filter(None, accepted))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": known,
            "reasoning_tokens": 0,
        },
    }
