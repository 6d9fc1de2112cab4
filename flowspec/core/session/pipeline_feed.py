"""What feeds a run's pipeline: the tree's growth, the segments that wait, those in flight.

A growth's segments wait until a stage may take them. Growing and sending take turns, until the
growth waits for the drafter, for a slot or for an answer.
"""

from __future__ import annotations

import enum

from flowspec.core.drafting.drafting import Drafting
from flowspec.core.run.limits import Limits
from flowspec.core.run.share import ALONE, RunShare
from flowspec.core.session.in_flight import InFlightWindow
from flowspec.core.session.lifecycle import Lifecycle
from flowspec.core.session.model_chain import ModelChain
from flowspec.core.session.outbox import Outbox
from flowspec.core.session.stats import Tally
from flowspec.core.session.strategy import Occasion, Strategy, View
from flowspec.core.tree.tree import Status, Tree
from flowspec.errors import JobError, StateError


class GrowingStep(enum.Enum):
    """What growing the tree does next, or what it waits for.

    The growth wants rows of the drafter until it is complete; a strategy may have it collected
    before (``may_collect``), once a segment could leave. One that drafts ahead keeps a complete
    growth until a segment can leave.

        growth      wants rows   a segment   strategy           step
                                 can leave
        none        -            -           may grow idle      BEGIN
        none        -            -           may not            AWAIT_ANSWER
        there       yes          no          -                  AWAIT_DRAFTER
        there       yes          yes         completes it       AWAIT_DRAFTER
        there       yes          yes         may collect        COLLECT
        there       no           no          drafts ahead       AWAIT_SLOT
        there       no           yes         drafts ahead       COLLECT
        there       no           -           does not           COLLECT
    """

    BEGIN = "begin"
    COLLECT = "collect"
    AWAIT_ANSWER = "await answer"
    AWAIT_DRAFTER = "await drafter"
    AWAIT_SLOT = "await slot"


