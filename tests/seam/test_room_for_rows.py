"""Jobs begin when the stages have room for their rows, in the order of their submission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.machine import Allocate, Input, OpenJob, Output, Release
from flowspec.core.protocol.work import Encode, EncodeDone
from flowspec.core.run.limits import BLOCK_ROWS, TREE_ROWS, in_blocks
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.rehearse.simulator import Simulation
from flowspec.strategies import build
from tests.marks import examples
from tests.toy import PROMPT, TARGET, limits
from tests.toy_model import ToyDrafter, ToyStage

STAGES = 2
#: Tokens of an answer: of so many jobs whose rows are nearly those of their trees.
ANSWER = 12


class Rows:
    """The rows that stage 1 has allocated, and the order in which jobs began, as a tap."""

    def __init__(self) -> None:
        self.most = 0
        self.opened: list[str] = []
        self._held: dict[object, int] = {}

    def tap(self, node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, OpenJob):
                self.opened.append(output.run.job)
            if node == stage_address(1) and isinstance(output, Allocate):
                self._held[output.run] = output.capacity
            elif node == stage_address(1) and isinstance(output, Release):
                self._held.pop(output.run, None)
        self.most = max(self.most, sum(self._held.values()))


def run(
    specs: Sequence[JobSpec], most_rows: int, row_unit: int = 1, kept_rows: int = 0
) -> tuple[Rows, Simulation]:
    """``specs``, submitted in turn to a pipeline of ``most_rows`` rows, of whole units."""
    rows = Rows()
    bounds = replace(limits(STAGES), kept_rows=kept_rows)
    machine = DraftMachine(bounds, build, most_rows=most_rows, row_unit=row_unit)
    nodes: dict[Address, Any] = {DRAFT: (machine, ToyDrafter(TARGET, 0.8, (0, 0, 1)))}
    for stage in range(1, STAGES + 1):
        nodes[stage_address(stage)] = (StageMachine(stage, STAGES), ToyStage(TARGET, stage, STAGES))

    def encode(work: Encode) -> EncodeDone:
        return EncodeDone(PROMPT)

    simulation = Simulation(nodes, tap=rows.tap, encode=encode)
    for at, spec in enumerate(specs):
        simulation.submit(f"j{at}", spec, at=0.5 * at)
    simulation.run()
    return rows, simulation


def job(*, text: bool, strategy: str = "auto", answer: int = ANSWER) -> JobSpec:
    if text:
        return JobSpec(prompt="words", max_new_tokens=answer, strategy=strategy)
    return JobSpec(prompt_ids=PROMPT, max_new_tokens=answer, strategy=strategy)


@settings(max_examples=examples(20))
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from(("auto", "autoregressive", "pipedec"))),
        min_size=2,
        max_size=7,
    ),
    st.integers(1, 4),
)
def test_no_stage_holds_more_rows_than_it_has_and_no_job_is_left(
    kinds: list[tuple[bool, str]], room: int
) -> None:
    most = room * (TREE_ROWS + len(PROMPT) + ANSWER)
    specs = [job(text=text, strategy=strategy) for text, strategy in kinds]
    rows, simulation = run(specs, most)
    assert rows.most <= most
    for record in simulation.jobs.values():
        assert tuple(record.tokens) == TARGET.decode(PROMPT, ANSWER, Sampling())
    assert simulation.rows_held == 0


def test_jobs_that_wait_for_room_begin_in_their_order() -> None:
    wide, narrow = job(text=False, answer=40), job(text=False)
    rows, simulation = run([narrow, wide, narrow], 2 * (TREE_ROWS + len(PROMPT)) + 2 * ANSWER)
    assert rows.opened == ["j0", "j1", "j2"], "the third would have had room beside the first"
    assert all(record.tokens for record in simulation.jobs.values())


def test_a_job_that_has_no_room_in_an_empty_pipeline_is_refused() -> None:
    _, simulation = run([job(text=True), job(text=False)], TREE_ROWS)
    for record in simulation.jobs.values():
        assert record.finish is not None
        assert record.finish.error.startswith(
            f"the job needs {TREE_ROWS + len(PROMPT) + ANSWER} KV"
        )
        assert record.finish.error.endswith("shorten the prompt or the answer")


def test_rows_are_counted_in_whole_blocks() -> None:
    needs = TREE_ROWS + len(PROMPT) + ANSWER
    assert needs % BLOCK_ROWS
    rows, _ = run([job(text=False)] * 2, 2 * needs, BLOCK_ROWS)
    assert rows.most == needs, "one after the other"
    rows, _ = run([job(text=False)] * 2, 2 * in_blocks(needs), BLOCK_ROWS)
    assert rows.most == 2 * needs


def test_a_job_that_awaits_another_ones_rows_has_its_room() -> None:
    long = tuple(2 + at % 50 for at in range(40))
    same = [
        JobSpec(prompt_ids=long, max_new_tokens=ANSWER, sampling=Sampling(1.0, seed=seed))
        for seed in range(2)
    ]
    most = 2 * (TREE_ROWS + len(long) + ANSWER)
    rows, simulation = run([*same, job(text=False)], most, kept_rows=200)
    assert rows.opened == ["j0", "j1", "j2"]
    assert rows.most <= most
    stats = [record.finish.stats for record in simulation.jobs.values() if record.finish]
    assert [found["cached_tokens"] for found in stats] == [0, len(long) - 1, 0]
