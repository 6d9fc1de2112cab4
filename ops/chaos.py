"""Break a running pipeline at random moments, and check what its users would see.

    python -m ops.chaos [--seeds 25] [--first 0] [--faults 20] [--only NAME]

Each seed starts a pipeline of two stages by `flowspec up`, of the packaged pair, and does so many
faults to it: processes that are killed, stopped for a while or asked to end, one, two or all at
once; a broker that is killed with or without its data, halted, emptied, full or without replicas;
its password changed; made a replica of nobody; its keys, entries and scripts deleted, cut, doubled
or replaced; rows that are no numbers; a thread that computes and hangs; a worker with other
weights. Jobs are in the middle of their text meanwhile. After each fault,

- every job has ended within a bound, with an answer or with one line;
- an answer is the target's own text: of a greedy job what transformers' ``generate`` says, of a
  sampled one what plain decoding had said before the first fault; what came before an error is its
  beginning;
- the next job is answered, without hands.

At the end the pipeline is asked to stop; no process is left, no key of an ended job without a
lifetime, and no process has collected open files. Nothing here uses the library: jobs go in and
out as with redis-cli.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import redis

from ops.parser import Parser

PAIR = Path(__file__).parent.parent / "flowspec" / "default_pair"
TAG = "flowspec:{p0}"
JOBS = "flowspec:jobs"
ROLES = ("scheduler", "draft", "verify-1", "verify-2")
STRATEGIES = ("flowspec", "pipedec", "specpipe", "pipespec", "chain", "auto", "autoregressive")
PROMPTS = (
    "Describe how to open a text file in Python.",
    "Once upon a time there was a small town by the sea.",
    "Write down three reasons to get up early.",
)
TOKENS = 160
#: Until a job has ended, seconds; a message that was deleted is missed after 120 s without answer.
ENDS_SECONDS = 150.0
#: Longer than a loop may hang.
HANG_SECONDS = 75.0
#: Requests of ptrace(2), and the flag with which its user waits for a thread.
_SEIZE = 0x4206
_INTERRUPT = 0x4207
_DETACH = 17
_WALL = 0x40000000
#: No number in any type of rows.
_NAN = b"\xff" * 8
#: Until a pipeline is ready, and gone.
UP_SECONDS = 120.0
#: By how many open files a process may differ from one moment to another.
MORE_FILES = 8
#: Starts of one process that the supervisor allows, and within how many seconds.
KILLS, WITHIN_SECONDS = 4, 330.0


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


@dataclass
class SeedResult:
    """What one seed found: problems, one line each, and seconds until all jobs were served."""

    seed: int
    problems: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: Counter[str] = field(default_factory=Counter)


class Pipeline:
    """What `flowspec up` starts, under a home of its own in ``place``."""

    def __init__(self, place: Path, *, persist: bool) -> None:
        self.environment = {
            **os.environ,
            "XDG_STATE_HOME": str(place / "state"),
            "XDG_CACHE_HOME": str(place / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        kept = ("--persist", str(place / "data")) if persist else ()
        said = self._flowspec("up", "--stages", "2", "--jobs", "2", *kept)
        self.url = re.findall(r"FLOWSPEC_REDIS_URL='(.+)'", said)[0]
        self.persist = persist
        self.broker: Any = redis.Redis.from_url(self.url, socket_timeout=5.0)
        self.kills: dict[str, deque[float]] = defaultdict(deque)

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
        for role in ROLES:
            try:
                claim = self.broker.get(f"{TAG}:claim:{role}")
                if claim is not None:
                    found[role] = int(json.loads(claim.partition(b" ")[2])["pid"])
            except redis.ResponseError:  # a key of another type
                continue
        return found

    def open_files(self) -> dict[int, int]:
        """By process, its number of open files."""
        found = {}
        for pid in self.pids().values():
            with suppress(FileNotFoundError):  # it has just ended
                found[pid] = len([*Path(f"/proc/{pid}/fd").iterdir()])
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
            "seed": 7,
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
            job.error, job.ended = "lost with its key", "lost"
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

    def lasting_keys(self) -> list[str]:
        """Keys of jobs without a lifetime."""
        found = []
        for kind in ("job", "request", "run", "out", "recording"):
            for key in self.broker.scan_iter(f"{TAG}:{kind}:*"):
                if self.broker.ttl(key) == -1:
                    found.append(key.decode())
        return found

    def down(self) -> None:
        self._flowspec("down")


# ---- faults --------------------------------------------------------------------------------------

Fault = Callable[[Pipeline, random.Random], None]
FAULTS: dict[str, Fault] = {}
#: Faults that may take a job's record or output with them: it may end without a word.
TAKES_DATA = {
    *("broker killed", "broker emptied", "key deleted", "key of a wrong type"),
    "value of garbage",
}


def fault(name: str) -> Callable[[Fault], Fault]:
    def note(act: Fault) -> Fault:
        FAULTS[name] = act
        return act

    return note


@fault("killed")
def _killed(pipeline: Pipeline, luck: random.Random) -> None:
    pipeline.kill(luck.choice(ROLES), signal.SIGKILL)


@fault("asked to end")
def _asked(pipeline: Pipeline, luck: random.Random) -> None:
    pipeline.kill(luck.choice(ROLES), signal.SIGTERM)


@fault("two killed")
def _two_killed(pipeline: Pipeline, luck: random.Random) -> None:
    for role in luck.sample(ROLES, 2):
        pipeline.kill(role, signal.SIGKILL)


@fault("all killed")
def _all_killed(pipeline: Pipeline, luck: random.Random) -> None:
    for role in ROLES:
        pipeline.kill(role, signal.SIGKILL)


@fault("stopped")
def _stopped(pipeline: Pipeline, luck: random.Random) -> None:
    pid = pipeline.pids().get(luck.choice(ROLES))
    if pid is not None:
        _halt([pid], luck.choice((1.0, 5.0, 5.0, 30.0)))


@fault("all stopped")
def _all_stopped(pipeline: Pipeline, luck: random.Random) -> None:
    pids = [pid for role, pid in pipeline.pids().items() if role != "broker"]
    _halt(pids, luck.choice((1.0, 8.0)))


@fault("broker halted")
def _halted(pipeline: Pipeline, luck: random.Random) -> None:
    _halt([pipeline.pids()["broker"]], luck.choice((0.5, 4.0, 12.0)))


@fault("thread hangs")
def _hangs(pipeline: Pipeline, luck: random.Random) -> None:
    """The one that computes; the lease's thread goes on. The supervisor starts another process."""
    role = luck.choice(ROLES[1:])
    pid = pipeline.pids().get(role)
    if pid is None or not pipeline.may_kill(role):
        return
    pipeline.kills[role].append(time.monotonic())
    ptrace = ctypes.CDLL(None).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    if ptrace(_SEIZE, pid, None, None):
        raise PermissionError("this user may not trace processes")
    ptrace(_INTERRUPT, pid, None, None)
    until = time.monotonic() + HANG_SECONDS
    with suppress(ChildProcessError):
        os.waitpid(pid, _WALL)
        while time.monotonic() < until:
            changed, status = os.waitpid(pid, _WALL | os.WNOHANG)
            if changed and not os.WIFSTOPPED(status):
                break
            time.sleep(0.2)
    ptrace(_DETACH, pid, None, None)


