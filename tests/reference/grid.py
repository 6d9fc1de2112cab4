"""Seeded cases for every system: costs, a drafter and options from small sets of values.

Half of the costs are dyadic, so that many events fall on one moment; the other half avoid that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.reference import barrier_flowspec, batches, free_flowspec, levels, timesteps, windows
from tests.reference.cases import Case, Commits, Costs, Options

SWITCH = ("on", "on", "off")
#: By option the values to choose from.
Choices = Mapping[str, Sequence[int | str]]

#: FlowSpec's options at their defaults, which are its published code's.
PUBLISHED = {
    "width": 10,
    "loops": 6,
    "nodes": 80,
    "segment": 16,
    "merge_loops": 6,
    "merge_nodes": 64,
    "expand_layers": 1,
    "expand_nodes": 48,
}


@dataclass(frozen=True, slots=True)
class System:
    """``strategy``: its name in the project; ``fixed``: options there that name the variant."""

    strategy: str
    commits: Callable[[Case, Options], Commits]
    choices: Choices
    fixed: Mapping[str, str]


#: Without the order, which changes nothing in a round that is judged as a whole.
_NAIVE: Choices = {
    "width": (1, 2, 3, 4),
    "loops": (1, 2, 3),
    "nodes": (4, 8, 16, 30),
    "segment": (2, 4, 100),
}
_PRUNED: Choices = {**_NAIVE, "segment": (2, 4, 16), "order": ("score", "generation")}
_FLOWSPEC: Choices = {
    **_PRUNED,
    "merge_loops": (1, 2, 3),
    "merge_nodes": (4, 8, 20),
    "merge": SWITCH,
    "expand_layers": (1, 2),
    "expand_nodes": (3, 8, 20),
    "expand": SWITCH,
}
_LAYERS: Choices = {"width": (1, 2, 4, 8), "children": (1, 2, 4)}
_SPECPIPE: Choices = {
    **_LAYERS,
    "width": (2, 4, 8),
    "levels": (1, 1, 2, 3),
    "in_flight": (0, 0, 1, 2, 4, 8),
}
_CHAIN: Choices = {"window": (1, 2, 3), "in_flight": (1, 2, 4, 8), "confidence": (0, 0, 40, 80)}
_SHAPES = ("1-1-3-1-1-1-1-1", "1-1-3-1", "2-2-2", "4", "3-1")
_BARRIER, _NO_BARRIER = {"lockstep": "on"}, {"barrier": "off"}

#: By a name of its own: every system and variant.
SYSTEMS = {
    "flowspec": System("flowspec", free_flowspec.commits, _FLOWSPEC, {}),
    "flowspec with the barrier": System("flowspec", barrier_flowspec.commits, _FLOWSPEC, _BARRIER),
    "naive_pp": System("naive_pp", batches.naive, _NAIVE, {}),
    "naive_pp with the barrier": System("naive_pp", barrier_flowspec.naive, _NAIVE, _BARRIER),
    "pruned_pp": System("pruned_pp", free_flowspec.pruned, _PRUNED, {}),
    "pruned_pp with the barrier": System("pruned_pp", barrier_flowspec.pruned, _PRUNED, _BARRIER),
    "static_tree": System("static_tree", batches.static, {"shape": _SHAPES}, {}),
    "pipedec": System("pipedec", timesteps.commits, {**_LAYERS, "groups": range(7)}, {}),
    "pipedec without timesteps": System(
        "pipedec", levels.grouped, {**_LAYERS, "groups": range(7)}, _NO_BARRIER
    ),
    "specpipe": System("specpipe", levels.commits, _SPECPIPE, {}),
    "specpipe with timesteps": System(
        "specpipe", timesteps.commits, {**_LAYERS, "width": (2, 4, 8)}, {"barrier": "on"}
    ),
    "chain": System("chain", windows.commits, _CHAIN, {}),
}


def drawn(name: str, seed: int) -> tuple[Case, dict[str, int | str]]:
    """The case and the options of one seed of a system."""
    rng = random.Random(f"{name} {seed}")
    system = SYSTEMS[name]
    costs = _costs(rng)
    options = {option: rng.choice(values) for option, values in system.choices.items()}
    candidates = rng.choice((1, 2, 4, 4))
    if "merge" in options and rng.random() < 1 / 16:
        options.update(PUBLISHED)
        candidates = 10
    if int(options.get("groups", 0)) > len(costs.stages):
        options["groups"] = 0
    hits = rng.choice((0.3, 0.6, 0.8, 1.0))
    return Case(seed, costs, hits=hits, candidates=candidates), options


def _costs(rng: random.Random) -> Costs:
    count = rng.randint(1, 6)
    dyadic = rng.random() < 0.5
    speeds = (0.5, 1.0, 1.5) if dyadic else (0.7, 1.0, 1.137)
    drafts = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0) if dyadic else (1 / 7, 0.3037, 0.0931, 2.0173)
    links = (0.25, 1.0) if dyadic else (0.2113, 0.8719)
    even = rng.random() < 0.5
    stages = tuple(1.0 if even else rng.choice(speeds) for _ in range(count))
    link = rng.choice((0.0, 0.0, *links))
    return Costs(stages, rng.choice(drafts), link, per_growth=rng.random() < 0.2)
