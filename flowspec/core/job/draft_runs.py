"""The runs at the draft worker, and how each of them ends.

A run ends with its job, complete or with an error; unbegun, if it is rejected; or without a word to
the client, if another run of its job goes on. What ends it is an event of ``lifecycle``.
"""

from __future__ import annotations

from flowspec.core.job.draft_run import DraftRun
from flowspec.core.prefixes.kept_prefixes import KeptPrefixes
from flowspec.core.protocol.causes import FAILED, LATE, NOT_BEGUN
from flowspec.core.protocol.machine import Evict, Finish, Keep, OpenJob, Output, Release
from flowspec.core.protocol.messages import Submit
from flowspec.core.run.ended import EndedRuns
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.session.lifecycle import Event, State
from flowspec.core.session.session import Session
from flowspec.core.session.stats import unmeasured


class DraftRuns(dict[RunKey, DraftRun]):
    """Runs by key, from their Submit to their end; what ends one returns the outputs of that.

    ``prefixes``: the rows that the pipeline keeps of them.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.prefixes = KeptPrefixes(limits.kept_rows)
        self.ended = EndedRuns()
        self._limits = limits

    def end_overdue(self, now: float) -> list[Output]:
        """End the runs that have waited for too long."""
        outputs: list[Output] = []
        for run in list(self.values()):
            session = run.session
            if run.due is None or now < run.due:
                continue
            if session is None:
                outputs += self.reject(run, NOT_BEGUN, LATE)
            elif run.lifecycle.state is State.CLOSING:
                outputs += self.end(run, session, Event.REPORTED)
            else:
                waited = session.answer_deadline.seconds
                outputs += self.fail(
                    run, f"no answer from the pipeline for {waited:g} s: a message was lost"
                )
        return outputs

    def fail(self, run: DraftRun, reason: str, cause: Event = Event.FAILED) -> list[Output]:
        """End the job with an error, unless its text is complete; committed tokens stay."""
        if not run.lifecycle.can(cause):
            return []
        if run.session is None:
            return self.reject(run, reason, FAILED)
        if run.lifecycle.state is not State.CLOSING:
            run.session.close()
        return self.end(run, run.session, cause, reason)

    def end(self, run: DraftRun, session: Session, event: Event, error: str = "") -> list[Output]:
        """End a job that has begun, with its stats; ``error``: why, if its text is not complete."""
        run.lifecycle.fire(event)
        keep = self._keep(run, session, event)
        self._forget(run)
        stats = session.tally.stats(session.text.output, run.meters, self._limits.stages)
        if session.strategy.decisions:
            stats["decisions"] = session.strategy.decisions
        reason = session.finish_reason if event is Event.REPORTED else "error"
        return [
            *session.outbox.take(),
            Finish(run.key, reason, error, stats),
            *keep,
            Release(run.key),
        ]

    def _keep(self, run: DraftRun, session: Session, event: Event) -> list[Output]:
        """Keep the drafters' rows of a run if all stages have kept theirs."""
        whole = event is Event.REPORTED and len(run.meters) == session.workers
        rows = self.prefixes.confirm(run.key) if whole else 0
        caches = session.drafting.keep(rows) if rows else ()
        if not rows:
            self.prefixes.drop(run.key)
        return [*self.evict(), *([Keep(run.key, caches)] if caches else [])]

    def evict(self) -> list[Output]:
        """Free the drafters' rows of runs that are kept no longer."""
        return [Evict(run) for run in self.prefixes.take_dropped()]

    def reject(self, run: DraftRun, reason: str, cause: str) -> list[Output]:
        """End a job that did not begin."""
        run.lifecycle.fire(Event.FAILED)
        self._forget(run)
        return [rejected(run.submit, reason, cause)]

    def end_encoded(self, run: DraftRun, prompt: tuple[int, ...]) -> list[Output]:
        """End a job that asked for no more than its prompt's ids."""
        run.lifecycle.fire(Event.TOKENIZED)
        self._forget(run)
        stats = unmeasured((), self._limits.stages)
        return [
            OpenJob(run.key, prompt, run.spec.strategy),
            Finish(run.key, "length", "", stats),
        ]

    def drop_before(self, run: RunKey) -> list[Output]:
        """Forget all runs of the job that are earlier than ``run``."""
        earlier = [
            known for key, known in self.items() if key.job == run.job and key.epoch < run.epoch
        ]
        outputs = [output for known in earlier for output in self.drop(known)]
        if run.epoch > 1:
            self.ended.add(RunKey(run.job, run.epoch - 1))
        return outputs

    def drop(self, run: DraftRun) -> list[Output]:
        """Forget a run whose job goes on elsewhere."""
        run.lifecycle.fire(Event.REVOKED)
        self._forget(run)
        self.prefixes.revert(run.key)
        return [*self.evict(), Release(run.key)]

    def _forget(self, run: DraftRun) -> None:
        del self[run.key]
        self.ended.add(run.key)


def rejected(message: Submit, reason: str, cause: str) -> Finish:
    """The end of a job that cannot begin."""
    return Finish(message.run, "error", reason, {}, cause)
