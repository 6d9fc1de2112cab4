"""Seam: jobs begin with rows that are kept of earlier ones, and give the text they give alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.machine import Evict, Received, Refused
from flowspec.core.protocol.messages import Close, Open, PrefixLost, Returns
from flowspec.core.protocol.work import Draft, DraftDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import StateError
from flowspec.model.base import DraftExecutor, RowArray
from flowspec.model.drafters.drafter_choice import ChoiceDrafter, levels_of, wanting_hidden
from flowspec.rehearse.simulator import Costs, RunRecord, Simulation, unit_costs
from flowspec.strategies import EXACT, build
from tests.addresses import D0, S1, S2, S3
from tests.marks import crossed, examples
from tests.toy import TARGET
from tests.toy_blocks import ToyBlocks
from tests.toy_model import ToyDrafter, ToyStage

STAGES = 3
PROMPT = tuple((35 + at * 7) % 60 + 2 for at in range(40))
#: Stages and drafter differ in speed, and links take time, so that messages of jobs interleave.
COSTS = Costs(
    lambda node, work: unit_costs(work) * {D0: 0.3, S1: 1.0, S2: 1.7, S3: 0.6}[node],
    lambda source, target, envelope: 0.45,
)
SAMPLINGS = (Sampling(), Sampling(temperature=1.0, seed=3))


class ToyHead(ToyDrafter):
    """A drafter that, as a draft head, needs the hidden row of the row before each."""

    wants_hidden = True

    def __init__(self, hit_rate: float = 0.8) -> None:
        super().__init__(TARGET, hit_rate)
        self._rows = (self.allocate, self.resume)
        self._known: dict[RunKey, set[int]] = {}
        self.allocate = self._allocate  # type: ignore[method-assign,assignment]
        self.resume = self._resume  # type: ignore[method-assign,assignment]

    def _allocate(self, run: RunKey, capacity: int, sampling: Sampling, returns: Returns) -> None:
        self._rows[0](run, capacity, sampling, returns)
        self._known[run] = {-1}

    def _resume(self, run: RunKey, source: RunKey, held: Sequence[int]) -> None:
        self._rows[1](run, source, held)
        self._known[run] = set()

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        assert len(ids) == len(rows)
        self._known[run].update(ids)

    def run(self, work: Draft) -> DraftDone:
        known = self._known[work.part.run]
        for node, parent in zip(work.part.ids, work.part.parents, strict=True):
            if parent not in known:
                raise StateError(f"nothing is known of row {parent}, before row {node}")
            known.add(node)
        return super().run(work)


class Forgetful(StageMachine):
    """A stage that comes back without the rows it kept, whenever ``forget`` is called."""

    def __init__(self, stage: int, executor: ToyStage) -> None:
        super().__init__(stage, STAGES)
        self._executor = executor

    def forget(self) -> None:
        self._kept.clear()
        for run in self._executor.layers.kept:
            self._executor.evict(run)


class Conversations(Simulation):
    """A pipeline that keeps ``kept_rows`` rows; ``opened``, ``lost`` and ``closed`` as seen."""

    def __init__(self, drafter: DraftExecutor, kept_rows: int = 400, costs: Costs = COSTS) -> None:
        wanting = wanting_hidden(drafter)
        limits = Limits(
            STAGES,
            TARGET.context,
            TARGET.vocabulary,
            TARGET.eos,
            hidden=wanting[0],
            others=wanting[1:],
            levels=levels_of(drafter),
            kept_rows=kept_rows,
        )
        self.executors = [ToyStage(TARGET, stage, STAGES) for stage in range(1, STAGES + 1)]
        self.machines = [Forgetful(at, stage) for at, stage in enumerate(self.executors, 1)]
        self.draft = DraftMachine(limits, build)
        self.opened: dict[str, Open] = {}
        self.closed: dict[str, Close] = {}
        self.lost: list[str] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        stages = zip((S1, S2, S3), self.machines, self.executors, strict=True)
        super().__init__(
            {D0: (self.draft, drafter), **{at: (one, run) for at, one, run in stages}},
            costs,
            tap=self._watch,
        )

    def _watch(self, node: Address, now: float, event: object, outputs: object) -> None:
        due = [action for at, action in self._due if at <= now]
        self._due = [(at, action) for at, action in self._due if at > now]
        for action in due:
            action()
        if not isinstance(event, Received):
            return
        for envelope in event.envelopes:
            match envelope.message:
                case Open() as message if node == S1:
                    self.opened[message.run.job] = message
                case Close() as message if node == S1:
                    self.closed[message.run.job] = message
                case PrefixLost() as message:
                    self.lost.append(message.run.job)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do ``action`` at the first step from virtual ``time`` on."""
        self._due.append((time, action))

    def cancel(self, job: str) -> None:
        self.revoke(job, self.now)

    def ask(self, job: str, prompt: Sequence[int], strategy: str, **more: object) -> RunRecord:
        """One job to its end."""
        self.submit(job, spec(prompt, strategy, **more), self.now)
        self.run()
        return self.jobs[job]

    def check_rows(self) -> None:
        """No run is left, and stages keep the rows that they and the draft worker know of."""
        assert not self.draft.sessions
        for machine, executor in zip(self.machines, self.executors, strict=True):
            assert not machine.open_runs
            assert executor.layers.runs == ()
            assert set(executor.layers.kept) == set(machine._kept)
        assert self.draft._runs.prefixes.rows <= self.draft._limits.kept_rows
        assert self.rows_held == 0


