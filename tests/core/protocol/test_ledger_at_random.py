"""Random changes to a ledger against a naive account of what it must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowspec.core.protocol.addresses import GRAPH, SCHEDULER, Address
from flowspec.core.protocol.codes import Code
from flowspec.core.protocol.ledger import Admission, Change, Delivery, Ledger
from flowspec.core.protocol.machine import Complete, OpenJob
from flowspec.core.protocol.messages import Envelope, Revoke, Submit, Synced
from flowspec.core.run.key import RunKey
from tests.addresses import D0, S1, S2
from tests.core.protocol.ledgers import (
    WORKERS,
    accepted,
    commit,
    held,
    picture,
    put_back,
    send,
)
from tests.marks import examples


@dataclass
class Account:
    """A job's state in the simplest form."""

    state: str
    epoch: int = 0
    offset: int | None = None
    emitted: int = 0
    entries: int = 0
    seqs: dict[tuple[Address, Address], int] = field(default_factory=dict)
    logs: Counter[Address] = field(default_factory=Counter)  # entries of its run
    trimmed: Counter[Address] = field(default_factory=Counter)
    tasks: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name -> its dependencies
    done: set[str] = field(default_factory=set)
    released: dict[str, Address] = field(default_factory=dict)  # in order

    def begin(self) -> None:
        self.state = "running"
        self.epoch += 1
        self.forget_run()

    def forget_run(self) -> None:
        self.seqs = {}
        self.logs = Counter()
        self.trimmed = Counter()
        self.tasks = {}
        self.done = set()
        self.released = {}


JOBS = ["1-0", "2-0", "3-0", "4-0", "5-0"]
TASKS = ["t1", "t2", "t3", "t4"]
LOGS = (D0, S1, S2)
SOME_TASKS = st.lists(st.sampled_from(TASKS), max_size=2, unique=True)


