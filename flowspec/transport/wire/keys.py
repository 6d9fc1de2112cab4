"""All key names but an inbox's.

One pipeline's keys share a hash tag, so that one script may touch all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowspec.core.protocol.addresses import Address
from flowspec.core.run.key import RunKey

#: The intake stream; untagged, read through a consumer group.
JOBS = "flowspec:jobs"


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of a pipeline's keys; a broker has one pipeline, with the default name."""

    pipeline: str = "p0"

    @property
    def tag(self) -> str:
        return f"flowspec:{{{self.pipeline}}}"

    @property
    def record(self) -> str:
        """Hash: the pipeline's record (stages, target, layer ranges)."""
        return f"{self.tag}:pipeline"

    @property
    def queue(self) -> str:
        """List: admitted jobs that wait, oldest first."""
        return f"{self.tag}:queue"

    @property
    def running(self) -> str:
        """Set: jobs assigned and not ended."""
        return f"{self.tag}:running"

    @property
    def submissions(self) -> str:
        """Stream: runs that begin, with their requests, for the draft worker alone."""
        return f"{self.tag}:submissions"

    @property
    def generations(self) -> str:
        """Hash: by role the number of its latest claim, and the token that made it."""
        return f"{self.tag}:generations"

    @property
    def followed(self) -> str:
        """Sorted set: jobs that end if nobody follows them, and until when one does, server ms."""
        return f"{self.tag}:followed"

    @property
    def spares(self) -> str:
        """Sorted set: spares that wait, as JSON, and until when each counts, server ms."""
        return f"{self.tag}:spares"

    @property
    def written(self) -> str:
        """String with a lifetime: written to see whether the broker takes writes."""
        return f"{self.tag}:written"

    def claim(self, role: str) -> str:
        """String with a lifetime: the lease on ``role`` (scheduler, draft, verify-1 ...)."""
        return f"{self.tag}:claim:{role}"

    def job(self, job: str) -> str:
        """Hash: state, epoch and offset of a job."""
        return f"{self.tag}:job:{job}"

    def request(self, job: str) -> str:
        """Hash: a job's submitted fields and the ids of its prompt, which stages cannot read."""
        return f"{self.tag}:request:{job}"

    def run(self, run: RunKey) -> str:
        """Hash: a run's sequence numbers and task graph."""
        return f"{self.tag}:run:{run.job}:{run.epoch}"

    def out(self, job: str) -> str:
        """Stream: the job's output."""
        return f"{self.tag}:out:{job}"

    def recording(self, run: RunKey) -> str:
        """Stream: the recording of a run whose job requested one."""
        return f"{self.tag}:recording:{run.job}:{run.epoch}"

    def wake(self, reader: str) -> str:
        """Stream: entries that end a blocked read of the reader of outputs ``reader``."""
        return f"{self.tag}:wake:{reader}"

    def idempotency(self, key: str) -> str:
        """String: the job first submitted under a caller's key."""
        return f"{self.tag}:idempotency:{key}"

    def log(self, address: Address) -> str:
        """Stream: a process's log of envelopes; their numbers define each sender's order."""
        return f"{self.tag}:log:{address}"

    def rows(self, address: Address) -> str:
        """Stream: rows sent to a process."""
        return f"{self.tag}:rows:{address}"
