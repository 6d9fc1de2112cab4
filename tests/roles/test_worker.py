"""Real workers in threads over both brokers: plain decoding's text under all disturbances."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.lease import HUNG_SECONDS, LeaseTerms
from flowspec.core.protocol.machine import Send
from flowspec.core.protocol.messages import Answer, Segment
from flowspec.core.protocol.work import Part, Pass, PassDone
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import CANCEL, JobSpec
from flowspec.errors import ReplayMismatch
from flowspec.rehearse.emulated_link import EmulatedLink
from flowspec.rehearse.replay import merge, replay
from flowspec.roles.record import line_of
from flowspec.roles.worker import Worker
from flowspec.strategies import EXACT
from flowspec.transport.base import CommitText, Link, Op, PutRows, ReadResult
from flowspec.transport.connections.connection import connect
from flowspec.transport.link.live_link import LiveLink
from flowspec.transport.wire.keys import Keys
from tests.addresses import D0, S1, S2
from tests.toy import TARGET
from tests.toy_cluster import ToyCluster, ids_of
from tests.transport.conftest import Rig, rig_over
from tests.waiting import SECONDS, seconds_of, until

Start = Callable[..., ToyCluster]


@pytest.fixture(
    params=[
        "memory",
        pytest.param("redis", marks=pytest.mark.live),
        pytest.param("live", marks=pytest.mark.live),
    ]
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with rig_over(request.param, request) as rig:
        yield rig


@pytest.fixture
def start(rig: Rig) -> Iterator[Start]:
    """``start(stages)`` returns a running cluster over the broker under test."""
    running: list[ToyCluster] = []

    def begin(stages: int, **options: Any) -> ToyCluster:
        middles = len(options.get("middles", ()))

        def link(address: Address, holder: Holder) -> Link:
            if rig.memory is not None:
                return rig.link(address, holder)
            kind = LiveLink if rig.live else EmulatedLink
            made = kind(rig.url, Keys(), address, stages, middles=middles, holder=holder)
            rig.given.append(made)
            return made

        cluster = ToyCluster(rig.control, link, stages, **options)
        running.append(cluster)
        return cluster

    yield begin
    for cluster in running:
        cluster.stop()


PROMPT = "whyitworks"


def expected(
    count: int = 40, sampling: Sampling = Sampling(), prompt: str = PROMPT
) -> tuple[int, ...]:
    return TARGET.decode(ids_of(prompt), count, sampling)


def shorten_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of 1.5 s."""
    monkeypatch.setattr("tests.toy_cluster.TERMS", LeaseTerms(1500))
    monkeypatch.setattr("flowspec.roles.lease.load_per_core", lambda: 0.0)


