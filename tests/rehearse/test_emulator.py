"""Emulated workers: the simulation's trace, charged software, and late inputs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import (
    DRAFT,
    SCHEDULER,
    Address,
    middle_address,
    stage_address,
)
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.machine import Allocate, Machine, Received
from flowspec.core.protocol.messages import Answer, Envelope, Returns, Submit
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.protocol.work import Part, Pass
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import ConfigError
from flowspec.rehearse.devices.arrivals import Parcel
from flowspec.rehearse.devices.profile import LinkShape, Profile, Times
from flowspec.rehearse.devices.profiles import load
from flowspec.rehearse.devices.setup import Emulation
from flowspec.rehearse.devices.way import NO_BROKER, Way
from flowspec.rehearse.emulator import EmulatedWorker
from flowspec.rehearse.simulator import Costs
from flowspec.roles.performers import DraftPerformer, VerifyPerformer
from flowspec.roles.worker import Performer
from flowspec.strategies import build
from flowspec.transport.base import Link
from tests.addresses import S1
from tests.toy import PROMPT, TARGET, limits, pipeline
from tests.toy_cluster import Characters
from tests.toy_model import ToyDrafter, ToyMiddle, ToyStage
from tests.transport.memory import MemoryBroker, MemoryLink
from tests.transport.memory_control import MemoryControl
from tests.waiting import until

MS = 2.0**-10  # seconds; costs are sums of powers of two, so that no sum is rounded
#: A small machine on a fast network: stages of 12 to 24 ms, a drafter of 2 ms.
PROFILE = Profile(
    "toy",
    "",
    "",
    layers=12,
    hidden=512,
    value_bytes=2,
    layer=Times(((1, 2 * MS), (17, 2.5 * MS))),
    head=Times(((1, 1.25 * MS),)),
    drafters={"slm": Times(((1, 1.5 * MS), (9, 2 * MS)))},
    link=LinkShape(0.25 * MS, 2.0**27),
    stages=(4,),
    middles=(Times(((1, 6 * MS),)),),
)
WAYS = [
    NO_BROKER,
    Way("draft", "broker"),
    Way("own", "straight"),
    Way("own", "broker"),
    Way("stage-2", "straight"),
    Way("stage-2", "broker"),
]
SPLIT = replace(PROFILE, split=(5, 2, 4, 1), blocks=(PROFILE.layer,) * 4)
Trace = list[tuple[float, int]]
Run = tuple[Trace, Mapping[str, object]]


def costs(profile: Profile, stages: int) -> Costs:
    return Costs(
        lambda node, work: profile.work_seconds(node, work, stages, "slm"),
        lambda source, target, _: 0.0 if source == target else profile.link.latency,
        lambda _, target, envelope: profile.transfer_seconds(target, envelope),
        way=profile.way,
        hop=profile.hop,
    )


class Emulated:
    """Emulated workers in threads over the in-memory broker."""

    def __init__(
        self, emulation: Emulation, middles: Sequence[float] = (), delay: float = 0.0
    ) -> None:
        self.broker = MemoryBroker()
        self.emulation = emulation
        self.delay = delay
        self.control = MemoryControl(self.broker)
        self.stages = emulation.stages
        self.workers: dict[Address, EmulatedWorker] = {}
        self.failures: list[BaseException] = []
        drafter = DraftPerformer(ToyDrafter(TARGET, 0.8, (0, 0, 0, 0, 0, 1, 1, 2)), Characters())
        self._add(DRAFT, DraftMachine(limits(self.stages, middles=len(middles)), build), drafter)
        for stage in range(1, self.stages + 1):
            executor = VerifyPerformer(ToyStage(TARGET, stage, self.stages), (), ("<u8",))
            self._add(stage_address(stage), StageMachine(stage, self.stages), executor)
        for model, agreement in enumerate(middles, 1):
            executor = VerifyPerformer(ToyMiddle(TARGET, agreement), (), ("<u8",))
            self._add(middle_address(model), StageMachine(1, self.stages, middle=model), executor)

    def _add(self, address: Address, machine: Machine, role: Performer) -> None:
        link: Any = Slow(MemoryLink(self.broker, address), self.delay)
        self.workers[address] = EmulatedWorker(machine, link, role, self.emulation)

    @contextmanager
    def running(self) -> Iterator[Emulated]:
        stopped = threading.Event()

        def body(worker: EmulatedWorker) -> None:
            try:
                worker.run(stopped.is_set)
            except BaseException as error:  # noqa: BLE001 - shown by the test's thread
                self.failures.append(error)

        threads = [
            threading.Thread(target=body, args=(worker,), daemon=True)
            for worker in self.workers.values()
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            stopped.set()
            for thread in threads:
                thread.join(5)
            assert not self.failures, self.failures

    def run(self, spec: JobSpec) -> Run:
        """Run a job; token counts by time since its assignment, and stats without queueing."""
        job = self.control.submit(spec.fields())
        (intake,) = self.control.read_intake(0.0)
        self.control.admit(job, intake.fields)
        self.control.acknowledge([job])
        assert self.control.assign(job, 1, {}) is Code.OK

        def has_ended() -> bool:
            assert not self.failures, self.failures
            output = self.broker.jobs[job].output
            return bool(output) and output[-1]["kind"] == "end"

        until(has_ended)
        *texts, end = self.broker.jobs[job].output
        counts = []
        stats = json.loads(end["stats"])
        for entry in texts:
            counts.append(
                (float(entry["at"]), int(entry["offset"]) + len(json.loads(entry["ids"])))
            )
        stats["ttft_seconds"] -= stats["queue_seconds"]
        stats["queue_seconds"] = 0.0
        began = counts[0][0] - stats["ttft_seconds"]
        return [(at - began, count) for at, count in counts], stats

    def total(self, name: str) -> int:
        return sum(int(worker.facts()[name]) for worker in self.workers.values())  # type: ignore[call-overload]


def flat(stats: Mapping[str, object]) -> dict[str, float]:
    """Values of nested stats by path."""
    found: dict[str, float] = {}
    for name, value in stats.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            found |= {f"{name}.{path}": number for path, number in flat(value).items()}
        else:
            found[str(name)] = value  # type: ignore[assignment]
    return found


class Slow:
    """A link that takes ``delay`` wall seconds to write."""

    def __init__(self, link: Link, delay: float) -> None:
        self._link = link
        self._delay = delay

    def write(self, ops: Sequence[object], stamps: Sequence[Stamp | None]) -> object:
        time.sleep(self._delay)
        return self._link.write(ops, stamps)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)


def simulated(
    strategy: str,
    stages: int,
    middles: Sequence[float] = (),
    count: int = 16,
    profile: Profile = PROFILE,
) -> Run:
    """The simulation's result at the same costs; the first token at the draft worker's time."""
    simulation = pipeline(stages, costs=costs(profile, stages), middles=middles)
    simulation.submit("j", spec_of(strategy, count))
    simulation.run()
    record = simulation.jobs["j"]
    assert record.finish is not None
    stats = record.finish.stats
    began = record.committed_at[0][0] - stats["ttft_seconds"]  # type: ignore[operator]
    return [(at - began, count) for at, count in record.committed_at], stats


def first_whole(make: Callable[[float], Emulated], strategy: str) -> Run:
    """The first run without overtaken inputs; a busy machine needs more stretch."""
    (run,) = whole_runs(make, strategy, 1)
    return run


def whole_runs(make: Callable[[float], Emulated], strategy: str, jobs: int) -> list[Run]:
    """The first ``jobs`` runs in a row without overtaken inputs."""
    for stretch in (6.0, 20.0, 60.0):
        with make(stretch).running() as emulated:
            runs = [emulated.run(spec_of(strategy))]
            while len(runs) < jobs:
                # A stage may still be computing rows that were just pruned.
                time.sleep(stretch * 30 * MS)
                runs.append(emulated.run(spec_of(strategy)))
            if not emulated.total("overtaken"):
                return runs
    raise AssertionError("this machine is too busy to emulate anything")


def spec_of(strategy: str, count: int = 16) -> JobSpec:
    return JobSpec(prompt_ids=PROMPT, max_new_tokens=count, strategy=strategy)


def emulation(stages: int, profile: Profile = PROFILE, **more: object) -> Emulation:
    return Emulation(profile, stages, "slm", began=time.monotonic(), **more)  # type: ignore[arg-type]


@pytest.mark.live
@pytest.mark.parametrize(
    ("strategy", "stages"),
    [
        ("autoregressive", 3),
        ("chain", 2),
        ("chain:window=4", 4),
        ("flowspec", 2),
        ("flowspec", 4),
        ("flowspec:lockstep=on", 3),
        ("pipedec:width=8,children=4", 3),
        ("pipedec:width=8,children=4,barrier=off", 4),
        ("specpipe:width=8,children=4", 4),
        ("static_tree", 2),
        ("pipespec", 2),
    ],
)
def test_free_software_gives_the_trace_of_the_simulation(strategy: str, stages: int) -> None:
    assert_the_same_trace(strategy, stages, PROFILE)


@pytest.mark.live
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.at}, {way.rows}")
@pytest.mark.parametrize(
    "strategy", ["flowspec", "flowspec:lockstep=on", "pipedec:width=8,children=4"]
)
def test_free_software_gives_the_trace_of_the_simulation_on_every_way(
    strategy: str, way: Way
) -> None:
    """FlowSpec with both kinds of messages, and the two systems that the task graph orders."""
    assert_the_same_trace(strategy, 3, replace(PROFILE, way=way))


@pytest.mark.live
@pytest.mark.parametrize("way", WAYS[:2], ids=lambda way: f"{way.at}, {way.rows}")
@pytest.mark.parametrize("strategy", ["flowspec", "pipedec:width=8,children=4"])
def test_a_profile_s_own_software_is_charged_as_in_the_simulation(strategy: str, way: Way) -> None:
    assert_the_same_trace(strategy, 3, replace(PROFILE, way=way, hop=0.125 * MS))


@pytest.mark.live
def test_software_that_is_charged_as_it_runs_replaces_the_profile_s() -> None:
    profile = replace(PROFILE, hop=1.0)
    run = first_whole(
        lambda stretch: Emulated(emulation(2, profile, stretch=stretch)), "autoregressive"
    )
    assert run[0][-1][0] < 16.0, "a token has three hops"


def assert_the_same_trace(strategy: str, stages: int, profile: Profile) -> None:
    """Emulated with free software, a job has the commits and the stats of the simulation."""
    middles = (0.7,) if strategy == "pipespec" else ()
    trace, stats = simulated(strategy, stages, middles, profile=profile)
    run = first_whole(
        lambda stretch: Emulated(
            emulation(stages, profile, stretch=stretch, free_software=True), middles
        ),
        strategy,
    )
    assert [count for _, count in run[0]] == [count for _, count in trace]
    assert [at for at, _ in run[0]] == pytest.approx([at for at, _ in trace], abs=1e-9)
    assert flat(run[1]) == pytest.approx(flat(stats))


@pytest.mark.live
def test_a_later_job_has_the_same_trace() -> None:
    expected = pytest.approx([at for at, _ in simulated("flowspec", 2)[0]], abs=1e-9)
    runs = whole_runs(
        lambda stretch: Emulated(emulation(2, stretch=stretch, free_software=True)), "flowspec", 2
    )
    for trace, _ in runs:
        assert [at for at, _ in trace] == expected


@pytest.mark.live
def test_software_is_charged_once_a_hop_and_with_its_cpu_time() -> None:
    stages = 2
    hop = 4 * MS
    count = 8
    free, _ = simulated("autoregressive", stages, count=count)
    with Emulated(emulation(stages, hop=hop, stretch=4.0)).running() as emulated:
        trace, _ = emulated.run(spec_of("autoregressive", count))
        software = sum(worker.software_seconds for worker in emulated.workers.values())
    # Links per token: d0 to s1, s1 to s2, s2 to d0. The rest is CPU time.
    extra = (trace[-1][0] - trace[0][0]) - (free[-1][0] - free[0][0])
    hops = (count - 1) * (stages + 1) * hop
    assert hops < extra < hops + software


@pytest.mark.live
def test_an_input_behind_what_it_might_have_changed_is_counted() -> None:
    slow = 40 * MS
    with Emulated(emulation(3, free_software=True), delay=slow).running() as emulated:
        emulated.run(spec_of("flowspec"))
        assert emulated.total("overtaken") > 0
    trace, _ = simulated("autoregressive", 2)
    with Emulated(emulation(2, free_software=True), delay=slow).running() as emulated:
        run, _ = emulated.run(spec_of("autoregressive"))
        assert emulated.total("late") > 0
        assert emulated.total("overtaken") == 0, (
            "with one segment on its way nothing can be overtaken"
        )
    assert [at for at, _ in run] == pytest.approx([at for at, _ in trace], abs=1e-9)


def test_model_seconds_split_a_pass_into_device_and_software() -> None:
    spent = [0.0]

    class Executor(ToyStage):
        def run(self, work: object, inputs: object) -> object:  # type: ignore[override]
            began = time.thread_time()
            result = super().run(work, inputs)  # type: ignore[arg-type]
            while time.thread_time() - began < 3 * MS:
                pass
            spent[0] += MS
            return result

    broker = MemoryBroker()
    role = VerifyPerformer(Executor(TARGET, 1, 2), (), ("<u8",))
    worker = EmulatedWorker(
        StageMachine(1, 2),
        MemoryLink(broker, S1),
        role,
        emulation(2),
        model_seconds=lambda: spent[0],
    )
    run = RunKey("j", 1)
    part = Part(
        run, 0, ids=(0,), parents=(-1,), positions=(0,), tokens=(2,), offsets=(0,), context=1
    )
    role.allocate(Allocate(run, 4, Sampling(), Returns()))
    worker._start(Pass((part,)))
    assert worker.software_seconds >= 2 * MS
    assert worker.busy_seconds == PROFILE.stage_seconds(1, 2, 1)
    assert worker._running is not None
    assert worker._running[0] == pytest.approx(
        worker.busy_seconds + worker.software_seconds, abs=1e-3
    )


@given(
    st.sampled_from([replace(PROFILE, way=Way("own", "broker")), load("mixed-7b"), SPLIT]),
    *(st.floats(1.0, 1e4), st.booleans(), st.floats(0, 1), st.floats(0, 1e6)),
)
def test_a_description_survives_the_record(
    profile: Profile, stretch: float, free: bool, hop: float, began: float
) -> None:
    one = Emulation(profile, 4, "slm", stretch, free, hop, began=began)
    assert Emulation.read(one.text()) == one
    assert one.nominal(one.wall(2.0)) == pytest.approx(2.0 + one.guard / stretch)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"profile": {}}', '{"profile": 3, "stages": 1}'])
def test_a_description_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="an emulated pipeline is described by"):
        Emulation.read(text)


def test_what_cannot_be_emulated_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"stretch is 0\.5; expected 1"):
        emulation(2, stretch=0.5)
    for source in ("head", "slm:head", "slm:slm+head"):
        with pytest.raises(ConfigError, match="no drafter 'head'"):
            Emulation(PROFILE, 2, source)
    shape = replace(PROFILE.link, exclusive=True)
    exclusive = replace(PROFILE, link=shape, way=NO_BROKER)
    with pytest.raises(ConfigError, match="has exclusive links, which only simulations have"):
        Emulation(exclusive, 2, "slm")
    with pytest.raises(ConfigError, match="the broker is at 'stage-3', but there are 2 stages"):
        Emulation(replace(PROFILE, way=Way("stage-3")), 2, "slm")


def test_hidden_rows_are_charged_to_the_jobs_that_get_some() -> None:
    stages = 2
    rows = (1, 2, 3)
    taken = dict[str, float]()
    machine = DraftMachine(replace(limits(stages), others=(True,)), build)
    link = MemoryLink(MemoryBroker(), DRAFT)
    role = DraftPerformer(ToyDrafter(TARGET, 0.8), Characters())
    profile = replace(PROFILE, way=Way("stage-1", "broker"))
    worker = EmulatedWorker(machine, link, role, emulation(stages, profile))
    last = stage_address(stages)
    for job in ("autoregressive", "chain", "auto"):
        fields = tuple(spec_of(job).fields().items())
        submit = Envelope(SCHEDULER, 1, Submit(RunKey(job, 1), fields))
        machine.step(Received((submit,)), 0.0)
    assert len(machine.sessions) == 3
    runs = (*machine.sessions, RunKey("unknown", 1))
    for at, run in enumerate(runs):  # a link that is free again
        answer = Envelope(last, 1, Answer(run, 1, rows, rows))
        parcel = Parcel(Stamp(float(at), S1), (answer,))
        worker._arrivals.expect(parcel)
        ((arrival, _),) = worker._arrivals.enter(parcel)
        taken[run.job] = arrival - at
    carried = len(rows) * PROFILE.hidden * PROFILE.value_bytes / PROFILE.link.bandwidth
    expected = {job: taken["unknown"] + (carried if job == "auto" else 0.0) for job in taken}
    assert taken == pytest.approx(expected, abs=1e-9), "only auto can use the second drafter"


def test_an_emulation_follows_the_pipelines_layers() -> None:
    plain = Emulation(PROFILE, 4, "slm")
    followed = plain.following([1, 2, 3, 6])
    assert [followed.profile.stage_layers(stage, 4) for stage in range(1, 5)] == [1, 2, 3, 6]
    assert plain.following([2, 2]) == plain, "another model's layers"
    planned = Emulation(SPLIT, 4, "slm")
    assert planned.following([5, 2, 4, 1]) == planned
    with pytest.raises(ConfigError, match="expected the same"):
        planned.following([1, 2, 3, 6])