class LedgerAgainstAccounts(RuleBasedStateMachine):
    """Random changes of any run: codes, deliveries and state follow the docstrings."""

    CAP = 3

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.CAP)
        self.accounts: dict[str, Account] = {}
        self.queue: list[str] = []
        self.running: set[str] = set()
        self.keys: dict[str, str] = {}
        self.before: object = None
        # Receivers of every held task of every run.
        self.receivers: dict[tuple[RunKey, str], Address] = {}

    # Draws.

    @initialize(opened=st.sets(st.sampled_from(JOBS[:3])), again=st.sets(st.sampled_from(JOBS[:3])))
    def begin(self, opened: set[str], again: set[str]) -> None:
        """Run three jobs, some of them for the second time; open some."""
        for job in JOBS[:3]:
            self.admit(job, "", 9, "")
            self.assign(job, 9)
            if job in opened:
                self.accounts[job].offset = 2
                assert self.ledger.open(accepted(RunKey(job, 1))) is Code.OK
            if job in again:
                self.put_back(job)
                self.assign(job, 9)

    def draw_run(self, data: st.DataObject, stale: int = 1) -> RunKey:
        """Mostly a run that owns its job; ``stale``: in nine of ten cases another one."""
        other = data.draw(st.integers(0, 8)) < stale
        if self.running and not other:
            job = data.draw(st.sampled_from(sorted(self.running)))
            return RunKey(job, self.accounts[job].epoch)
        job = data.draw(st.sampled_from(JOBS))
        epoch = self.accounts[job].epoch if job in self.accounts else 1
        return RunKey(job, max(0, epoch + data.draw(st.sampled_from([0, -1, 1]))))

    def owned(self, run: RunKey) -> Account | None:
        account = self.accounts.get(run.job)
        owns = account and account.state == "running" and account.epoch == run.epoch
        return account if owns else None

    def watch(self) -> None:
        self.before = picture(self.ledger)

    def unchanged(self) -> None:
        assert picture(self.ledger) == self.before

    def note(self, deliveries: Sequence[Delivery], *expected: tuple[Address, Envelope]) -> None:
        """Assert that ``expected`` was delivered, and nothing else."""
        assert [(one.to, one.envelope) for one in deliveries] == list(expected)
        for one in deliveries:
            if one.envelope.sender != SCHEDULER:
                self.accounts[one.envelope.message.run.job].logs[one.to] += 1

    def full(self, account: Account, log: Address) -> bool:
        return account.logs[log] - account.trimmed[log] >= self.CAP

    # Jobs.

    @rule(
        job=st.sampled_from(JOBS),
        key=st.sampled_from(["", "k"]),
        most=st.sampled_from([9, 9, 2, 1, 0]),
        refused=st.sampled_from(["", "", "", "why"]),
    )
    def admit(self, job: str, key: str, most: int, refused: str) -> None:
        fields = {"idempotency_key": key} if key else {}
        self.watch()
        admission = self.ledger.admit(job, fields, most, refused)
        if job in self.accounts:
            assert admission == Admission(Code.DUP)
            self.unchanged()
            return
        other = self.keys.get(key, "")
        if refused:
            assert admission == Admission(Code.OK, "why")
        elif other:
            assert (admission.code, admission.duplicate_of) == (Code.DUP, other)
        elif len(self.queue) >= most:
            assert admission.code is Code.FULL
        else:
            assert admission == Admission(Code.OK)
            self.accounts[job] = Account("queued")
            self.queue.append(job)
            if key:
                self.keys[key] = job
            return
        assert admission.refused
        self.accounts[job] = Account("done")

    @rule(data=st.data(), most=st.sampled_from([9, 9, 9, 2, 1]))
    def assign_some(self, data: st.DataObject, most: int) -> None:
        first = data.draw(st.booleans()) and self.queue
        self.assign(self.queue[0] if first else data.draw(st.sampled_from(JOBS)), most)

    def assign(self, job: str, most: int) -> None:
        self.watch()
        change = self.ledger.assign(job, most)
        if job not in self.queue:
            assert change == Change(Code.GAP)
            self.unchanged()
        elif len(self.running) >= most:
            assert change == Change(Code.FULL)
            self.unchanged()
        else:
            self.queue.remove(job)
            account = self.accounts[job]
            account.begin()
            self.running.add(job)
            fields = self.ledger.jobs[job].fields
            submit = Submit(RunKey(job, account.epoch), fields)
            assert change.code is Code.OK
            self.note(change.deliveries, (D0, Envelope(SCHEDULER, 1, submit)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def put_one_back(self, data: st.DataObject) -> None:
        self.put_back(data.draw(st.sampled_from(sorted(self.running))))

    def put_back(self, job: str) -> None:
        """Queue a running job again, which no change of the ledger does."""
        self.accounts[job].state = "queued"
        self.queue.append(job)
        self.running.discard(job)
        put_back(self.ledger, job)
        self.ledger.running.discard(job)

    @rule(data=st.data(), failed=st.booleans())
    def finish(self, data: st.DataObject, failed: bool) -> None:
        run = self.draw_run(data, stale=6)
        account = self.owned(run)
        self.watch()
        code = self.ledger.finish(run, failed=failed)
        assert code is (Code.OK if account else Code.STALE)
        if account is None:
            self.unchanged()
        else:
            self.end(run.job, account, failed)

    @rule(job=st.sampled_from([*JOBS, *("9-0",) * 9]), failed=st.booleans())
    def revoke(self, job: str, failed: bool) -> None:
        account = self.accounts.get(job)
        self.watch()
        change = self.ledger.revoke(job, WORKERS, failed=failed)
        if account is None or account.state == "done":
            assert change == Change(Code.DUP)
            self.unchanged()
            return
        assert change.code is Code.OK
        account.epoch += 1
        envelope = Envelope(SCHEDULER, 0, Revoke(RunKey(job, account.epoch)))
        told = [(to, envelope) for to in WORKERS] if account.state == "running" else []
        self.note(change.deliveries, *told)
        self.end(job, account, failed)

    def end(self, job: str, account: Account, failed: bool) -> None:
        if failed:
            self.keys = {key: other for key, other in self.keys.items() if other != job}
        account.state = "done"
        account.forget_run()
        self.running.discard(job)
        self.queue = [other for other in self.queue if other != job]

    # Runs.

    @rule(data=st.data(), length=st.integers(1, 3))
    def open(self, data: st.DataObject, length: int) -> None:
        run = self.draw_run(data)
        account = self.owned(run)
        self.watch()
        code = self.ledger.open(OpenJob(run, (5,) * length, ""))
        if account is None or account.offset is not None:
            assert code is (Code.STALE if account is None else Code.DUP)
            self.unchanged()
        else:
            assert code is Code.OK
            account.offset = length - 1

    @rule(
        data=st.data(),
        sender=st.sampled_from((D0, S1)),
        to=st.sampled_from(LOGS),
        ahead=st.sampled_from([0, 1, 1, 1, 2]),
        completes=SOME_TASKS,
    )
    def publish(
        self, data: st.DataObject, sender: Address, to: Address, ahead: int, completes: list[str]
    ) -> None:
        run = self.draw_run(data)
        account = self.owned(run)
        last = account.seqs.get((sender, to), 0) if account else 0
        message = send(run, last + ahead, sender, to, completes)
        self.watch()
        change = self.ledger.publish(message)
        if account is None:
            assert change == Change(Code.STALE)
            self.unchanged()
        elif ahead == 0:
            assert change.code is Code.DUP
            self.note(change.deliveries, *self.completed(run, account, completes))
        elif self.full(account, to):
            assert change == Change(Code.FULL)
            self.unchanged()
        else:
            assert change.code is Code.OK
            account.seqs[sender, to] = last + ahead
            freed = self.completed(run, account, completes)
            self.note(change.deliveries, (to, message.envelope), *freed)

    @rule(
        data=st.data(),
        task=st.sampled_from(TASKS),
        to=st.sampled_from(LOGS),
        after=SOME_TASKS,
        completes=SOME_TASKS,
    )
    def publish_task(
        self,
        data: st.DataObject,
        task: str,
        to: Address,
        after: list[str],
        completes: list[str],
    ) -> None:
        run = self.draw_run(data)
        account = self.owned(run)
        self.watch()
        change = self.ledger.publish(held(run, task, *after, to=to, completes=completes))
        if account is None:
            assert change == Change(Code.STALE)
            self.unchanged()
        elif task in account.tasks:
            assert change.code is Code.DUP
            self.note(change.deliveries, *self.completed(run, account, completes))
        elif self.full(account, to):
            assert change == Change(Code.FULL)
            self.unchanged()
        else:
            assert change.code is Code.OK
            account.tasks[task] = tuple(after)
            self.receivers[run, task] = to
            freed = self.completed(run, account, ())
            freed += self.completed(run, account, completes)
            self.note(change.deliveries, *freed)

    @rule(data=st.data(), completes=SOME_TASKS)
    def complete(self, data: st.DataObject, completes: list[str]) -> None:
        run = self.draw_run(data)
        account = self.owned(run)
        self.watch()
        change = self.ledger.complete(Complete(run, tuple(completes)))
        if account is None:
            assert change == Change(Code.STALE)
            self.unchanged()
        else:
            assert change.code is Code.OK
            self.note(change.deliveries, *self.completed(run, account, completes))

    @rule(
        data=st.data(),
        off=st.sampled_from([0, 0, 0, 0, 0, -1, 1]),
        late=st.sampled_from([0, 0, 0, 0, -1, 1]),
        tokens=st.integers(0, 2),
        completes=SOME_TASKS,
    )
    def commit(
        self, data: st.DataObject, off: int, late: int, tokens: int, completes: list[str]
    ) -> None:
        run = self.draw_run(data)
        account = self.owned(run)
        offset = (account.offset if account and account.offset is not None else 0) + off
        emitted = account.emitted if account else 0
        counts = account.seqs if account else {}
        seqs = [counts.get((D0, S1), 0) + 1, counts.get((D0, S2), 0) + 1 + late]
        step = commit(
            run,
            offset,
            *seqs,
            emitted=emitted,
            advance=tokens,
            tokens=(9,) * tokens,
            completes=completes,
        )
        self.watch()
        change = self.ledger.commit(step)
        if account is None:
            expected = Code.STALE
        elif account.offset is None or off > 0:
            expected = Code.GAP
        elif off < 0:
            expected = Code.DUP
        elif self.full(account, S1):
            expected = Code.FULL
        elif late < 0:
            expected = Code.GAP
        elif self.full(account, S2) or account.entries >= self.CAP:
            expected = Code.FULL
        else:
            expected = Code.OK
        assert change.code is expected
        if account is None or account.offset is None or expected is not Code.OK:
            assert change.deliveries == ()
            self.unchanged()
            return
        account.seqs |= {(D0, S1): seqs[0], (D0, S2): seqs[1]}
        account.offset += tokens
        account.emitted += tokens
        account.entries += 1
        pruned = zip((S1, S2), step.prunes, strict=True)
        self.note(change.deliveries, *pruned, *self.completed(run, account, completes))

    @rule(data=st.data(), log=st.sampled_from(LOGS))
    def trim(self, data: st.DataObject, log: Address) -> None:
        run = self.draw_run(data)
        account = self.owned(run)
        read = data.draw(st.integers(account.trimmed[log], account.logs[log])) if account else 1
        self.watch()
        self.ledger.trim(log, {run: read})
        if account is None:
            self.unchanged()
        else:
            account.trimmed[log] = read

    # What follows.

    def completed(
        self, run: RunKey, account: Account, tasks: Sequence[str]
    ) -> list[tuple[Address, Envelope]]:
        """The messages released when ``tasks`` complete one after another."""
        freed = []
        for task in [None, *tasks]:
            if task is not None:
                account.done.add(task)
            for name, after in account.tasks.items():
                if name in account.released or not set(after) <= account.done:
                    continue
                to = self.receivers[run, name]
                account.released[name] = to
                seq = list(account.released.values()).count(to)
                freed.append((to, Envelope(GRAPH, seq, Synced(run, name))))
        return freed

    @invariant()
    def agrees(self) -> None:
        ledger = self.ledger
        assert ledger.queue == self.queue
        assert ledger.running == self.running
        assert set(ledger.jobs) == set(self.accounts)
        for job, account in self.accounts.items():
            entry = ledger.jobs[job]
            assert (entry.state.value, entry.epoch) == (account.state, account.epoch)
            assert (entry.offset, entry.emitted) == (account.offset, account.emitted)
            assert entry.entries == account.entries
            if account.state != "queued":
                waiting = set(account.tasks) - set(account.released)
                assert set(entry.graph.waiting) == waiting


TestLedgerAgainstAccounts = LedgerAgainstAccounts.TestCase
TestLedgerAgainstAccounts.settings = settings(
    max_examples=examples(200), stateful_step_count=40, deadline=None
)
