"""What a strategy answers. A strategy is one job's plan: it looks at the tree, and knows no I/O.

The session asks ``grow`` at three occasions, drives the growth it gets until nothing is pending,
and sends the segments the growth then names. Before it passes a verdict it asks ``judges``. The
other questions have the common answer here, so that a strategy only says what is special about
it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.job.pacing import FreeRunning, Pacing
from flowspec.core.job.round_trip import RoundTrip
from flowspec.core.protocol.messages import Answer
from flowspec.core.run.history import History
from flowspec.core.tree.tree import Tree


class Occasion(enum.Enum):
    """Why a strategy is asked to grow the tree."""

    ROUND = "round"  #: a root was planted and nothing else is in the tree
    VERDICT = "verdict"  #: the root moved to a node of the tree, all else was pruned
    # : nothing waits to be sent, no growth is under way, and a slot is free (or ``ahead``)
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class View:
    """What a strategy may see of its session; it must not change the tree outside a growth.

    ``covering``: segments that have to be in flight so that none of the pipeline waits for the
    draft worker, from measured times; 0: not known yet. ``draft_seconds``: a pass of its
    drafter, on average. ``decoded``: tokens after the first one, made in ``decode_seconds``.
    """

    tree: Tree
    in_flight: int  # segments sent and neither answered nor emptied by a prune
    waiting: int  # segments cut but not sent
    covering: int = 0
    planted: bool = True  # the target has given its first token
    draft_seconds: float = 0.0
    decoded: int = 0
    decode_seconds: float = 0.0


class Strategy:
    """One system's answers for one job."""

    #: Continuations to draft per node; 0: this strategy never drafts.
    width: int = 0
    #: Segments allowed in flight.
    capacity: int = 1
    #: Draft while no slot is free, and choose what to send only once one is; a fresh root goes out
    #: at once.
    ahead: bool = False
    #: A candidate that was never sent may become the root: the draft ran ahead of what is in
    #: flight.
    candidates: bool = False
    #: A draft head's proposals are drafted anew after every verdict, from the target's true rows.
    redrafts: bool = True
    #: At a temperature, let the drafter see the target's noise (``algorithms.md`` 7, coupled
    #: drafting).
    coupled: bool = False
    #: Values of candidates are corrected by what they were worth so far, also those of a drafter's
    #: own probabilities.
    calibrated: bool = False
    #: It may choose among several drafters; one that does not has the first.
    chooses: bool = False
    #: The number of the drafter whose passes it wants now.
    drafter: int = 0
    #: The drafter drafts for the first middle model where the pipeline has some, not for the
    #: target.
    middles: bool = False
    #: Best (id, log-probability) pairs wanted with every answer.
    top: int = 0
    #: Whether the text may differ from the target's own: the mode's name, or "".
    lossy: ClassVar[str] = ""

    @property
    def decisions(self) -> list[dict[str, object]]:
        """What it chose by itself while the job ran, in order, for the job's ``stats``; empty:
        nothing.
        """
        return []

    def __init__(self) -> None:
        #: How segments are paced through the stages.
        self.pace: Pacing = FreeRunning()

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        """A growth to carry out now, or None to leave the tree as it is."""
        return None

    def judges(self, view: View) -> bool:
        """Whether the answers at hand may be judged now; answers are kept until then."""
        return True

    def among(self, drafters: tuple[bool, ...]) -> tuple[bool, ...]:
        """Of what is said of each of a pipeline's drafters, what concerns those it may use."""
        return drafters if self.chooses else drafters[:1]

    def recall(self, history: History, *, sampled: bool = False, drafters: int = 1) -> None:
        """What jobs before this one have found out; what this one finds out may be added to it.
        ``sampled``: the job has a temperature; ``drafters``: how many there are to choose from.
        """

    def heard(self, view: View, result: Answer, trip: RoundTrip | None) -> None:
        """An answer came in and has not been judged. ``trip``: the prompt's is the first; None: its
        segment is void.
        """

    def decide(self, tree: Tree, node: int, token: int, top: Sequence[tuple[int, float]]) -> int:
        """The token that follows ``node``, whose target chose ``token``; another one only if
        ``lossy``.
        """
        return token

    def feed(self, view: View, model: int, tip: int) -> int | None:
        """The node up to which middle model ``model`` (from 1) is to verify now; None: it waits.

        ``tip``: where its own text ends; the answer is ``tip`` or lies below it. Asked when the
        model is free. Source: PipeSpec (``algorithms.md`` 5.1).
        """
        return None

    def verified(self, view: View, tips: Mapping[int, int]) -> None:
        """The middle models' texts now end in ``tips``, by model: one has verified, or the target
        has.
        """
