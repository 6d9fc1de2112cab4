"""The same random operations on a ledger and on a broker have the same results."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from flowspec.core.protocol.addresses import DRAFT, GRAPH, Address, worker_addresses
from flowspec.core.protocol.bundles import Bundle
from flowspec.core.protocol.causes import FULL, LOST, REFUSED
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.ledger import Admission, Change, JobState, Ledger
from flowspec.core.protocol.machine import Commit, Complete, Finish, OpenJob, Send
from flowspec.core.protocol.messages import (
    Earlier,
    Envelope,
    Message,
    Prune,
    Segment,
    Submit,
    Synced,
)
from flowspec.core.protocol.stamps import Stamp
from flowspec.core.run.key import RunKey
from flowspec.transport.base import CommitText, Link
from flowspec.transport.control import redis_control
from flowspec.transport.wire.keys import Keys
from tests.clients import ControlAndClient
from tests.marks import examples
from tests.transport import memory_control
from tests.transport.conftest import STAGES, Rig
from tests.transport.memory import MemoryBroker

WORKERS = worker_addresses(STAGES, 1)
STAGES_OF_A_COMMIT = WORKERS[1 : STAGES + 1]
JOBS = 6
MOST_QUEUED = 2

Entry = tuple[Address, int, Message, Stamp | None]


# ---- one broker and one ledger -------------------------------------------------------------------


@dataclass
class Pair:
    """A broker and a ledger; operations apply to both."""

    control: ControlAndClient
    links: dict[Address, Link]
    requeue: Callable[[str], None]
    ledger: Ledger
    jobs: list[str]
    logs: dict[Address, list[Entry]] = field(default_factory=dict)
    outputs: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def running(self, number: int) -> str:
        """A running job; any job, if none runs."""
        jobs = sorted(self.ledger.running) or self.jobs
        return jobs[number % len(jobs)]

    def run(self, job: str, epochs_off: int) -> RunKey:
        """A job's current run, or one ``epochs_off`` from it."""
        entry = self.ledger.jobs.get(job)
        return RunKey(job, max(0, (entry.epoch if entry is not None else 0) + epochs_off))

    def next_seq(self, job: str, sender: Address, to: Address) -> int:
        """The next sequence number of the job's current run."""
        entry = self.ledger.jobs.get(job)
        return (entry.run.seqs.get((sender, to), 0) if entry is not None else 0) + 1

    def note(self, change: Change) -> Code:
        """Record what a change of the ledger delivers."""
        for delivery in change.deliveries:
            envelope = delivery.envelope
            entry = (envelope.sender, envelope.seq, envelope.message, delivery.stamp)
            self.logs.setdefault(delivery.to, []).append(entry)
        return change.code

    def say(self, job: str, **entry: str) -> None:
        """Record an entry of a job's output."""
        self.outputs.setdefault(job, []).append(entry)

    def agree(self, what: object, on_ledger: Code, on_broker: Code) -> Code:
        """Assert that both gave the same answer; return it."""
        note(f"{what}: {on_ledger.name}")
        assert on_broker is on_ledger
        return on_ledger

    # ---- operations ------------------------------------------------------------------------------

    def admit(self, job: str, key: str, error: str, prompt: str = "p") -> None:
        fields = {"prompt": prompt} | ({"idempotency_key": key} if key else {})
        known = job in self.ledger.jobs
        admission = self.ledger.admit(job, fields, MOST_QUEUED, error)
        what = f"admit {job} {fields} {error!r}"
        self.agree(what, admission.code, self.control.admit(job, fields, error))
        if admission.refused and not known:
            self._say_refusal(job, admission)

    def _say_refusal(self, job: str, admission: Admission) -> None:
        cause = FULL if admission.code is Code.FULL else REFUSED
        entry = {"kind": "error", "text": admission.refused, "cause": cause}
        if admission.duplicate_of:
            entry["duplicate_of"] = admission.duplicate_of
        self.say(job, **entry)
        self.say(job, kind="end", finish_reason="error")

    def assign(self, job: str, most_running: int) -> None:
        code = self.note(self.ledger.assign(job, most_running, earlier=self._earlier(job)))
        what = f"assign {job}, at most {most_running}"
        self.agree(what, code, self.control.assign(job, most_running, {}))

    def _earlier(self, job: str) -> Earlier | None:
        """What earlier runs of ``job`` have left, if one was opened."""
        if job not in self.prompts:
            return None
        entries = [one for one in self.outputs.get(job, ()) if one["kind"] == "tokens"]
        return Earlier(self.prompts[job], tuple(tuple(json.loads(one["ids"])) for one in entries))

    def revoke(self, job: str, error: str) -> None:
        reason = "error" if error else "cancelled"
        code = self.note(self.ledger.revoke(job, WORKERS, failed=bool(error)))
        self.agree(f"revoke {job}", code, self.control.revoke(job, reason, error))
        if code is Code.OK:
            self._say_end(job, reason, error, LOST)

    def put_back(self, job: str) -> None:
        """Put a running job back into the queue."""
        if job not in self.ledger.running:
            return
        note(f"put back {job}")
        self.ledger.jobs[job].state = JobState.QUEUED
        self.ledger.queue.append(job)
        self.ledger.running.discard(job)
        self.requeue(job)

    def open(self, run: RunKey, prompt_length: int) -> None:
        accepted = OpenJob(run, tuple(range(prompt_length)), "flowspec")
        code = self.ledger.open(accepted)
        self.agree(accepted, code, *self.links[DRAFT].write([accepted]))
        if code is Code.OK:
            self.prompts[run.job] = accepted.prompt_ids

    def publish(self, writer: Address, send: Send, at: float | None) -> None:
        stamp = stamp_of(at, writer)
        code = self.note(self.ledger.publish(send, stamp))
        self.agree(f"{send} at {at}", code, *self.links[writer].write([send], [stamp]))

    def publish_together(self, writer: Address, bundle: Bundle, at: float | None) -> None:
        stamp = stamp_of(at, writer)
        codes = [self.note(one) for one in self.ledger.publish_together(bundle.sends, stamp)]
        found = self.links[writer].write([bundle], [stamp])
        for send, code, on_broker in zip(bundle.sends, codes, found, strict=True):
            self.agree(f"{send} of a bundle at {at}", code, on_broker)

    def complete(self, writer: Address, complete: Complete, at: float | None) -> None:
        stamp = stamp_of(at, writer)
        code = self.note(self.ledger.complete(complete, stamp))
        what = f"{complete} by {writer} at {at}"
        self.agree(what, code, *self.links[writer].write([complete], [stamp]))

    def commit(self, commit: Commit, at: float | None) -> None:
        stamp = stamp_of(at, DRAFT)
        code = self.note(self.ledger.commit(commit, stamp))
        text = CommitText(commit, "text", (2, 3))
        self.agree(f"{commit} at {at}", code, *self.links[DRAFT].write([text], [stamp]))
        if code is Code.OK:
            entry = {
                "kind": "tokens",
                "offset": str(commit.emitted),
                "ids": json.dumps(commit.tokens),
                "text": "text",
                "sizes": "[2,3]",
            }
            if commit.finish:
                entry["finish_reason"] = commit.finish
            if at is not None:
                entry["at"] = repr(at)
            self.say(commit.run.job, **entry)

    def finish(self, run: RunKey, error: str) -> None:
        finish = Finish(run, "error" if error else "eos", error, {"rows": 3})
        code = self.ledger.finish(run, failed=bool(error))
        self.agree(finish, code, *self.links[DRAFT].write([finish]))
        if code is Code.OK:
            cause = finish.cause
            self._say_end(run.job, finish.reason, error, cause, json.dumps(finish.stats))

    def _say_end(self, job: str, reason: str, error: str, cause: str, stats: str = "") -> None:
        if error:
            self.say(job, kind="error", text=error, cause=cause)
        more = {"stats": stats} if stats else {}
        self.say(job, kind="end", finish_reason=reason, **more)

    # ---- comparing -------------------------------------------------------------------------------

    def assert_equal(self) -> None:
        """Both have the same state and delivered the same messages."""
        assert self.control.queued() == self.ledger.queue
        assert self.control.running() == sorted(self.ledger.running)
        for job in self.jobs:
            assert self._facts(job) == self._expected_facts(job), job
        for job in self.jobs:
            self.revoke(job, "")  # gives an output to read without waiting
        for job in self.ledger.jobs:
            output = [dict(entry.fields) for entry in self.control.read_output(job, "0", 1.0)]
            assert output == self.outputs[job], job
        for address, link in self.links.items():
            expected = self.logs.get(address, [])
            assert by_stream(delivered(link)) == by_stream(expected), str(address)

    def _facts(self, job: str) -> dict[str, str]:
        known = self.control.job(job)
        return {
            name: known[name] for name in ("state", "epoch", "offset", "emitted") if name in known
        }

    def _expected_facts(self, job: str) -> dict[str, str]:
        entry = self.ledger.jobs.get(job)
        if entry is None:
            return {}
        facts = {"state": entry.state.value, "epoch": str(entry.epoch)}
        if entry.offset is not None:
            facts |= {"offset": str(entry.offset), "emitted": str(entry.emitted)}
        return facts


