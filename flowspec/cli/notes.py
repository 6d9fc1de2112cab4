"""What is done in another way than a user may expect, said once on stderr before it begins."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flowspec.strategies import build

if TYPE_CHECKING:
    from flowspec.testbed.grid import BenchPlan


def of_plan(plan: BenchPlan) -> None:
    """All there is to say of a simulated comparison."""
    from flowspec.testbed.naming import canonical, choices_of

    surplus(plan)
    first_of_several(plan.runs, [choices_of(canonical(source)) for source in plan.sources])


def surplus(plan: BenchPlan) -> None:
    """A line for every stage count above what the profile's layers are enough for."""
    profile = plan.profile
    for stages in plan.stages:
        idle = sum(profile.stage_layers(stage, stages) == 0 for stage in range(1, stages))
        if idle:
            sys.stderr.write(
                f"note: {idle} of {stages} stages have no layer and pass rows on: the model of "
                "profile "
                f"{profile.name} has {profile.layers} layers\n"
            )


def first_of_several(strategies: Iterable[str], drafts: Iterable[tuple[str, ...]]) -> None:
    """A line that names those of ``strategies`` that draft and do not choose, if any of ``drafts``,
    each what there is to choose from, has more than one name.
    """
    several = list(dict.fromkeys(names for names in drafts if len(names) > 1))
    if not several:
        return
    built = {name: build(name, 1) for name in strategies}  # for any number of stages
    fixed = [name for name, strategy in built.items() if strategy.width and not strategy.chooses]
    if not fixed:
        return
    does, uses = ("does", "it uses") if len(fixed) == 1 else ("do", "they use")
    used = ", and ".join(f"{names[0]}, the first of {':'.join(names)}" for names in several)
    sys.stderr.write(
        f"note: {', '.join(fixed)} {does} not choose between drafts: {uses} {used}; "
        "put another one first, or use auto\n"
    )