@pytest.mark.live
@pytest.mark.parametrize("rig", ["memory"], indirect=True)
def test_an_idle_pipelines_first_token_waits_for_no_poll(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step from the submission to the first token wakes the next one's process."""
    poll = SECONDS
    monkeypatch.setattr("flowspec.roles.scheduler.WATCH_SECONDS", poll)
    monkeypatch.setattr("flowspec.roles.worker.IDLE_SECONDS", poll)
    cluster = start(2)
    for _ in range(4):
        time.sleep(0.2)  # everyone waits
        job = cluster.submit(JobSpec(prompt=PROMPT, max_new_tokens=4))
        assert seconds_of(lambda at=job: cluster.control.read_output(at, "0", poll)) < poll / 2  # type: ignore[misc]
        cluster.wait(job)


@pytest.mark.parametrize("stages", [1, 3])
def test_every_strategy_gives_the_targets_text(start: Start, stages: int) -> None:
    """Greedy or sampled, in turn; with the other number of stages the other way round."""
    cluster = start(stages)
    variants = (*EXACT, "flowspec:lockstep=on", "specpipe:barrier=on", "specpipe:width=auto")
    for at, strategy in enumerate(variants, stages // 2):
        sampling = (Sampling(), Sampling(1.0, seed=2))[at % 2]
        spec = JobSpec(prompt=PROMPT, max_new_tokens=40, strategy=strategy, sampling=sampling)
        ids, end, error = cluster.run(spec)
        assert (ids, error) == (expected(40, sampling), ""), strategy
        stats = json.loads(end["stats"])
        assert stats["tokens"] == len(ids)
        assert stats["rows"]["useful"] == (len(ids) - 1) * stages
        assert all(0 <= busy <= 1.5 for busy in stats["stage_busy"])


def test_turns_begin_with_rows_that_are_kept(start: Start) -> None:
    cluster = start(2, kept_rows=300, endless=True, jobs=2)
    prompt = tuple(ids_of(PROMPT)) * 3
    for turn, strategy in enumerate(["flowspec", "auto", "autoregressive", "pipedec", "specpipe"]):
        sampling = Sampling(1.0, seed=turn)
        spec = JobSpec(prompt_ids=prompt, max_new_tokens=16, strategy=strategy, sampling=sampling)
        if turn == 3:  # a stage that has lost what it kept, as after a restart
            cluster.stages[1].evict_all()
        jobs = [cluster.submit(spec), cluster.submit(replace(spec, reuse=False))]
        (ids, end, error), (alone, plain, _) = map(cluster.wait, jobs)
        assert (ids, error) == (alone, "")
        cached = json.loads(end["stats"])["cached_tokens"]
        assert cached == (0 if turn in (0, 3) else len(prompt) - 4)
        assert json.loads(plain["stats"])["cached_tokens"] == 0
        prompt = (*prompt, *ids, 5, 6, 7)


def test_rows_that_cannot_be_kept_are_not_missed(start: Start) -> None:
    cluster = start(2, kept_rows=300)
    cluster.stages[0].broken = True
    prompt = tuple(ids_of(PROMPT)) * 3
    for _ in range(3):
        spec = JobSpec(prompt_ids=prompt, max_new_tokens=16)
        ids, end, error = cluster.run(spec)
        assert (ids, error) == (TARGET.decode(prompt, 16, Sampling()), "")
        assert json.loads(end["stats"])["cached_tokens"] == 0
        prompt = (*prompt, 9)


def test_equal_prompts_at_once_share_their_rows(start: Start) -> None:
    """Only those of one salt; and a cancelled job leaves its prompt's rows."""
    cluster = start(2, kept_rows=600, endless=True, jobs=6)
    prompt = tuple(ids_of(PROMPT)) * 4
    specs = [
        JobSpec(
            prompt_ids=prompt,
            max_new_tokens=16,
            sampling=Sampling(1.0, seed=seed),
            cache_salt="a" if seed < 4 else "b",
        )
        for seed in range(6)
    ]
    jobs = [cluster.submit(spec) for spec in specs]
    ended = [cluster.wait(job) for job in jobs]
    cached = []
    for (ids, end, error), spec in zip(ended, specs, strict=True):
        assert (ids, error) == (cluster.run(replace(spec, reuse=False))[0], "")
        cached.append(json.loads(end["stats"])["cached_tokens"])
    known = len(prompt) - 1
    assert cached == [0, known, known, known, 0, known]
    other = tuple(reversed(prompt))
    long = cluster.submit(JobSpec(prompt_ids=other, max_new_tokens=200))
    assert cluster.control.read_output(long, "0", 5.0)
    cluster.control.submit({CANCEL: long})
    cluster.wait(long)
    _, end, _ = cluster.run(JobSpec(prompt_ids=(*other, 5), max_new_tokens=4))
    assert json.loads(end["stats"])["cached_tokens"] == len(other) - 1


@pytest.mark.parametrize("middles", [(0.8,), (0.7, 0.9)])
def test_a_chain_of_models_gives_the_targets_text(start: Start, middles: tuple[float, ...]) -> None:
    cluster = start(2, middles=middles)
    for strategy in ("pipespec:window=16", "speculative", "flowspec"):
        for sampling in (Sampling(), Sampling(1.0, seed=2)):
            spec = JobSpec(prompt=PROMPT, max_new_tokens=30, strategy=strategy, sampling=sampling)
            ids, end, error = cluster.run(spec)
            assert (ids, error) == (expected(30, sampling), ""), strategy
            assert len(json.loads(end["stats"])["stage_busy"]) == 2


def test_jobs_run_side_by_side_and_in_turn(start: Start) -> None:
    cluster = start(2, jobs=2)
    specs = [JobSpec(prompt=PROMPT + letter, max_new_tokens=30) for letter in "abcde"]
    jobs = [cluster.submit(spec) for spec in specs]
    for job, spec in zip(jobs, specs, strict=True):
        assert cluster.wait(job)[0] == expected(30, prompt=spec.prompt or "")


@pytest.mark.live
@pytest.mark.parametrize("rig", ["redis"], indirect=True)  # the in-memory broker trims nothing
def test_after_a_job_the_streams_are_empty(start: Start, rig: Rig) -> None:
    cluster = start(2)
    cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=30, record=True))
    client = connect(rig.url)
    keys = Keys()
    streams = [keys.log(address) for address in (D0, S1, S2)] + [keys.rows(S2)]
    # Idle reads perform the last trims.
    until(lambda: [client.xlen(stream) for stream in streams] == [0] * 4)
    lives = {key.decode(): client.pttl(key) for key in client.scan_iter("flowspec:*")}
    client.close()
    mortal = [key for key in lives if ":job:" in key or ":out:" in key or ":recording:" in key]
    assert len(mortal) == 3
    assert all(0 < lives[key] <= 3_600_000 for key in mortal)
    assert not [key for key in lives if ":run:" in key]


