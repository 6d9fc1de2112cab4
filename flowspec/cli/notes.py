"""Notes on stderr before work that differs from what a user may expect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowspec.core.protocol.addresses import DRAFT, SCHEDULER
from flowspec.core.protocol.lease import TERMS
from flowspec.observe import note
from flowspec.strategies import build, runs_alone
from flowspec.transport.base import CONTEXT, command_of, full_of, role_of, roles_of

if TYPE_CHECKING:
    from flowspec.client import Client
    from flowspec.rehearse.compare.grid import BenchPlan

#: Why nothing may come where no worker is missing.
SILENT = (
    "nothing has come for a while, and every worker still has its role: one that has just died "
    f"loses it within {TERMS.longest_ms / 1000:g} s"
)


def of_plan(plan: BenchPlan) -> None:
    """All notes on a simulated comparison."""
    from flowspec.rehearse.compare.naming import canonical, choices_of

    surplus(plan)
    first_of_several(plan.runs, [choices_of(canonical(source)) for source in plan.sources])


def surplus(plan: BenchPlan) -> None:
    """A note for every stage count at which stages have no layer."""
    profile = plan.profile
    for stages in plan.stages:
        idle = sum(profile.stage_layers(stage, stages) == 0 for stage in range(1, stages))
        if idle:
            note(
                f"{idle} of {stages} stages have no layer and pass rows on: "
                f"the model of profile {profile.name} has {profile.layers} layers"
            )


def waits(client: Client) -> None:
    """A note if a job would wait."""
    if why := why_waiting_at(client):
        note(why)


def cut(asked: int, workers: Mapping[str, Mapping[str, Any]]) -> None:
    """A note if the context that ``workers`` name has no room for an answer of ``asked`` tokens.

    Without a draft worker the context is unknown, and nothing is said.
    """
    most = workers.get(role_of(DRAFT), {}).get(CONTEXT)
    if isinstance(most, int) and asked >= most:
        note(
            f"the answer has fewer than {asked} tokens: the pipeline's context is {most}, prompt "
            "and answer together"
        )


def alone(strategy: str) -> None:
    """A note if a job with ``strategy`` waits for all others."""
    if runs_alone(strategy):
        note(
            f"{strategy} runs alone: it begins when the jobs before it have ended, and later "
            "ones wait for it"
        )


def why_waiting_at(client: Client) -> str:
    """``why_waiting`` in the pipeline of ``client``."""
    return why_waiting(client.pipeline(), client.workers(), client.lost())


def why_waiting(
    record: Mapping[str, str], workers: Mapping[str, Mapping[str, Any]], lost: Sequence[str]
) -> str:
    """Why jobs of the pipeline of ``record`` wait, by its ``workers``, and what to do; or nothing.

    That it has no worker for a role, the scheduler first; or that its broker takes no writes.
    ``lost``: roles that had a worker.
    """
    if full := full_of(workers):
        return f"jobs wait: {full}"
    missing = [role for role in (role_of(SCHEDULER), *roles_of(record)) if role not in workers]
    if not missing:
        return ""
    if missing[0] == role_of(SCHEDULER):
        how = "`flowspec up`, or `python -m workers.scheduler` with the pipeline's models"
    else:
        how = f"`{command_of(missing[0])}`"
    if missing[0] in lost:
        return f"{missing[0]} was lost: jobs wait until it is started again, by {how}"
    return f"{missing[0]} is not started, or still starting: jobs wait for it; start it by {how}"


def drafts_by_ngrams(target: str) -> None:
    """A note for a target of the user's that is given without a draft."""
    note(
        f"no --draft is given for {target}: drafting with n-grams of its text "
        "(--draft ngram); a small model with the same tokenizer usually drafts better"
    )


def unused_middles(strategy: str, middles: Sequence[str], *, running: bool) -> None:
    """A note if ``strategy`` does not use the pipeline's middle models.

    ``running``: they are running; otherwise they are not started.
    """
    if middles and not build(strategy, 1).uses_middles:
        one = len(middles) == 1
        if running:
            what = "runs unused" if one else "run unused"
        else:
            what = "is not started" if one else "are not started"
        note(
            f"{strategy} uses no middle models: {', '.join(middles)} {what}; "
            "pipespec and speculative use them"
        )


def first_of_several(strategies: Iterable[str], drafts: Iterable[tuple[str, ...]]) -> None:
    """A note on those of ``strategies`` that draft but do not choose, if there is a choice.

    ``drafts``: the choices in each draft source.
    """
    several = list(dict.fromkeys(names for names in drafts if len(names) > 1))
    if not several:
        return
    built = {name: build(name, 1) for name in strategies}  # for any number of stages
    fixed = [
        name
        for name, strategy in built.items()
        if strategy.draft_width and not strategy.chooses_drafter
    ]
    if not fixed:
        return
    does, uses = ("does", "it uses") if len(fixed) == 1 else ("do", "they use")
    used = ", and ".join(f"{names[0]}, the first of {':'.join(names)}" for names in several)
    note(
        f"{', '.join(fixed)} {does} not choose between drafts: {uses} {used}; "
        "put another one first, or use auto"
    )
