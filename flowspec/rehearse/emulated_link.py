"""The link of an emulated worker: per hop one round trip to write and one blocking read.

The latencies of a profile are charged by stamps, which go with what is written; so the link itself
waits for every answer, and a read returns all that was there when it began.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.messages import Envelope
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.key import RunKey
from flowspec.transport.base import ROWS_CAP, Op, PutRows, ReadResult, Rows
from flowspec.transport.connections.connection import MAX_BLOCK_SECONDS
from flowspec.transport.connections.redis_client import DirectClient
from flowspec.transport.link.commands import Commands, codes_of
from flowspec.transport.link.log_reader import LogReader
from flowspec.transport.link.pending_read import BATCH, is_cut
from flowspec.transport.link.recorded import Recorded
from flowspec.transport.wire.entries import xread
from flowspec.transport.wire.keys import Keys

#: Writes of rows between two checks of the streams' lengths against their cap.
_MEASURE_EVERY = 32


class EmulatedLink:
    """``address``'s link to a pipeline of ``stages`` verify stages and ``middles`` middle models.

    ``holder``: as in ``Commands``.
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
    ) -> None:
        self.address = address
        self._keys = keys
        self._commands = Commands(keys, address, stages, middles, holder)
        self._client = DirectClient(url)
        self._reader = LogReader(keys, address, self._client, self._commands)
        self._rows_written = 0
        self._recorded = Recorded()

    # ---- reading ---------------------------------------------------------------------------------

    def read(self, block_seconds: float) -> ReadResult:
        reader = self._reader
        envelopes: list[Envelope] = []
        stamps: list[Stamp | None] = []
        refused: list[str] = []
        block_seconds = min(block_seconds, MAX_BLOCK_SECONDS)
        more = True
        while more:
            read = xread(reader.cursors, block_seconds, BATCH)
            # Trims are sent with the blocking read: in a hop's write they would delay its reader.
            *_, found = self._client.run([*reader.take_trims(), read])
            for stream, entries in found or ():
                reader.take_in(stream.decode(), entries, envelopes, stamps, refused)
            more = is_cut(found or ())
            block_seconds = 0.0
        return ReadResult(tuple(envelopes), tuple(refused), tuple(stamps) if any(stamps) else ())

    def take_rows(self, run: RunKey, segment: int) -> Rows:
        return self._reader.take(run, segment)

    def drop_rows(self, run: RunKey, segment: int) -> None:
        self._reader.drop(run, segment)

    def forget(self, run: RunKey) -> None:
        self._recorded.forget(run)
        self._reader.forget(run)

    # ---- writing ---------------------------------------------------------------------------------

    def write(self, ops: Sequence[Op], stamps: Sequence[Stamp | None] | None = None) -> list[Code]:
        """See ``emulator.StampedLink``.

        Safe to repeat after a lost reply: a repeated command returns DUP, or its reader ignores it.
        """
        full = self._rows_full([op for op in ops if isinstance(op, PutRows)])
        sent = [number for number, op in enumerate(ops) if not self._recorded.over(op)]
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

    def _rows_full(self, rows: Sequence[PutRows]) -> set[Address]:
        """Receivers whose stream of rows is at its cap; checked every ``_MEASURE_EVERY`` writes."""
        before = self._rows_written
        self._rows_written = self._rows_written + len(rows)
        if before // _MEASURE_EVERY == self._rows_written // _MEASURE_EVERY:
            return set()
        targets = list({op.to for op in rows})
        lengths = self._client.run([("XLEN", self._keys.rows(to)) for to in targets])
        return {to for to, length in zip(targets, lengths, strict=True) if length >= ROWS_CAP}

    def close(self) -> None:
        self._client.close()