def test_a_bad_job_is_answered_and_the_next_one_served(start: Start) -> None:
    cluster = start(2)
    for fields, says in (
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x", "strategy": "fastest"}, "unknown strategy 'fastest'"),
        ({"prompt": "x", "max_new_tokens": "many"}, "expected a whole number"),
        ({"nonsense": "1"}, "unknown job field"),
        ({"prompt": "x" * 600}, "the model's context is 512"),
        ({"prompt": "boom"}, "RuntimeError: no tokenizer for this"),
    ):
        _, end, error = cluster.wait(cluster.control.submit(fields))
        assert end["finish_reason"] == "error"
        assert says in error
    assert cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=5))[0] == expected(5)


def test_a_job_there_is_no_memory_for_ends_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(2)
    performer = cluster.workers["verify-2"]._performer
    real = performer.allocate

    def full(output: object) -> None:
        raise MemoryError("no room for 600 rows")

    monkeypatch.setattr(performer, "allocate", full)
    _, end, error = cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=5))
    assert end["finish_reason"] == "error"
    assert error == "s2: MemoryError: no room for 600 rows"
    monkeypatch.setattr(performer, "allocate", real)
    assert cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=5))[0] == expected(5)


def test_cancelling_keeps_what_was_committed_and_frees_the_pipeline(start: Start) -> None:
    cluster = start(2)
    slow = cluster.workers["verify-2"]._performer
    real = slow.compute
    passes = itertools.count()
    ended = threading.Event()

    def held(*arguments: object) -> object:
        """The first passes are computed, and the others once the job has ended."""
        assert next(passes) < 4 or ended.wait(SECONDS)
        return real(*arguments)  # type: ignore[arg-type]

    slow.compute = held  # type: ignore[method-assign, assignment]
    job = cluster.submit(JobSpec(prompt=PROMPT, max_new_tokens=60))
    until(lambda: cluster.control.read_output(job, "0", 0.5))
    cluster.control.submit({"cancel": job})
    ids, end, error = cluster.wait(job)
    ended.set()
    assert (end["finish_reason"], error) == ("cancelled", "")
    assert 0 < len(ids) < 60
    assert ids == expected(60)[: len(ids)]
    slow.compute = real  # type: ignore[method-assign]
    assert cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=5))[0] == expected(5)


@pytest.mark.live
def test_a_job_waits_for_a_lost_worker_and_ends_with_one_line_if_none_comes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_leases(monkeypatch)
    cluster = start(2, incomplete_seconds=1.0)
    cluster.workers["verify-2"]._performer.compute = lambda *_: time.sleep(3)  # type: ignore[method-assign, assignment, return-value]
    job = cluster.submit(JobSpec(prompt=PROMPT, max_new_tokens=60))
    time.sleep(0.3)
    cluster.leases["verify-2"]._stop.set()  # as if its process were gone
    _, end, error = cluster.wait(job)
    assert end["finish_reason"] == "error"
    assert error == (
        "no worker of verify stage 2 for 1 s; start one with `python -m workers.verify --stage 2`"
    )


