"""A worker's link over Redis: per hop one round trip to write and one blocking read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.messages import Envelope
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.key import RunKey
from flowspec.errors import GapError
from flowspec.transport.base import ROWS_CAP, Op, PutRows, ReadResult, Rows
from flowspec.transport.connections.connection import MAX_BLOCK_SECONDS
from flowspec.transport.connections.redis_client import BrokerClient, Command, DirectClient
from flowspec.transport.link.commands import Commands, codes_of
from flowspec.transport.link.log_reader import LogReader
from flowspec.transport.link.pending_read import BATCH
from flowspec.transport.link.recorded import Recorded
from flowspec.transport.wire.entries import xread
from flowspec.transport.wire.keys import Keys

#: Longest wait for rows whose envelope has arrived, seconds.
ROWS_SECONDS = 5.0
#: Writes of rows between two checks of the streams' lengths against their cap.
_MEASURE_EVERY = 32
#: Answers about a stream that is not there yet, or whose key is of another type.
_NO_STREAM = ("no such key", "WRONGTYPE")


class RedisLink:
    """``address``'s link to a pipeline of ``stages`` verify stages and ``middles`` middle models.

    ``rows_url``: the broker for rows, if it is not the one at ``url``. ``holder``: as in
    ``Commands``.
    """

    def __init__(
        self,
        url: str,
        keys: Keys,
        address: Address,
        stages: int,
        rows_url: str | None = None,
        *,
        middles: int = 0,
        holder: Holder | None = None,
    ) -> None:
        self.address = address
        self._keys = keys
        self._commands = Commands(keys, address, stages, middles, holder)
        self._client = DirectClient(url)
        self._rows_client = (
            self._client if rows_url in (None, url) else DirectClient(rows_url or url)
        )
        self._reader = LogReader(
            keys,
            address,
            last_id(self._client, keys.log(address)),
            last_id(self._rows_client, keys.rows(address)),
            self._commands,
        )
        self._rows_written = 0
        self._recorded = Recorded()

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, block_seconds: float) -> ReadResult:
        reader = self._reader
        streams = reader.cursors
        if self._rows_client is not self._client:
            del streams[reader.rows_stream]
        envelopes: list[Envelope] = []
        stamps: list[Stamp | None] = []
        refused: list[str] = []
        # Trims are sent with the blocking read: in the write of a hop they would delay its reader.
        found = self._xread(
            self._client, streams, min(block_seconds, MAX_BLOCK_SECONDS), self._take_trims()
        )
        for stream, entries in found:
            if stream.decode() == reader.rows_stream:
                reader.take_in_rows(entries, refused)
            else:
                reader.take_in_log(entries, envelopes, stamps, refused)
        return ReadResult(tuple(envelopes), tuple(refused), tuple(stamps) if any(stamps) else ())

    @staticmethod
    def _xread(
        client: DirectClient,
        streams: Mapping[str, str],
        block_seconds: float,
        before: Sequence[Command] = (),
    ) -> Any:
        """Entries after the cursors, ``[[stream, [[id, [name, value, ...]], ...]], ...]``.

        ``before``: commands to run first, in the same round trip.
        """
        *_, found = client.run([*before, xread(streams, block_seconds, BATCH)])
        return found or ()

    def take_rows(self, run: RunKey, segment: int) -> Rows:
        deadline = time.monotonic() + ROWS_SECONDS
        while (rows := self._reader.take(run, segment)) is None:
            left = deadline - time.monotonic()
            if self._rows_client is self._client or left <= 0:
                raise GapError(f"the rows of segment {segment} did not arrive at {self.address}")
            self._wait_for_rows(left)
        return rows

    def _wait_for_rows(self, seconds: float) -> None:
        reader = self._reader
        streams = {reader.rows_stream: reader.rows_at}
        for _, entries in self._xread(self._rows_client, streams, max(0.001, min(seconds, 1.0))):
            reader.take_in_rows(entries, [])

    def drop_rows(self, run: RunKey, segment: int) -> None:
        self._reader.take(run, segment)

    def forget(self, run: RunKey) -> None:
        self._recorded.forget(run)
        self._reader.forget(run)

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, ops: Sequence[Op], stamps: Sequence[Stamp | None] | None = None) -> list[Code]:
        """Carry out ``ops`` in order; see ``base.Link``.

        Safe to repeat after a lost reply: a repeated command returns DUP, or its reader ignores it.
        """
        full = self._rows_full([op for op in ops if isinstance(op, PutRows)])
        apart = self._rows_client is not self._client
        if apart:
            self._rows_client.run(
                [self._commands.build(op) for op in ops if isinstance(op, PutRows)]
            )
        sent = [
            number
            for number, op in enumerate(ops)
            if not ((apart and isinstance(op, PutRows)) or self._recorded.over(op))
        ]
        texts = [stamp.text() if stamp else "" for stamp in stamps or [None] * len(ops)]
        commands = [self._commands.build(ops[number], texts[number]) for number in sent]
        # Atomic, so that rows and their envelope, or a prune and the next segment, wake their
        # reader once.
        answers = dict(zip(sent, self._client.run(commands, atomic=len(commands) > 1), strict=True))
        codes: list[Code] = []
        for number, op in enumerate(ops):
            if isinstance(op, PutRows):
                codes.append(Code.FULL if op.to in full else Code.OK)
            else:
                codes += codes_of(op, answers[number]) if number in answers else [Code.OK]
        return codes

    def _take_trims(self) -> list[Command]:
        if self._rows_client is not self._client:
            self._rows_client.run(self._reader.take_rows_trim())
        return self._reader.take_trims()

    def _rows_full(self, rows: Sequence[PutRows]) -> set[Address]:
        """Receivers whose stream of rows is at its cap; checked every ``_MEASURE_EVERY`` writes."""
        before = self._rows_written
        self._rows_written = self._rows_written + len(rows)
        if before // _MEASURE_EVERY == self._rows_written // _MEASURE_EVERY:
            return set()
        targets = list({op.to for op in rows})
        lengths = self._rows_client.run([("XLEN", self._keys.rows(to)) for to in targets])
        return {to for to, length in zip(targets, lengths, strict=True) if length >= ROWS_CAP}

    def close(self) -> None:
        self._client.close()
        if self._rows_client is not self._client:
            self._rows_client.close()


def last_id(client: BrokerClient, stream: str) -> str:
    """The id of the last entry, after which a new reader begins."""

    def ask(connection: redis.Redis) -> str:
        try:
            info: Any = connection.xinfo_stream(stream)
        except redis.ResponseError as error:
            if not any(sign in str(error) for sign in _NO_STREAM):
                raise
            return "0-0"
        return str(info["last-generated-id"].decode())

    return client.call(ask)
