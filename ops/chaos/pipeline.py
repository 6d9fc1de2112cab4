"""The pipeline that is broken: its processes, and jobs as with redis-cli."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import redis

PAIR = Path(__file__).parents[2] / "flowspec" / "default_pair"
TAG = "flowspec:{p0}"
JOBS = "flowspec:jobs"
ROLES = ("scheduler", "draft", "verify-1", "verify-2")
MIDDLE = "middle-1"
TOKENS, SEED = 160, 7
#: Until a job has ended, seconds; a message that was deleted is missed after 120 s without answer.
ENDS_SECONDS = 150.0
#: Until a pipeline is ready, and gone.
UP_SECONDS = 120.0
#: Starts of one process that the supervisor allows, and within how many seconds.
KILLS, WITHIN_SECONDS = 4, 330.0


def until(holds: Callable[[], object], otherwise: str) -> None:
    """Wait until ``holds()``; it may fail meanwhile. RuntimeError: ``otherwise``, after a while."""
    end = time.monotonic() + UP_SECONDS
    while time.monotonic() < end:
        with suppress(redis.RedisError, OSError, HTTPException, KeyError):
            if holds():
                return
        time.sleep(0.05)
    raise RuntimeError(otherwise)


@dataclass(frozen=True)
class JobText:
    """A job's beginning, and how its tokens are chosen."""

    ids: tuple[int, ...]
    temperature: float


@dataclass
class SentJob:
    """A submitted job; ``id``: its entry's. ``ids``: the tokens read so far."""

    id: str
    prompt: JobText
    strategy: str
    since: float
    ids: list[int] = field(default_factory=list)
    error: str = ""
    ended: str = ""
    gap: bool = False


