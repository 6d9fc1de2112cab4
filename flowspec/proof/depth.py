"""How deep a drafter's own chain stays right, on a text that is known.

Of several merged drafters the candidate leads that seems likeliest, as in a job
(``core.drafting.calibration``).
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.drafting.calibration import Calibration, Calibrations
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import BlockDone, BlockDraft, Draft, Part
from flowspec.core.run.key import RunKey
from flowspec.core.tree.live_rows import LiveRows
from flowspec.core.tree.tree import Expansion
from flowspec.model.base import DraftExecutor, DraftsBlocks
from flowspec.proof.plain import PlainText

_RUN = RunKey("depth", 1)
#: Candidates of a position, as of strategies that draft chains.
_WIDTH = 4


class _Chains:
    """One run of a drafter over a known text: at each position a chain below it, then dropped."""

    def __init__(
        self, drafter: DraftExecutor, text: PlainText, depth: int, calibration: Calibration
    ) -> None:
        self._drafter = drafter
        self._calibration = calibration
        self._text = text
        self._tokens = (*text.prompt, *text.output)
        self._rows = LiveRows(len(text.prompt))
        self._next = len(self._tokens)  # ids of drafted nodes are above those of the text
        self._depth = depth
        block = drafter.levels if isinstance(drafter, DraftsBlocks) else depth
        capacity = len(self._tokens) + block + 1
        returns = Returns(hidden=drafter.wants_hidden)
        drafter.allocate(_RUN, capacity, text.sampling, returns)

    def right(self) -> list[int]:
        """For each position from the prompt's last token on: how many drafts in a row are right."""
        first = len(self._text.prompt) - 1
        found = []
        for at in range(first, len(self._tokens) - 1):
            if isinstance(self._drafter, DraftsBlocks):
                found.append(self._block(range(at) if at == first else range(at - 1, at)))
                continue
            if self._drafter.wants_hidden:
                known = range(at + 1) if at == first else (at,)
                self._drafter.learn(_RUN, known, self._text.hidden[known[0] : known[-1] + 1])
            context = range(at + 1) if at == first else range(at, at + 1)
            drafted = self._draft(tuple(context), len(context))
            found.append(self._chain(at, drafted))
            self._calibration.observe(drafted, self._tokens[at + 1])
            self._rows.prune((), at + 1)
        self._drafter.release(_RUN)
        return found

    def _block(self, context: range) -> int:
        """How many of the best tokens of a block are right; ``context``: its new context rows."""
        root = context.stop
        self._drafter.learn(_RUN, context, self._text.hidden[context.start : root])
        ids = (*context, root)
        part = Part(
            run=_RUN,
            segment=-1,
            ids=ids,
            parents=tuple(node - 1 for node in ids),
            positions=ids,
            tokens=tuple(self._tokens[node] for node in ids),
            offsets=(),
            context=len(context),
            answers=(len(context),),
        )
        coupled = self._text.sampling.temperature > 0
        done = self._drafter.run(BlockDraft(part, 1, coupled=coupled))
        assert isinstance(done, BlockDone)
        best = [done.tokens[0], *(level.tokens for level in done.below[0])][: self._depth]
        wanted = self._tokens[root + 1 : root + 1 + len(best)]
        pairs = enumerate(zip(best, wanted, strict=False))
        return next((at for at, (one, right) in pairs if one[0] != right), len(wanted))

    def _chain(self, at: int, drafted: Expansion) -> int:
        """How many tokens of the chain after position ``at`` that ``drafted`` begins are right."""
        wanted = self._tokens[at + 1 : at + 1 + self._depth]
        parent = at
        for count, right in enumerate(wanted):
            if drafted.tokens[:1] != (right,):
                return count
            if count + 1 < len(wanted):
                node = self._next
                self._next += 1
                drafted = self._draft((node,), 0, right, parent, at + 1 + count)
                parent = node
        return len(wanted)

    def _draft(
        self, ids: tuple[int, ...], context: int, token: int = -1, parent: int = -1, place: int = -1
    ) -> Expansion:
        """The best tokens after the last of ``ids``: context rows, or one drafted node."""
        parents = tuple(node - 1 for node in ids) if context else (parent,)
        part = Part(
            run=_RUN,
            segment=-1,
            ids=ids,
            parents=parents,
            positions=ids if context else (place,),
            tokens=tuple(self._tokens[node] for node in ids) if context else (token,),
            offsets=(),
            context=context,
            pruned=self._rows.begin_pass(ids, parents, context),
            answers=(len(ids) - 1,),
        )
        coupled = self._text.sampling.temperature > 0
        done = self._drafter.run(Draft(part, _WIDTH, coupled=coupled))
        if done.sources:
            return self._calibration.expansion(done.tokens[0], done.values[0], done.sources[0])
        return Expansion(done.tokens[0], done.values[0])


def acceptance_by_depth(
    drafter: DraftExecutor, texts: Sequence[PlainText], depth: int
) -> tuple[float, ...]:
    """The share of positions at which the first 1, 2, ... ``depth`` drafts are all right.

    A position counts for a depth if the text goes on that far. What merged drafters are worth is
    learnt from text to text.
    """
    right = [0] * depth
    seen = [0] * depth
    known = Calibrations()
    for text in texts:
        sampled = text.sampling.temperature > 0
        calibration = known.model(coupled=sampled, sampled=sampled)
        found = _Chains(drafter, text, depth, calibration).right()
        for at, count in enumerate(found):
            room = min(depth, len(found) - at)
            for level in range(room):
                seen[level] += 1
                right[level] += count > level
    return tuple(hits / count for hits, count in zip(right, seen, strict=True) if count)
