"""The work of executors, and its results.

A pass names rows by id. The model side (``flowspec.model.rows.placement``) derives their places in
memory, the moves and the mask from the ids, the parent links and the prunes. So a recording of
these values stays valid when the cache's layout changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.run.key import RunKey
from flowspec.core.run.turns import Turn


@dataclass(frozen=True, slots=True)
class Pruned:
    """The combined effect of the prunes since a run's last pass.

    ``accepted``: tree rows that became context, in the order of the path. ``live``: the tree rows
    that are left, in the order they were computed. All other tree rows are dropped.
    """

    accepted: tuple[int, ...]
    live: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """The first ``rows`` rows of a cache, which are context once ``pruned`` is applied."""

    rows: int
    pruned: Pruned | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One run's rows of a pass, parents before children; columns are parallel.

    The first ``context`` rows become context at once (prompt rows, or accepted rows that a drafter
    has not computed yet); the others are tree rows. A parent that is not a live tree row is the
    last context row; -1: the row has no parent. ``tokens`` is empty if the input rows travel beside
    the segment; ``offsets`` then names the rows of the segment that are left. ``pruned`` is applied
    before the rows; None: nothing was pruned. ``answers``: offsets of the rows that need a result
    (a target's choice, a drafter's proposals).
    """

    run: RunKey
    segment: int
    ids: tuple[int, ...]
    parents: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    context: int = 0
    pruned: Pruned | None = None
    answers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of a stage over rows of one or several runs."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The target's choices for ``Part.answers``, parallel to it; see ``messages.Answer``."""

    tokens: tuple[int, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """The executor could not do the work; ``reason`` is one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class PassDone:
    """Choices parallel to ``Pass.parts``; the driver keeps the computed rows.

    A part of several may fail without the others: it has the reason in the place of its choice.
    ``others``: rows of the pass that belong to runs which a recording leaves out.
    """

    choices: tuple[Choice | WorkFailed, ...]
    others: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """One run's rows of a drafter's pass: the best ``width`` continuations of every answered row.

    ``growth_pass`` counts the passes of one growth from 0: a cost model may charge a growth once.
    ``coupled``: rank by ``log softmax(logits / T) + noise`` of the job's keyed draw
    (docs/algorithms.md#coupled-drafting). ``drafter``: the drafter's number.
    """

    part: Part
    width: int
    growth_pass: int = 0
    coupled: bool = False
    drafter: int = 0

    @property
    def rows(self) -> int:
        """Rows that the drafter computes."""
        return len(self.part.ids)


@dataclass(frozen=True, slots=True)
class BlockDraft(Draft):
    """A run's rows of a block drafter's pass: a block for every answered row.

    A block is the answered row with its ancestors among the tree rows, and then a row for each of
    the ``levels`` positions after it. No later pass sees these rows: only context is kept.
    """

    levels: int = 1

    @property
    def rows(self) -> int:
        """Rows that the drafter computes: an ancestor of several blocks is a row in each."""
        part = self.part
        first = part.context
        known: dict[int, int] = {}  # tree rows on the path to each tree row, itself included
        for node, parent in zip(part.ids[first:], part.parents[first:], strict=True):
            known[node] = known.get(parent, 0) + 1
        blocks = sum(known[part.ids[row]] + self.levels for row in part.answers)
        return first + blocks


@dataclass(frozen=True, slots=True)
class DraftPass:
    """One forward pass of the drafter over rows of one or several runs.

    Drafts that name different drafters are one pass of each of these.
    """

    drafts: tuple[Draft, ...]


@dataclass(frozen=True, slots=True)
class DraftDone:
    """Per answered row: token ids best first, distinct, and their values.

    A value is the log of the expected acceptance, at most 0; in a coupled draft it is the
    candidate's perturbed score minus the best one's. ``sources``: which of a hybrid's drafters
    proposed each candidate; empty: not a hybrid. ``core.drafting.calibration`` calibrates both
    kinds of values.
    """

    tokens: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]
    sources: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class LevelProposals:
    """Proposals for one position: as a row of ``DraftDone``."""

    tokens: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BlockDone(DraftDone):
    """``below``: per answered row, the proposals for each position after the next one.

    They hold whichever tokens come between, as the drafter proposes for all positions at once.
    """

    below: tuple[tuple[LevelProposals, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftPassDone:
    """Proposals parallel to ``DraftPass.drafts``.

    One of several may fail without the others: it has the reason in the place of its proposals.
    """

    results: tuple[DraftDone | WorkFailed, ...]


@dataclass(frozen=True, slots=True)
class Encode:
    """Turn a run's prompt text into token ids. ``raw``: without the chat template."""

    run: RunKey
    prompt: str
    raw: bool


@dataclass(frozen=True, slots=True)
class EncodeTurns:
    """Turn a run's conversation into token ids, by the model's chat template."""

    run: RunKey
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class EncodeDone:
    """Token ids of the prompt."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodeFailed:
    """The prompt could not be encoded; ``reason`` is one line.

    ``refused``: because of what the job asks for.
    """

    reason: str
    refused: bool = False


#: Done beside other work: it keeps no pass waiting.
Encoding = Encode | EncodeTurns
Encoded = EncodeDone | EncodeFailed
Work = Pass | DraftPass | Encoding
WorkResult = PassDone | DraftPassDone | Encoded | WorkFailed


def rows_of(work: Work) -> int:
    """Rows that are computed for ``work``."""
    match work:
        case Pass(parts):
            return sum(len(part.ids) for part in parts)
        case DraftPass(drafts):
            return sum(draft.rows for draft in drafts)
        case _:
            return 0
