"""Performers of the roles: layers for a stage, a drafter and a tokenizer for the draft worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from flowspec.core.protocol.machine import Allocate, Commit, Keep, Learn, ScoredCommit
from flowspec.core.protocol.row_types import ROW_TYPES, to_float32
from flowspec.core.protocol.work import (
    Choice,
    DraftPass,
    Encode,
    EncodeDone,
    EncodeTurns,
    Encoding,
    Part,
    Pass,
    PassDone,
    Work,
    WorkFailed,
    WorkResult,
)
from flowspec.core.run.key import RunKey
from flowspec.core.run.logprobs import TokenWritten, logprobs_text, scored
from flowspec.core.run.turns import Turn
from flowspec.errors import FlowSpecError, StateError, WireError
from flowspec.model.base import (
    DraftExecutor,
    RowArray,
    StageExecutor,
    allocate,
    drafted,
    evict,
    keeping,
)
from flowspec.model.layers.taps import elements
from flowspec.transport.base import CommitText, Link

Executor = TypeVar("Executor", bound=StageExecutor | DraftExecutor)


class Encoder(Protocol):
    """Text to ids and back; ``model.text.tokenizer.Tokenizer`` is one."""

    def encode(self, prompt: str, *, raw: bool) -> tuple[int, ...]: ...

    def encode_turns(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """By the chat template; JobError if there is none, or it refuses ``turns``."""
        ...

    def stream(self, prompt: Sequence[int]) -> TextPieces:
        """The text behind ``prompt``."""
        ...


def encoded(encoder: Encoder, work: Encoding) -> EncodeDone:
    """The prompt of ``work`` as ids; JobError if its chat template refuses it."""
    if isinstance(work, EncodeTurns):
        return EncodeDone(encoder.encode_turns(work.turns))
    return EncodeDone(encoder.encode(work.prompt, raw=work.raw))


class TextPieces(Protocol):
    """A growing text, returned as far as no further token can change it.

    ``length``: characters of it so far, with those that may still change.
    """

    @property
    def length(self) -> int: ...

    def token(self, token: int) -> TokenWritten:
        """How ``token`` is written behind what was pushed."""
        ...

    def push(self, ids: tuple[int, ...], *, last: bool = False) -> str: ...


class _Performer(Generic[Executor]):
    """What both have of their executor's rows: those of runs, and kept ones of ended runs."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._held: set[RunKey] = set()  # runs with rows
        self._kept: set[RunKey] = set()  # runs of which rows are kept

    def allocate(self, output: Allocate) -> None:
        allocate(self._executor, output)
        self._held.add(output.run)

    def keep(self, output: Keep) -> None:
        keeping(self._executor).keep(output.run, output.caches)
        self._kept.add(output.run)

    def evict(self, run: RunKey) -> None:
        evict(self._executor, run)
        self._kept.discard(run)

    def release(self, run: RunKey) -> None:
        self._executor.release(run)
        self._held.discard(run)

    def drop(self) -> None:
        """Free the rows of all runs, and all that is kept."""
        for run in tuple(self._held):
            self.release(run)
        for run in tuple(self._kept):
            self.evict(run)


