"""A worker's link over Redis: per hop one round trip to write and one blocking read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from flowspec.broker import codec
from flowspec.broker.base import RECORDING_CAP, ROWS_CAP, Op, PutRows, ReadResult, Record, Rows
from flowspec.broker.commands import Commands
from flowspec.broker.connection import MAX_BLOCK_SECONDS
from flowspec.broker.keys import Keys
from flowspec.broker.redis_client import Command, DirectClient
from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.messages import Envelope, Open, Submit
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.ended import EndedRuns
from flowspec.core.run.key import RunKey
from flowspec.errors import GapError, WireError

#: Longest wait for rows whose envelope has arrived, seconds.
ROWS_SECONDS = 5.0
#: Writes of rows between two checks of the streams' lengths against their cap.
_MEASURE_EVERY = 32
_BATCH = 256

Fields = Mapping[bytes, bytes]


class RedisLink:
    """``address``'s link to a pipeline of ``stages`` verify stages and ``middles`` middle models.

    ``rows_url``: the broker for rows, if it is not the one at ``url``.
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
    ) -> None:
        self.address = address
        self._keys = keys
        self._commands = Commands(keys, address, stages, middles)
        self._client = DirectClient(url)
        self._rows_client = (
            self._client if rows_url in (None, url) else DirectClient(rows_url or url)
        )
        self._log = keys.log(address)
        self._rows_stream = keys.rows(address)
        self._rows_name = self._rows_stream.encode()
        self._log_cursor = _last_id(self._client, self._log)
        self._rows_cursor = _last_id(self._rows_client, self._rows_stream)
        self._rows: dict[tuple[RunKey, int], Rows] = {}
        self._first_entry: dict[RunKey, str] = {}  # log entry at which each open run begins
        self._ended = EndedRuns()  # runs whose late rows are dropped
        self._log_trim: Command | None = None
        self._rows_trim: Command | None = None
        self._rows_written = 0
        self._recorded: Counter[RunKey] = Counter()

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, block_seconds: float) -> ReadResult:
        streams = [(self._log, self._log_cursor)]
        if self._rows_client is self._client:
            streams.append((self._rows_stream, self._rows_cursor))
        envelopes: list[Envelope] = []
        stamps: list[Stamp | None] = []
        refused: list[str] = []
        # Trims are sent with the blocking read: in the write of a hop they would delay its reader.
        found = self._xread(
            self._client, streams, min(block_seconds, MAX_BLOCK_SECONDS), self._take_trims()
        )
        for stream, entries in found:
            if stream == self._rows_name:
                self._take_in_rows(entries, refused)
            else:
                self._take_in_log(entries, envelopes, stamps, refused)
        return ReadResult(tuple(envelopes), tuple(refused), tuple(stamps) if any(stamps) else ())

    @staticmethod
    def _xread(
        client: DirectClient,
        streams: Sequence[tuple[str, str]],
        block_seconds: float,
        before: Sequence[Command] = (),
    ) -> Any:
        """Entries after the cursors, ``[[stream, [[id, [name, value, ...]], ...]], ...]``.

        ``before``: commands to run first, in the same round trip.
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
                self._first_entry.setdefault(envelope.message.run, self._log_cursor)
            envelopes.append(envelope)
            stamps.append(stamp)
        if not self._first_entry:
            self._trim_log()

    def _take_in_rows(self, entries: Any, refused: list[str]) -> None:
        for entry, flat in entries:
            self._rows_cursor = entry.decode()
            fields = _fields(flat)
            try:
                run = RunKey(_text(fields, b"j"), _number(fields, b"e"))
                if run not in self._ended:
                    rows = codec.decode_rows(_field(fields, b"d"))
                    self._rows[run, _number(fields, b"s")] = rows
            except WireError as error:
                refused.append(f"{self._rows_stream} {self._rows_cursor}: {error}")
        self._rows_trim = ("XTRIM", self._rows_stream, "MINID", _after(self._rows_cursor))

    def take_rows(self, run: RunKey, segment: int) -> Rows:
        deadline = time.monotonic() + ROWS_SECONDS
        while (run, segment) not in self._rows:
            left = deadline - time.monotonic()
            if self._rows_client is self._client or left <= 0:
                raise GapError(f"the rows of segment {segment} did not arrive at {self.address}")
            self._wait_for_rows(left)
        return self._rows.pop((run, segment))

    def _wait_for_rows(self, seconds: float) -> None:
        streams = [(self._rows_stream, self._rows_cursor)]
        for _, entries in self._xread(self._rows_client, streams, max(0.001, min(seconds, 1.0))):
            self._take_in_rows(entries, [])

    def drop_rows(self, run: RunKey, segment: int) -> None:
        self._rows.pop((run, segment), None)

    def forget(self, run: RunKey) -> None:
        self._first_entry.pop(run, None)
        self._recorded.pop(run, None)
        self._ended.add(run)
        self._rows = {name: rows for name, rows in self._rows.items() if name[0] != run}
        self._trim_log()

    def _trim_log(self) -> None:
        """Schedule a trim of the entries before the oldest open run; unread entries stay."""
        oldest = min(self._first_entry.values(), key=_order, default=_after(self._log_cursor))
        self._log_trim = ("XTRIM", self._log, "MINID", oldest)

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
            if not ((apart and isinstance(op, PutRows)) or self._over(op))
        ]
        texts = [stamp.text() if stamp else "" for stamp in stamps or [None] * len(ops)]
        commands = [self._commands.build(ops[number], texts[number]) for number in sent]
        # Atomic, so that rows and their envelope, or a prune and the next segment, wake their
        # reader once.
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

    def _rows_full(self, rows: Sequence[PutRows]) -> set[Address]:
        """Receivers whose stream of rows is at its cap; checked every ``_MEASURE_EVERY`` writes."""
        before = self._rows_written
        self._rows_written = self._rows_written + len(rows)
        if before // _MEASURE_EVERY == self._rows_written // _MEASURE_EVERY:
            return set()
        targets = list({op.to for op in rows})
        lengths = self._rows_client.run([("XLEN", self._keys.rows(to)) for to in targets])
        return {to for to, length in zip(targets, lengths, strict=True) if length >= ROWS_CAP}

    def _over(self, op: Op) -> bool:
        """Count ``op`` if it is a line of a recording; whether it is beyond the cap."""
        if not isinstance(op, Record):
            return False
        self._recorded[op.run] += 1
        return self._recorded[op.run] > RECORDING_CAP

    def close(self) -> None:
        self._client.close()
        if self._rows_client is not self._client:
            self._rows_client.close()


def _last_id(client: DirectClient, stream: str) -> str:
    """The id of the last entry, after which a new reader begins."""

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
    return Envelope(
        Address.parse(_text(fields, b"f")),
        _number(fields, b"q"),
        codec.decode(_field(fields, b"m")),
    )


def _field(fields: Fields, name: bytes) -> bytes:
    value = fields.get(name)
    if value is None:
        raise WireError(f"an entry without field {name.decode()}")
    return value


def _text(fields: Fields, name: bytes) -> str:
    try:
        return _field(fields, name).decode()
    except UnicodeDecodeError:
        raise WireError(f"field {name.decode()} is not text") from None


def _number(fields: Fields, name: bytes) -> int:
    text = _text(fields, name)
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise WireError(f"field {name.decode()} is not a number")
    return int(text)


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


def _after(entry: str) -> str:
    milliseconds, number = _order(entry)
    return f"{milliseconds}-{number + 1}"
