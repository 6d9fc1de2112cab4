"""A worker's link that never waits for the network: reads and writes are always under way.

It waits at the control broker and at its own inbox, if it has one, at once (``incoming``). Writes
are sent, and their answers taken when they come: a refusal reaches the machine with a later read. A
segment or an answer, or a bundle of them, goes straight into the receiver's inbox if there is a
connection (``peers``), everything else through the control broker: jobs, commits and prunes, and
what the task graph holds or completes. The order of each sender's messages is restored here
(``in_order``).
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import redis

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.bundles import Bundle, sends_of, unbundled
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.in_order import InOrder, goes_straight
from flowspec.core.protocol.machine import Finish, Send
from flowspec.core.protocol.messages import Answer, Envelope, Segment
from flowspec.core.protocol.refusals import refusal
from flowspec.core.run.key import RunKey
from flowspec.errors import BrokerError
from flowspec.transport.base import (
    ROWS_CAP,
    CommitText,
    Op,
    PutRows,
    ReadResult,
    Rows,
    role_of,
)
from flowspec.transport.connections.connection import translate
from flowspec.transport.connections.pipelined_client import PipelinedClient
from flowspec.transport.connections.redis_client import Command
from flowspec.transport.link.commands import Commands, codes_of
from flowspec.transport.link.inbox import Inbox
from flowspec.transport.link.incoming import Incoming, open_incoming
from flowspec.transport.link.log_reader import LogReader
from flowspec.transport.link.peers import PeerInbox, Peers, Posted
from flowspec.transport.link.recorded import Recorded
from flowspec.transport.wire.keys import Keys

#: Most writes under way at the control broker; a further one waits for the oldest answer.
MOST_UNDER_WAY = 64
#: How long ``close`` waits for the answers to what was written, seconds.
CLOSE_SECONDS = 5.0

NOTHING = ReadResult()
#: Writes of rows between two looks at the length of the receiver's stream.
_MEASURE_EVERY = 32


class LiveLink:
    """``address``'s link to a pipeline of ``stages`` verify stages and ``middles`` middle models.

    ``holder``: as in ``Commands``. ``inbox``: its own, closed with the link. ``peers``: the inboxes
    of its receivers.
    """

    def __init__(
        self,
        url: str,
        keys: Keys,
        address: Address,
        stages: int,
        *,
        middles: int = 0,
        holder: Holder | None = None,
        inbox: Inbox | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.address = address
        self._keys = keys
        self._commands = Commands(keys, address, stages, middles, holder)
        self._writes = PipelinedClient(url)
        self._inbox = inbox
        self._peers = peers
        self._reader = LogReader(keys, address, self._writes, self._commands)
        self._order = InOrder()
        self._takers: deque[Callable[[list[Any]], None]] = deque()  # of the answers to come
        self._unwritten: list[tuple[Op, Code]] = []
        self._last_through: dict[tuple[RunKey, Address], int] = {}
        self._recorded = Recorded()
        self._rows_written = 0
        self._control = open_incoming(url, self._reader.cursors)
        if inbox is not None:
            inbox.start()

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, block_seconds: float) -> ReadResult:
        self._trim()
        deadline = time.monotonic() + block_seconds
        while True:
            self._confirm_answered()
            left = deadline - time.monotonic()
            waited = self._wait(0.0 if self._unwritten else left)
            found = self._take(waited)
            if left <= 0 or found != NOTHING:
                return found

    def _take(self, waited: bool) -> ReadResult:
        """What has arrived; ``waited``: as ``Incoming.take``'s."""
        envelopes: list[Envelope] = []
        refused: list[str] = []
        if self._control.news:
            self._take_in_control(waited, envelopes, refused)
        if self._inbox is not None and self._inbox.news:
            self._take_in_inbox(self._inbox, waited, envelopes, refused)
        now = time.monotonic()
        ordered = [known for found in envelopes for known in self._arrived(found, now)]
        ordered += self._order.overdue(now)
        unwritten = tuple(self._unwritten)
        self._unwritten = []
        return ReadResult(tuple(ordered), tuple(refused), (), unwritten)

    def _wait(self, seconds: float) -> bool:
        """Wait until something has arrived or a held message is overdue, at most ``seconds``.

        Return whether there was nothing at first.
        """
        sources: list[Incoming | Inbox] = [self._control]
        if self._inbox is not None:
            sources.append(self._inbox)
        if any(source.news for source in sources):
            return False
        overdue = self._order.deadline
        if overdue is not None:
            seconds = min(seconds, overdue - time.monotonic())
        if seconds > 0:
            waiting = select.poll()
            for source in sources:
                waiting.register(source.fileno(), select.POLLIN)
            waiting.poll(seconds * 1e3)
        return True

    def _take_in_control(self, waited: bool, envelopes: list[Envelope], refused: list[str]) -> None:
        for stream, arrived in self._control.take(waited=waited):
            self._reader.take_in(stream, arrived, envelopes, [], refused)

    def _take_in_inbox(
        self, inbox: Inbox, waited: bool, envelopes: list[Envelope], refused: list[str]
    ) -> None:
        """Read the inbox; BrokerError if it is lost, and messages with it."""
        try:
            envelopes += inbox.take(self._reader, refused, waited=waited)
        except BrokerError as error:
            raise BrokerError(f"{role_of(self.address)} has lost its inbox: {error}") from None

    def _arrived(self, envelope: Envelope, now: float) -> list[Envelope]:
        if envelope.message.run in self._reader.ended:
            return [envelope]
        return self._order.arrive(envelope, now)

    def take_rows(self, run: RunKey, segment: int) -> Rows:
        return self._reader.take(run, segment)

    def drop_rows(self, run: RunKey, segment: int) -> None:
        self._reader.drop(run, segment)

    def forget(self, run: RunKey) -> None:
        self._recorded.forget(run)
        for channel in [channel for channel in self._last_through if channel[0] == run]:
            del self._last_through[channel]
        self._order.forget(run)
        self._reader.forget(run)

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, ops: Sequence[Op]) -> list[Code]:
        """Carry out ``ops``; refusals come with a later read."""
        through: list[Op] = []
        for op in ops:
            if isinstance(op, Send | Bundle):
                entry = [Posted(send, _rows_of(send, through)) for send in sends_of(op)]
                self._send(entry, through)
            elif isinstance(op, Finish):
                through.append(self._finish(op))
            elif not self._recorded.over(op):
                through.append(op)
        self._write_through(through)
        return [Code.OK for _ in unbundled(ops)]

    def _send(self, entry: Sequence[Posted], through: list[Op]) -> None:
        """Send an entry straight, or append it to what goes ``through`` the broker."""
        send = entry[0].send
        inbox = self._peers.get(send.to) if self._peers is not None else None
        if inbox is None or not goes_straight(send):
            through += _ops(entry)
            return
        try:
            inbox.post(entry)
        except BrokerError as error:
            *before, last = self._given_up(send.to, inbox, str(error))
            through[:0] = [op for unconfirmed in before for op in unconfirmed]
            through += last

    def _write_through(self, ops: Sequence[Op]) -> None:
        if not ops:
            return
        # Atomic, so that rows and their envelope, or a prune and the next segment, wake their
        # reader once.
        commands = [self._commands.build(op) for op in ops]
        for op in ops:
            self._note_last(op)
            if isinstance(op, PutRows):
                self._measure(op)
        self._post(commands, partial(self._note_codes, ops), atomic=len(ops) > 1)
        while self._writes.under_way > MOST_UNDER_WAY or self._writes.silent:
            self._confirm()

    def _post(
        self,
        commands: Sequence[Command],
        taker: Callable[[list[Any]], None],
        *,
        atomic: bool = False,
    ) -> None:
        """Send ``commands`` to the control broker; ``taker`` takes their answers."""
        self._takers.append(taker)  # first: what is posted is under way, though it may raise
        self._writes.post(commands, atomic=atomic)

    def _note_last(self, op: Op) -> None:
        """Remember the last number of each run and receiver that went through the broker."""
        if isinstance(op, Send | Bundle):
            for send in sends_of(op):
                self._last_through[send.envelope.message.run, send.to] = send.envelope.seq
        elif isinstance(op, CommitText):
            for to, prune in zip(op.commit.to, op.commit.prunes, strict=True):
                self._last_through[op.commit.run, to] = prune.seq

    def _measure(self, op: PutRows) -> None:
        """Look up, now and then, how many rows wait for the receiver of ``op``."""
        self._rows_written += 1
        if self._rows_written % _MEASURE_EVERY == 0:
            self._post([("XLEN", self._keys.rows(op.to))], partial(self._note_length, op))

    def _note_codes(self, ops: Sequence[Op], answers: list[Any]) -> None:
        codes = (
            code for op, answer in zip(ops, answers, strict=True) for code in codes_of(op, answer)
        )
        refused = zip(unbundled(ops), codes, strict=True)
        self._unwritten += [(op, code) for op, code in refused if code is not Code.OK]

    def _note_length(self, op: PutRows, answers: list[Any]) -> None:
        if answers[0] >= ROWS_CAP:
            self._unwritten.append((op, Code.FULL))

    def _finish(self, finish: Finish) -> Finish:
        """``finish``, or an error if the broker has refused a commit of that run meanwhile."""
        while self._writes.under_way:
            self._confirm()
        for op, code in self._unwritten:
            if isinstance(op, CommitText) and op.commit.run == finish.run:
                refused = refusal(finish.run, "a commit", code)
                if refused is not None:
                    return replace(finish, reason="error", error=refused.reason)
        return finish

    def _confirm(self) -> None:
        """Take the answers to the oldest batch of writes."""
        answers = self._writes.collect()
        take = self._takers.popleft()
        for answer in answers:
            if isinstance(answer, redis.RedisError):
                raise translate(answer, self._writes.url)
        take(answers)

    def _confirm_answered(self) -> None:
        """Take the answers that have come, without waiting."""
        while self._writes.answered():
            self._confirm()
        for to, inbox in self._peers.inboxes if self._peers is not None else ():
            try:
                while inbox.client.answered():
                    inbox.collect()
            except BrokerError as error:
                for ops in self._given_up(to, inbox, str(error)):
                    self._write_through(ops)

    def _given_up(self, to: Address, inbox: PeerInbox, reason: str) -> list[list[Op]]:
        """Give up the link; what was not confirmed, to be sent through the broker.

        Its receiver drops what it has twice. The broker takes no message of a run behind a later
        one: BrokerError if a run has sent one there since. A worker that begins anew has its jobs
        put back.
        """
        assert self._peers is not None
        self._peers.broken(to, inbox, reason)
        for posted in chain.from_iterable(inbox.unanswered):
            envelope = posted.send.envelope
            if envelope.seq < self._last_through.get((envelope.message.run, to), 0):
                raise BrokerError(
                    f"the link from {self.address} to {to} broke with messages under way: {reason}"
                )
        return [_ops(entry) for entry in inbox.unanswered]

    def _trim(self) -> None:
        """Remove what was read: after a hop's write, which it would delay."""
        trims = self._reader.take_trims()
        if trims:
            self._post(trims, lambda answers: None)

    def close(self) -> None:
        """Take the answers to what was written, and close all connections."""
        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            while self._writes.under_way and time.monotonic() < deadline:
                if self._writes.answered(deadline - time.monotonic()):
                    self._confirm()
        finally:
            self._control.close()
            self._writes.close()
            if self._peers is not None:
                self._peers.close()
            if self._inbox is not None:
                self._inbox.close()


def _ops(entry: Sequence[Posted]) -> list[Op]:
    """What the broker gets for an entry: rows, then one entry with the messages."""
    rows = [posted.rows for posted in entry if posted.rows is not None]
    sends = tuple(posted.send for posted in entry)
    return [*rows, Bundle(sends) if len(sends) > 1 else sends[0]]


def _rows_of(send: Send, written: list[Op]) -> PutRows | None:
    """Remove and return the rows of ``send`` from the operations before it; None: it has none."""
    message = send.envelope.message
    if not isinstance(message, Segment | Answer):
        return None
    name = (send.to, message.run, message.segment)
    for at, op in enumerate(written):
        if isinstance(op, PutRows) and (op.to, op.run, op.segment) == name:
            del written[at]
            return op
    return None
