"""Commit times of every published system against the independent reference, ``tests/reference``."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import Address, stage_address
from flowspec.core.protocol.machine import Input, Output
from flowspec.core.protocol.messages import Envelope
from flowspec.core.protocol.work import Draft, DraftDone, DraftPass, Pass, Work
from flowspec.core.run.limits import Limits
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.rehearse.compare.oracle import OracleStage
from flowspec.rehearse.simulator import Costs, Simulation, Tap
from flowspec.strategies import build
from tests.addresses import D0
from tests.marks import examples
from tests.reference import cases
from tests.reference.cases import EMPTY_PATH, Case, Commits, Options, follow_path
from tests.reference.grid import SYSTEMS, drawn
from tests.strategies.scripted import ScriptedDrafter, commits

#: Cases per system.
COUNTS = {**dict.fromkeys(SYSTEMS, 24), "flowspec": 60, "flowspec with the barrier": 90}
FOLDER = Path(cases.__file__).parent


class PathDrafter(ScriptedDrafter):
    """Proposes what the case says for a row's whole path."""

    def __init__(self, case: Case) -> None:
        super().__init__({})
        self._case = case
        self._paths = {-1: EMPTY_PATH}

    def run(self, work: Draft) -> DraftDone:
        part = work.part
        for node, parent, token in zip(part.ids, part.parents, part.tokens, strict=True):
            self._paths[node] = follow_path(self._paths[parent], token)
        found = [
            self._case.propose(self._paths[part.ids[row]])[: work.width] for row in part.answers
        ]
        return DraftDone(
            tuple(tuple(token for token, _ in entries) for entries in found),
            tuple(tuple(value for _, value in entries) for entries in found),
        )


def simulated_costs(case: Case) -> Costs:
    costs = case.costs
    seconds = {stage_address(number): cost for number, cost in enumerate(costs.stages, 1)}

    def work_seconds(node: Address, work: Work) -> float:
        if isinstance(work, Pass):
            return seconds[node]
        assert isinstance(work, DraftPass)
        (draft,) = work.drafts
        paid = bool(draft.part.answers) and not (costs.per_growth and draft.growth_pass)
        return costs.draft if paid else 0.0

    def link_seconds(source: Address, target: Address, envelope: Envelope) -> float:
        return costs.link if source != target else 0.0

    return Costs(work_seconds, link_seconds)


def simulated(case: Case, strategy: str, tap: Tap | None = None) -> Commits:
    """The project's commits."""
    count = len(case.costs.stages)
    nodes: dict[Address, Any] = {
        D0: (DraftMachine(Limits(count, 512, 128, frozenset()), build), PathDrafter(case))
    }
    for stage in range(1, count + 1):
        nodes[stage_address(stage)] = (StageMachine(stage, count), OracleStage({"j": case.text}))
    simulation = Simulation(nodes, simulated_costs(case), tap=tap)
    spec = JobSpec(
        prompt_ids=case.text[: case.prompt], max_new_tokens=case.budget, strategy=strategy
    )
    simulation.submit("j", spec)
    simulation.run()
    assert simulation.jobs["j"].tokens == list(case.text[case.prompt :])
    return commits(simulation)


def strategy_text(name: str, options: Options) -> str:
    """A zero stands for ``auto``, the default."""
    system = SYSTEMS[name]
    given = {**options, **system.fixed}
    parts = [f"{option}={value}" for option, value in given.items() if value != 0]
    return f"{system.strategy}:{','.join(parts)}"


def check(name: str, seed: int) -> None:
    case, options = drawn(name, seed)
    strategy = strategy_text(name, options)
    ours, reference = simulated(case, strategy), SYSTEMS[name].commits(case, options)
    said = f"seed {seed}, {strategy}, {case.costs}"
    assert [tokens for _, tokens in ours] == [tokens for _, tokens in reference], said
    times = [time for time, _ in reference]
    assert [time for time, _ in ours] == pytest.approx(times, rel=0, abs=1e-9), said


@pytest.mark.parametrize("name", SYSTEMS)
def test_commits_come_when_the_reference_says(name: str) -> None:
    for seed in range(examples(COUNTS[name])):
        check(name, seed)


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(sorted(SYSTEMS)), st.integers(1000, 1_000_000))
def test_commits_come_when_the_reference_says_in_any_case(name: str, seed: int) -> None:
    check(name, seed)


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in SYSTEMS for option in SYSTEMS[name].choices]
)
def test_the_grid_tells_the_values_of_an_option_apart(name: str, option: str) -> None:
    system = SYSTEMS[name]
    for seed in range(COUNTS[name]):
        case, options = drawn(name, seed)
        known = system.commits(case, options)
        for value in system.choices[option]:
            within = option != "groups" or int(value) <= len(case.costs.stages)
            if within and system.commits(case, {**options, option: value}) != known:
                return
    raise AssertionError("no case depends on the option")


