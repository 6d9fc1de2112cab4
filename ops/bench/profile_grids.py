"""The same texts and the same drafts on several profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowspec.rehearse.compare.grid import BenchPlan, Cell, Grid, SweptLink
from flowspec.rehearse.compare.prompts import Prompt
from flowspec.rehearse.devices.profile import Profile


def grids_on(profiles: Sequence[Profile], plan: BenchPlan, prompts: Sequence[Prompt]) -> list[Grid]:
    """A grid of ``plan`` per profile, each on its first stage count; they share texts and drafters.

    The systems with a chain of models have two, like all others: no middle model.
    """
    two = [replace(profile, middles=()) for profile in profiles]
    first = Grid(replace(plan, profile=two[0], stages=two[0].stages[:1]), prompts)
    return [first.on(profile) for profile in two]


def cell_of(grid: Grid, strategy: str, source: str, temperature: float) -> Cell:
    """The row of ``strategy`` on the profile's own link and ``grid``'s first stage count."""
    plan = grid.plan
    link = SweptLink("", plan.profile.link)
    return Cell(strategy, source, plan.stages[0], temperature, link)
