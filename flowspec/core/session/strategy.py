"""The interface of a strategy: one run's plan, which sees the tree and does no I/O.

The session calls ``grow`` on three occasions, drives the growth it gets until nothing is pending,
and sends the segments that the growth then names. Before it judges answers it calls ``may_judge``.
All methods have a default, so that a strategy overrides only those in which it differs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flowspec.core.drafting.growth import Growth
from flowspec.core.protocol.messages import Answer
from flowspec.core.run.history import History
from flowspec.core.session.pacing import FreeRunning, Pacing
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.tree.tree import Node, Tree


class Occasion(enum.Enum):
    """Why a strategy is asked to grow the tree."""

    #: A new root, and nothing else in the tree.
    ROUND = "round"
    #: The root moved to a node of the tree; everything not below it was pruned.
    VERDICT = "verdict"
    #: Nothing waits to be sent, no growth is running, and a slot is free (or ``drafts_ahead``).
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class View:
    """What a strategy may see of its session; it must not change the tree outside a growth.

    ``in_flight``: segments sent and neither answered nor emptied by a prune. ``waiting``: segments
    cut but not sent. ``bandwidth_delay``: segments that must be in flight so that no part of the
    pipeline waits for the draft worker, from measured times; 0: unknown. ``decoding``: the target
    has returned its first token. ``draft_pass_seconds``: the median time of the drafter's recent
    passes; ``least_draft_pass_seconds``: the shortest of them.
    ``decoded``: tokens after the first one, decoded in ``decode_seconds``. ``rows``: most rows of
    a segment, beside other jobs; 0: no limit.
    """

    tree: Tree
    in_flight: int
    waiting: int
    bandwidth_delay: int = 0
    decoding: bool = True
    draft_pass_seconds: float = 0.0
    least_draft_pass_seconds: float = 0.0
    decoded: int = 0
    decode_seconds: float = 0.0
    rows: int = 0

    def at_most(self, rows: int) -> int:
        """``rows``, or as many of them as a segment may have."""
        return min(rows, self.rows) if self.rows else rows


class Strategy:
    """One run's plan; subclasses override attributes and methods in which they differ."""

    #: Candidates to draft per node; 0: this strategy never drafts.
    draft_width: int = 0
    #: Segments allowed in flight.
    max_in_flight: int = 1
    #: Draft while no slot is free and choose the segment once one is; a new root is sent at once.
    #: It may change from one growth to the next.
    drafts_ahead: bool = False
    #: With ``drafts_ahead``: a new root waits, and leads the growth's first segment.
    holds_root: bool = False
    #: A candidate that was never sent may become the root.
    accepts_unsent: bool = False
    #: After every verdict, drop a draft head's expansions and draft them again from the target's
    #: own hidden states.
    redrafts: bool = True
    #: At a temperature, let the drafter see the target's noise
    #: (docs/algorithms.md#coupled-drafting).
    coupled: bool = False
    #: Correct the values of all candidates by the acceptance rates of earlier ones, not only of
    #: coupled and merged ones (docs/algorithms.md#calibration).
    calibrated: bool = False
    #: Chooses among the pipeline's drafters; other strategies use the first.
    chooses_drafter: bool = False
    #: The number of the drafter to use now.
    drafter: int = 0
    #: Decode plainly for now: ``grow`` returns None, and the root is sent alone.
    is_plain: bool = False
    #: In a pipeline with middle models, the drafter drafts for the first of them.
    uses_middles: bool = False
    #: Keeps to the rows and segments that other jobs leave to it.
    governed: ClassVar[bool] = True
    #: Number of best (id, log-probability) pairs to return with every row.
    top: int = 0
    #: The name of a mode whose text may differ from the target's own; "": exact.
    lossy: ClassVar[str] = ""
    #: Values worth trying when the strategy is tuned, by option, in an order in which neighbours
    #: are alike; the default is among them.
    search: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: Further points from which to begin tuning, as ``option=value,option=value``.
    starts: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        #: When segments leave and answers are judged.
        self.pacing: Pacing = FreeRunning()

    @property
    def decisions(self) -> list[dict[str, object]]:
        """What the strategy chose while the job ran, in order, for the job's ``stats``."""
        return []

    # ---- the plan --------------------------------------------------------------------------------

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        """A growth to carry out now, or None to leave the tree as it is."""
        return None

    def may_judge(self, view: View) -> bool:
        """Whether the answers received so far may be judged now; they are kept until then."""
        return True

    def may_collect(self, view: View) -> bool:
        """Whether the segments of a growth are taken now, although it still needs the drafter.

        Asked while a slot is free and nothing waits to be sent.
        """
        return False

    def decide(self, tree: Tree, node: Node, token: int) -> int:
        """The token that follows ``node``: the target's choice, ``token``, unless ``lossy``."""
        return token

    # ---- measurements ----------------------------------------------------------------------------

    def eligible_drafters(self, drafters: tuple[bool, ...]) -> tuple[bool, ...]:
        """The entries of ``drafters``, one per drafter, of those this strategy may use."""
        return drafters if self.chooses_drafter else drafters[:1]

    def use_history(self, history: History, *, sampled: bool = False, drafters: int = 1) -> None:
        """Take what earlier jobs measured; the strategy may add to it. Called once, at the start.

        ``sampled``: the job has a temperature. ``drafters``: the number of drafters.
        """

    def observe_answer(self, view: View, answer: Answer, trip: RoundTrip | None) -> None:
        """An answer arrived and has not been judged.

        ``trip``: the segment's round trip, the prompt's at first; None: the segment is void.
        """

    # ---- middle models (docs/algorithms.md#model-chain) ------------------------------------------

    def next_for_middle(self, view: View, model: int, tip: int) -> int | None:
        """The node up to which middle model ``model`` (from 1) verifies next; None: it waits.

        Called when the model is free. ``tip``: the last node of its own text; the result is ``tip``
        or a descendant of it.
        """
        return None

    def middles_advanced(self, view: View, tips: Mapping[int, int]) -> None:
        """A middle model or the target has verified: ``tips`` are the ends of the models' texts."""