def spec(
    prompt: Sequence[int],
    strategy: str,
    *,
    count: int = 24,
    sampling: Sampling = Sampling(),
    **more: object,
) -> JobSpec:
    return JobSpec(
        prompt_ids=tuple(prompt),
        max_new_tokens=count,
        sampling=sampling,
        strategy=strategy,
        **more,  # type: ignore[arg-type]
    )


def cached(record: RunRecord) -> object:
    assert record.finish is not None
    assert record.finish.error == ""
    return record.finish.stats["cached_tokens"]


def text_of(prompt: Sequence[int], record: RunRecord) -> tuple[int, ...]:
    return (*prompt, *record.tokens)


DRAFTERS = {
    "model": lambda: ToyDrafter(TARGET, 0.8),
    "head": ToyHead,
    "blocks": lambda: ToyBlocks(3, 0.7),
    "choice": lambda: ChoiceDrafter([ToyHead(), ToyDrafter(TARGET, 0.7)]),
}


@pytest.mark.parametrize(
    ("strategy", "drafter"), crossed([name for name in EXACT if name != "pipespec"], DRAFTERS)
)
def test_a_second_turn_computes_what_is_new(strategy: str, drafter: str) -> None:
    pipeline = Conversations(DRAFTERS[drafter]())
    first = pipeline.ask("one", PROMPT, strategy)
    assert cached(first) == 0
    turn = (*text_of(PROMPT, first), 7, 8, 9, 10)
    sampled = Sampling(temperature=1.0, seed=5)
    second = pipeline.ask("two", turn, strategy, sampling=sampled)
    assert tuple(second.tokens) == TARGET.decode(turn, 24, sampled)
    most = len(turn) - 5  # the last token of the first answer has no row
    if drafter == "model" or strategy == "autoregressive":
        assert cached(second) == most
    else:
        # A drafter that lags behind the text lets the stages leave out as much less.
        assert most - 30 <= int(str(cached(second))) <= most
    pipeline.check_rows()
    assert pipeline.lost == []


@given(
    turns=st.lists(
        st.tuples(
            st.sampled_from(["autoregressive", "flowspec", "auto", "specpipe", "chain", "pipedec"]),
            st.sampled_from(SAMPLINGS),
            st.integers(0, 70),  # how much of an earlier text it begins with
            st.integers(0, 5),  # which one
            st.floats(0.0, 60.0),  # when, after the one before
            st.sampled_from([None, None, None, 3.0, 20.0]),  # when it is cancelled
            st.sampled_from([None, None, 0, 1, 2]),  # which stage loses what it kept, then
        ),
        min_size=2,
        max_size=7,
    ),
    drafter=st.sampled_from(sorted(DRAFTERS)),
    kept_rows=st.sampled_from([0, 60, 150, 1000]),
)
@settings(max_examples=examples(40), deadline=None)
def test_any_conversations_give_the_texts_they_give_alone(
    turns: list[tuple[str, Sampling, int, int, float, float | None, int | None]],
    drafter: str,
    kept_rows: int,
) -> None:
    pipeline = Conversations(DRAFTERS[drafter](), kept_rows)
    texts = [PROMPT, PROMPT[:30] + tuple(range(2, 40))]
    at = 0.0
    asked: dict[str, JobSpec] = {}
    cancelled: set[str] = set()
    for number, (strategy, sampling, length, of, later, ends, forgets) in enumerate(turns):
        job = f"job {number}"
        prompt = (*texts[of % len(texts)][: max(1, length)], 3 + number)
        asked[job] = spec(prompt, strategy, sampling=sampling, count=12)
        texts.append(prompt + TARGET.decode(prompt, 12, sampling))
        at += later
        pipeline.submit(job, asked[job], at)
        if ends is not None:
            cancelled.add(job)
            pipeline.at(at + ends, partial(pipeline.cancel, job))
        if forgets is not None:
            pipeline.at(at + 1.0, pipeline.machines[forgets].forget)
    pipeline.run()
    for job, wanted in asked.items():
        assert wanted.prompt_ids is not None
        right = TARGET.decode(wanted.prompt_ids, 12, wanted.sampling)
        got = tuple(pipeline.jobs[job].tokens)
        if job in cancelled and pipeline.jobs[job].finish is None:
            assert got == right[: len(got)]
            continue
        event(f"reused {cached(pipeline.jobs[job])!s:.1}")
        assert got == right
    pipeline.check_rows()
    event(f"lost {len(pipeline.lost)}")