def test_a_stage_that_comes_back_after_it_was_replaced_does_no_harm(start: Start) -> None:
    """It reads the log of its successor, and has none of the rows."""
    cluster = start(2)
    before = cluster.workers["verify-2"]
    cluster.take_over("verify-2")
    for strategy in ("flowspec", "pipedec", "autoregressive"):
        ids, _, error = cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=30, strategy=strategy))
        assert (ids, error) == (expected(30), "")
    assert before.passes == 0
    assert cluster.workers["verify-2"].passes > 0


def test_a_draft_worker_that_comes_back_after_it_was_replaced_does_no_harm(start: Start) -> None:
    cluster = start(2)
    before = cluster.workers["draft"]
    cluster.take_over("draft")
    ids, _, error = cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=30))
    assert (ids, error) == (expected(30), "")
    assert before.passes == 0


# ---- recordings ----------------------------------------------------------------------------------


def recorded(cluster: ToyCluster, strategy: str) -> list[str]:
    job = cluster.submit(JobSpec(prompt=PROMPT, max_new_tokens=30, strategy=strategy, record=True))
    cluster.wait(job)
    return merge(cluster.control.read_recording(job))


def test_a_recording_replays_exactly(start: Start) -> None:
    cluster = start(3)
    for strategy in (*EXACT, "flowspec:lockstep=on", "specpipe:width=auto"):
        lines = recorded(cluster, strategy)
        result = replay(lines)
        assert result.tokens == expected(30), strategy
        assert result.nodes == ("d0", "s1", "s2", "s3")
        assert result.steps == len(lines) - 1


@pytest.mark.parametrize("strategy", ["pipespec:window=8", "speculative", "specpipe"])
def test_a_chains_recording_replays_exactly(start: Start, strategy: str) -> None:
    """Also if the job did not use the middle model."""
    lines = recorded(start(2, middles=(0.8,)), strategy)
    assert replay(lines).tokens == expected(30)


def test_a_recording_of_one_job_among_others_replays_alone(start: Start) -> None:
    cluster = start(2, jobs=3)
    others = [cluster.submit(JobSpec(prompt=PROMPT + letter, max_new_tokens=40)) for letter in "xy"]
    lines = recorded(cluster, "flowspec")
    for job in others:
        cluster.wait(job)
    assert replay(lines).tokens == expected(30)
    assert all(job not in line for line in lines for job in others)


def test_a_cancelled_jobs_recording_replays_exactly(start: Start) -> None:
    """It ends with the Revoke, which names the epoch after the recorded run's."""
    cluster = start(2)
    job = cluster.submit(JobSpec(prompt=PROMPT, max_new_tokens=900, record=True))
    until(lambda: cluster.control.read_output(job, "0", 0.2))
    cluster.control.submit({CANCEL: job})
    ids, end, _ = cluster.wait(job)
    assert end["finish_reason"] == "cancelled"
    # The workers' last lines follow the job's end.
    recording = cluster.control.read_recording
    until(lambda: sum('"Release"' in line for line in merge(recording(job))) == 3)
    result = replay(merge(recording(job)))
    assert result.nodes == ("d0", "s1", "s2")
    assert result.tokens[: len(ids)] == ids