def stamp_of(at: float | None, writer: Address) -> Stamp | None:
    return None if at is None else Stamp(at, writer)


def delivered(link: Link) -> list[Entry]:
    """All entries of a link's log, without the queueing time, which only the broker measures."""
    delivery = link.read(0.0)
    assert delivery.refused == ()
    stamps = delivery.stamps or (None,) * len(delivery.envelopes)
    entries = []
    for envelope, stamp in zip(delivery.envelopes, stamps, strict=True):
        message = envelope.message
        if isinstance(message, Submit):
            assert message.queued_seconds >= 0.0
            earlier = message.earlier and replace(message.earlier, first_token_seconds=0.0)
            message = replace(message, queued_seconds=0.0, earlier=earlier)
        entries.append((envelope.sender, envelope.seq, message, stamp))
    return entries


def by_stream(found: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """What came by the draft worker's submissions, and by its log; each is in order."""
    submitted = [entry for entry in found if isinstance(entry[2], Submit)]
    return submitted, [entry for entry in found if not isinstance(entry[2], Submit)]


# ---- operations at random ------------------------------------------------------------------------

Step = Callable[[Pair], None]

#: Chooses a job by a function.
Choice = Callable[[Pair], str]
JOB: st.SearchStrategy[Choice] = st.one_of(
    *[st.integers(0, 1).map(lambda number: lambda pair: pair.running(number)) for _ in range(7)],
    st.integers(0, JOBS - 1).map(lambda number: lambda pair: pair.jobs[number]),
)
#: Offset of a number from the correct one.
OFF = st.sampled_from((0,) * 20 + (-1, -1, -2, 1))
WORKER = st.sampled_from(WORKERS)
TASK = st.integers(0, 9).map("task/{}".format)
AFTER = st.one_of(*[st.lists(TASK, min_size=1, max_size=3) for _ in range(3)], st.just([]))
COMPLETES = st.one_of(*[st.lists(TASK, min_size=1, max_size=3) for _ in range(2)], st.just([]))
#: Few, so that equal ones occur; some are hard to tell apart or to encode.
SECONDS = st.sampled_from((None, 0.0, 1e-7, 0.1, 0.30000000000000004, 2.0, 10.0, 1e6))
ERROR = st.sampled_from(("", "", "it went wrong"))


@st.composite
def admissions(draw: st.DrawFn) -> Step:
    """Of the first unknown job, or of any."""
    any_job = draw(st.one_of(st.none(), st.none(), JOB))
    key = draw(st.sampled_from(("", "", "", "mine", "yours")))
    error = draw(st.sampled_from(("", "", "", "", "", "no such strategy")))
    prompt = draw(st.sampled_from(("p", "p", "q")))

    def step(pair: Pair) -> None:
        unknown = [job for job in pair.jobs if job not in pair.ledger.jobs]
        new = unknown[0] if unknown else pair.jobs[0]
        pair.admit(new if any_job is None else any_job(pair), key, error, prompt)

    return step


@st.composite
def assignments(draw: st.DrawFn) -> Step:
    """Of the queue's first job, or of any. Most are opened at once."""
    any_job = draw(st.one_of(st.none(), st.none(), JOB))
    most_running = draw(st.sampled_from((0, 1, 2, 2, 2, 3)))
    length = draw(st.integers(0, 4))

    def step(pair: Pair) -> None:
        first = pair.ledger.queue[0] if pair.ledger.queue else pair.jobs[0]
        job = first if any_job is None else any_job(pair)
        pair.assign(job, most_running)
        if length:
            pair.open(pair.run(job, 0), length)

    return step


@st.composite
def arrivals(draw: st.DrawFn) -> Step:
    """Admit a job and assign the first of the queue."""
    admit = draw(admissions())
    assign = draw(assignments())

    def step(pair: Pair) -> None:
        admit(pair)
        assign(pair)

    return step


@st.composite
def openings(draw: st.DrawFn) -> Step:
    job = draw(JOB)
    off = draw(OFF)
    length = draw(st.integers(1, 4))
    return lambda pair: pair.open(pair.run(job(pair), off), length)


@st.composite
def messages(draw: st.DrawFn) -> Step:
    """Delivered at once."""
    job = draw(JOB)
    epochs_off = draw(OFF)
    sender = draw(WORKER)
    to = draw(WORKER)
    off = draw(OFF)
    completes = tuple(draw(COMPLETES))
    at = draw(SECONDS)
    text = draw(st.sampled_from(("one", "other")))

    def step(pair: Pair) -> None:
        run = pair.run(job(pair), epochs_off)
        seq = max(0, pair.next_seq(run.job, sender, to) + off)
        envelope = Envelope(sender, seq, Synced(run, text))
        pair.publish(sender, Send(to, envelope, completes=completes), at)

    return step


@st.composite
def bundles(draw: st.DrawFn) -> Step:
    """Messages of several runs as one entry."""
    numbers = draw(st.lists(st.integers(0, JOBS - 1), min_size=2, max_size=4, unique=True))
    offs = draw(st.lists(st.tuples(OFF, OFF), min_size=len(numbers), max_size=len(numbers)))
    sender = draw(WORKER)
    to = draw(WORKER)
    at = draw(SECONDS)

    def step(pair: Pair) -> None:
        running = sorted(pair.ledger.running)
        jobs = dict.fromkeys([*running, *(pair.jobs[number] for number in numbers)])
        sends = []
        for job, (epochs_off, off) in zip(jobs, offs, strict=False):
            run = pair.run(job, epochs_off)
            seq = max(0, pair.next_seq(job, sender, to) + off)
            segment = Segment(run, seq, 0, (), (), ())
            sends.append(Send(to, Envelope(sender, seq, segment)))
        pair.publish_together(sender, Bundle(tuple(sends)), at)

    return step


@st.composite
def tasks(draw: st.DrawFn) -> Step:
    """Delivered by the graph."""
    job = draw(JOB)
    epochs_off = draw(OFF)
    writer = draw(WORKER)
    to = draw(WORKER)
    name = draw(TASK)
    after = tuple(draw(AFTER))
    completes = tuple(draw(COMPLETES))
    at = draw(SECONDS)

    def step(pair: Pair) -> None:
        run = pair.run(job(pair), epochs_off)
        envelope = Envelope(GRAPH, 0, Synced(run, name))
        send = Send(to, envelope, task=name, after=after, completes=completes)
        pair.publish(writer, send, at)

    return step


@st.composite
def completions(draw: st.DrawFn) -> Step:
    job = draw(JOB)
    off = draw(OFF)
    writer = draw(WORKER)
    names = draw(st.lists(TASK, min_size=1, max_size=3).map(tuple))
    at = draw(SECONDS)

    def step(pair: Pair) -> None:
        run = pair.run(job(pair), off)
        pair.complete(writer, Complete(run, names), at)

    return step


@st.composite
def commits(draw: st.DrawFn) -> Step:
    job = draw(JOB)
    epochs_off = draw(OFF)
    offset_off = draw(OFF)
    seqs_off = draw(st.tuples(*(OFF for _ in STAGES_OF_A_COMMIT)))
    advance = draw(st.integers(0, 3))
    tokens = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
    finish = draw(st.sampled_from(("", "", "length")))
    completes = tuple(draw(COMPLETES))
    at = draw(SECONDS)

    def step(pair: Pair) -> None:
        run = pair.run(job(pair), epochs_off)
        entry = pair.ledger.jobs.get(run.job)
        stored = entry.offset if entry is not None and entry.offset is not None else 0
        offset = max(0, stored + offset_off)
        emitted = entry.emitted if entry is not None else 0
        prune = Prune(run, offset, tuple(range(advance)), advance, (offset,))
        prunes = []
        for to, off in zip(STAGES_OF_A_COMMIT, seqs_off, strict=True):
            seq = max(0, pair.next_seq(run.job, DRAFT, to) + off)
            prunes.append(Envelope(DRAFT, seq, prune))
        commit = Commit(
            run,
            offset,
            emitted,
            advance,
            tokens,
            finish,
            STAGES_OF_A_COMMIT,
            tuple(prunes),
            completes,
        )
        pair.commit(commit, at)

    return step


@st.composite
def ends(draw: st.DrawFn) -> Step:
    job = draw(JOB)
    off = draw(OFF)
    error = draw(ERROR)
    return lambda pair: pair.finish(pair.run(job(pair), off), error)


@st.composite
def revocations(draw: st.DrawFn) -> Step:
    job = draw(JOB)
    error = draw(ERROR)
    return lambda pair: pair.revoke(job(pair), error)


@st.composite
def requeues(draw: st.DrawFn) -> Step:
    job = draw(JOB)
    return lambda pair: pair.put_back(job(pair))


STEPS = (
    *(admissions() for _ in range(2)),
    *(assignments() for _ in range(2)),
    *(arrivals() for _ in range(3)),
    openings(),
    *(messages() for _ in range(9)),
    *(bundles() for _ in range(5)),
    *(tasks() for _ in range(9)),
    *(completions() for _ in range(4)),
    *(commits() for _ in range(8)),
    ends(),
    revocations(),
    requeues(),
)
#: Two running jobs: without them most operations change nothing.
START: tuple[Step, ...] = (
    lambda pair: pair.admit(pair.jobs[0], "mine", ""),
    lambda pair: pair.admit(pair.jobs[1], "", ""),
    lambda pair: pair.assign(pair.jobs[0], 2),
    lambda pair: pair.assign(pair.jobs[1], 2),
    lambda pair: pair.open(RunKey(pair.jobs[0], 1), 2),
    lambda pair: pair.open(RunKey(pair.jobs[1], 1), 3),
)


def pair_of(rig: Rig, keys: Keys, cap: int, patch: pytest.MonkeyPatch) -> Pair:
    """A new broker of ``rig``'s kind with a ledger. ``cap``: of every log and output."""
    for module in (memory_control, redis_control):
        patch.setattr(module, "QUEUE_CAP", MOST_QUEUED)
    patch.setattr("flowspec.transport.link.commands.LOG_CAP", cap)
    rig.middles = 1
    rig.keys = keys
    if rig.memory is not None:
        rig.memory = MemoryBroker(log_cap=cap)
    control = rig.control()
    links = {address: rig.link(address) for address in WORKERS}
    jobs = [control.submit({"prompt": "p"}) for _ in range(JOBS)]
    return Pair(control, links, rig.requeue, Ledger(cap), jobs)


_PIPELINES = itertools.count()


@pytest.mark.parametrize("rig", ["memory", "redis"], indirect=True)
@given(
    cap=st.sampled_from((2, 3, 6, 50_000, 50_000)),
    started=st.sampled_from((True,) * 7 + (False,)),
    steps=st.integers(0, 60).flatmap(
        lambda count: st.lists(st.one_of(STEPS), min_size=count, max_size=count)
    ),
)
@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_operations(rig: Rig, cap: int, started: bool, steps: list[Step]) -> None:
    keys = Keys(f"random-{next(_PIPELINES)}")
    with pytest.MonkeyPatch.context() as patch:
        pair = pair_of(rig, keys, cap, patch)
        try:
            for step in (*(START if started else ()), *steps):
                step(pair)
            pair.assert_equal()
        finally:
            rig.close()
