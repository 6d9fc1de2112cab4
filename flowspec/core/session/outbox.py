"""What a session sends: envelopes numbered per receiver, collected until the machine takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from flowspec.core.protocol.addresses import DRAFT, GRAPH, Address, stage_address
from flowspec.core.protocol.machine import Commit, Complete, Output, ScoredCommit, Send
from flowspec.core.protocol.messages import Envelope, Message, Prune, Segment
from flowspec.core.protocol.sequence import SeqWriter
from flowspec.core.run.key import RunKey
from flowspec.core.session.pacing import DELIVERED, Route
from flowspec.core.tree.accept import Verdict
from flowspec.core.tree.segments import prefill_chunks
from flowspec.core.tree.tree import Node, Top


class Outbox:
    """One run's outputs in order; ``stages`` are the addresses of the verify stages."""

    def __init__(self, run: RunKey, stages: int) -> None:
        self.stages = tuple(stage_address(stage) for stage in range(1, stages + 1))
        self._run = run
        self._writer = SeqWriter()
        self._outputs: list[Output] = []
        self._next_segment = 0

    def take(self) -> list[Output]:
        """Return and remove the collected outputs."""
        taken = self._outputs
        self._outputs = []
        return taken

    # ---- segments --------------------------------------------------------------------------------

    def segment(
        self,
        round_number: int,
        nodes: Sequence[Node],
        route: Route = DELIVERED,
        together: int = 0,
    ) -> Segment:
        """``nodes`` as the run's next segment over ``route``; all receivers share one numbering.

        ``together``: as in ``Segment``.
        """
        self._next_segment += 1
        return Segment(
            run=self._run,
            segment=self._next_segment - 1,
            round=round_number,
            ids=tuple(node.id for node in nodes),
            parents=tuple(node.parent for node in nodes),
            positions=tuple(node.position for node in nodes),
            tokens=tuple(node.token for node in nodes),
            marker=route.marker,
            task=route.task,
            route=route.rest,
            together=together,
        )

    def prefill(self, to: Address, prefix: Sequence[int], begin: int = 0) -> None:
        """Send the text from ``begin`` on in chunks.

        Ids equal positions, a token's parent is the one before it.
        """
        for chunk in prefill_chunks(len(prefix), begin):
            rows = [Node(at, at - 1, prefix[at], at, 0.0, 0.0, 0) for at in chunk]
            self.send(to, self.segment(0, rows))

    # ---- messages --------------------------------------------------------------------------------

    def send(self, to: Address, message: Message) -> None:
        """Send ``message`` to ``to``."""
        self._outputs.append(Send(to, self._envelope(to, message)))

    def tell(self, receivers: Sequence[Address], message: Message) -> None:
        """Send ``message`` to each of ``receivers``."""
        for to in receivers:
            self.send(to, message)

    def send_after(self, to: Address, message: Message, task: str, after: Sequence[str]) -> None:
        """Send ``message`` as ``task`` of the graph, which holds it until ``after`` is done."""
        self._outputs.append(Send(to, Envelope(GRAPH, 0, message), task=task, after=tuple(after)))

    def commit(
        self,
        prune: Prune,
        emitted: int,
        verdict: Verdict,
        completes: Sequence[str],
        top: Sequence[Top] = (),
        alternatives: int | None = None,
    ) -> None:
        """Append the verdict's tokens to the ``emitted`` ones and prune every stage, atomically.

        ``alternatives``, ``top``: as in ``ScoredCommit``; None: the job asked for none.
        """
        made: Callable[..., Commit] = Commit
        if alternatives is not None:
            made = partial(ScoredCommit, alternatives=alternatives, top=tuple(map(tuple, top)))
        self._outputs.append(
            made(
                run=self._run,
                offset=prune.offset,
                emitted=emitted,
                advance=len(verdict.accepted),
                tokens=verdict.tokens,
                finish=verdict.finish,
                to=self.stages,
                prunes=tuple(self._envelope(stage, prune) for stage in self.stages),
                completes=tuple(completes),
            )
        )

    def complete(self, tasks: Sequence[str]) -> None:
        """Complete tasks of the graph."""
        if tasks:
            self._outputs.append(Complete(self._run, tuple(tasks)))

    def _envelope(self, to: Address, message: Message) -> Envelope:
        return Envelope(DRAFT, self._writer.next(to), message)
