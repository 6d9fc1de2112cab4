"""What a worker has read of its streams on the control broker: cursors, rows, trims.

Rows that came through its inbox are kept here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from flowspec.core.protocol.addresses import DRAFT, SCHEDULER, Address
from flowspec.core.protocol.messages import Envelope, Revoke
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.ended import EndedRuns
from flowspec.core.run.key import RunKey
from flowspec.errors import GapError, WireError
from flowspec.transport.base import TRIM_BYTES, TRIM_ENTRIES, Rows
from flowspec.transport.connections.answers import WRONG_TYPE, code_of
from flowspec.transport.connections.redis_client import BrokerClient, Command
from flowspec.transport.link.commands import Commands
from flowspec.transport.wire import codec, entries
from flowspec.transport.wire.keys import Keys

#: Most rows, and bytes of them, that are kept of runs of which no message has come yet.
EARLY_ROWS = 1024
EARLY_BYTES = 256 << 20
#: What the server says of a stream that is not there yet, under its code for everything.
_NO_STREAM = "no such key"
#: The id before all entries.
_NOTHING = "0-0"


class Untrimmed:
    """Entries read of streams and not removed: a trim for each would cost more than it frees."""

    def __init__(self) -> None:
        self.streams: set[str] = set()
        self.entries = 0
        self._bytes = 0

    def note(self, stream: str, flat: Sequence[bytes]) -> None:
        """An entry of ``stream`` with the fields ``flat`` was read."""
        self.streams.add(stream)
        self.entries += 1
        self._bytes += sum(map(len, flat))

    @property
    def many(self) -> bool:
        """Whether they are worth a trim."""
        return self.entries >= TRIM_ENTRIES or self._bytes >= TRIM_BYTES


class LogReader:
    """The reader of ``address``'s streams, from where they end now at the ``client``'s server.

    They are its log and its rows, and submissions for the draft worker. Malformed entries are
    skipped; a line on each goes into the caller's ``refused``. ``commands``: builds the trims. What
    has been read, or came before, is needed by nobody: a worker that takes over begins behind it,
    and ends the runs of its predecessor, which then removes nothing any more.
    """

    def __init__(
        self, keys: Keys, address: Address, client: BrokerClient, commands: Commands
    ) -> None:
        self._address = address
        self._log = keys.log(address)
        self._rows_stream = keys.rows(address)
        streams = [self._log, self._rows_stream, *[keys.submissions] * (address == DRAFT)]
        #: How far each stream has been read.
        self.cursors = {stream: last_id(client, stream) for stream in streams}
        self.ended = EndedRuns()  # runs whose late rows are dropped
        self._rows: dict[tuple[RunKey, int], Rows] = {}
        self._early: dict[tuple[RunKey, int], int] = {}  # bytes of rows whose run is not named yet
        self._commands = commands
        self._read: dict[RunKey, int] = {}  # entries read of each run that has begun, not ended
        self._untrimmed = 0  # entries read of the log and not removed
        self._uncounted: set[RunKey] = set()  # runs that had entries among these
        self._others = Untrimmed()  # of the other streams, and what a predecessor has left there
        self._others.streams |= {
            stream for stream, at in self.cursors.items() if stream != self._log and at != _NOTHING
        }
        self._bundles = 0  # entries read with messages of several runs

    # ---- entries ---------------------------------------------------------------------------------

    def take_in(
        self,
        stream: str,
        found: Any,
        envelopes: list[Envelope],
        stamps: list[Stamp | None],
        refused: list[str],
    ) -> None:
        """Keep the rows in ``stream``'s entries ``found``; append what others hold to the lists."""
        for entry, flat in found:
            self.cursors[stream] = entry.decode()
            place = f"{stream} {self.cursors[stream]}"
            if stream == self._log:
                self._untrimmed += 1
            else:
                self._others.note(stream, flat)
            try:
                if stream == self._rows_stream:
                    self.keep(*entries.rows(entries.fields(flat)))
                    continue
                parts = entries.parts(flat)
            except WireError as error:
                refused.append(f"{place}: {error}")
                continue
            bundle = self.bundle_of(parts)
            for part in parts:
                try:
                    envelope = entries.envelope(part, bundle)
                    stamp = Stamp.read(entries.text(part, b"t")) if b"t" in part else None
                except WireError as error:
                    refused.append(f"{place}: {error}")
                    continue
                self._count(envelope)
                envelopes.append(envelope)
                stamps.append(stamp)

    def bundle_of(self, parts: Sequence[entries.Fields]) -> int:
        """The number of an entry with ``parts``, as in ``Envelope``; not for other readers."""
        if len(parts) == 1:
            return 0
        self._bundles += 1
        return self._bundles

    def _count(self, envelope: Envelope) -> None:
        """Count an entry for its run, as the writers do: but for those of the scheduler."""
        message = envelope.message
        run = message.run
        if isinstance(message, Revoke):
            ended = [known for known in self._read if known.job == run.job]
            for known in ended:
                del self._read[known]
        elif run not in self.ended:
            self._read[run] = self._read.get(run, 0) + (envelope.sender != SCHEDULER)
            self._uncounted.add(run)

    # ---- rows ------------------------------------------------------------------------------------

    def keep(self, run: RunKey, segment: int, data: bytes) -> None:
        """Keep the rows in ``data`` until they are taken, unless the run has ended.

        If too much is kept of runs that no message has named, the oldest of these are dropped: with
        a run's rows comes its segment, and before that its ``Open``.
        """
        if run not in self.ended:
            self._rows[run, segment] = codec.decode_rows(data)
            self._note_early(run, segment, len(data))

    def _note_early(self, run: RunKey, segment: int, size: int) -> None:
        if run in self._read:
            return
        self._early[run, segment] = size
        # Runs that were named since, and rows that were taken, count no longer.
        if len(self._early) <= EARLY_ROWS and sum(self._early.values()) <= EARLY_BYTES:
            return
        self._early = {
            name: size
            for name, size in self._early.items()
            if name in self._rows and name[0] not in self._read
        }
        while len(self._early) > EARLY_ROWS or sum(self._early.values()) > EARLY_BYTES:
            name = next(iter(self._early))
            del self._early[name], self._rows[name]

    def take(self, run: RunKey, segment: int) -> Rows:
        """Remove and return a segment's rows; GapError if they have not arrived."""
        rows = self.drop(run, segment)
        if rows is None:
            raise GapError(f"the rows of segment {segment} did not arrive at {self._address}")
        return rows

    def drop(self, run: RunKey, segment: int) -> Rows | None:
        """Remove a segment's rows, if they have arrived."""
        return self._rows.pop((run, segment), None)

    def forget(self, run: RunKey) -> None:
        """Drop everything of ``run``, which has ended here."""
        self._read.pop(run, None)
        self.ended.add(run)
        self._rows = {name: rows for name, rows in self._rows.items() if name[0] != run}

    # ---- trims -----------------------------------------------------------------------------------

    def take_trims(self) -> list[Command]:
        """Commands that remove what has been read; each is returned once.

        There is one for many entries, or for the last ones before the reader is idle.
        """
        idle = not self._read
        trims = []
        if self._untrimmed >= TRIM_ENTRIES or (self._untrimmed and idle):
            trims.append(self._log_trim())
        if self._others.many or idle:
            for stream in sorted(self._others.streams):
                trims.append(self._commands.trim(stream, entries.after(self.cursors[stream])))
            self._others = Untrimmed()
        return trims

    def _log_trim(self) -> Command:
        """The trim of all that has been read of the log; unread entries stay."""
        read = {run: self._read[run] for run in self._uncounted if run in self._read}
        self._untrimmed = 0
        self._uncounted.clear()
        return self._commands.trim(self._log, entries.after(self.cursors[self._log]), read)


def last_id(client: BrokerClient, stream: str) -> str:
    """The id of the last entry, after which a new reader begins."""

    def ask(connection: redis.Redis) -> str:
        try:
            info: Any = connection.xinfo_stream(stream)
        except redis.ResponseError as error:
            if code_of(error) != WRONG_TYPE and _NO_STREAM not in str(error):
                raise
            return _NOTHING
        return str(info["last-generated-id"].decode())

    return client.call(ask)