class PipelineFeed:
    """Grows the ``tree`` of a run as its ``strategy`` says and sends its segments to ``outbox``.

    ``share``: what the run may take of a pipeline that other runs use.
    """

    def __init__(
        self,
        strategy: Strategy,
        lifecycle: Lifecycle,
        limits: Limits,
        tally: Tally,
        tree: Tree,
        drafting: Drafting,
        chain: ModelChain,
        outbox: Outbox,
    ) -> None:
        self.window = InFlightWindow()
        self.share = ALONE
        self._strategy = strategy
        self._lifecycle = lifecycle
        self._limits = limits
        self._tally = tally
        self._tree = tree
        self._drafting = drafting
        self._chain = chain
        self._outbox = outbox
        self._idle_growth_empty = False  # nothing to send was found; retried after a verdict

    @property
    def in_flight(self) -> int:
        """Segments sent and neither answered nor emptied by a prune."""
        return len(self.window.loaded)

    @property
    def view(self) -> View:
        """The run as its strategy sees it."""
        return View(
            tree=self._tree,
            in_flight=self.in_flight,
            waiting=self.window.waiting,
            bandwidth_delay=self.window.bandwidth_delay.segments,
            decoding=self._lifecycle.is_decoding,
            draft_pass_seconds=self._drafting.pass_seconds,
            least_draft_pass_seconds=self._drafting.least_pass_seconds,
            decoded=self._tally.choices,
            decode_seconds=self._tally.decode_seconds,
            rows=self._allowed.rows,
        )

    def retry_idle(self) -> None:
        """Let an idle growth be tried again: the tree has changed since one found nothing."""
        self._idle_growth_empty = False

    def needs_drafter(self) -> bool:
        """Proceed with the current growth; whether it needs the drafter."""
        return self._drafting.needs_drafter(self._tree)

    def grow(self, occasion: Occasion) -> None:
        """Begin the growth that the strategy wants on this ``occasion``."""
        idle = occasion is Occasion.IDLE
        self._strategy.pacing.begin_growth(idle=idle)
        growth = None if self._allowed.is_plain else self._strategy.grow(self.view, occasion)
        is_plain = self._allowed.is_plain or self._strategy.is_plain
        drafter = self._strategy.drafter
        self._drafting.begin(growth, idle=idle, drafter=drafter, rests=is_plain)
        root_leaves = self._strategy.drafts_ahead and not self._strategy.holds_root
        if occasion is Occasion.ROUND and (growth is None or root_leaves):
            self.window.enqueue([self._tree.root])
        elif is_plain and not self._tree[self._tree.root].selected:
            self.enqueue([[self._tree.root]])  # a candidate that was never sent became the root

    def enqueue(self, segments: list[list[int]]) -> None:
        """Append segments to those that wait to be sent."""
        for segment in segments:
            if len(segment) > self._limits.tree_rows:
                raise JobError(
                    f"a segment has {len(segment)} rows; "
                    f"the pipeline holds {self._limits.tree_rows}"
                )
            self._tree.mark_waiting(segment)
            self.window.enqueue(segment)

    def grow_and_send(self, now: float) -> None:
        """Send and grow in turn, until growing waits for the drafter, a slot or an answer."""
        self._send_waiting(now)
        while (step := self._next_step()) in (GrowingStep.BEGIN, GrowingStep.COLLECT):
            if step is GrowingStep.BEGIN:
                self.grow(Occasion.IDLE)
                self._idle_growth_empty = not self._drafting.growing
            else:
                self._collect()
            self._send_waiting(now)

    @property
    def _allowed(self) -> RunShare:
        """The run's share, unless its rules leave it no choice: behind a barrier, or in a chain."""
        strategy = self._strategy
        free = strategy.governed and not strategy.pacing.has_barrier and not self._chain.addresses
        return self.share if free else ALONE

    def _next_step(self) -> GrowingStep:
        if not self._drafting.growing:
            return GrowingStep.BEGIN if self._may_grow_idle() else GrowingStep.AWAIT_ANSWER
        if self.needs_drafter() and not (
            self._has_room() and self._strategy.may_collect(self.view)
        ):
            return GrowingStep.AWAIT_DRAFTER
        if self._strategy.drafts_ahead and not self._has_room():
            return GrowingStep.AWAIT_SLOT
        return GrowingStep.COLLECT

    def _collect(self) -> None:
        """End the growth, and let its segments wait to be sent."""
        segments = self._drafting.collect(self._tree)
        self._idle_growth_empty = not segments and self._drafting.began_idle
        self.enqueue(segments)
        self._check_root()

    def _check_root(self) -> None:
        """StateError unless a root that is to be sent is in a segment: no answer would come."""
        if self._strategy.drafts_ahead or self._chain.addresses:
            return  # the root is sent already, or once another model's text is long enough
        root = self._tree.root
        if self._tree.status(root) is Status.WAITING and not self.window.has_waiting(root):
            raise StateError("the first segment of the strategy's growth lacks the root")

    def _may_grow_idle(self) -> bool:
        if self._strategy.pacing.expands_on_empty_verdict:
            return self._strategy.pacing.expansion_pending
        if not self._lifecycle.is_decoding or self.window.waiting or self._idle_growth_empty:
            return False
        return self._strategy.drafts_ahead or self._has_room()

    def _has_room(self) -> bool:
        """Whether a new segment could leave at once."""
        return not self.window.waiting and self._has_slot()

    def _has_slot(self) -> bool:
        slots = self._strategy.max_in_flight
        allowed = self._allowed.in_flight
        slots = min(slots, allowed) if allowed else slots
        return self._strategy.pacing.has_slot(len(self.window), slots)

    def _send_waiting(self, now: float) -> None:
        while (segment := self.window.first_waiting) is not None and self._may_send(segment):
            self._send(self.window.dequeue(), now)
        if not self.window.waiting:
            for _ in range(self._strategy.pacing.bubbles_due(growing=self._drafting.growing)):
                self._send([], now)  # a bubble: the stages count the step

    def _may_send(self, segment: list[int]) -> bool:
        fits = len(self._tree.sent) + len(segment) <= self._limits.tree_rows
        return fits and self._has_slot()

    def _send(self, nodes: list[int], now: float) -> None:
        route = self._strategy.pacing.route()
        rows = [self._tree[node] for node in nodes]
        segment = self._outbox.segment(self._tally.rounds, rows, route, self._allowed.together)
        self._tree.mark_sent(nodes)
        self.window.launch(segment.segment, nodes, now)
        self._strategy.pacing.sent(segment.segment)
        self._tally.segments += bool(nodes)
        first_stage = self._outbox.stages[0]
        if route.first is None:
            self._outbox.send(first_stage, segment)
        else:
            self._outbox.send_after(first_stage, segment, route.first.task, route.first.after)
