"""What a drafter proposes to several jobs in one pass is what it proposes to each alone."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Pruned, WorkFailed
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.model.base import DraftExecutor, DraftsAlone, RowArray
from flowspec.model.drafters.drafter_choice import levels_of, wanting_hidden
from flowspec.model.drafters.sources import load_sources, taps_of
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.stage import load_stage
from flowspec.model.weights.directory import ModelDirectory, layer_ranges, open_directory
from flowspec.rehearse.simulator import Simulation
from flowspec.strategies import build
from tests.marks import crossed, examples, heavy
from tests.model.block_drafters import save_block_drafter
from tests.model.eagle3_heads import save_eagle3
from tests.model.test_eagle import save_head
from tests.precisions import FOUR_BITS

Family = Callable[..., ModelDirectory]
#: What a job does with its drafter: the name of a method, and its arguments.
Call = tuple[str, tuple[Any, ...]]
STAGES = 2
TOKENS = 8
#: Prompts of several lengths, and all that a draft depends on.
JOBS = {
    "a": (tuple(range(30, 47)), "flowspec:coupled=off", Sampling()),
    "b": (tuple(range(50, 55)) * 2, "auto", Sampling(1.0, seed=4)),
    "c": (tuple(range(20, 29)), "flowspec", Sampling(0.7, top_k=9, seed=5)),
    "d": (tuple(range(9, 80)), "chain", Sampling()),
}
SOURCES = (
    *("ngram", "eagle3", "block", "head+slm"),
    *(heavy(source) for source in ("slm", "head", "gemma2", "slm+ngram", "slm:head")),
)


class Listening(DraftsAlone):
    """``inner``, with all that every run has it do."""

    def __init__(self, inner: DraftExecutor) -> None:
        self.inner = inner
        self.wants_hidden = inner.wants_hidden
        self.calls: defaultdict[RunKey, list[Call]] = defaultdict(list)

    def allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self.calls[run].append(("allocate", (run, capacity, sampling, returns)))
        self.inner.allocate(run, capacity, sampling, returns)

    def release(self, run: RunKey) -> None:
        self.calls[run].append(("release", (run,)))
        self.inner.release(run)

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        self.calls[run].append(("learn", (run, ids, rows)))
        self.inner.learn(run, ids, rows)

    def run(self, work: Draft) -> DraftDone:
        self.calls[work.part.run].append(("run", (work,)))
        return self.inner.run(work)


def with_tokenizer(model: ModelDirectory, folder: Path) -> ModelDirectory:
    """A copy of ``model`` in ``folder`` with a tokenizer, the same for all."""
    shutil.copytree(model.path, folder)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    return open_directory(str(folder))


def folders(source: str, family: Family, root: Path) -> str:
    """``source`` with folders of random models in the place of names."""
    target = family("llama")
    made = {
        "slm": lambda: str(with_tokenizer(family("llama", seed=1), root / "slm").path),
        "gemma2": lambda: str(with_tokenizer(family("gemma2", seed=1), root / "gemma2").path),
        "head": lambda: str(save_head(root / "head").path),
        "eagle3": lambda: str(save_eagle3(root / "eagle3", target).path),
        "block": lambda: str(save_block_drafter(root / "block").path),
    }
    choices = [choice.split("+") for choice in source.split(":")]
    named = [[made[name]() if name in made else name for name in choice] for choice in choices]
    return ":".join("+".join(choice) for choice in named)


def calls_of(draft: str, target: ModelDirectory) -> dict[RunKey, list[Call]]:
    """What jobs that decode alone with ``draft`` have their drafter do, by job."""
    drafter = Listening(load_sources(draft, target, dtype="float32"))
    decoded(drafter, draft, target)
    return dict(drafter.calls)


def decoded(
    drafter: Listening, draft: str, target: ModelDirectory, placing: Placing | None = None
) -> list[tuple[int, ...]]:
    """The output of each job alone; ``drafter`` is that of ``draft``, ``placing`` the target's."""
    wanting = wanting_hidden(drafter.inner)
    taps = taps_of(draft, target)
    heads = {"taps": taps, "drafter": None if taps is None else open_directory(draft)}
    limits = Limits(
        STAGES,
        target.context,
        target.vocabulary,
        target.eos,
        hidden=wanting[0],
        others=wanting[1:],
        levels=levels_of(drafter.inner),
    )
    found = []
    for job, (prompt, strategy, sampling) in JOBS.items():
        nodes: dict[Address, Any] = {DRAFT: (DraftMachine(limits, build), drafter)}
        for stage, layers in enumerate(layer_ranges(target.layers, STAGES), start=1):
            executor = load_stage(target, layers, placing=placing, **heads)  # type: ignore[arg-type]
            nodes[stage_address(stage)] = (StageMachine(stage, STAGES), executor)
        simulation = Simulation(nodes)
        spec = JobSpec(
            prompt_ids=prompt, max_new_tokens=TOKENS, strategy=strategy, sampling=sampling
        )
        simulation.submit(job, spec)
        simulation.run()
        found.append(tuple(simulation.jobs[job].tokens))
    return found


