"""A whole pipeline of real workers in threads, on the toy model, over either broker."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar
from unittest.mock import Mock

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, middle_address, stage_address
from flowspec.core.protocol.holders import Holder
from flowspec.core.protocol.lease import TERMS
from flowspec.core.protocol.machine import Machine
from flowspec.core.protocol.work import Kept
from flowspec.core.run.key import RunKey
from flowspec.core.run.logprobs import TokenWritten
from flowspec.core.run.spec import JobSpec
from flowspec.core.run.turns import Turn
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.errors import JobError, LeaseLost
from flowspec.rehearse.replay import header
from flowspec.roles.lease import Lease
from flowspec.roles.performers import DraftPerformer, VerifyPerformer
from flowspec.roles.scheduler import Scheduler
from flowspec.roles.worker import Performer, Worker
from flowspec.strategies import build
from flowspec.transport.base import CHAT_TEMPLATE, CONTEXT, Link, role_of, setup_of
from tests.clients import ControlAndClient
from tests.toy import TARGET, limits
from tests.toy_model import ToyDrafter, ToyMiddle, ToyStage
from tests.waiting import until

M = TypeVar("M", bound=Machine)


class Characters:
    """Text and ids for the toy model: id 2 is 'a'."""

    def encode(self, prompt: str, *, raw: bool) -> tuple[int, ...]:
        if prompt == "boom":
            raise RuntimeError("no tokenizer for this")
        return tuple(
            2 + (ord(character) - ord("a")) % (TARGET.vocabulary - 2) for character in prompt
        )

    def encode_turns(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        if turns[0].role == "assistant":
            raise JobError("the model's chat template refuses the messages: it begins")
        return self.encode("".join(f"{turn.role}:{turn.content};" for turn in turns), raw=True)

    def stream(self, prompt: Sequence[int] = ()) -> Characters:
        self.length = 0
        return self

    def push(self, ids: tuple[int, ...], *, last: bool = False) -> str:
        self.length += len(ids)
        return "".join(chr(ord("a") + token - 2) if token >= 2 else "." for token in ids)

    def token(self, token: int) -> TokenWritten:
        return TokenWritten((chr(ord("a") + token - 2) if token >= 2 else ".").encode())


class KeepingStage(ToyStage):
    """A toy stage whose kept rows may get lost; ``broken``: it cannot keep any."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(TARGET, stage, stages)
        self.machine: StageMachine | None = None
        self.broken = False
        self.keep = self._keep  # type: ignore[method-assign,assignment]

    def _keep(self, run: RunKey, caches: Sequence[Kept]) -> None:
        if self.broken:
            raise MemoryError("no room")
        self.layers.keep(run, caches)

    def evict_all(self) -> None:
        """Lose all kept rows; nothing may run."""
        assert self.machine is not None
        self.machine._kept.clear()
        for run in self.layers.kept:
            self.layers.evict(run)


