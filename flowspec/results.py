"""What a client has of a job: pieces of its output, and its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar, cast

from flowspec.core.protocol.causes import FAILED
from flowspec.core.run.committed import committed_ids, unreadable_output
from flowspec.core.run.fields import DEFAULT_MAX_NEW_TOKENS
from flowspec.core.run.logprobs import TokenLogprobs, read_logprobs
from flowspec.core.session.stats import unmeasured
from flowspec.errors import GapError, JobFailed, StateError

T = TypeVar("T")
#: What reading another one's data may raise.
_UNREADABLE = (LookupError, TypeError, ValueError, RecursionError)


class RowCounts(TypedDict):
    """Rows by fate, summed over the stages."""

    useful: int | None
    wasted: int | None
    void: int | None


class Stats(TypedDict, total=False):
    """The figures of a job, docs/stats.md; None: not measured. Times are in seconds."""

    tokens: int
    cached_tokens: int | None
    queue_seconds: float | None
    ttft_seconds: float | None
    decode_seconds: float | None
    tokens_per_second: float | None
    rounds: int | None
    segments: int | None
    steps: float | None
    tokens_per_step: float | None
    tokens_per_round: float | None
    hit_rate: float | None
    rows: RowCounts
    stage_busy: list[float | None]
    stage_passes: list[int | None]
    draft_passes: int | None
    draft_seconds: float | None
    repeated_4grams: float
    runs_on: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    shares: list[dict[str, int]]
    lossy: str
    resumed_tokens: int


def reported(value: T | None) -> T:
    """A figure that an ended job reports; StateError if it was not measured."""
    if value is None:
        raise StateError("the job did not report this figure: it was cancelled")
    return value


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a job's output. ``text`` ends on a whole character and may be empty.

    ``sizes``: the characters that each token adds to the text of the whole output; of a character
    whose bytes are spread over several tokens the last one adds it, though it may come with a later
    piece. ``logprobs``: of each token; empty unless the job asked
    for them.
    """

    text: str
    token_ids: tuple[int, ...]
    sizes: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a job. ``finish_reason``: eos, length or cancelled.

    ``token_ids``: the generated ones, of which ``max_new_tokens`` were asked for; None: the job is
    not known any more. ``logprobs``: of each of them; empty unless asked for.
    """

    job: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    strategy: str
    finish_reason: str
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] = ()
    max_new_tokens: int | None = None


@dataclass(slots=True)
class OutputSoFar:
    """A job's output, from the entries of its stream in their order.

    ``job``: its id, another one once the output says that this submission repeats an earlier one.
    ``error``: why the job failed, one line, and the ``cause``, of ``transport.base``; empty: it has
    not.
    """

    job: str
    cursor: str = "0"
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str = ""
    cause: str = ""
    end: Mapping[str, str] | None = None

    @property
    def ended(self) -> bool:
        """Whether the end of the output has been read."""
        return self.end is not None

    @property
    def chunk(self) -> Chunk | None:
        """All of it as one piece; None: there is nothing yet."""
        if not self.texts and not self.token_ids:
            return None
        ids, sizes = tuple(self.token_ids), tuple(self.sizes)
        return Chunk("".join(self.texts), ids, sizes, tuple(self.logprobs))

    def take(self, cursor: str, fields: Mapping[str, str]) -> Chunk | None:
        """Take the entry at ``cursor``; the piece of output in it, if there is one.

        GapError if tokens are missing before it; one that was taken before is passed over.
        """
        self.cursor = cursor
        match fields.get("kind"):
            case "tokens":
                return self._take_tokens(fields)
            case "error" if "duplicate_of" in fields:
                self.job = fields["duplicate_of"]
                self.cursor = "0"
            case "error":
                self.error = fields.get("text", "unknown error")
                self.cause = fields.get("cause", FAILED)
            case "end":
                self.end = dict(fields)
        return None

    def _take_tokens(self, fields: Mapping[str, str]) -> Chunk | None:
        known = len(self.token_ids)
        try:
            offset, chunk = _read(self.job, fields)
        except _UNREADABLE:
            raise unreadable_output(self.job) from None
        if offset > known:
            raise GapError(
                f"the output of job {self.job} is incomplete: its tokens {known} to {offset - 1} "
                "are gone from the broker; submit the job again"
            )
        if offset < known:
            return None
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.sizes += chunk.sizes
        self.logprobs += chunk.logprobs
        return chunk

    def check(self) -> None:
        """JobFailed if the job has failed."""
        if self.error:
            raise JobFailed(self.error, self.cause)

    def result(self, known: Mapping[str, str], stages: int) -> Result:
        """The result so far; ``finish_reason`` is empty unless the end has been read.

        ``known``: the stored facts of the job. ``stages``: those of its pipeline.
        """
        end = self.end or {}
        asked = known.get("f:max_new_tokens", "" if not known else str(DEFAULT_MAX_NEW_TOKENS))
        return Result(
            job=self.job,
            prompt_token_ids=tuple(json.loads(known.get("prompt_token_ids", "[]"))),
            token_ids=tuple(self.token_ids),
            text="".join(self.texts),
            strategy=known.get("strategy", ""),
            finish_reason=end.get("finish_reason", ""),
            stats=cast(Stats, self._stats(end, stages)),
            logprobs=tuple(self.logprobs),
            max_new_tokens=int(asked) if asked.isascii() and asked.isdigit() else None,
        )

    def _stats(self, end: Mapping[str, str], stages: int) -> Any:
        if "stats" not in end:
            return unmeasured(self.token_ids, stages)
        try:
            found = json.loads(end["stats"])
        except _UNREADABLE:
            found = None
        if not isinstance(found, dict):
            raise unreadable_output(self.job)
        return found


def _read(job: str, fields: Mapping[str, str]) -> tuple[int, Chunk]:
    """An entry of a job's output: how many tokens are before it, and what is in it.

    One of ``_UNREADABLE`` if it is not what a worker writes.
    """
    if "sizes" not in fields:
        raise StateError(
            f"the output of job {job} was written by an older version of FlowSpec, which this one "
            "cannot read; submit the job again"
        )
    ids, sizes = committed_ids(job, fields), json.loads(fields["sizes"])
    if len(sizes) != len(ids):
        raise ValueError
    logprobs = read_logprobs(fields["logprobs"]) if "logprobs" in fields else ()
    return int(fields["offset"]), Chunk(fields["text"], ids, tuple(map(int, sizes)), logprobs)
