"""Rows in blocks of a pool against rows in ranges of their own: the same bits, and no leak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol.messages import Open, Prune, Returns, Segment
from flowspec.core.protocol.work import Part, Pass, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import BLOCK_ROWS
from flowspec.core.run.sampling import Sampling
from flowspec.core.stage.stage_run import StageRun
from flowspec.errors import StateError
from flowspec.model.rows.block_pool import RANGE, BlockPool
from flowspec.model.rows.kept_rows import KeptRows
from flowspec.model.rows.kv import CopiedRows, TreeCache
from flowspec.model.rows.paged import PagedCache, PagedStore, SharedRows
from flowspec.model.stage import ModelStage, load_stage
from flowspec.model.weights.directory import ModelDirectory
from tests.marks import examples
from tests.model.families import FAMILIES
from tests.model.paged_checks import check_pool
from tests.model.stories import CAPACITY, Story, next_part

Family = Callable[..., ModelDirectory]
BLOCKS = 64
LAYERS, HEADS, SIZE = 2, 3, 4


class Longer(Story):
    """A story with a prompt of more than ``least`` tokens."""

    def __init__(self, seed: int, least: int) -> None:
        super().__init__(seed)
        more = least + 1
        self.tokens = [*self.tokens, *self.rng.integers(2, 100, more).tolist()]
        self.length += more
        self.parents = list(range(-1, self.length - 1))
        self.root = self.context = self.length - 1
        self.alive = {self.root}
        self.computed = {self.root}


@dataclass
class Job:
    """A random run whose first ``held`` rows are known, at a stage."""

    key: RunKey
    story: Story
    held: int = 0
    text: list[int] = field(default_factory=list)  # tokens of the context

    def __post_init__(self) -> None:
        story = self.story
        opened = Open(self.key, story.length, CAPACITY, Sampling())
        self.run = StageRun(1, opened, last=True, held=self.held)
        self.text = story.tokens[: story.length - 1]
        self._events = story.events(8)

    def parts(self) -> Iterator[Part]:
        """What the stage computes for it, in order."""
        for event in self._events:
            if isinstance(event, Prune):
                self.text += [self.story.tokens[node] for node in event.accepted]
            part = next_part(self.run, event if isinstance(event, Prune) else self._new(event))
            if part is not None:
                yield replace(part, run=self.key, answers=())

    def _new(self, event: Segment) -> Segment:
        ids = [node for node in event.ids if node >= self.held]
        return (
            self.story.segment(ids)
            if ids
            else replace(event, ids=(), parents=(), positions=(), tokens=())
        )


class Twins:
    """Every job's rows in both stores, given the same random keys and values."""

    def __init__(self, seed: int) -> None:
        self.store = PagedStore.allocate(LAYERS, HEADS, BLOCKS, SIZE, torch.float32)
        self.caches: dict[RunKey, tuple[TreeCache, PagedCache]] = {}
        self.kept: tuple[KeptRows[CopiedRows], KeptRows[SharedRows]] = (KeptRows(), KeptRows())
        self._draw = torch.Generator().manual_seed(seed)

    def open(self, run: RunKey, source: RunKey | None = None, held: int = 0) -> None:
        plain = TreeCache.allocate(LAYERS, HEADS, CAPACITY, SIZE, torch.float32)
        paged = self.store.new_cache()
        if source is not None:
            self.kept[0].resume(plain, source, held)
            self.kept[1].resume(paged, source, held)
        self.caches[run] = (plain, paged)

    def compute(self, part: Part) -> None:
        plain, paged = self.caches[part.run]
        assert plain.begin_pass(part) == paged.begin_pass(part)
        rows = len(part.ids)
        assert len(paged.table) == -(-(paged.held + rows) // BLOCK_ROWS), "prunes free blocks"
        short = bool(torch.randint(2, (1,), generator=self._draw))
        both = (cache.slots(rows).by_layer() for cache in (plain, paged))
        for layer, (one, two) in enumerate(zip(*both, strict=True)):
            assert one.added == two.added == rows
            keys, values = torch.randn(2, HEADS, rows, SIZE, generator=self._draw)
            if short:
                one.write(keys, values)
                two.write(keys, values)
                assert torch.equal(one.wide(torch.float64), two.wide(torch.float64))
            else:
                found = [
                    cache.layers[layer].update(keys[None], values[None]) for cache in (plain, paged)
                ]
                assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        assert [layer.get_seq_length() for layer in plain.layers] == [
            layer.get_seq_length() for layer in paged.layers
        ]
        assert plain.layers[0].get_mask_sizes(rows) == paged.layers[0].get_mask_sizes(rows)

    def keep(self, job: Job, rows: int) -> None:
        wanted = job.run.keep(rows)
        assert wanted is not None
        plain, paged = self.caches[job.key]
        self.kept[0].keep(job.key, plain, wanted)
        self.kept[1].keep(job.key, paged, wanted)

    def end(self, run: RunKey) -> None:
        self.caches.pop(run)[1].free()

    def evict(self, run: RunKey) -> None:
        for kept in self.kept:
            kept.evict(run)

    def check(self) -> None:
        paged = [cache for _, cache in self.caches.values()]
        check_pool(self.store, paged, self.kept[1]._rows.values())


class Traffic:
    """Jobs that open, are computed, kept and closed in any order that ``data`` draws."""

    def __init__(self, seed: int, data: st.DataObject) -> None:
        self.twins = Twins(seed)
        self.jobs: dict[RunKey, tuple[Job, Iterator[Part]]] = {}
        self.kept: dict[RunKey, int] = {}
        self._seed = seed
        self._data = data

    def open(self, number: int) -> None:
        key = RunKey(f"job {number}", 1)
        source = self._data.draw(st.sampled_from([None, *self.kept]))
        held = self._data.draw(st.integers(1, self.kept[source])) if source is not None else 0
        seed = self._seed + number
        job = Job(key, Longer(seed, held) if held else Story(seed), held)
        self.twins.open(key, source, held)
        self.jobs[key] = (job, job.parts())

    def step(self) -> None:
        """A pass of one of the jobs, after which it may be kept, or end, or both."""
        draw = self._data.draw
        job, parts = self.jobs[draw(st.sampled_from(list(self.jobs)))]
        part = next(parts, None)
        if part is not None:
            self.twins.compute(part)
            if draw(st.integers(0, 9)):
                return
        context = job.run._rows.context
        if context and draw(st.booleans()):
            self.kept[job.key] = draw(st.integers(1, context))
            self.twins.keep(job, self.kept[job.key])
        if part is None or draw(st.booleans()):
            self.twins.end(job.key)
            del self.jobs[job.key]

    def evict(self) -> None:
        gone = self._data.draw(st.sampled_from(list(self.kept)))
        del self.kept[gone]
        self.twins.evict(gone)


@given(st.integers(0, 2**32 - 1), st.data())
@settings(deadline=None, max_examples=examples(60))
def test_both_stores_hold_the_same_rows_of_many_jobs(seed: int, data: st.DataObject) -> None:
    """Passes, prunes, rows kept of running and of ended jobs, jobs that begin with them, ends."""
    traffic = Traffic(seed, data)
    for number in range(data.draw(st.integers(2, 7))):
        traffic.open(number)
        traffic.twins.check()
        for _ in range(data.draw(st.integers(0, 25))):
            if traffic.jobs:
                traffic.step()
                traffic.twins.check()
        if traffic.kept and data.draw(st.booleans()):
            traffic.evict()
            traffic.twins.check()
    for key in traffic.jobs:
        traffic.twins.end(key)
    for key in traffic.kept:
        traffic.twins.evict(key)
    assert traffic.twins.store.pool.free == BLOCKS


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_compute_the_same_bits(family: Family, name: str) -> None:
    """Two jobs in shared passes, and a third that begins as the first one did."""
    directory = family(name)
    stages = (load_stage(directory, range(6)), load_stage(directory, range(6), blocks=24))
    store = stages[1]._store
    assert store is not None
    jobs = [Job(RunKey(f"job {number}", 1), Story(7 + number)) for number in range(2)]
    jobs[0].story = first = Longer(7, 40)
    jobs[0].__post_init__()
    for job in jobs:
        _allocate(stages, job.key)
    steps = [job.parts() for job in jobs]
    while parts := [part for step in steps if (part := next(step, None)) is not None]:
        _compare(stages, parts)
        check_pool(store, _caches(stages[1]))
    held = first.length - 2
    wanted = jobs[0].run.keep(held)
    assert wanted is not None
    for stage in stages:
        stage.keep(jobs[0].key, [wanted])
    later = Job(RunKey("later", 1), Longer(9, 60), held)
    later.story.tokens[:held] = first.tokens[:held]
    _allocate(stages, later.key)
    for stage in stages:
        stage.resume(later.key, jobs[0].key, [held])
    assert store.pool.shared == -(-held // BLOCK_ROWS)
    for part in later.parts():
        _compare(stages, [part])
        check_pool(store, _caches(stages[1]), stages[1]._kept._rows.values())
    for key in (later.key, *(job.key for job in jobs)):
        stages[1].release(key)
    stages[1].release(later.key)
    stages[1].evict(jobs[0].key)
    assert store.pool.free == 24


def _allocate(stages: tuple[ModelStage, ...], run: RunKey) -> None:
    for stage in stages:
        stage.allocate(run, CAPACITY, Sampling(), Returns())


def _caches(stage: ModelStage) -> list[PagedCache]:
    return [cache for cache, *_ in stage._runs.values() if isinstance(cache, PagedCache)]


def _compare(stages: tuple[ModelStage, ...], parts: list[Part]) -> None:
    outputs = [stage.run(Pass(tuple(parts)), [None] * len(parts))[1] for stage in stages]
    for one, two in zip(*outputs, strict=True):
        assert np.array_equal(one, two)
        logits = [stages[0].block.logits(torch.from_numpy(rows)) for rows in (one, two)]
        assert torch.equal(*logits)


def _prompt(run: RunKey, rows: int) -> Part:
    ids = tuple(range(rows))
    return Part(run, 0, ids, tuple(node - 1 for node in ids), ids, ids, ids, rows - 1, None, (0,))


def test_a_full_pool_fails_the_job_that_needs_more_and_no_other(family: Family) -> None:
    stage = load_stage(family("llama"), range(6), blocks=3)
    keys = [RunKey(name, 1) for name in "abc"]
    for key in keys:
        stage.allocate(key, CAPACITY, Sampling(), Returns())
    small = [_prompt(key, 20) for key in keys[:2]]
    stage.run(Pass(tuple(small)), [None, None])
    large = _prompt(keys[2], 2 * BLOCK_ROWS)
    with pytest.raises(StateError, match="2 blocks of 32 KV rows are needed, and 1 of 3 are free"):
        stage.run(Pass((large,)), [None])
    stage.release(keys[2])
    stage.release(keys[1])
    assert stage.room() == {
        "kv": {"store": "paged", "blocks": 3, "free": 2, "shared": 0, "block_rows": 32}
    }
    for key in keys[1:]:
        stage.allocate(key, CAPACITY, Sampling(), Returns())
    both = (replace(_prompt(keys[1], 3 * BLOCK_ROWS)), _prompt(keys[2], 20))
    done, rows = stage.run(Pass(both), [None, None])
    assert isinstance(done.choices[0], WorkFailed)
    assert not isinstance(done.choices[1], WorkFailed), "the other has its block"
    assert len(rows[1]) == 20


def test_blocks_of_one_text_are_neighbours_while_there_is_room() -> None:
    pool = BlockPool(3 * RANGE)
    texts = [pool.take(None) for _ in range(3)]
    assert texts == [0, RANGE, 2 * RANGE], "each has room to grow"
    assert [pool.take(at) for at in range(RANGE - 1)] == [*range(1, RANGE)]
    assert pool.take(RANGE - 1) == RANGE + 1, "no range is free any more"
    assert pool.take(RANGE) == RANGE + 2
    pool.drop(3)
    assert pool.take(None) == 3, "the lowest one that is free"


def test_a_job_with_rows_cannot_begin_with_kept_ones() -> None:
    store = PagedStore.allocate(1, 1, 4, 1, torch.float32)
    cache = store.new_cache()
    cache.begin_pass(_prompt(RunKey("a", 1), 5))
    with pytest.raises(StateError, match="cannot begin with kept ones"):
        cache.resume(cache.kept(3), 3)