@fault("other weights")
def _other_weights(pipeline: Pipeline, luck: random.Random) -> None:
    """A stage is lost, and a worker with a damaged copy of the target asks for its place."""
    number = luck.choice((1, 2))
    pipeline.kill(f"verify-{number}", signal.SIGKILL)
    copy = Path(pipeline.environment["XDG_STATE_HOME"]).parent / "copy"
    shutil.copytree(PAIR / "target", copy, dirs_exist_ok=True)
    with (copy / "model.safetensors").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for at in range(size // 8, size, size // 64):  # some in every layer
            file.seek(at)
            file.write(b"\x3f\x3f")
    command = (sys.executable, "-m", "workers.verify", "--stage", str(number))
    done = subprocess.run(
        [*command, "--target", str(copy), "--spare"],
        env={**pipeline.environment, "FLOWSPEC_REDIS_URL": pipeline.url},
        cwd=PAIR.parent.parent,
        capture_output=True,
        text=True,
        timeout=UP_SECONDS,
    )
    if done.returncode == 0 or "other values" not in done.stderr:
        raise RuntimeError(f"a worker with other weights ended with {done.returncode}")


def _halt(pids: Sequence[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        with suppress(ProcessLookupError):  # the supervisor has another one in its place
            os.kill(pid, signal.SIGCONT)


@fault("broker killed")
def _broker_killed(pipeline: Pipeline, luck: random.Random) -> None:
    pipeline.kill("broker", signal.SIGKILL)


@fault("broker emptied")
def _emptied(pipeline: Pipeline, luck: random.Random) -> None:
    pipeline.broker.flushall()


@fault("broker full")
def _full(pipeline: Pipeline, luck: random.Random) -> None:
    _configured(pipeline, "maxmemory", "1", luck.choice((1.0, 8.0, 20.0)))


@fault("broker demoted")
def _demoted(pipeline: Pipeline, luck: random.Random) -> None:
    pipeline.broker.replicaof("127.0.0.1", "1")  # where nobody listens
    time.sleep(luck.choice((0.5, 4.0, 15.0)))
    pipeline.patiently(lambda: pipeline.broker.replicaof("NO", "ONE"))


@fault("broker without replicas")
def _no_replicas(pipeline: Pipeline, luck: random.Random) -> None:
    _configured(pipeline, "min-replicas-to-write", "1", luck.choice((1.0, 8.0)))


def _configured(pipeline: Pipeline, name: str, value: str, seconds: float) -> None:
    before = pipeline.broker.config_get(name)[name]
    pipeline.broker.config_set(name, value)
    time.sleep(seconds)
    pipeline.patiently(lambda: pipeline.broker.config_set(name, before))


@fault("password changed")
def _password(pipeline: Pipeline, luck: random.Random) -> None:
    broker = pipeline.broker
    with broker.client() as admin:  # one connection, which stays allowed
        before = admin.config_get("requirepass")["requirepass"]
        admin.config_set("requirepass", "another")
        admin.client_kill_filter(_type="normal", skipme=True)
        time.sleep(luck.choice((1.0, 5.0)))
        admin.config_set("requirepass", before)


@fault("connections closed")
def _closed(pipeline: Pipeline, luck: random.Random) -> None:
    pipeline.broker.client_kill_filter(_type="normal", skipme=True)


@fault("scripts deleted")
def _scripts(pipeline: Pipeline, luck: random.Random) -> None:
    pipeline.broker.script_flush()


@fault("key deleted")
def _key_deleted(pipeline: Pipeline, luck: random.Random) -> None:
    pipeline.broker.delete(_some_key(pipeline, luck))


@fault("key of a wrong type")
def _key_replaced(pipeline: Pipeline, luck: random.Random) -> None:
    key = _some_key(pipeline, luck)
    pipeline.broker.delete(key)
    pipeline.broker.zadd(key, {"x": 1.0})


@fault("value of garbage")
def _value(pipeline: Pipeline, luck: random.Random) -> None:
    """A field of a hash, a member of a list or a set, or a lease."""
    key = _some_key(pipeline, luck)
    broker, garbage = pipeline.broker, luck.randbytes(luck.randrange(1, 64))
    place = b""
    match broker.type(key):
        case b"hash":
            place = luck.choice([b"another", *sorted(broker.hkeys(key))])
            broker.hset(key, place, garbage)
        case b"list":
            broker.lpush(key, garbage)
        case b"set":
            broker.sadd(key, garbage)
        case b"string":
            broker.set(key, garbage, keepttl=True)
        case b"stream":
            broker.xadd(key, {"kind": "tokens", "ids": garbage, "offset": garbage})
    sys.stderr.write(f"damaged: {key.decode()} {place.decode()}\n")


def _some_key(pipeline: Pipeline, luck: random.Random) -> Any:
    """A key of the pipeline or of a job that has not ended, or the intake."""
    keys = sorted(pipeline.broker.scan_iter(f"{TAG}:*"))
    lasting = [key for key in keys if b":claim:" in key or pipeline.broker.ttl(key) == -1]
    return luck.choice([JOBS.encode(), *lasting])


def _some_entry(pipeline: Pipeline, luck: random.Random) -> tuple[Any, Any, dict[Any, Any]] | None:
    """A stream of messages or rows, and one of its last entries; None: there is none now."""
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        for kind in luck.sample(("log", "rows"), 2):
            streams = sorted(pipeline.broker.scan_iter(f"{TAG}:{kind}:*"))
            luck.shuffle(streams)
            for stream in streams:
                entries = pipeline.broker.xrevrange(stream, count=3)
                if entries:
                    at, fields = luck.choice(entries)
                    return stream, at, fields
    return None


@fault("entry deleted")
def _entry_deleted(pipeline: Pipeline, luck: random.Random) -> None:
    if found := _some_entry(pipeline, luck):
        pipeline.broker.xdel(found[0], found[1])


@fault("entry doubled")
def _entry_doubled(pipeline: Pipeline, luck: random.Random) -> None:
    if found := _some_entry(pipeline, luck):
        pipeline.broker.xadd(found[0], found[2])


@fault("entry cut")
def _entry_cut(pipeline: Pipeline, luck: random.Random) -> None:
    if found := _some_entry(pipeline, luck):
        name = luck.choice(sorted(found[2]))
        value = found[2][name]
        pipeline.broker.xadd(found[0], {**found[2], name: value[: luck.randrange(len(value) + 1)]})


@fault("entry of garbage")
def _garbage(pipeline: Pipeline, luck: random.Random) -> None:
    if found := _some_entry(pipeline, luck):
        fields = {name: luck.randbytes(luck.randrange(1, 64)) for name in found[2]}
        pipeline.broker.xadd(found[0], fields)


@fault("rows of no numbers")
def _no_numbers(pipeline: Pipeline, luck: random.Random) -> None:
    """Whatever arrives for a moment comes again, with a NaN at its end and the right checksum."""
    until = time.monotonic() + luck.choice((0.2, 1.0))
    seen: set[Any] = set()
    while time.monotonic() < until:
        for stream in pipeline.broker.scan_iter(f"{TAG}:rows:*"):
            for at, fields in pipeline.broker.xrevrange(stream, count=3):
                if at not in seen and fields[b"d"][-8:] != _NAN:
                    data = fields[b"d"][:-8] + _NAN
                    again = {**fields, b"d": data, b"c": zlib.crc32(data)}
                    seen |= {at, pipeline.broker.xadd(stream, again)}


# ---- the oracle ----------------------------------------------------------------------------------


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Token ids of the prompts, by the tokenizer's own package."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    return tuple(tuple(tokenizer.encode(text).ids) for text in PROMPTS)


@cache
def _target() -> Any:
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)


@cache
def greedy(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The target's own greedy text after ``ids``, by the library's ``generate``."""
    import torch

    given = torch.tensor([ids])
    found = _target().generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=TOKENS
    )
    return tuple(found[0].tolist()[len(ids) :])


def expected(pipeline: Pipeline) -> dict[JobText, tuple[int, ...]]:
    """Every prompt's text; of those at a temperature what plain decoding says before any fault."""
    found = {JobText(ids, 0.0): greedy(ids) for ids in prompts()}
    jobs = [pipeline.submit(JobText(ids, 1.0), "autoregressive") for ids in prompts()]
    pipeline.wait(jobs)
    return found | {job.prompt: tuple(job.ids) for job in jobs}


def problem_of(job: SentJob, wanted: tuple[int, ...], *, may_be_lost: bool) -> str:
    """What is wrong with how ``job`` has ended; empty: nothing."""
    if not job.ended:
        return f"has not ended after {time.monotonic() - job.since:.0f} s"
    if job.ended == "lost":
        return "" if may_be_lost else "was lost without a word"
    failed = job.ended == "error"
    if failed and (not job.error or "\n" in job.error):
        return f"ended with {job.error!r} in the place of one line"
    if may_be_lost and job.gap:
        return ""  # a part of its output was deleted under its reader's eyes
    if tuple(job.ids) == (wanted[: len(job.ids)] if failed else wanted):
        return ""
    return "has another text" + (" before its error" if failed else f" ({len(job.ids)} tokens)")


# ---- a seed --------------------------------------------------------------------------------------


def run(seed: int, faults: int, only: str = "") -> SeedResult:
    """Do ``faults`` faults to a pipeline."""
    found = SeedResult(seed)
    luck = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        pipeline = Pipeline(Path(place), persist=bool(seed % 2))
        try:
            wanted = expected(pipeline)
            processes = pipeline.open_files()
            for at in range(faults):
                name = luck.choice([one for one in FAULTS if only in one])
                if not _suffer(pipeline, luck, name, wanted, found, at):
                    break
            _check_keys(pipeline, found)
            _check_files(processes, pipeline.open_files(), found)
            processes |= pipeline.open_files()
        finally:
            pipeline.down()
    left = [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    if left:
        found.problems.append(f"seed {seed}: processes are left: {left}")
    return found


def _suffer(
    pipeline: Pipeline,
    luck: random.Random,
    name: str,
    wanted: dict[JobText, tuple[int, ...]],
    found: SeedResult,
    at: int,
) -> bool:
    """One fault, and what comes of it; False: the pipeline serves no more."""
    where = f"seed {found.seed}, fault {at}, {name}"
    jobs = [
        pipeline.submit(luck.choice(list(wanted)), luck.choice(STRATEGIES))
        for _ in range(luck.choice((1, 1, 2, 3)))
    ]
    _begin(pipeline, jobs[0])
    time.sleep(luck.uniform(0.0, 0.4))
    found.faults[name] += 1
    began = time.monotonic()
    try:
        FAULTS[name](pipeline, luck)
    except (redis.RedisError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        found.problems.append(f"{where}: the fault failed: {error}")
    pipeline.wait(jobs)
    takes = name in TAKES_DATA and not (name == "broker killed" and pipeline.persist)
    for job in jobs:
        found.errors[job.error] += bool(job.error)
        if problem := problem_of(job, wanted[job.prompt], may_be_lost=takes):
            found.problems.append(f"{where}: job {job.id} of {job.strategy} {problem}")
    after = pipeline.submit(luck.choice(list(wanted)), "flowspec")
    pipeline.wait([after])
    found.seconds[name].append(time.monotonic() - began)
    sys.stderr.write(f"{where}: {found.seconds[name][-1]:.1f} s\n")
    if problem := problem_of(after, wanted[after.prompt], may_be_lost=False):
        found.problems.append(f"{where}: the next job {problem} {after.error}")
    elif after.error:
        found.problems.append(f"{where}: the next job ended with {after.error}")
    return bool(after.ended)


def _begin(pipeline: Pipeline, job: SentJob) -> None:
    """Until the job has some tokens, or has ended."""
    until = time.monotonic() + ENDS_SECONDS
    while not job.ids and not job.ended and time.monotonic() < until:
        pipeline.read(job)
        time.sleep(0.01)


def _check_keys(pipeline: Pipeline, found: SeedResult) -> None:
    until = time.monotonic() + 10.0
    while (left := pipeline.lasting_keys()) and time.monotonic() < until:
        time.sleep(0.2)
    if left:
        found.problems.append(f"seed {found.seed}: keys have no lifetime: {left[:5]}")


def _check_files(before: dict[int, int], after: dict[int, int], found: SeedResult) -> None:
    """Of the processes that have lived through all faults."""
    for pid in before.keys() & after.keys():
        if after[pid] > before[pid] + MORE_FILES:
            found.problems.append(
                f"seed {found.seed}: a process had {before[pid]} files open and has {after[pid]}"
            )


def report(results: Sequence[SeedResult]) -> Iterator[str]:
    """A table of the faults, and all problems."""
    yield "| fault | times | seconds until all was served, median | most |"
    yield "|---|---|---|---|"
    seconds: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, taken in result.seconds.items():
            seconds[name] += taken
    for name in sorted(seconds):
        taken = seconds[name]
        yield f"| {name} | {len(taken)} | {statistics.median(taken):.1f} | {max(taken):.1f} |"
    errors = sum((result.errors for result in results), Counter())
    yield f"\nerrors that jobs ended with: {sum(errors.values())}"
    for error, count in errors.most_common():
        yield f"{count:4} {error}"
    problems = [problem for result in results for problem in result.problems]
    yield f"\nproblems: {len(problems)}"
    yield from problems


def main() -> None:
    parser = Parser(prog="python -m ops.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=25)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    given = parser.parse_args()
    results = []
    for seed in range(given.first, given.first + given.seeds):
        results.append(run(seed, given.faults, given.only))
        said = "; ".join(results[-1].problems) or "nothing"
        print(f"seed {seed}: {sum(results[-1].faults.values())} faults; found: {said}", flush=True)
    print("\n".join(report(results)))
    sys.exit(any(result.problems for result in results))


if __name__ == "__main__":
    main()
