"""A pipeline of real worker processes on this machine, under one parent.

Each worker is ``python -m workers...``, forked where that is safe (``start.forks``). It has a
session of its own, so that Ctrl-C reaches only the parent, and is killed when the parent exits,
whatever the reason. Its stderr is kept and shown if it fails. One that stops is started again
(``restarts``), and so is one that has lost its role and does not end: nothing in it runs any more.
The jobs that it had go on behind what they have committed.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.core.run.limits import CONTIGUOUS, TREE_ROWS
from flowspec.errors import BrokerError, ClusterError, ConfigError, FlowSpecError
from flowspec.model.drafters.sources import open_models
from flowspec.model.weights.directory import layer_ranges, local_path
from flowspec.model.weights.precision import AUTO, check_built_for, check_device, check_dtype
from flowspec.model.weights.same_tokenizer import check_pieces
from flowspec.observe import NOTE
from flowspec.plan.cluster_file import check_ranges, ranges_text
from flowspec.plan.fit import gib
from flowspec.rehearse.devices.setup import Emulation
from flowspec.restarts import Restarts
from flowspec.start.forks import StartedProcess, spawn, start
from flowspec.transport.base import FREE, NEEDS, Claim
from flowspec.transport.connections.server import PrivateBroker
from flowspec.transport.control.redis_control import RedisControl
from flowspec.transport.ways import AUTO as AUTO_ROWS
from flowspec.transport.wire.keys import Keys

#: How long all workers together may take to be ready, seconds.
READY_SECONDS = 300.0
_STOP_SECONDS = 5.0
#: The name of the private broker among the processes.
BROKER = "broker"
#: Interval between two looks at the processes, seconds.
_WATCH_SECONDS = 0.1
#: Interval between two looks at the workers' roles, seconds, and at how many of them in a row a
#: process may lack the role that it had; more if another worker has it, for which a sound one waits
#: before it ends. A worker that can tell says itself that it hangs.
_ROLES_SECONDS = 5.0
_HUNG_LOOKS = 6
_REPLACED_LOOKS = 36
#: Bytes of the stages on one device that take a while to load.
_MUCH = 1 << 30

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Places:
    """Precision and device of the target and the middle models, and those of the drafters.

    Names as in ``model.weights.precision``; ConfigError for any other. Those of the target may be
    several by spaces, one for each stage. A worker's own flags have precedence.
    """

    dtype: str = AUTO
    device: str = AUTO
    draft_dtype: str = AUTO
    draft_device: str = AUTO

    def __post_init__(self) -> None:
        for dtype in (*self.dtype.split(), self.draft_dtype):
            check_dtype(dtype)
        for device in (*self.device.split(), self.draft_device):
            check_device(device)

    @property
    def arguments(self) -> list[str]:
        """The scheduler's arguments for these places."""
        return [
            *("--dtype", self.dtype, "--device", self.device),
            *("--draft-dtype", self.draft_dtype, "--draft-device", self.draft_device),
        ]


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of a pipeline; models are folders or hub names.

    ``draft``: see ``model.drafters.sources``. ``stages``: number of verify stages. ``middles``:
    models of a chain between drafter and target, smaller ones first. ``emulated``: devices and
    links to emulate; None: none. ``places``: what the models run on. ``layers``: the target's
    layers by stage; None: near-equal blocks. ``context``: most tokens of a job's prompt and output;
    None: as many as the target takes. ``rows``: how rows travel, one of ``transport.ways.ROWS``.
    ``jobs``: how many run at once. ``persist``: folder where a private broker keeps jobs and
    outputs; None: it keeps nothing. ``keep_rows``: most rows that are kept for jobs that begin
    alike; None: as many as the context suggests (``limits.default_kept_rows``). ``most_rows``: KV
    rows of all running jobs at a stage; a job that would need more waits; 0: as many as ``jobs`` of
    them can need. ``kv``: how stages store KV rows, one of ``limits.STORES``.
    """

    target: str
    draft: str
    stages: int
    middles: tuple[str, ...] = ()
    emulated: Emulation | None = None
    places: Places = Places()
    layers: tuple[range, ...] | None = None
    context: int | None = None
    rows: str = AUTO_ROWS
    jobs: int = 1
    keep_rows: int | None = None
    most_rows: int = 0
    kv: str = CONTIGUOUS
    persist: Path | None = None

    def check(self) -> None:
        """ConfigError for anything that would make a worker fail, before one is started."""
        if 0 < self.most_rows <= TREE_ROWS:
            raise ConfigError(
                f"--most-rows is {self.most_rows}; expected 0 (no limit), or more than the "
                f"{TREE_ROWS} that every job needs for its tree, by those of its text"
            )
        for device in (*self.places.device.split(), self.places.draft_device):
            check_built_for(device)
        target, middles = open_models(self.target, self.draft, self.middles)
        check_pieces(target.path)
        if self.layers is None:
            layer_ranges(target.layers, self.stages, surplus=self.emulated is not None)
        else:
            check_ranges(self.layers, target.layers, self.stages)
        for name, directory in zip((self.target, *self.middles), (target, *middles), strict=True):
            if local_path(name) is not None:
                directory.check_weights()

    @property
    def arguments(self) -> list[str]:
        """The scheduler's arguments for this setup."""
        chain = [part for middle in self.middles for part in ("--middle", middle)]
        emulated = ["--emulate", self.emulated.text()] if self.emulated is not None else []
        layers = ["--layers", ranges_text(self.layers)] if self.layers is not None else []
        context = ["--context", str(self.context)] if self.context is not None else []
        keep = ["--keep-rows", str(self.keep_rows)] if self.keep_rows is not None else []
        return [
            "--target",
            self.target,
            "--draft",
            self.draft,
            "--stages",
            str(self.stages),
            *chain,
            *emulated,
            *self.places.arguments,
            *("--rows", self.rows, "--jobs", str(self.jobs), "--kv", self.kv),
            *("--most-rows", str(self.most_rows)),
            *layers,
            *context,
            *keep,
        ]