def test_an_edited_recording_is_found_out(start: Start) -> None:
    lines = recorded(start(1), "flowspec")
    at = next(at for at, line in enumerate(lines) if '"PassDone"' in line and at > len(lines) // 2)
    row = json.loads(lines[at])
    row["in"]["result"]["choices"][0]["tokens"][0] += 1
    with pytest.raises(
        ReplayMismatch, match=r"step \d+ of (s1|d0), output \d+: .* was .* and is now"
    ):
        replay([*lines[:at], line_of(row), *lines[at + 1 :]])
    with pytest.raises(ReplayMismatch, match="is missing; the recording goes on with"):
        replay([*lines[:at], *lines[at + 1 :]])
    with pytest.raises(ReplayMismatch, match="no JSON"):
        replay([*lines[:-1], lines[-1][:40]])
    with pytest.raises(ReplayMismatch, match="not a recording"):
        replay(lines[1:])
    with pytest.raises(ReplayMismatch, match="says nothing"):
        replay([])


# ---- what a network does to messages -------------------------------------------------------------


class Meddling:
    """A link that changes what it reads or writes."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.address = link.address

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)


class Stuttering(Meddling):
    """Every delivery arrives twice, late or in pieces."""

    def read(self, block_seconds: float) -> ReadResult:
        self.__dict__.setdefault("_rng", random.Random(str(self.address)))
        rng: random.Random = self.__dict__["_rng"]
        held: list[object] = self.__dict__.setdefault("_held", [])
        delivery = self._link.read(0.0 if held else block_seconds)
        held += [envelope for envelope in delivery.envelopes for _ in range(rng.choice((1, 1, 2)))]
        count = rng.randint(0, len(held))
        now = held[:count]
        held[:] = held[count:]
        return ReadResult(tuple(now), delivery.refused)  # type: ignore[arg-type]


class Repeating(Meddling):
    """Every write is sent twice, as after a lost reply."""

    def write(self, ops: Sequence[Op]) -> list[Code]:
        self._link.write(ops)
        codes = self._link.write(ops)
        assert all(code in (Code.OK, Code.DUP, Code.STALE) for code in codes), codes
        return [Code.OK if code is Code.STALE else code for code in codes]


@pytest.mark.parametrize("meddler", [Stuttering, Repeating])
def test_duplicates_and_delays_change_nothing(start: Start, meddler: type[Meddling]) -> None:
    cluster = start(2, wrap=meddler, middles=(0.8,))
    for strategy in (*EXACT, "flowspec:lockstep=on"):
        ids, _, error = cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=30, strategy=strategy))
        assert (ids, error) == (expected(30), ""), strategy


class RefusingTheLast(Meddling):
    """The broker has no room for the commit that completes the text."""

    def write(self, ops: Sequence[Op]) -> list[Code]:
        refused = {
            at for at, op in enumerate(ops) if isinstance(op, CommitText) and op.commit.finish
        }
        codes = iter(self._link.write([op for at, op in enumerate(ops) if at not in refused]))
        return [Code.FULL if at in refused else next(codes) for at in range(len(ops))]


def test_a_text_whose_last_tokens_are_refused_is_an_error(start: Start) -> None:
    cluster = start(2, wrap=RefusingTheLast)
    ids, end, error = cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=20))
    assert end["finish_reason"] == "error"
    assert "the broker refused a commit: a stream is at its cap" in error
    assert len(ids) < 20
    assert ids == expected(20)[: len(ids)]


#: Drafted segments may be pruned before their rows are needed.
EVERY_SEGMENT = JobSpec(prompt=PROMPT, max_new_tokens=60, strategy="autoregressive")


class Losing(Meddling):
    """One message of a kind never arrives."""

    def __init__(self, link: Link, kind: type, victim: Address) -> None:
        super().__init__(link)
        self._kind = kind
        self._victim = victim
        self._left = 3

    def read(self, block_seconds: float) -> ReadResult:
        delivery = self._link.read(block_seconds)
        kept = []
        for envelope in delivery.envelopes:
            if isinstance(envelope.message, self._kind) and self.address == self._victim:
                self._left -= 1
                if self._left == 0:
                    continue
            kept.append(envelope)
        return ReadResult(tuple(kept), delivery.refused)


@pytest.mark.parametrize(("kind", "victim"), [(Segment, S1), (Segment, S2), (Answer, D0)])
def test_a_lost_message_ends_in_an_error_never_in_a_hang(
    start: Start, kind: type, victim: Address
) -> None:
    cluster = start(2, wrap=lambda link: Losing(link, kind, victim), stall_seconds=2.0)
    ids, end, error = cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=60, strategy="flowspec"))
    assert end["finish_reason"] == "error"
    assert "was lost" in error
    assert ids == expected(60)[: len(ids)], "the committed text is correct"


class Hanging(Meddling):
    """Writes of stage 2 do not return before ``goes_on``."""

    def __init__(self, link: Link, goes_on: threading.Event) -> None:
        super().__init__(link)
        self._goes_on = goes_on

    def write(self, ops: Sequence[Op]) -> list[Code]:
        if self.address == S2:
            self._goes_on.wait(SECONDS)
        return self._link.write(ops)


def test_a_loop_that_hangs_outside_a_pass_gives_its_role_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.toy_cluster.TERMS", LeaseTerms(renew_seconds=0.05))
    monkeypatch.setattr("flowspec.roles.worker.HUNG_SECONDS", 0.3)
    goes_on = threading.Event()
    cluster = start(2, wrap=lambda link: Hanging(link, goes_on))
    cluster.submit(EVERY_SEGMENT)
    lease = cluster.leases["verify-2"]
    until(lambda: bool(lease.lost))
    assert lease.lost.startswith("the loop of verify-2 has hung for")
    until(lambda: "verify-2" not in cluster.control.claims())  # said first, then given back
    goes_on.set()


def test_the_first_pass_is_bounded_by_what_a_lone_row_took() -> None:
    bounds: list[float] = []

    def computed(*_: object) -> PassDone:
        bounds.append(worker.doing().most)
        return PassDone(())

    machine: Any = SimpleNamespace(serves=())
    link: Any = SimpleNamespace(address=S2)
    performer: Any = SimpleNamespace(compute=computed)
    worker = Worker(machine, link, performer, row_seconds=0.9)
    ids = tuple(range(10))
    part = Part(RunKey("j", 1), 0, ids, (-1, *ids[:-1]), ids, ids, ids)
    for _ in range(2):
        worker._compute(Pass((part,)))
    assert bounds == [90.0, HUNG_SECONDS]


class LosingRows(Meddling):
    """Rows of one segment never arrive."""

    def write(self, ops: Sequence[Op]) -> list[Code]:
        kept = [op for op in ops if not (isinstance(op, PutRows) and op.segment == 4)]
        codes = iter(self._link.write(kept))
        return [
            Code.OK if isinstance(op, PutRows) and op.segment == 4 else next(codes) for op in ops
        ]


def test_lost_rows_end_in_an_error(start: Start) -> None:
    cluster = start(2, wrap=LosingRows)
    _, end, error = cluster.run(EVERY_SEGMENT)
    assert end["finish_reason"] == "error"
    assert "stage 2 could not compute: the rows of segment 4 did not arrive at s2" in error


class Corrupting(Meddling):
    """Rows of one segment arrive in another shape."""

    def write(self, ops: Sequence[Op]) -> list[Code]:
        return self._link.write([self._spoil(op) for op in ops])

    def _spoil(self, op: Op) -> Op:
        if isinstance(op, PutRows) and op.segment == 4:
            return replace(op, rows=op.rows.astype("<f4").reshape(1, -1))
        return op


def test_rows_of_another_type_end_the_job_not_the_worker(start: Start) -> None:
    cluster = start(2, wrap=Corrupting)
    _, end, error = cluster.run(EVERY_SEGMENT)
    assert end["finish_reason"] == "error"
    assert "of float32 arrived; expected" in error
    assert cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=3))[0] == expected(3)


def test_a_message_the_broker_refuses_fails_the_job(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(1)

    class Full(Meddling):
        def write(self, ops: Sequence[Op]) -> list[Code]:
            codes = self._link.write(ops)
            segments = [
                isinstance(op, Send) and isinstance(op.envelope.message, Segment) for op in ops
            ]
            return [
                Code.FULL if segment else code
                for segment, code in zip(segments, codes, strict=True)
            ]

    worker = cluster.workers["draft"]
    monkeypatch.setattr(worker, "_link", Full(worker._link))
    _, end, error = cluster.run(JobSpec(prompt=PROMPT, max_new_tokens=10))
    assert end["finish_reason"] == "error"
    assert "the broker refused a message to s1: a stream is at its cap" in error
