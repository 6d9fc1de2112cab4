"""Every key name. Keys of one pipeline share a hash tag, so that one script may touch
all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Where jobs of every pipeline are submitted; untagged, read through a consumer group.
JOBS = "flowspec:jobs"
#: The pipeline that serves when nothing else is said.
DEFAULT_PIPELINE = "p0"


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of one pipeline's keys."""

    pipeline: str = DEFAULT_PIPELINE

    @property
    def tag(self) -> str:
        return f"flowspec:{{{self.pipeline}}}"

    @property
    def record(self) -> str:
        """Hash: what the pipeline runs (stages, target, layer ranges)."""
        return f"{self.tag}:pipeline"

    @property
    def queue(self) -> str:
        """List: admitted jobs that wait, oldest first."""
        return f"{self.tag}:queue"

    @property
    def running(self) -> str:
        """Set: jobs assigned and not ended."""
        return f"{self.tag}:running"

    def claim(self, role: str) -> str:
        """String with a lifetime: who owns ``role`` (scheduler, draft, verify-1 ...)."""
        return f"{self.tag}:claim:{role}"

    def job(self, job: str) -> str:
        """Hash: state, epoch, offset and the fields of a job."""
        return f"{self.tag}:job:{job}"

    def graph(self, job: str) -> str:
        """Hash: the job's task graph."""
        return f"{self.tag}:graph:{job}"

    def out(self, job: str) -> str:
        """Stream: the job's output."""
        return f"{self.tag}:out:{job}"

    def recording(self, job: str) -> str:
        """Stream: the recording of a job that asked for one."""
        return f"{self.tag}:recording:{job}"

    def idempotency(self, key: str) -> str:
        """String: the job first submitted under a caller's key."""
        return f"{self.tag}:idempotency:{key}"

    def log(self, node: str) -> str:
        """Stream: a node's log of envelopes; order lives here alone."""
        return f"{self.tag}:log:{node}"

    def rows(self, node: str) -> str:
        """Stream: rows on their way to a node."""
        return f"{self.tag}:rows:{node}"
