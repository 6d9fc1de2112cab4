"""A run as the draft worker's machine has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowspec.core.protocol.messages import Meter, Submit
from flowspec.core.protocol.sequence import SeqReader
from flowspec.core.run.key import RunKey
from flowspec.core.run.spec import JobSpec
from flowspec.core.session.lifecycle import Lifecycle, State
from flowspec.core.session.session import Session

#: How long a complete job waits for the stages' reports before it ends without them, seconds.
REPORT_SECONDS = 2.0


@dataclass(slots=True)
class DraftRun:
    """A run at the draft worker, from its Submit to its end.

    ``submitted_at`` is on this worker's clock. ``alone``: it runs behind a barrier. ``waits``: for
    other runs, or for room. ``awaits``: the run whose prompt's rows it will begin with.
    ``reuses``: it may begin with another run's rows; ``drafts``: its strategy grows a tree.
    ``prompt``: its ids; None: to be encoded. ``rows``: that each stage allocates for it; 0 until
    the ids are known. ``session``: None until it has begun. ``closing_since``: when the text was
    complete.
    """

    submit: Submit
    spec: JobSpec
    submitted_at: float
    alone: bool = False
    waits: bool = False
    awaits: RunKey | None = None
    reuses: bool = False
    drafts: bool = False
    prompt: tuple[int, ...] | None = None
    rows: int = 0
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    seen: SeqReader = field(default_factory=SeqReader)
    session: Session | None = None
    meters: dict[int, Meter] = field(default_factory=dict)
    closing_since: float | None = None

    @property
    def key(self) -> RunKey:
        return self.submit.run

    @property
    def drafting_session(self) -> Session | None:
        """The session, while it may draft."""
        return None if self.lifecycle.state is State.CLOSING else self.session

    @property
    def is_to_encode(self) -> bool:
        """Whether it has begun with a text whose ids are not known."""
        return self.lifecycle.state is State.ENCODING and not self.waits and self.prompt is None

    @property
    def is_decoding(self) -> bool:
        return self.lifecycle.is_decoding

    @property
    def due(self) -> float | None:
        """When the run's wait for its beginning, an answer or the stages' reports ends."""
        if self.closing_since is not None:
            return self.closing_since + REPORT_SECONDS
        return self._begins_by if self.session is None else self.session.answer_deadline.until

    @property
    def _begins_by(self) -> float | None:
        """When the run ends if it still waits; None: never, or a run of its job has begun."""
        may_wait = self.spec.wait_seconds
        waits = self.waits or self.awaits is not None
        if not waits or not may_wait or self.submit.earlier is not None:
            return None
        return self.submitted_at - self.submit.queued_seconds + may_wait
