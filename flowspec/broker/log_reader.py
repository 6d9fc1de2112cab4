"""What a worker has read of its log and its rows on the control broker: cursors, rows, trims."""

from __future__ import annotations

from typing import Any

from flowspec.broker import codec, entries
from flowspec.broker.base import Rows
from flowspec.broker.keys import Keys
from flowspec.broker.redis_client import Command
from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.messages import Envelope, Open, Submit
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.ended import EndedRuns
from flowspec.core.run.key import RunKey
from flowspec.errors import WireError


class LogReader:
    """The reader of ``address``'s two streams, from the cursors ``log_at`` and ``rows_at`` on.

    Malformed entries are skipped; a line on each goes into the caller's ``refused``.
    """

    def __init__(self, keys: Keys, address: Address, log_at: str, rows_at: str) -> None:
        self.log = keys.log(address)
        self.rows_stream = keys.rows(address)
        self.log_at = log_at
        self.rows_at = rows_at
        self.ended = EndedRuns()  # runs whose late rows are dropped
        self._rows: dict[tuple[RunKey, int], Rows] = {}
        self._first_entry: dict[RunKey, str] = {}  # log entry at which each open run begins
        self._log_trim: Command | None = None
        self._rows_trim: Command | None = None

    @property
    def cursors(self) -> dict[str, str]:
        """Both streams and how far they have been read."""
        return {self.log: self.log_at, self.rows_stream: self.rows_at}

    @property
    def open_runs(self) -> tuple[RunKey, ...]:
        """Runs that have begun here and not ended."""
        return tuple(self._first_entry)

    # ---- entries ---------------------------------------------------------------------------------

    def take_in_log(
        self,
        found: Any,
        envelopes: list[Envelope],
        stamps: list[Stamp | None],
        refused: list[str],
    ) -> None:
        """Append what the log's entries ``found`` hold to the lists."""
        for entry, flat in found:
            self.log_at = entry.decode()
            parts = entries.fields(flat)
            try:
                envelope = entries.envelope(parts)
                stamp = Stamp.read(entries.text(parts, b"t")) if b"t" in parts else None
            except WireError as error:
                refused.append(f"{self.log} {self.log_at}: {error}")
                continue
            if isinstance(envelope.message, Open | Submit):
                self._first_entry.setdefault(envelope.message.run, self.log_at)
            envelopes.append(envelope)
            stamps.append(stamp)
        if not self._first_entry:
            self._trim_log()

    def take_in_rows(self, found: Any, refused: list[str]) -> None:
        """Keep the rows in the entries ``found`` until they are taken."""
        for entry, flat in found:
            self.rows_at = entry.decode()
            try:
                run, segment, data = entries.rows(entries.fields(flat))
                self.keep(run, segment, data)
            except WireError as error:
                refused.append(f"{self.rows_stream} {self.rows_at}: {error}")
        self._rows_trim = ("XTRIM", self.rows_stream, "MINID", entries.after(self.rows_at))

    # ---- rows ------------------------------------------------------------------------------------

    def keep(self, run: RunKey, segment: int, data: bytes) -> None:
        """Keep the rows in ``data`` until they are taken, unless the run has ended."""
        if run not in self.ended:
            self._rows[run, segment] = codec.decode_rows(data)

    def take(self, run: RunKey, segment: int) -> Rows | None:
        """Remove and return a segment's rows; None: they have not arrived."""
        return self._rows.pop((run, segment), None)

    def forget(self, run: RunKey) -> None:
        """Drop everything of ``run``, which has ended here."""
        self._first_entry.pop(run, None)
        self.ended.add(run)
        self._rows = {name: rows for name, rows in self._rows.items() if name[0] != run}
        self._trim_log()

    # ---- trims -----------------------------------------------------------------------------------

    def take_trims(self) -> list[Command]:
        """Commands that remove what no run needs any more; each is returned once."""
        trims = [trim for trim in (self._log_trim, self._rows_trim) if trim is not None]
        self._log_trim = self._rows_trim = None
        return trims

    def take_rows_trim(self) -> list[Command]:
        """The trim of the rows alone, for a server of their own."""
        trim = self._rows_trim
        self._rows_trim = None
        return [] if trim is None else [trim]

    def _trim_log(self) -> None:
        """Schedule a trim of the entries before the oldest open run; unread entries stay."""
        behind = entries.after(self.log_at)
        oldest = min(self._first_entry.values(), key=entries.order, default=behind)
        self._log_trim = ("XTRIM", self.log, "MINID", oldest)