class VerifyPerformer(_Performer[StageExecutor]):
    """A verify stage: rows in, rows out.

    ``row_shape``, ``row_types``: shape and possible types of incoming rows; others are refused.
    By default a row may have any type that a stage computes in: stages may differ in precision.
    ``beside``: values of a drafter's sum beside each row of a run that returns hidden rows
    (``model.layers.taps``).
    """

    def __init__(
        self,
        executor: StageExecutor,
        row_shape: tuple[int, ...],
        row_types: Sequence[npt.DTypeLike] = tuple(ROW_TYPES.values()),
        beside: int = 0,
    ) -> None:
        super().__init__(executor)
        self._row_shape = row_shape
        self._row_types = tuple(np.dtype(kind) for kind in row_types)
        self._beside = beside
        self._returning: set[RunKey] = set()  # runs that return hidden rows
        self._outputs: list[RowArray] = []

    def compute(self, work: Work, link: Link) -> WorkResult:
        if not isinstance(work, Pass):
            raise StateError(f"a verify stage cannot do {type(work).__name__}")
        if len(work.parts) == 1:
            result, self._outputs = self._executor.run(work, [self._input(work.parts[0], link)])
            return result
        return self._compute_several(work.parts, link)

    def _compute_several(self, parts: Sequence[Part], link: Link) -> WorkResult:
        """A pass over several runs' parts; what is wrong with one's input fails that one alone."""
        inputs: dict[int, RowArray | None] = {}
        choices: dict[int, Choice | WorkFailed] = {}
        for at, part in enumerate(parts):
            try:
                inputs[at] = self._input(part, link)
            except FlowSpecError as error:
                choices[at] = WorkFailed(str(error))
        self._outputs = [np.empty(0)] * len(parts)
        if inputs:
            sound = Pass(tuple(parts[at] for at in inputs))
            done, outputs = self._executor.run(sound, list(inputs.values()))
            for at, choice, rows in zip(inputs, done.choices, outputs, strict=True):
                choices[at] = choice
                self._outputs[at] = rows
        return PassDone(tuple(choices[at] for at in range(len(parts))))

    def _input(self, part: Part, link: Link) -> RowArray | None:
        if part.tokens:
            return None
        return self._checked(link.take_rows(part.run, part.segment), part)

    def _checked(self, rows: RowArray, part: Part) -> RowArray:
        shape = self._shape(part.run, rows.dtype)
        if (
            rows.dtype not in self._row_types
            or rows.ndim != len(shape) + 1
            or rows.shape[1:] != shape
        ):
            kinds = " or ".join(map(str, self._row_types))
            wanted = f"[rows, {', '.join(map(str, shape))}] of {kinds}"
            raise WireError(
                f"rows of shape {list(rows.shape)} of {rows.dtype} arrived; expected {wanted}"
            )
        last = max(part.offsets)
        if rows.shape[0] <= last:
            raise WireError(f"{rows.shape[0]} rows arrived for a segment of at least {last + 1}")
        return rows

    def _shape(self, run: RunKey, kind: np.dtype[Any]) -> tuple[int, ...]:
        """The shape of a row of ``run`` in type ``kind``, with what lies beside it."""
        if not self._beside or run not in self._returning or kind not in self._row_types:
            return self._row_shape
        return (self._row_shape[0] + elements(self._beside, kind),)

    def allocate(self, output: Allocate) -> None:
        if output.returns.hidden:
            self._returning.add(output.run)
        super().allocate(output)

    def learn(self, output: Learn, link: Link) -> None:
        raise StateError("a verify stage learns nothing")

    def release(self, run: RunKey) -> None:
        super().release(run)
        self._returning.discard(run)

    def rows(self, part: int, offsets: Sequence[int]) -> RowArray:
        rows = self._outputs[part]
        return rows if len(offsets) == len(rows) else rows[list(offsets)]

    def written(self, commit: Commit) -> CommitText:
        raise StateError("a verify stage commits nothing")


class DraftPerformer(_Performer[DraftExecutor]):
    """The draft worker: text to ids, drafting, ids to text.

    ``hidden_size``: values of a row that comes with an answer for a drafter that wants them.
    """

    def __init__(self, executor: DraftExecutor, encoder: Encoder, hidden_size: int = 0) -> None:
        super().__init__(executor)
        self._encoder = encoder
        self._hidden_size = hidden_size
        self._texts: dict[RunKey, TextPieces] = {}

    def compute(self, work: Work, link: Link) -> WorkResult:
        match work:
            case Encode() | EncodeTurns():
                return encoded(self._encoder, work)
            case DraftPass():
                return drafted(self._executor, work)
            case _:
                raise StateError("the draft worker runs no stage's pass")

    def allocate(self, output: Allocate) -> None:
        super().allocate(output)
        pieces = self._texts[output.run] = self._encoder.stream(output.prompt)
        for tokens in output.committed:
            pieces.push(tokens)  # as they were: what a commit ended in may be half a character

    def learn(self, output: Learn, link: Link) -> None:
        rows = link.take_rows(output.run, output.segment)
        if rows.dtype not in ROW_TYPES.values() or rows.shape != (
            len(output.ids),
            self._hidden_size,
        ):
            wanted = f"[{len(output.ids)}, {self._hidden_size}] of floats"
            raise WireError(
                f"hidden rows of shape {list(rows.shape)} of {rows.dtype} arrived; expected "
                f"{wanted}"
            )
        self._executor.learn(output.run, output.ids, to_float32(rows))

    def release(self, run: RunKey) -> None:
        super().release(run)
        self._texts.pop(run, None)

    def rows(self, part: int, offsets: Sequence[int]) -> RowArray:
        raise StateError("the draft worker sends no rows")

    def written(self, commit: Commit) -> CommitText:
        stream = self._texts[commit.run]
        text = ""
        lengths = []
        found = []
        for at, token in enumerate(commit.tokens):
            if isinstance(commit, ScoredCommit):
                found.append(scored(token, commit.top[at], commit.alternatives, stream.token))
            before = stream.length
            last = bool(commit.finish) and at + 1 == len(commit.tokens)
            text += stream.push((token,), last=last)
            lengths.append(stream.length - before)
        logprobs = logprobs_text(found) if isinstance(commit, ScoredCommit) else ""
        return CommitText(commit, text, tuple(lengths), logprobs)