@pytest.mark.parametrize(("stage", "drafter"), crossed([0, 1, 2], DRAFTERS))
def test_a_stage_that_lost_the_rows_gets_the_whole_prompt(stage: int, drafter: str) -> None:
    pipeline = Conversations(DRAFTERS[drafter]())
    turn = (*text_of(PROMPT, pipeline.ask("one", PROMPT, "flowspec")), 7, 8)
    pipeline.machines[stage].forget()
    second = pipeline.ask("two", turn, "flowspec")
    assert tuple(second.tokens) == TARGET.decode(turn, 24, Sampling())
    assert cached(second) == 0
    assert pipeline.lost == ["two"]
    # Its own rows are kept everywhere, and the run that was lost is known nowhere.
    assert pipeline.closed["two"].kept == (RunKey("two", 1),)
    third = pipeline.ask("three", (*text_of(turn, second), 9), "flowspec")
    assert int(str(cached(third))) > len(turn)
    pipeline.check_rows()


def test_several_stages_may_have_lost_the_rows() -> None:
    pipeline = Conversations(ToyHead())
    turn = (*text_of(PROMPT, pipeline.ask("one", PROMPT, "flowspec")), *range(2, 60))
    pipeline.machines[0].forget()
    pipeline.machines[2].forget()
    second = pipeline.ask("two", turn, "flowspec")
    assert tuple(second.tokens) == TARGET.decode(turn, 24, Sampling())
    assert pipeline.lost == ["two", "two"]
    pipeline.check_rows()


def test_rows_that_could_not_be_kept_are_lost_ones() -> None:
    pipeline = Conversations(ToyDrafter(TARGET, 0.8))
    first = pipeline.ask("one", PROMPT, "flowspec")
    machine = pipeline.machines[1]
    (freed,) = machine.step(
        Refused(RunKey("one", 1), False, "no memory", is_keep=True), pipeline.now
    )
    assert freed == Evict(RunKey("one", 1))
    assert (
        machine.step(Refused(RunKey("one", 1), False, "no memory", is_keep=True), pipeline.now)
        == []
    )
    pipeline.executors[1].evict(RunKey("one", 1))
    turn = (*text_of(PROMPT, first), 7)
    second = pipeline.ask("two", turn, "flowspec")
    assert tuple(second.tokens) == TARGET.decode(turn, 24, Sampling())
    assert pipeline.lost == ["two"]


@pytest.mark.parametrize(
    ("strategy", "drafter"), crossed(["autoregressive", "flowspec", "auto", "specpipe"], DRAFTERS)
)
def test_equal_prompts_at_once_are_computed_once(strategy: str, drafter: str) -> None:
    """The others begin with the rows of the first as soon as it has its first token."""
    pipeline = Conversations(DRAFTERS[drafter]())
    begun = pipeline.now
    asked = {
        f"seed {seed}": spec(PROMPT, strategy, sampling=Sampling(1.0, seed=seed))
        for seed in range(4)
    }
    for job, wanted in asked.items():
        pipeline.submit(job, wanted, begun)
    pipeline.run()
    for job, wanted in asked.items():
        assert tuple(pipeline.jobs[job].tokens) == TARGET.decode(PROMPT, 24, wanted.sampling)
    first, *others = (int(str(cached(pipeline.jobs[job]))) for job in asked)
    assert first == 0
    # A head lets the stages compute one row for it, a drafter that another one was chosen for all.
    expected = {len(PROMPT) - 1, len(PROMPT) - 2}
    assert set(others) <= (expected | {0} if drafter == "choice" else expected)
    pipeline.check_rows()


def test_rows_that_would_not_be_kept_are_not_awaited() -> None:
    pipeline = Conversations(ToyDrafter(TARGET, 0.8), kept_rows=0)
    for job in ("first", "second"):
        pipeline.submit(job, spec(PROMPT, "flowspec"), 0.0)
    pipeline.run()
    began = [pipeline.jobs[job].committed_at[0][0] for job in ("first", "second")]
    assert began[0] == pytest.approx(began[1], abs=2.0), "they share the passes"
    assert [cached(pipeline.jobs[job]) for job in ("first", "second")] == [0, 0]