class Cluster:
    """The processes of ``setup``, on a private broker or the one at ``url``.

    ``urls``: by role (``verify-1``), the broker's URL for workers that need another one.
    ``programs``: by role, module and first arguments of another program than the role's own.
    ``more``: further arguments, by role. ``before``: what stands before a worker's command, by
    role, like ``("nsenter", "--net=...")``; it must become the command, with the same process id.
    ``say``: takes a line for the user when a process has stopped.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        url: str | None = None,
        urls: Mapping[str, str] | None = None,
        programs: Mapping[str, Sequence[str]] | None = None,
        more: Mapping[str, Sequence[str]] | None = None,
        before: Mapping[str, Sequence[str]] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.setup = setup
        self._say = say
        self._urls = urls or {}
        self._more = more or {}
        self._before = before or {}
        self._programs = programs or {}
        self._given_url = url
        self._broker: PrivateBroker | None = None
        self._processes: dict[str, StartedProcess] = {}
        self._commands: dict[str, tuple[str, ...]] = {}  # module and arguments, by role
        self._restarts: dict[str, Restarts] = {}
        self._ended: dict[str, str] = {}  # by role, why it is not started again
        self._without: dict[str, tuple[int, int]] = {}  # by role, its process, looks without it
        self._looked_at = 0.0
        self._stopping = threading.Event()
        self._watched = threading.Event()  # the watcher starts nothing any more
        self._stopped = threading.Event()  # and may end, with which its processes end
        self._watcher: threading.Thread | None = None
        self._logs: Path | None = None
        self._weighed = False
        self.url = url or ""
        self.reported = ""

    def start(self, progress: Progress = lambda ready, of: None) -> None:
        """Start all processes and wait until they are ready; on an error stop them all."""
        self.setup.check()
        try:
            if self._given_url is None:
                self._broker = PrivateBroker(persist=self.setup.persist)
                self.url = self._broker.start()
            self._drop_record()
            place = self._broker.directory if self._broker is not None else None
            self._logs = Path(tempfile.mkdtemp(prefix="flowspec-logs-", dir=place))
            self._spawn("scheduler", "workers.scheduler", *self.setup.arguments)
            self._spawn("draft", "workers.draft")
            for stage in range(1, self.setup.stages + 1):
                self._spawn(f"verify-{stage}", "workers.verify", "--stage", str(stage))
            for model in range(1, len(self.setup.middles) + 1):
                self._spawn(f"middle-{model}", "workers.middle", "--model", str(model))
            self._wait_until_ready(progress)
        except BaseException:
            self.stop()
            raise
        self._watcher = threading.Thread(target=self._watch, name="restarts", daemon=True)
        self._watcher.start()

    def _drop_record(self) -> None:
        """Delete the record of an earlier pipeline, which the workers might take for theirs.

        A private broker's data have no other users: leases in them are of processes that are gone.
        """
        with closing(RedisControl(self.url, Keys())) as control:
            if self._broker is not None:
                for role, claim in control.claims().items():
                    control.release(role, claim.token)
            control.drop_pipeline()

    def _spawn(self, role: str, module: str, *arguments: str) -> None:
        assert self._logs is not None
        self._commands[role] = (module, *arguments)
        self._restarts.setdefault(role, Restarts())
        environment = {
            **os.environ,
            "FLOWSPEC_REDIS_URL": self._urls.get(role, self.url),
            "PYTHONUNBUFFERED": "1",
        }
        first = self._programs.get(role, (module,))
        given = (*first[1:], *arguments, *self._more.get(role, ()))
        log = self._logs / role
        before = self._before.get(role)
        self._processes[role] = (
            start(first[0], given, environment, log)
            if before is None
            else spawn(first[0], given, environment, log, before)
        )

    def _wait_until_ready(self, progress: Progress) -> None:
        deadline = time.monotonic() + READY_SECONDS
        with closing(RedisControl(self.url, Keys())) as control:
            while True:
                self.check()
                claims = control.claims() if control.pipeline() else {}
                facts = {role: claims[role].facts for role in self._processes if role in claims}
                ready = [
                    role
                    for role, known in facts.items()
                    if known.get("state") == "ready"
                    and known.get("pid") == self._processes[role].pid
                ]
                self._weigh([facts[role] for role in facts if role.startswith("verify-")])
                progress(len(ready), len(self._processes))
                if len(ready) == len(self._processes):
                    return
                if time.monotonic() > deadline:
                    late = sorted(set(self._processes) - set(ready))[0]
                    raise ClusterError(
                        f"{late} was not ready after {READY_SECONDS:g} s; {self._said(late)}"
                    )
                time.sleep(0.05)

    def _weigh(self, stages: Sequence[Mapping[str, Any]]) -> None:
        """Say once, while they load, what memory the ``stages`` of a device need, if it is much.

        Or if it is more than was free there.
        """
        if self._weighed or len(stages) < self.setup.stages:
            return
        if not all(NEEDS in facts for facts in stages):
            return
        self._weighed = True
        for device in sorted({facts["device"] for facts in stages}):
            beside = {
                number: facts
                for number, facts in enumerate(stages, start=1)
                if facts["device"] == device
            }
            needed = sum(facts[NEEDS] for facts in beside.values())
            free = max(facts[FREE] for facts in beside.values())
            each = ", ".join(
                f"stage {number} {gib(facts[NEEDS])}" for number, facts in beside.items()
            )
            if needed > free:
                self._say(
                    f"the stages on {device} need {gib(needed)} together ({each}), and {gib(free)} "
                    "were free: the system may end one; a smaller --dtype, --context or --jobs "
                    "needs less"
                )
            elif needed >= _MUCH:
                self._say(
                    f"loading stages on {device}, with their programs and KV rows {each}; "
                    f"{gib(free)} are free"
                )

    def check(self) -> None:
        """ClusterError if the broker or a worker has stopped, with the last line of its log.

        Not for a worker that is started again.
        """
        broker = self._broker
        if broker is not None and broker.exited is not None and self._watcher is None:
            raise ClusterError(f"the private broker stopped: {broker.log_tail()}")
        for why in tuple(self._ended.values()):
            raise ClusterError(why)
        if self._watcher is None:
            for role, process in self._processes.items():
                if process.poll() is not None:
                    raise ClusterError(self._end_of(role, process))

    def _end_of(self, role: str, process: StartedProcess) -> str:
        status = process.poll()
        if status == 0:
            return f"{role} was asked to stop"
        return f"{role} stopped with status {status}: {self._said(role)}"

    # ---- starting again --------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start again what has stopped, until the cluster is stopped.

        A process ends with the thread that has started it, so this one waits for the others' end.
        """
        self._start_again()
        self._watched.set()
        self._stopped.wait()

    def _start_again(self) -> None:
        while not self._stopping.wait(_WATCH_SECONDS):
            try:
                self._look_once()
            except Exception as error:  # noqa: BLE001 - nobody else starts the workers again
                self._say(f"the processes were not looked at: {type(error).__name__}: {error}")
                self._stopping.wait(1.0)

    def _look_once(self) -> None:
        if self._broker is not None and not self._look_after_broker(self._broker):
            return  # nobody can be started without it
        for role in self._commands:
            if role not in self._ended:
                self._look_after(role)
        if time.monotonic() - self._looked_at >= _ROLES_SECONDS:
            self._look_for_hangs()

    def _look_for_hangs(self) -> None:
        """Kill what has been without its role for long, though roles could be taken.

        Looks are counted, not seconds: leases end while this process is stopped, too.
        """
        self._looked_at = time.monotonic()
        try:
            with closing(RedisControl(self.url, Keys())) as control:
                control.check_writes()
                claims = control.claims() if control.pipeline() else {}
        except BrokerError:
            claims = {}
        if not claims:
            self._without = {role: (pid, 0) for role, (pid, _) in self._without.items()}
            return
        for role, process in self._processes.items():
            claim = claims.get(role)
            if claim is not None and _is_of(claim, process.pid):
                self._without[role] = process.pid, 0
                continue
            pid, looks = self._without.get(role, (0, 0))
            if pid != process.pid:
                continue  # it has not had the role yet
            self._without[role] = pid, looks + 1
            most = _HUNG_LOOKS if claim is None else _REPLACED_LOOKS
            if looks + 1 >= most and process.poll() is None:
                del self._without[role]
                self._say(f"{role} has lost its role and does not answer: it is killed")
                process.kill()

    def _look_after_broker(self, broker: PrivateBroker) -> bool:
        """Start the private broker again if it has stopped; whether it runs.

        If it stops too often, all workers are stopped.
        """
        if broker.exited is None:
            return True
        if BROKER in self._ended:
            return False
        now = time.monotonic()
        restarts = self._restarts.setdefault(BROKER, Restarts())
        if not restarts.waits:
            end = f"the private broker stopped with status {broker.exited}: {broker.log_tail()}"
            if not restarts.stopped(now):
                self._ended[BROKER] = end
                self._say(f"{end}; it has stopped too often to be started again")
                self._interrupt()
                return False
            self._say(f"{end}; it is started again")
        if not restarts.is_due(now):
            return False
        restarts.started()
        try:
            broker.start_again()
        except BrokerError as error:
            self._say(str(error))
            return False
        return True

    def _look_after(self, role: str) -> None:
        """Start ``role`` again if it has stopped and its time has come."""
        process = self._processes[role]
        if process.poll() is None:
            return
        restarts = self._restarts[role]
        now = time.monotonic()
        try:
            if not restarts.waits:
                end = self._end_of(role, process)
                if not restarts.stopped(now):
                    self._ended[role] = end
                    self._say(f"{end}; it has stopped too often to be started again")
                    return
                self._say(f"{end}; it is started again")
            if (
                restarts.is_due(now)
                and self._free(role, process.pid)
                and not self._stopping.is_set()
            ):
                self._spawn(role, *self._commands[role])
                restarts.started()
        except FlowSpecError as error:
            self._say(f"{role} cannot be started again yet: {error}")
            self._stopping.wait(1.0)

    def _free(self, role: str, pid: int) -> bool:
        """Free the role of a process that is gone; whether it may be taken.

        A worker that was started elsewhere may have it: that one serves as well.
        """
        with closing(RedisControl(self._urls.get(role, self.url), Keys())) as control:
            claim = control.claims().get(role)
            if claim is None:
                return True
            if not _is_of(claim, pid):
                return False
            control.release(role, claim.token)
            return True

    def report(self) -> bool:
        """Say on stderr, each change once, what has stopped for good; False once nothing is left.

        Nothing is left without a worker, or without the private broker if there is one.
        ``reported`` is what was said last.
        """
        # Looked at before the check, which then says of all what stopped them.
        is_left = BROKER not in self._ended and not self._commands.keys() <= self._ended.keys()
        try:
            self.check()
        except ClusterError as error:
            if str(error) != self.reported:
                self.reported = str(error)
                sys.stderr.write(f"flowspec: {error}\n")
        return is_left

    def _said(self, role: str) -> str:
        assert self._logs is not None
        log = self._logs / role
        printed = (
            log.read_text(errors="replace", encoding="utf-8").splitlines() if log.exists() else []
        )
        lines = [line for line in printed if line.strip() and not line.startswith(NOTE)]
        prefix = f"flowspec {role.partition('-')[0]}: "
        return lines[-1].strip().removeprefix(prefix) if lines else "it printed nothing"

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role, the private broker's as ``broker``."""
        found = {role: process.pid for role, process in self._processes.items()}
        return found | ({BROKER: self._broker.pid} if self._broker is not None else {})

    def stop(self) -> None:
        """Stop all workers and the private broker, and remove their files.

        At once: SIGTERM would let their jobs end first.
        """
        self._stopping.set()
        if self._watcher is not None:
            self._watched.wait()
        self._interrupt()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._commands.clear()
        if self._broker is not None:
            self._broker.stop()
            self._broker = None
        self._stopped.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        if self._logs is not None:
            shutil.rmtree(self._logs, ignore_errors=True)
            self._logs = None

    def _interrupt(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _is_of(claim: Claim, pid: int) -> bool:
    """Whether the process ``pid`` of this machine has the lease."""
    return (claim.facts.get("host"), claim.facts.get("pid")) == (socket.gethostname(), pid)
