"""Rows of ended jobs, kept in every kind of cache; and whole pipelines that begin with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.messages import Prune
from flowspec.core.protocol.work import Kept
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import StateError
from flowspec.model.drafters.drafter_choice import levels_of, wanting_hidden
from flowspec.model.drafters.sources import load_sources, taps_of
from flowspec.model.reference import Reference
from flowspec.model.rows.kept_rows import KeptRows
from flowspec.model.rows.kv import CopiedRows, TreeCache
from flowspec.model.stage import ModelStage, load_stage
from flowspec.model.weights.directory import ModelDirectory, layer_ranges, open_directory
from flowspec.rehearse.simulator import Simulation
from flowspec.strategies import build
from tests.marks import examples, heavy
from tests.model.paged_checks import check_pool
from tests.model.stories import CAPACITY, Story, next_part
from tests.model.test_drafts_together import SOURCES, Family, folders, with_tokenizer

ENDED = RunKey("ended", 1)
STAGES = 2
PROMPT = tuple(range(30, 60))


@given(st.integers(0, 2**32 - 1), st.data())
@settings(deadline=None, max_examples=examples(80))
def test_what_is_kept_is_the_context_and_begins_another_cache(
    seed: int, data: st.DataObject
) -> None:
    story = Story(seed)
    cache = TreeCache.allocate(1, 1, CAPACITY, 1, torch.float32)
    run = story.run()
    text = list(range(story.length - 1))  # ids of the context
    for event in story.events(6):
        if isinstance(event, Prune):
            text += event.accepted
        part = next_part(run, event)
        if part is None:
            continue
        cache.begin_pass(part)
        rows = torch.tensor(part.ids, dtype=torch.float32).reshape(1, 1, -1, 1)
        cache.layers[0].update(rows, rows)
    count = data.draw(st.integers(1, len(text)))
    wanted = run.keep(count)
    assert wanted is not None
    kept: KeptRows[CopiedRows] = KeptRows()
    kept.keep(ENDED, cache, wanted)
    assert kept.nbytes == 2 * 4 * count
    held = data.draw(st.integers(1, count))
    other = TreeCache.allocate(1, 1, CAPACITY, 1, torch.float32)
    kept.resume(other, ENDED, held)
    store = other.storage
    assert store[0, :, 0, 0, :held, 0].tolist() == [text[:held]] * 2
    placement = other.begin_pass(_next_row(story, held))
    assert (placement.context, placement.held) == (held, held)
    kept.evict(ENDED)
    with pytest.raises(StateError, match="are not kept here"):
        kept.resume(other, ENDED, held)


def _next_row(story: Story, position: int) -> Any:
    part = next_part(story.run(), story.segment([0]))
    assert part is not None
    return type(part)(ENDED, 0, (position,), (position - 1,), (position,), (3,), (0,))


def test_more_rows_than_there_are_cannot_be_kept() -> None:
    cache = TreeCache.allocate(1, 1, 8, 1, torch.float32)
    with pytest.raises(StateError, match="3 rows are to be kept of 0"):
        KeptRows[CopiedRows]().keep(ENDED, cache, Kept(3))


class Talk:
    """A pipeline of real layers with the drafter ``draft``, which keeps rows."""

    def __init__(self, target: ModelDirectory, draft: str, blocks: int = 0) -> None:
        drafter = load_sources(draft, target, dtype="float32")
        wanting = wanting_hidden(drafter)
        taps = taps_of(draft, target)
        head = None if taps is None else open_directory(draft)
        limits = Limits(
            STAGES,
            target.context,
            target.vocabulary,
            target.eos,
            hidden=wanting[0],
            others=wanting[1:],
            levels=levels_of(drafter),
            kept_rows=1000,
        )
        nodes: dict[Address, Any] = {DRAFT: (DraftMachine(limits, build), drafter)}
        self.stages: list[ModelStage] = []
        for stage, layers in enumerate(layer_ranges(target.layers, STAGES), start=1):
            executor = load_stage(target, layers, taps=taps, drafter=head, blocks=blocks)
            self.stages.append(executor)
            nodes[stage_address(stage)] = (StageMachine(stage, STAGES), executor)
        self._simulation = Simulation(nodes)
        self._reference = Reference(target)
        self._jobs = 0

    def ask(self, prompt: tuple[int, ...], strategy: str, sampling: Sampling) -> tuple[int, Any]:
        """Rows that were known, and the text after ``prompt``, which is the target's own."""
        (found,) = self.ask_at_once([prompt], strategy, [sampling])
        return found

    def ask_at_once(
        self,
        prompts: Sequence[tuple[int, ...]],
        strategy: str,
        samplings: Sequence[Sampling],
    ) -> list[tuple[int, Any]]:
        """``ask`` for jobs that come at one moment."""
        asked = []
        for prompt, sampling in zip(prompts, samplings, strict=True):
            self._jobs += 1
            job = f"job {self._jobs}"
            spec = JobSpec(
                prompt_ids=prompt, max_new_tokens=20, strategy=strategy, sampling=sampling
            )
            self._simulation.submit(job, spec, self._simulation.now)
            asked.append((job, prompt, sampling))
        self._simulation.run()
        return [self._answer(*one) for one in asked]

    def _answer(self, job: str, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, Any]:
        record = self._simulation.jobs[job]
        assert record.finish is not None
        assert record.finish.error == ""
        assert tuple(record.tokens) == self._reference.decode(prompt, 20, sampling)
        cached = record.finish.stats["cached_tokens"]
        assert isinstance(cached, int)
        return cached, tuple(record.tokens)


