"""The task graph: random graphs in any order of creation and completion. Lua's passes the same
body.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.graph import TaskGraph
from flowspec.core.protocol.messages import Envelope, Synced, Task


def work(name: str, *after: str) -> Task:
    return Task("job", name, tuple(after), "s1", Envelope("graph", 0, Synced("job", 1, name)))


def join(name: str, *after: str) -> Task:
    return Task("job", name, tuple(after))


def names(tasks: list[Task]) -> list[str]:
    return [task.name for task in tasks]


def test_a_task_without_open_dependencies_goes_at_once() -> None:
    graph = TaskGraph()
    assert names(graph.apply(created=[work("a")])) == ["a"]


def test_a_dependency_may_be_named_before_it_exists() -> None:
    graph = TaskGraph()
    assert names(graph.apply(created=[work("b", "a", "a")])) == []
    assert graph.waiting == ("b",)
    assert names(graph.apply(completed=["a"])) == ["b"]


def test_a_join_completes_itself_and_frees_what_waits_for_it() -> None:
    graph = TaskGraph()
    graph.apply(created=[join("sync", "x", "y"), work("next", "sync")])
    assert names(graph.apply(completed=["x"])) == []
    assert names(graph.apply(completed=["y"])) == ["next"]


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
    """Tasks with edges to earlier ones, and steps: batches that create or complete, in a mixed
    order.
    """
    count = draw(st.integers(1, 12))
    tasks = []
    for at in range(count):
        after = (
            draw(st.lists(st.sampled_from([f"t{n}" for n in range(at)]), max_size=4)) if at else []
        )
        make = work if draw(st.booleans()) else join
        tasks.append(make(f"t{at}", *after))
    order = draw(st.permutations(range(count)))
    return tasks, [tuple(f"t{n}" for n in order[at : at + 3]) for at in range(0, count, 3)]


@given(random_graphs(), st.randoms(use_true_random=False))
def test_random_graphs_release_each_task_once_and_never_early(
    drawn: tuple[list[Task], list[tuple[str, ...]]], rng: object
) -> None:
    tasks, batches = drawn
    by_name = {task.name: task for task in tasks}
    graph = TaskGraph()
    done = set()
    released = []

    def complete_joins() -> None:
        grew = True
        while grew:
            ready = [
                task
                for task in tasks
                if task.name in created
                and task.envelope is None
                and task.name not in done
                and set(task.after) <= done
            ]
            done.update(task.name for task in ready)
            grew = bool(ready)

    created: set[str] = set()
    for batch in batches:
        created |= set(batch)
        got = names(graph.apply(created=[by_name[name] for name in batch]))
        queue = list(got)
        complete_joins()
        while queue:
            name = queue.pop(0)
            assert set(by_name[name].after) <= done, "released before its dependencies"
            assert name not in released
            released.append(name)
            done.add(name)
            queue += names(graph.apply(completed=[name]))
            complete_joins()
    assert set(released) == {task.name for task in tasks if task.envelope is not None}
    assert graph.waiting == ()