def until_draft(drafter: DraftExecutor, calls: list[Call]) -> Draft | None:
    """Make the calls up to the next draft, and return that; None: there is none any more."""
    while calls:
        name, given = calls.pop(0)
        if name == "run":
            return given[0]  # type: ignore[no-any-return]
        getattr(drafter, name)(*given)
    return None


def check_that_jobs_cannot_tell(
    make: Callable[[], DraftExecutor], calls: dict[RunKey, list[Call]], data: st.DataObject
) -> None:
    """Have two drafters do all ``calls``, one of them for several jobs at once; compare."""
    together, alone = make(), make()
    left = {run: ([*own], [*own]) for run, own in calls.items()}
    while left:
        chosen = data.draw(st.lists(st.sampled_from(list(left)), min_size=1, unique=True))
        works = []
        wanted = []
        for run in chosen:
            work = until_draft(together, left[run][0])
            other = until_draft(alone, left[run][1])
            if work is None or other is None:
                del left[run]
                continue
            works.append(work)
            wanted.append(alone.run(other))
        if works:
            assert together.run_together(works) == wanted


@pytest.mark.parametrize("layers", ["lean", heavy("library")])
@pytest.mark.parametrize("source", SOURCES)
def test_drafts_of_several_jobs_are_those_of_each_alone(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, layers: str
) -> None:
    if layers == "library" and source in ("ngram", "gemma2", "block", "slm:head"):
        pytest.skip("it has no short path, or a part of it is tried alone")
    monkeypatch.setenv("FLOWSPEC_LAYERS", layers)
    target = with_tokenizer(family("llama"), tmp_path / "target")
    draft = folders(source, family, tmp_path)
    calls = calls_of(draft, target)
    assert len(calls) == len(JOBS)
    assert all(any(name == "run" for name, _ in own) for own in calls.values())

    @given(st.data())
    @settings(max_examples=examples(4), deadline=None)
    def check(data: st.DataObject) -> None:
        check_that_jobs_cannot_tell(
            lambda: load_sources(draft, target, dtype="float32"), calls, data
        )

    check()


@pytest.mark.parametrize(("source", "dtype"), crossed(["slm", "head"], ["bfloat16", FOUR_BITS]))
def test_drafts_in_lower_precisions_are_those_of_each_alone(
    family: Family, tmp_path: Path, source: str, dtype: str
) -> None:
    target = with_tokenizer(family("llama"), tmp_path / "target")
    draft = folders(source, family, tmp_path)
    calls = calls_of(draft, target)

    @given(st.data())
    @settings(max_examples=1, deadline=None)
    def check(data: st.DataObject) -> None:
        check_that_jobs_cannot_tell(lambda: load_sources(draft, target, dtype=dtype), calls, data)

    check()


def first_drafts(drafter: DraftExecutor, calls: dict[RunKey, list[Call]]) -> list[Draft]:
    found = [until_draft(drafter, [*own]) for own in calls.values()]
    return [draft for draft in found if draft is not None]


@pytest.mark.parametrize("source", crossed(["slm", "head", "block", "slm+ngram", "slm:ngram"]))
def test_a_draft_that_does_not_continue_its_job_fails_alone(
    family: Family, tmp_path: Path, source: str
) -> None:
    target = with_tokenizer(family("llama"), tmp_path / "target")
    draft = folders(source, family, tmp_path)
    calls = calls_of(draft, target)
    together, alone = (load_sources(draft, target, dtype="float32") for _ in range(2))
    works = first_drafts(together, calls)
    wanted = [alone.run(work) for work in first_drafts(alone, calls)]
    blamed = works[1].part
    unknown = tuple(node + 5000 for node in blamed.ids)
    wrong = replace(blamed, ids=unknown, pruned=Pruned((9999,), ()))
    works[1] = replace(works[1], part=wrong)
    found = together.run_together(works)
    assert isinstance(found[1], WorkFailed)
    assert "\n" not in found[1].reason
    assert [found[0], *found[2:]] == [wanted[0], *wanted[2:]]


def test_a_pass_without_memory_for_all_jobs_is_made_for_each(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = with_tokenizer(family("llama"), tmp_path / "target")
    draft = folders("slm", family, tmp_path)
    calls = calls_of(draft, target)
    together, alone = (load_sources(draft, target, dtype="float32") for _ in range(2))
    works = first_drafts(together, calls)
    wanted = [alone.run(work) for work in first_drafts(alone, calls)]
    whole = LayerBlock.run_together

    def scarce(self: LayerBlock, parts: Sequence[Any], *more: Any) -> Any:
        if len(parts) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(self, parts, *more)

    monkeypatch.setattr(LayerBlock, "run_together", scarce)
    assert together.run_together(works) == wanted