def test_the_grid_tells_systems_apart() -> None:
    for name, other in itertools.combinations([n for n in SYSTEMS if "flowspec" in n], 2):
        found = (drawn(name, seed) for seed in range(COUNTS[name]))
        assert any(
            SYSTEMS[name].commits(case, options) != SYSTEMS[other].commits(case, options)
            for case, options in found
        )


#: Far above what the case below takes.
MOST_EVENTS = 5000


def test_a_timestep_that_the_drafter_ends_has_the_answer_of_its_last_group() -> None:
    """The last group is done 1.5 s after a timestep's beginning, the drafter 0.2 s later.

    The answer takes until 2.0 s. A join at D0 before that has nothing to judge.
    """
    events = itertools.count()

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        assert next(events) < MOST_EVENTS, f"still busy at {now}"

    case = Case(5, cases.Costs((1.0, 1.0), draft=1.7, link=0.5), hits=1.0, budget=8)
    options: Options = {"width": 2, "children": 2}
    ours = simulated(case, strategy_text("pipedec", options), tap)
    reference = SYSTEMS["pipedec"].commits(case, options)
    assert all(time <= known for (time, _), (known, _) in zip(ours, reference, strict=True))


# ---- the reference by itself -------------------------------------------------------------------


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_the_reference_imports_nothing_that_it_checks() -> None:
    modules = {module for path in FOLDER.glob("*.py") for module in imported(path)}
    assert "dataclasses" in modules
    assert {module.partition(".")[0] for module in modules} <= {
        *("__future__", "collections", "copy", "dataclasses", "functools", "heapq", "itertools"),
        *("math", "random", "tests", "typing"),
    }
    assert {module for module in modules if module.startswith("tests")} <= {
        *("tests.reference", *(f"tests.reference.{path.stem}" for path in FOLDER.glob("*.py"))),
    }


def perfect(stages: int, draft: float = 0.0) -> Case:
    """A drafter whose only candidate is always the target's token."""
    costs = cases.Costs((1.0,) * stages, draft, per_growth=True)
    return Case(0, costs, hits=1.0, candidates=1, uneven=False, budget=12)


def useless(stages: int, draft: float = 0.0) -> Case:
    """A drafter that is never right."""
    costs = cases.Costs((1.0,) * stages, draft, per_growth=True)
    return Case(0, costs, hits=0.0, uneven=False, budget=6)


BEAM: Options = {"width": 1, "loops": 3, "nodes": 4, "segment": 16}
MERGED: Options = {
    **BEAM,
    "merge_loops": 3,
    "merge_nodes": 4,
    "merge": "on",
}
LEVEL: Options = {"width": 2, "children": 2, "groups": 0, "in_flight": 0}


def gaps(found: Commits) -> list[float]:
    return [after - before for (before, _), (after, _) in itertools.pairwise(found)]


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_miss_costs_the_reference_a_refill(stages: int) -> None:
    """Counted by hand: every token takes drafting and all stages; the naive round N slots more."""
    refill = {
        **dict.fromkeys(["pipedec", "specpipe", "pipedec without timesteps"], LEVEL),
        "chain": {"window": 1, "in_flight": stages},
    }
    for name, options in refill.items():
        assert gaps(SYSTEMS[name].commits(useless(stages), options)) == [float(stages)] * 5
    for name in ("flowspec", "flowspec with the barrier"):
        found = SYSTEMS[name].commits(useless(stages, draft=1.0), MERGED)
        assert gaps(found) == [1.0 + stages] * 5
    found = SYSTEMS["static_tree"].commits(useless(stages, draft=1.0), {"shape": "2-2"})
    assert gaps(found) == [1.0 + stages] * 5
    found = SYSTEMS["naive_pp"].commits(useless(stages, draft=1.0), {**BEAM, "width": 3})
    assert gaps(found) == [1.0 + stages + min(stages, 4)] * 5


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_perfect_drafter_brings_the_reference_a_token_a_step(stages: int) -> None:
    options = {
        **dict.fromkeys(["pipedec", "specpipe", "pipedec without timesteps"], LEVEL),
        "chain": {"window": 1, "in_flight": stages},
    }
    for name, chosen in options.items():
        found = SYSTEMS[name].commits(perfect(stages), chosen)
        assert gaps(found) == [float(stages)] + [1.0] * 10


def test_the_barrier_of_the_reference_by_hand() -> None:
    """Three stages and a perfect drafter that takes no time; a tree of a root and four nodes.

    The prompt takes three steps. The tree is cut into 1, 1, 1 and 2 rows, of which the first is
    back at 6, the others a step later each. Every verdict's merge adds one node below the last, or
    two after the verdict that took two, and is back four steps later: one step to wait for the
    next verdict, three for the stages.
    """
    found = SYSTEMS["flowspec with the barrier"].commits(perfect(3), MERGED)
    times = [3, *range(6, 15)]
    assert found == list(zip(times, [1, 1, 1, 1, 2, 1, 1, 1, 2, 1], strict=True))
