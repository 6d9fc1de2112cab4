"""A worker's link over Redis: one round trip to write a hop, one blocking read to wait for the
next.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from flowspec.broker import codec
from flowspec.broker.base import RECORDING_CAP, ROWS_CAP, Delivery, Op, PutRows, Record, Rows
from flowspec.broker.commands import Commands
from flowspec.broker.connection import MAX_BLOCK_SECONDS
from flowspec.broker.keys import Keys
from flowspec.broker.redis_client import Command, DirectClient
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.messages import Envelope, Open, Submit
from flowspec.core.protocol.stamps import Stamp
from flowspec.errors import GapError, WireError

#: Longest wait for rows whose envelope has arrived, seconds.
ROWS_SECONDS = 5.0
#: A stream of rows is measured against its cap every so many writes.
_MEASURE_EVERY = 32
_BATCH = 256
#: Ended jobs remembered.
ENDED_JOBS = 1024

Fields = Mapping[bytes, bytes]


class RedisLink:
    """``node``'s link to a pipeline of ``stages`` verify stages and ``middles`` middle models.

    ``rows_url``: where rows travel, if not on the control broker at ``url``.
    """

    def __init__(
        self,
        url: str,
        keys: Keys,
        node: str,
        stages: int,
        rows_url: str | None = None,
        *,
        middles: int = 0,
    ) -> None:
        self.node = node
        self._keys = keys
        self._commands = Commands(keys, node, stages, middles)
        self._client = DirectClient(url)
        self._rows_client = (
            self._client if rows_url in (None, url) else DirectClient(rows_url or url)
        )
        self._log = keys.log(node)
        self._rows_stream = keys.rows(node)
        self._rows_name = self._rows_stream.encode()
        self._log_cursor = _last_id(self._client, self._log)
        self._rows_cursor = _last_id(self._rows_client, self._rows_stream)
        self._rows: dict[tuple[str, int, int], Rows] = {}
        self._first_entry: dict[str, str] = {}  # log entry at which each open job begins
        self._ended: dict[str, None] = {}  # jobs whose rows may still come and are of no use
        self._log_trim: Command | None = None
        self._rows_trim: Command | None = None
        self._rows_written = 0
        self._recorded: Counter[str] = Counter()

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, block_seconds: float) -> Delivery:
        streams = [(self._log, self._log_cursor)]
        if self._rows_client is self._client:
            streams.append((self._rows_stream, self._rows_cursor))
        envelopes: list[Envelope] = []
        stamps: list[Stamp | None] = []
        refused: list[str] = []
        # Trims go out with the wait for more: on the way of a hop they would only delay its reader.
        found = self._xread(
            self._client, streams, min(block_seconds, MAX_BLOCK_SECONDS), self._take_trims()
        )
        for stream, entries in found:
            if stream == self._rows_name:
                self._take_in_rows(entries, refused)
            else:
                self._take_in_log(entries, envelopes, stamps, refused)
        return Delivery(tuple(envelopes), tuple(refused), tuple(stamps) if any(stamps) else ())

    @staticmethod
    def _xread(
        client: DirectClient,
        streams: Sequence[tuple[str, str]],
        block_seconds: float,
        before: Sequence[Command] = (),
    ) -> Any:
        """What lies behind the cursors, ``[[stream, [[id, [name, value, ...]], ...]], ...]``.

        ``before`` is carried out first, in the same round trip.
        """
        block = ("BLOCK", int(block_seconds * 1000)) if block_seconds >= 0.001 else ()
        names, cursors = zip(*streams, strict=True)
        *_, found = client.run(
            [*before, ("XREAD", "COUNT", _BATCH, *block, "STREAMS", *names, *cursors)]
        )
        return found or ()

    def _take_in_log(
        self,
        entries: Any,
        envelopes: list[Envelope],
        stamps: list[Stamp | None],
        refused: list[str],
    ) -> None:
        for entry, flat in entries:
            self._log_cursor = entry.decode()
            fields = _fields(flat)
            try:
                envelope = _envelope(fields)
                stamp = Stamp.read(_text(fields, b"t")) if b"t" in fields else None
            except WireError as error:
                refused.append(f"{self._log} {self._log_cursor}: {error}")
                continue
            if isinstance(envelope.message, Open | Submit):
                self._first_entry.setdefault(envelope.message.job, self._log_cursor)
                self._ended.pop(envelope.message.job, None)
            envelopes.append(envelope)
            stamps.append(stamp)
        if not self._first_entry:
            self._trim_log()

    def _take_in_rows(self, entries: Any, refused: list[str]) -> None:
        for entry, flat in entries:
            self._rows_cursor = entry.decode()
            fields = _fields(flat)
            try:
                name = (_text(fields, b"j"), _number(fields, b"e"), _number(fields, b"s"))
                if name[0] not in self._ended:
                    self._rows[name] = codec.decode_rows(_field(fields, b"d"))
            except WireError as error:
                refused.append(f"{self._rows_stream} {self._rows_cursor}: {error}")
        self._rows_trim = ("XTRIM", self._rows_stream, "MINID", _after(self._rows_cursor))

    def take_rows(self, job: str, epoch: int, segment: int) -> Rows:
        deadline = time.monotonic() + ROWS_SECONDS
        while (job, epoch, segment) not in self._rows:
            left = deadline - time.monotonic()
            if self._rows_client is self._client or left <= 0:
                raise GapError(f"the rows of segment {segment} did not arrive at {self.node}")
            self._wait_for_rows(left)
        return self._rows.pop((job, epoch, segment))

    def _wait_for_rows(self, seconds: float) -> None:
        streams = [(self._rows_stream, self._rows_cursor)]
        for _, entries in self._xread(self._rows_client, streams, max(0.001, min(seconds, 1.0))):
            self._take_in_rows(entries, [])

    def drop_rows(self, job: str, segment: int) -> None:
        self._rows = {
            name: rows for name, rows in self._rows.items() if (name[0], name[2]) != (job, segment)
        }

    def forget(self, job: str) -> None:
        self._first_entry.pop(job, None)
        self._recorded.pop(job, None)
        self._ended[job] = None
        while len(self._ended) > ENDED_JOBS:
            del self._ended[next(iter(self._ended))]
        self._rows = {name: rows for name, rows in self._rows.items() if name[0] != job}
        self._trim_log()

    def _trim_log(self) -> None:
        """Let go of what lies before the oldest open job, and never of what has not been read."""
        oldest = min(self._first_entry.values(), key=_order, default=_after(self._log_cursor))
        self._log_trim = ("XTRIM", self._log, "MINID", oldest)

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, ops: Sequence[Op], at: float | None = None) -> list[Code]:
        """Safe to repeat after a lost reply: every command answers DUP or is ignored
        by its reader.
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
            if not ((apart and isinstance(op, PutRows)) or self._over(op))
        ]
        stamp = "" if at is None else Stamp(at, self.node).text()
        commands = [self._commands.build(ops[number], stamp) for number in sent]
        # Rows and the envelope that names them, a prune and the segment behind it: one waking of
        # their reader, not two.
        answers = self._client.run(commands, atomic=len(commands) > 1)
        codes = [Code.FULL if isinstance(op, PutRows) and op.to in full else Code.OK for op in ops]
        for number, answer in zip(sent, answers, strict=False):
            if not isinstance(ops[number], PutRows | Record):
                codes[number] = Code(answer)
        return codes

    def _take_trims(self) -> list[Command]:
        if self._rows_trim is not None and self._rows_client is not self._client:
            self._rows_client.run([self._rows_trim])
            self._rows_trim = None
        trims = [trim for trim in (self._log_trim, self._rows_trim) if trim is not None]
        self._log_trim = self._rows_trim = None
        return trims

    def _rows_full(self, rows: Sequence[PutRows]) -> set[str]:
        """Receivers whose stream of rows is at its cap; looked at now and then."""
        before = self._rows_written
        self._rows_written = self._rows_written + len(rows)
        if before // _MEASURE_EVERY == self._rows_written // _MEASURE_EVERY:
            return set()
        targets = sorted({op.to for op in rows})
        lengths = self._rows_client.run([("XLEN", self._keys.rows(to)) for to in targets])
        return {to for to, length in zip(targets, lengths, strict=True) if length >= ROWS_CAP}

    def _over(self, op: Op) -> bool:
        """Whether a line of a recording comes after its cap."""
        if not isinstance(op, Record):
            return False
        self._recorded[op.job] += 1
        return self._recorded[op.job] > RECORDING_CAP

    def close(self) -> None:
        self._client.close()
        if self._rows_client is not self._client:
            self._rows_client.close()


def _last_id(client: DirectClient, stream: str) -> str:
    """Where a new reader begins: behind everything written so far."""

    def ask(connection: redis.Redis) -> str:
        try:
            info: Any = connection.xinfo_stream(stream)
        except redis.ResponseError:  # no such stream yet
            return "0-0"
        return str(info["last-generated-id"].decode())

    return client.call(ask)


def _fields(flat: Sequence[bytes]) -> Fields:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _envelope(fields: Fields) -> Envelope:
    return Envelope(_text(fields, b"f"), _number(fields, b"q"), codec.decode(_field(fields, b"m")))


def _field(fields: Fields, name: bytes) -> bytes:
    value = fields.get(name)
    if value is None:
        raise WireError(f"an entry without field {name.decode()}")
    return value


def _text(fields: Fields, name: bytes) -> str:
    try:
        return _field(fields, name).decode()
    except UnicodeDecodeError:
        raise WireError(f"field {name.decode()} is no text") from None


def _number(fields: Fields, name: bytes) -> int:
    text = _text(fields, name)
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise WireError(f"field {name.decode()} is no number")
    return int(text)


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


def _after(entry: str) -> str:
    milliseconds, number = _order(entry)
    return f"{milliseconds}-{number + 1}"