@pytest.mark.parametrize("source", SOURCES)
def test_turns_with_any_drafter(source: str, family: Family, tmp_path: Path) -> None:
    target = with_tokenizer(family("llama"), tmp_path / "target")
    talk = Talk(target, folders(source, family, tmp_path))
    prompt = PROMPT
    for turn, (strategy, sampling) in enumerate(
        [
            ("flowspec", Sampling()),
            ("flowspec", Sampling(1.0, seed=4)),
            ("auto", Sampling(0.7, seed=5)),
            ("chain", Sampling()),
        ]
    ):
        cached, tokens = talk.ask(prompt, strategy, sampling)
        # A head that an earlier turn has not used lacks what only the target's rows would give it.
        unused = source == "slm:head" and strategy == "auto"
        assert (cached > 20) == (turn > 0 and not unused)
        # What is known of an answer may differ from what is said of it in the next turn.
        prompt = (*prompt, *tokens[: 12 + turn], 7, 8, 9 + turn)


@pytest.mark.parametrize("source", ["eagle3", *map(heavy, ("ngram", "head", "block", "head+slm"))])
def test_equal_prompts_at_once_with_any_drafter(
    source: str, family: Family, tmp_path: Path
) -> None:
    """One computes the prompt, with rows in blocks, and the others begin with them."""
    target = with_tokenizer(family("llama"), tmp_path / "target")
    talk = Talk(target, folders(source, family, tmp_path), blocks=60)
    prompts = [PROMPT, PROMPT, (*PROMPT, 9)]
    samplings = [Sampling(), Sampling(1.0, seed=4), Sampling(0.7, seed=5)]
    found = talk.ask_at_once(prompts, "flowspec", samplings)
    cached = [rows for rows, _ in found]
    assert cached[0] == 0
    assert all(rows in (len(PROMPT) - 2, len(PROMPT) - 1) for rows in cached[1:])
    for stage in talk.stages:
        assert stage._store is not None
        assert not stage._runs
        check_pool(stage._store, (), stage._kept._rows.values())


@pytest.mark.parametrize("name", ["gemma2", "mistral-sliding", "qwen3-moe"])
def test_turns_with_other_families(name: str, family: Family) -> None:
    talk = Talk(family(name), "ngram")
    _, tokens = talk.ask(PROMPT, "flowspec", Sampling())
    cached, _ = talk.ask((*PROMPT, *tokens, 5), "flowspec", Sampling(1.0, seed=1))
    assert cached == len(PROMPT) + len(tokens) - 1
