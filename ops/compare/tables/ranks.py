"""How often the target's token is among a drafter's k best: hit at k, without a system.

The drafter proposes after every token of the target's text, with the true context; a system's
drafter often has to propose behind its own guesses.
"""

from __future__ import annotations

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, Part
from flowspec.core.run.key import RunKey
from flowspec.model.base import DraftExecutor
from flowspec.rehearse.compare.simulate import JOB
from flowspec.rehearse.compare.texts import Text

#: The k shown.
AT = (1, 2, 4, 8, 16, 32)


def hit_at(text: Text, drafter: DraftExecutor, *, coupled: bool) -> tuple[int, tuple[int, ...]]:
    """Tokens of the output after its first, and those among the ``k`` best for each of ``AT``.

    ``coupled``: the drafter ranks with the target's noise.
    """
    sequence = (*text.prompt, *text.output)
    first = len(text.prompt)
    rows = tuple(range(len(sequence) - 1))
    run = RunKey(JOB, 1)
    drafter.allocate(run, len(rows), text.sampling, Returns(hidden=drafter.wants_hidden))
    if drafter.wants_hidden:
        drafter.learn(run, rows, text.hidden[: len(rows)])
    part = Part(
        run,
        1,
        rows,
        tuple(row - 1 for row in rows),
        rows,
        sequence[:-1],
        (),
        context=first,
        answers=rows[first:],
    )
    done = drafter.run(Draft(part, max(AT), coupled=coupled))
    drafter.release(run)
    ranks = [
        proposed.index(true) if true in proposed else max(AT)
        for proposed, true in zip(done.tokens, sequence[first + 1 :], strict=True)
    ]
    return len(ranks), tuple(sum(rank < k for rank in ranks) for k in AT)
