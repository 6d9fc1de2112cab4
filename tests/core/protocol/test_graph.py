"""The task graph: random graphs in any order of creation and completion.

``tests/transport/test_contract.py`` compares this graph with each broker's, over random graphs of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import GRAPH
from flowspec.core.protocol.graph import Released, Task, TaskGraph
from flowspec.core.protocol.messages import Envelope, Synced
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.key import RunKey
from tests.addresses import D0, S1, S2


def work(name: str, *after: str) -> Task:
    return Task(name, tuple(after), S1, Envelope(GRAPH, 0, Synced(RunKey("job", 1), name)))


def names(released: Sequence[Released]) -> list[str]:
    return [one.task.name for one in released]


def test_a_task_without_open_dependencies_goes_at_once() -> None:
    graph = TaskGraph()
    assert names(graph.apply(created=[work("a")])) == ["a"]


def test_a_dependency_may_be_named_before_it_exists() -> None:
    graph = TaskGraph()
    assert names(graph.apply(created=[work("b", "a", "a")])) == []
    assert graph.waiting == ("b",)
    assert names(graph.apply(completed=["a"])) == ["b"]


def test_a_task_is_complete_when_a_call_says_so_and_not_when_it_is_released() -> None:
    graph = TaskGraph()
    graph.apply(created=[work("sync", "x", "y"), work("next", "sync")])
    assert names(graph.apply(completed=["x"])) == []
    assert names(graph.apply(completed=["y"])) == ["sync"]
    assert names(graph.apply(completed=["sync"])) == ["next"]


def test_completing_or_creating_twice_is_harmless() -> None:
    graph = TaskGraph()
    graph.apply(created=[work("b", "a"), work("c", "a", "d")])
    assert names(graph.apply(completed=["a", "a"])) == ["b"]
    assert names(graph.apply(completed=["a"])) == []
    assert names(graph.apply(created=[work("b", "a")])) == []
    assert names(graph.apply(created=[work("c", "a")])) == []
    assert names(graph.apply(completed=["d"])) == ["c"]


@st.composite
def random_graphs(draw: st.DrawFn) -> tuple[list[Task], list[tuple[str, ...]]]:
    """Tasks with edges to earlier ones, and steps: mixed batches of creations and completions."""
    count = draw(st.integers(1, 12))
    tasks = []
    for at in range(count):
        after = (
            draw(st.lists(st.sampled_from([f"t{n}" for n in range(at)]), max_size=4)) if at else []
        )
        tasks.append(work(f"t{at}", *after))
    order = draw(st.permutations(range(count)))
    return tasks, [tuple(f"t{n}" for n in order[at : at + 3]) for at in range(0, count, 3)]


@given(random_graphs(), st.randoms(use_true_random=False))
def test_random_graphs_release_each_task_once_and_never_early(
    drawn: tuple[list[Task], list[tuple[str, ...]]], rng: object
) -> None:
    tasks, batches = drawn
    by_name = {task.name: task for task in tasks}
    graph = TaskGraph()
    done: set[str] = set()
    released: list[str] = []

    for batch in batches:
        queue = names(graph.apply(created=[by_name[name] for name in batch]))
        while queue:
            name = queue.pop(0)
            assert set(by_name[name].after) <= done, "released before its dependencies"
            assert name not in released
            released.append(name)
            done.add(name)
            queue += names(graph.apply(completed=[name]))
    assert set(released) == by_name.keys()
    assert graph.waiting == ()


def test_a_task_without_stamps_has_none() -> None:
    graph = TaskGraph()
    graph.apply(created=[work("b", "a")])
    assert graph.apply(completed=["a"]) == [Released(work("b", "a"), None)]


def test_a_task_goes_with_the_latest_stamp_of_its_creation_and_of_what_it_waited_for() -> None:
    graph = TaskGraph()
    late = Stamp(9.0, S1)
    graph.apply(completed=["x"], stamp=late)
    graph.apply(created=[work("a", "x", "y"), work("b", "y")], stamp=Stamp(1.0, D0))
    released = graph.apply(completed=["y"], stamp=Stamp(2.0, S2))
    assert [(one.task.name, one.stamp) for one in released] == [
        ("a", late),
        ("b", Stamp(2.0, S2)),
    ]


@given(random_graphs(), st.data())
def test_random_graphs_release_each_task_with_the_latest_stamp_above_it(
    drawn: tuple[list[Task], list[tuple[str, ...]]], data: st.DataObject
) -> None:
    """Every call has its own stamp, in random order: stamps are nominal times."""
    tasks, batches = drawn
    by_name = {task.name: task for task in tasks}
    calls = len(tasks) + len(batches)
    moments = iter(data.draw(st.permutations(range(calls))))
    created_at: dict[str, int] = {}
    completed_at: dict[str, int] = {}
    released: dict[str, Stamp | None] = {}
    graph = TaskGraph()

    def stamp() -> Stamp:
        return Stamp(float(next(moments)), D0)

    def latest(task: Task) -> int:
        above = (completed_at[name] for name in task.after)
        return max(created_at[task.name], *above, -1)

    for batch in batches:
        at = stamp()
        created_at |= dict.fromkeys(batch, int(at.at))
        queue = graph.apply(created=[by_name[name] for name in batch], stamp=at)
        while queue:
            one = queue.pop(0)
            assert one.task.name not in released
            released[one.task.name] = one.stamp
            assert one.stamp is not None
            assert one.stamp.at == latest(one.task)
            at = stamp()
            completed_at[one.task.name] = int(at.at)
            queue += graph.apply(completed=[one.task.name], stamp=at)
    assert set(released) == by_name.keys()


def test_completing_or_creating_twice_keeps_the_first_stamp() -> None:
    graph = TaskGraph()
    graph.apply(completed=["a"], stamp=Stamp(1.0, D0))
    graph.apply(completed=["a"], stamp=Stamp(5.0, D0))
    graph.apply(created=[work("b", "a", "c")], stamp=Stamp(2.0, D0))
    graph.apply(created=[work("b", "a", "c")], stamp=Stamp(7.0, D0))
    (released,) = graph.apply(completed=["c"], stamp=Stamp(0.0, S1))
    assert released.stamp == Stamp(2.0, D0)