class Pipeline:
    """What `flowspec up` starts, under a home of its own in ``place``.

    ``persist``: its broker keeps its data. ``straight``: rows go from worker to worker, not through
    the broker. ``middle``: the packaged middle model is between drafter and target. ``spare``: a
    stage for which a spare waits; 0: none.
    """

    def __init__(
        self,
        place: Path,
        target: Path,
        draft: str,
        *,
        persist: bool,
        straight: bool = False,
        middle: bool = False,
        spare: int = 0,
    ) -> None:
        self.place = place
        self.target = target
        self.persist = persist
        self.straight = straight
        self.roles = (*ROLES, MIDDLE) if middle else ROLES
        self.environment = {
            **os.environ,
            "XDG_STATE_HOME": str(place / "state"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        models: tuple[str, ...] = ("--target", str(target), "--draft", draft)
        if middle:
            models = ("--models", f"{draft},{PAIR / 'medium'},{target}")
        kept = ("--persist", str(place / "data")) if persist else ()
        rows = ("--rows", "straight" if straight else "broker")
        said = self._flowspec(
            "up", "--stages", "2", "--jobs", "2", "--dtype", "float32", *models, *kept, *rows
        )
        url = re.findall(r"FLOWSPEC_REDIS_URL='(.+)'", said)[0]
        self.environment["FLOWSPEC_REDIS_URL"] = url
        self.broker: Any = redis.Redis.from_url(url, socket_timeout=5.0)
        self.kills: dict[str, deque[float]] = defaultdict(deque)
        self._spare = None
        if spare:
            command, quiet = self.spare_command(spare, target), subprocess.DEVNULL
            self._spare = subprocess.Popen(command, env=self.environment, stderr=quiet)
            until(lambda: self.broker.exists(f"{TAG}:spares"), "no spare is listed")

    @staticmethod
    def spare_command(stage: int, target: Path) -> list[str]:
        words = ("-m", "workers.verify", "--stage", str(stage), "--spare", "--dtype", "float32")
        return [sys.executable, *words, "--target", str(target)]

    def _flowspec(self, *words: str) -> str:
        command = [sys.executable, "-m", "flowspec", *words]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=UP_SECONDS
        )
        if done.returncode:
            raise RuntimeError(f"flowspec {words[0]}: {done.stderr.strip()}")
        return done.stdout

    def pids(self) -> dict[str, int]:
        """Processes by role, as far as they hold one; the broker's too."""
        found = {"broker": int(self.broker.info("server")["process_id"])}
        return found | {role: int(facts["pid"]) for role, facts in self.facts().items()}

    def facts(self) -> dict[str, dict[str, Any]]:
        """What the processes that hold a role tell of themselves."""
        found = {}
        for role in self.roles:
            try:
                claim = self.broker.get(f"{TAG}:claim:{role}")
                if claim is not None:
                    found[role] = json.loads(claim.partition(b" ")[2])
            except redis.ResponseError:  # a key of another type
                continue
        return found

    def inboxes(self) -> dict[str, int]:
        """The server of each worker's own inbox, by role."""
        found = {}
        for role, pid in self.pids().items():
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                for child in children.read_bytes().decode().split():
                    with suppress(OSError):  # it has just ended
                        if b"-server" in Path(f"/proc/{child}/cmdline").read_bytes():
                            found[role] = int(child)
        return found

    def open_files(self) -> dict[str, int]:
        """By role, the number of files that its process has open."""
        found = {}
        for role, pid in self.pids().items():
            with suppress(FileNotFoundError):  # it has just ended
                found[role] = len([*Path(f"/proc/{pid}/fd").iterdir()])
        return found

    def may_kill(self, role: str) -> bool:
        """Whether the supervisor would still start ``role`` again."""
        kills = self.kills[role]
        while kills and time.monotonic() - kills[0] > WITHIN_SECONDS:
            kills.popleft()
        return len(kills) < KILLS

    def kill(self, role: str, number: int) -> None:
        pid = self.pids().get(role)
        if pid is not None and self.may_kill(role):
            self.kills[role].append(time.monotonic())
            os.kill(pid, number)

    def submit(self, prompt: JobText, strategy: str) -> SentJob:
        fields: dict[Any, Any] = {
            "prompt_ids": json.dumps(prompt.ids),
            "max_new_tokens": TOKENS,
            "strategy": strategy,
            "temperature": prompt.temperature,
            "seed": SEED,
        }
        job = self.patiently(lambda: self.broker.xadd(JOBS, fields))
        return SentJob(job.decode(), prompt, strategy, time.monotonic())

    def patiently(self, call: Callable[[], Any]) -> Any:
        """``call()``, again and again while the broker does not answer."""
        until = time.monotonic() + ENDS_SECONDS
        while True:
            try:
                return call()
            except redis.RedisError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def read(self, job: SentJob) -> None:
        """Read what ``job`` has said; one that the broker has lost has ended."""
        key = f"{TAG}:out:{job.id}"
        try:
            entries = self.broker.xrange(key)
            known = entries or self.broker.exists(f"{TAG}:job:{job.id}")
            waits = known or self.broker.xrange(JOBS, job.id, job.id)
        except redis.RedisError:
            return
        if not waits and time.monotonic() - job.since > 5.0:
            job.error, job.ended = "vanished with its data", "lost"
        job.ids.clear()
        for _, entry in entries:
            kind = entry.get(b"kind")
            if kind == b"tokens" and not entry[b"offset"].isdigit():
                job.gap = True  # it is the fault's own
            elif kind == b"tokens":
                job.gap |= int(entry[b"offset"]) != len(job.ids)
                job.ids += json.loads(entry[b"ids"])
            elif kind == b"error":
                job.error = entry[b"text"].decode()
            elif kind == b"end":
                job.ended = entry[b"finish_reason"].decode()

    def wait(self, jobs: Sequence[SentJob]) -> None:
        """Until all ``jobs`` have ended, or have had their time."""
        began = time.monotonic()
        while time.monotonic() - began < ENDS_SECONDS:
            for job in jobs:
                if not job.ended:
                    self.read(job)
            if all(job.ended for job in jobs):
                return
            time.sleep(0.05)

    def lasting_keys(self) -> set[str]:
        """Keys without a lifetime except empty streams of rows, each number in them written as N.

        Beside straight rows such a stream is there once an inbox has been lost.
        """
        broker = self.broker
        keys = [key for key in broker.scan_iter("*") if broker.ttl(key) == -1]
        empty = {key for key in broker.scan_iter(f"{TAG}:rows:*") if not broker.xlen(key)}
        return {re.sub(r"\d+", "N", key.decode()) for key in keys if key not in empty}

    def processes(self) -> list[int]:
        """All processes of this pipeline: those with its place in their environment."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended, or is another user's
                if os.fsencode(self.place) in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
        return found

    def down(self) -> None:
        try:
            self._flowspec("down")
        finally:
            if self._spare is not None:
                self._spare.terminate()
                self._spare.wait(ENDS_SECONDS)