def test_who_awaits_rows_begins_in_full_if_they_do_not_come() -> None:
    pipeline = Conversations(ToyHead())
    for job in ("first", "second"):
        pipeline.submit(job, spec(PROMPT, "flowspec"), 0.0)
    pipeline.at(1.5, partial(pipeline.cancel, "first"))
    pipeline.run()
    assert pipeline.jobs["first"].tokens == []
    assert tuple(pipeline.jobs["second"].tokens) == TARGET.decode(PROMPT, 24, Sampling())
    assert cached(pipeline.jobs["second"]) == 0
    pipeline.check_rows()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_cancelled_job_leaves_its_prompts_rows(drafter: str) -> None:
    pipeline = Conversations(DRAFTERS[drafter]())
    pipeline.submit("one", spec(PROMPT, "flowspec", count=200), 0.0)
    pipeline.at(12.0, partial(pipeline.cancel, "one"))
    pipeline.run()
    assert pipeline.jobs["one"].finish is None
    text = (*PROMPT, *pipeline.jobs["one"].tokens, 7)
    assert len(text) > len(PROMPT) + 1
    second = pipeline.ask("two", text, "flowspec")
    assert tuple(second.tokens) == TARGET.decode(text, 24, Sampling())
    # A head lets the stages compute one row more.
    assert cached(second) == len(PROMPT) - (2 if drafter in ("head", "choice") else 1)
    pipeline.check_rows()


def test_other_prompts_other_salts_and_little_in_common_are_not_waited_for() -> None:
    pipeline = Conversations(ToyDrafter(TARGET, 0.8))
    long = tuple((3 + at * 11) % 60 + 2 for at in range(120))
    jobs = {
        "long": spec(long, "flowspec"),
        "other": spec(PROMPT, "flowspec"),
        "salted": spec(long, "flowspec", cache_salt="mine"),
        "alone": spec(long, "flowspec", reuse=False),
        "little": spec((*long[:40], *PROMPT), "flowspec"),
        "same": spec((*long, 5), "flowspec"),
    }
    for job, wanted in jobs.items():
        pipeline.submit(job, wanted, 0.0)
    pipeline.run()
    found = {job: cached(pipeline.jobs[job]) for job in jobs}
    assert found == dict.fromkeys(jobs, 0) | {"same": len(long) - 1}
    for job, wanted in jobs.items():
        assert wanted.prompt_ids is not None
        right = TARGET.decode(wanted.prompt_ids, 24, Sampling())
        assert tuple(pipeline.jobs[job].tokens) == right
    pipeline.check_rows()


@pytest.mark.parametrize("field", [{"reuse": False}, {"cache_salt": "other"}, {"record": True}])
def test_a_job_may_keep_to_itself(field: dict[str, object]) -> None:
    pipeline = Conversations(ToyDrafter(TARGET, 0.8))
    turn = (*text_of(PROMPT, pipeline.ask("one", PROMPT, "flowspec")), 7)
    assert cached(pipeline.ask("two", turn, "flowspec", **field)) == 0
    later = (*turn, 8)
    assert cached(pipeline.ask("three", later, "flowspec")) == len(turn) - 2
    if "cache_salt" in field:
        assert cached(pipeline.ask("four", later, "flowspec", **field)) == len(turn)
    else:
        assert pipeline.closed["two"].keep == 0


def test_a_chain_of_models_computes_the_whole_prompt() -> None:
    pipeline = Conversations(ToyDrafter(TARGET, 0.8))
    turn = (*text_of(PROMPT, pipeline.ask("one", PROMPT, "pipespec")), 7)
    assert tuple(pipeline.ask("two", turn, "pipespec").tokens) == TARGET.decode(
        turn, 24, Sampling()
    )


def test_rows_kept_are_bounded_and_those_used_last_stay() -> None:
    pipeline = Conversations(ToyDrafter(TARGET, 0.8), kept_rows=140)
    others = [tuple((5 + at * step) % 60 + 2 for at in range(40)) for step in (11, 13, 17)]
    for number, prompt in enumerate(others):
        if number == 2:  # uses the first one's rows, so that the second one's are older
            assert cached(pipeline.ask("again", (*others[0], 3), "flowspec", count=1)) == 40
        pipeline.ask(f"job {number}", prompt, "flowspec")
        pipeline.check_rows()
    assert cached(pipeline.ask("first", (*others[0], 4), "flowspec", count=1)) == 40
    assert cached(pipeline.ask("second", (*others[1], 4), "flowspec", count=1)) == 0


def test_a_text_longer_than_the_bound_is_kept_in_part() -> None:
    pipeline = Conversations(ToyHead(), kept_rows=30)
    turn = (*text_of(PROMPT, pipeline.ask("one", PROMPT, "flowspec")), 7)
    second = pipeline.ask("two", turn, "flowspec")
    assert cached(second) == 29
    assert tuple(second.tokens) == TARGET.decode(turn, 24, Sampling())
    pipeline.check_rows()
