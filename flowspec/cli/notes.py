"""What is done in another way than a user may expect, said once on stderr before it begins."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flowspec.strategies import build

if TYPE_CHECKING:
    from flowspec.testbed.grid import Plan


def of_plan(plan: Plan) -> None:
    """All there is to say of a simulated comparison."""
    from flowspec.testbed.naming import choices_of

    surplus(plan)
    first_of_several(plan.runs, plan.stages, map(choices_of, plan.sources))


def surplus(plan: Plan) -> None:
    """A line for every stage count above what the profile's layers are enough for."""
    profile = plan.profile
    for stages in plan.stages:
        idle = sum(profile.stage_layers(stage, stages) == 0 for stage in range(1, stages))
        if idle:
            sys.stderr.write(
                f"note: {idle} of {stages} stages have no layer and pass rows on: the model of profile "
                f"{profile.name} has {profile.layers} layers\n"
            )


def first_of_several(strategies: Iterable[str], stages: Iterable[int], drafts: Iterable[tuple[str, ...]]) -> None:
    """A line that names those of ``strategies`` that draft and do not choose, if any of ``drafts``, each what there is
    to choose from, has more than one name."""
    several = list(dict.fromkeys(names for names in drafts if len(names) > 1))
    counts = list(stages)
    built = {name: [build(name, count) for count in counts] for name in strategies}
    fixed = [name for name, made in built.items() if any(one.width and not one.chooses for one in made)]
    if not several or not fixed:
        return
    does, uses = ("does", "it uses") if len(fixed) == 1 else ("do", "they use")
    used = ", and ".join(f"{names[0]}, the first of {':'.join(names)}" for names in several)
    sys.stderr.write(f"flowspec: {', '.join(fixed)} {does} not choose between drafts: {uses} {used}\n")
