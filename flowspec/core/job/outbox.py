"""What a session sends: envelopes numbered per receiver, collected until the machine takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowspec.core.protocol.machine import Commit, Complete, Output, Send
from flowspec.core.protocol.messages import (
    DRAFT,
    GRAPH,
    Envelope,
    Hop,
    Message,
    Prune,
    Segment,
    stage_node,
)
from flowspec.core.protocol.sequence import SeqWriter
from flowspec.core.tree.accept import Verdict
from flowspec.core.tree.segments import prefill_chunks
from flowspec.core.tree.tree import Node


class Outbox:
    """One job's outputs in order; ``stages`` are the nodes of the verify stages."""

    def __init__(self, job: str, epoch: int, stages: int) -> None:
        self.stages = tuple(stage_node(stage) for stage in range(1, stages + 1))
        self._job = job
        self._epoch = epoch
        self._writer = SeqWriter()
        self._outputs: list[Output] = []
        self._next_segment = 0

    def segment(self, round_number: int, nodes: Sequence[Node], **more: Any) -> Segment:
        """``nodes`` as the next segment; one count for all receivers. ``more``: further fields of
        it.
        """
        self._next_segment += 1
        return Segment(
            self._job,
            self._epoch,
            self._next_segment - 1,
            round_number,
            tuple(node.id for node in nodes),
            tuple(node.parent for node in nodes),
            tuple(node.position for node in nodes),
            tuple(node.token for node in nodes),
            **more,
        )

    def prefill(self, node: str, prompt: Sequence[int]) -> None:
        """The prompt in chunks to ``node``: positions are ids, each token the child of the one
        before.
        """
        for chunk in prefill_chunks(len(prompt)):
            self.send(
                node,
                self.segment(0, [Node(at, at - 1, prompt[at], at, 0.0, 0.0, 0) for at in chunk]),
            )

    def put(self, output: Output) -> None:
        """Add an output that is no message."""
        self._outputs.append(output)

    def take(self) -> list[Output]:
        """Everything since the last time."""
        taken = self._outputs
        self._outputs = []
        return taken

    def envelope(self, node: str, message: Message) -> Envelope:
        """``message`` numbered for ``node``; it must be sent."""
        return Envelope(DRAFT, self._writer.next(node), message)

    def send(self, node: str, message: Message, hop: Hop | None = None) -> None:
        """To ``node``, at once or when the graph lets the hop go."""
        if hop is None:
            self.put(Send(node, self.envelope(node, message)))
        else:
            self.join(node, message, hop.task, hop.after)

    def join(self, node: str, message: Message, task: str, after: Sequence[str]) -> None:
        """To ``node`` as task ``task``, once all of ``after`` are complete."""
        self.put(Send(node, Envelope(GRAPH, 0, message), task=task, after=tuple(after)))

    def tell(self, nodes: Sequence[str], message: Message) -> None:
        """The same to every one of ``nodes``."""
        for node in nodes:
            self.send(node, message)

    def commit(
        self, prune: Prune, emitted: int, verdict: Verdict, completes: Sequence[str]
    ) -> None:
        """The tokens of ``verdict`` behind the ``emitted`` ones, and ``prune`` to every stage, as
        one.
        """
        prunes = tuple(self.envelope(node, prune) for node in self.stages)
        self.put(
            Commit(
                self._job,
                self._epoch,
                prune.offset,
                emitted,
                len(verdict.accepted),
                verdict.tokens,
                verdict.finish,
                self.stages,
                prunes,
                tuple(completes),
            )
        )

    def complete(self, tasks: Sequence[str]) -> None:
        """Complete tasks of the graph."""
        if tasks:
            self.put(Complete(self._job, self._epoch, tuple(tasks)))