class ToyCluster:
    """``control()`` and ``link(address, holder)`` come from the broker under test."""

    def __init__(
        self,
        control: Callable[[], ControlAndClient],
        link: Callable[[Address, Holder], Link],
        stages: int,
        *,
        jobs: int = 1,
        hit_rate: float = 0.8,
        stall_seconds: float = 120.0,
        wrap: Callable[[Link], Link] = lambda link: link,
        middles: Sequence[float] = (),
        endless: bool = False,
        template: bool = True,
        kept_rows: int = 0,
        incomplete_seconds: float = 60.0,
    ) -> None:
        """``endless``: no token ends a text, so that jobs end by length alone.

        ``template``: what the draft worker says of its chat template.
        """
        self._draft_facts = {CONTEXT: TARGET.context, CHAT_TEMPLATE: template}
        self.control = control()
        self._new_control = control
        self._link = link
        self._wrap = wrap
        self.control.set_pipeline(
            {"stages": str(stages), "middles": json.dumps(["toy"] * len(middles))}
        )
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.workers: dict[str, Worker] = {}
        self.leases: dict[str, Lease] = {}
        self.failures: list[BaseException] = []
        self._again: dict[str, Callable[[], object]] = {}
        eos = frozenset[int]() if endless else None
        bounds = replace(
            limits(stages, middles=len(middles), eos=eos),
            stall_seconds=stall_seconds,
            kept_rows=kept_rows,
        )
        role = DraftPerformer(ToyDrafter(TARGET, hit_rate), Characters())
        self._add(DRAFT, partial(DraftMachine, bounds, build), role, header(bounds))
        self.stages = [KeepingStage(stage, stages) for stage in range(1, stages + 1)]
        for number, stage in enumerate(self.stages, 1):
            executor = VerifyPerformer(stage, (), ("<u8",))
            make = partial(StageMachine, number, stages)
            stage.machine = self._add(stage_address(number), make, executor)
        for model, agreement in enumerate(middles, 1):
            executor = VerifyPerformer(ToyMiddle(TARGET, agreement), (), ("<u8",))
            make = partial(StageMachine, 1, stages, middle=model)
            self._add(middle_address(model), make, executor)
        self.scheduler = Scheduler(
            control(),
            stages,
            most_running=jobs,
            late_seconds=0.5,
            incomplete_seconds=incomplete_seconds,
        )
        self._start("scheduler", lambda: self.scheduler.run(self._stopped.is_set))

    def take_over(self, role: str) -> None:
        """Give ``role`` to another worker; the one before reads on, as if it knew nothing of it."""
        before = self.leases[role]
        before._stop.set()
        before._thread.join()
        before._control.release(role, before.token)
        before.check = lambda: None  # type: ignore[method-assign]
        self.workers[role]._performer = Mock(Performer)  # its rows are its own process'
        self._again[role]()

    def kill(self, role: str) -> None:
        """End the worker of ``role`` as if its process were killed, and free its role."""
        lease = self.leases[role]
        lease._stop.set()
        lease._thread.join()
        lease.lost = "killed"
        self.workers[role]._performer = Mock(Performer)
        lease._control.release(role, lease.token)

    def start_again(self, role: str) -> None:
        """Start a worker of ``role`` anew."""
        self._again[role]()

    def _add(
        self, address: Address, make: Callable[..., M], performer: Performer, head: str = ""
    ) -> M:
        """Serve ``address`` with a machine that ``make`` gives for a generation; the machine."""
        role = role_of(address)
        self._again[role] = partial(self._add, address, make, performer, head)
        setup = setup_of(self.control.pipeline())
        facts = {"state": "loading", "setup": setup}
        facts |= self._draft_facts if role == "draft" else {}
        lease = self.leases[role] = Lease(self._new_control(), role, lambda: facts, terms=TERMS)
        lease.take()
        machine = make(generation=lease.holder.generation)
        link = self._wrap(self._link(address, lease.holder))
        facts["state"] = "ready"  # what is sent from now on is read
        self.control.claim(role, lease.token, facts, TERMS.shortest_ms)
        worker = self.workers[role] = Worker(
            machine, link, performer, header=head, check_lease=lambda: lease.check()
        )
        lease.doing = worker.doing
        performer.drop()  # of the worker before, whose process is gone
        self._start(role, lambda: worker.run(lambda: self._stopped.is_set() or bool(lease.lost)))
        return machine

    def _start(self, name: str, body: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                body()
            except LeaseLost:
                return  # a test has taken the role away
            except BaseException as error:  # noqa: BLE001 - shown by the test's thread
                self.failures.append(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def submit(self, spec: JobSpec) -> str:
        return self.control.submit(spec.fields())

    def wait(self, job: str) -> tuple[tuple[int, ...], dict[str, str], str]:
        """Wait for a job's end; its token ids, last output entry and error."""
        ids: list[int] = []
        error = ""
        cursor = "0"
        end: dict[str, str] = {}

        def has_ended() -> bool:
            nonlocal error, cursor, end
            assert not self.failures, self.failures
            for entry in self.control.read_output(job, cursor, 0.2):
                cursor = entry.cursor
                if entry.fields["kind"] == "tokens":
                    assert int(entry.fields["offset"]) == len(ids)
                    ids.extend(json.loads(entry.fields["ids"]))
                elif entry.fields["kind"] == "error":
                    error = entry.fields["text"]
                else:
                    end = dict(entry.fields)
            return bool(end)

        until(has_ended, pause=0.0)
        return tuple(ids), end, error

    def run(self, spec: JobSpec) -> tuple[tuple[int, ...], dict[str, str], str]:
        return self.wait(self.submit(spec))

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(5)
        for lease in self.leases.values():
            lease.release()
        assert not self.failures, self.failures


def ids_of(text: str) -> Sequence[int]:
    return Characters().encode(text, raw=True)
