"""Which runs at the draft worker may begin, and when.

Runs begin in their order, by priority. A run behind a barrier runs alone: it begins when the runs
before it have ended, and those after it wait for its end. All others share the pipeline, as long as
the stages have room for their rows. A run whose prompt begins as another's that is computed now
awaits those rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from flowspec.core.job.draft_run import DraftRun
from flowspec.core.prefixes.kept_prefixes import LEAST_ROWS
from flowspec.core.protocol.causes import REFUSED, TOO_LONG
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.session.session import rows_of_run


class StartRules:
    """The rules by which runs begin; it changes nothing but a run's ``rows``.

    ``most_rows``: of all runs at a stage, KV rows; 0: no limit. ``row_unit``: stages have room for
    rows by so many at a time.
    """

    def __init__(self, limits: Limits, most_rows: int, row_unit: int) -> None:
        self._limits = limits
        self._most_rows = most_rows
        self._row_unit = row_unit

    # ---- whether at all --------------------------------------------------------------------------

    def what_is_wrong_with(self, run: DraftRun, prompt: Sequence[int]) -> tuple[str, str]:
        """Why ``run`` over ``prompt`` cannot be served, one line, and the cause; empty if it can.

        Notes the KV rows that the run takes at each stage.
        """
        if run.spec.tokenize:
            return "", ""
        limits = self._limits
        rows = rows_of_run(len(prompt), run.spec.max_new_tokens, limits)
        run.rows = -(-rows // self._row_unit) * self._row_unit
        if not prompt:
            return "the prompt has no tokens; give it some text", REFUSED
        if len(prompt) >= limits.context:
            wrong = (
                f"the prompt has {len(prompt)} tokens; "
                f"the model's context is {limits.context}: shorten it"
            )
            return wrong, TOO_LONG
        if max(prompt) >= limits.vocabulary:
            wrong = (
                f"prompt_ids has token {max(prompt)}; "
                f"the model's vocabulary ends at {limits.vocabulary - 1}"
            )
            return wrong, REFUSED
        if 0 < self._most_rows < run.rows:
            wrong = (
                f"the job needs {run.rows} KV rows, {limits.tree_rows} of them for its tree; "
                f"the pipeline has {self._most_rows}: shorten the prompt or the answer"
            )
            return wrong, REFUSED
        return "", ""

    # ---- when ------------------------------------------------------------------------------------

    def has_to_wait(self, run: DraftRun, others: Collection[DraftRun]) -> bool:
        """Whether ``run`` begins later than now."""
        # The recording of a run that waits has its beginning in a later step: so have all others.
        priority = run.spec.priority
        is_behind = any(other.waits and other.spec.priority >= priority for other in others)
        return run.spec.record or is_behind or not self._may_begin(run, others)

    def _may_begin(self, run: DraftRun, others: Collection[DraftRun]) -> bool:
        """Whether ``run`` may run beside ``others``."""
        if any(run.alone or other.alone for other in others):
            return False
        return not self._most_rows or run.rows + _rows_held(others) <= self._most_rows

    def next_to_begin(self, runs: Mapping[RunKey, DraftRun]) -> DraftRun | None:
        """The first of the runs that wait, if it may begin now, or one that awaits no more rows."""
        waiting = [run for run in runs.values() if run.waits]
        first = max(waiting, key=lambda run: run.spec.priority, default=None)
        begun = [run for run in runs.values() if not run.waits]
        if first is not None and self._may_begin(first, begun):
            return first
        return next((run for run in begun if run.awaits and not _will_share(run, runs)), None)

    def worth_awaiting(
        self, run: DraftRun, prompt: Sequence[int], runs: Mapping[RunKey, DraftRun]
    ) -> RunKey | None:
        """One of ``runs`` that computes rows now with which ``run`` can begin soon.

        Prompts at once cost as much as one after the other, so nothing is lost by waiting if at
        least half of what the other one computes is of use.
        """
        for key, other in runs.items():
            session = other.session
            if session is None or other.spec.cache_salt != run.spec.cache_salt:
                continue
            if not session.will_share(drafts=run.drafts and other.drafts):
                continue
            rows = session.prompt_rows
            gain = min(rows.common(prompt), len(prompt) - 1, self._limits.kept_rows) - rows.reused
            if gain >= LEAST_ROWS and 2 * gain >= rows.computes:
                return key
        return None


def _will_share(run: DraftRun, runs: Mapping[RunKey, DraftRun]) -> bool:
    """Whether the run that ``run`` awaits still computes rows for it."""
    other = runs.get(run.awaits) if run.awaits else None
    session = other.session if other is not None else None
    return (
        other is not None
        and session is not None
        and session.will_share(drafts=run.drafts and other.drafts)
    )


def _rows_held(runs: Iterable[DraftRun]) -> int:
    """Rows that each stage has allocated for ``runs``."""
    return sum(run.rows for run in runs if run.session is not None or run.awaits)
