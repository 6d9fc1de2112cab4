"""The three ways to draft for a level give equal proposals; their stated pass counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.emulation.profiles import load
from flowspec.model.base import DraftExecutor, DraftsAlone, RowArray
from flowspec.model.directory import default_pair, open_directory
from flowspec.model.sources import load_sources
from ops.bench.drafting import Level, hidden_table, speed_table, step_seconds
from ops.bench.trace import TraceBench

CONTEXT = 12
NODES = 4


class Watched(DraftsAlone):
    """``inner``, with a record of its passes."""

    def __init__(self, inner: DraftExecutor) -> None:
        self._inner = inner
        self.done: list[tuple[Draft, DraftDone]] = []
        self.wants_hidden = inner.wants_hidden

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._inner.allocate(run, capacity, sampling, returns)

    def release(self, run: RunKey) -> None:
        self._inner.release(run)

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        self._inner.learn(run, ids, rows)

    def run(self, work: Draft) -> DraftDone:
        self.done.append((work, self._inner.run(work)))
        return self.done[-1][1]

    def proposals(self) -> dict[int, tuple[list[int], list[float]]]:
        """Per node its two best tokens and their values, from the passes since the last call."""
        done = self.done
        self.done = []
        return {
            work.part.ids[row]: ([*answer.tokens[at][:2]], [*answer.values[at][:2]])
            for work, answer in done
            for at, row in enumerate(work.part.answers)
        }


@pytest.mark.parametrize("source", ["draft", "head", "ngram", "draft+ngram"])
def test_all_three_ways_propose_the_same(source: str) -> None:
    target = open_directory(default_pair()[0])
    watched = Watched(load_sources(source, target))
    level = Level(watched, target.vocabulary, target.hidden_size, CONTEXT, NODES)
    watched.proposals()
    found = []
    for way, passes, rows in (
        (level.recomputed, NODES, CONTEXT + 1),
        (level.one_by_one, NODES, 1),
        (level.together, 1, 4),
    ):
        assert way() > 0
        assert [len(work.part.ids) for work, _ in watched.done] == [rows] * passes
        found.append(watched.proposals())
    assert set(found[0]) == set(range(CONTEXT, CONTEXT + NODES))
    for other in found[1:]:
        assert {node: tokens for node, (tokens, _) in other.items()} == {
            node: t for node, (t, _) in found[0].items()
        }
        assert all(
            values == pytest.approx(found[0][node][1], abs=1e-3)
            for node, (_, values) in other.items()
        )


def test_a_level_in_one_pass_beats_recomputing_it(capsys: pytest.CaptureFixture[str]) -> None:
    target = open_directory(default_pair()[0])
    level = Level(load_sources("draft", target), target.vocabulary, target.hidden_size, 64, 8)
    recomputed, _, together = step_seconds(level, 3)
    assert recomputed > 2 * together > 0
    speed_table(["ngram"], [1, 2], 16, 1)
    printed = [
        line.split("|")[1:-1]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| ngram")
    ]
    assert [row[1].strip() for row in printed] == ["1", "2"]
    speed_table(["slm:ngram", "ngram"], [1], 16, 1)
    printed = [
        line.split("|")[1].strip()
        for line in capsys.readouterr().out.splitlines()
        if line[-3:-2].isdigit()
    ]
    assert printed == ["draft", "ngram"], "each of those to choose from has its own row"


def test_drafting_hides_where_the_next_layer_is_drafted_during_verification(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = TraceBench("slm", 16, 1, count=1)
    profile = load("jetson-7b")
    hidden_table(bench, profile, ["autoregressive", "speculative", "pipedec", "flowspec"])
    cells = [
        line.split("|")[1:-1]
        for line in capsys.readouterr().out.splitlines()
        if line.endswith("% |")
    ]
    rows = {row[0].strip(): row[1:] for row in cells}
    assert set(rows) == {"speculative", "pipedec", "flowspec"}, "plain decoding drafts nothing"
    share = {strategy: float(cells[-1].strip().rstrip("%")) for strategy, cells in rows.items()}
    assert share["speculative"] == 0 < share["flowspec"] < share["pipedec"] <= 100
    for trace in bench.run("flowspec", profile, 4)[1]:
        done = trace.drafting()
        assert (
            0
            < done["hidden"]
            < done["seconds"]
            == pytest.approx(done["passes"] * profile.draft_seconds("slm", 1))
        )
