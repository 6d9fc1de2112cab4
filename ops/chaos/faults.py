"""What is done to a pipeline."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import redis

from ops.chaos.oracle import prompts, text_after, text_of
from ops.chaos.pipeline import ENDS_SECONDS, JOBS, TAG, TOKENS, UP_SECONDS, Pipeline, until

#: Longer than a loop may hang.
HANG_SECONDS = 75.0
#: Requests of ptrace(2), and the flag with which its user waits for a thread.
_SEIZE = 0x4206
_INTERRUPT = 0x4207
_DETACH = 17
_WALL = 0x40000000
_DIRECT = build_opener(ProxyHandler({}))
#: No number in any type of rows.
_NAN = b"\xff" * 8

Fault = Callable[[Pipeline, random.Random], None]
FAULTS: dict[str, Fault] = {}
#: Faults that may take a job's record or output with them: it may end without a word.
TAKES_DATA = {
    *("broker killed", "broker emptied", "key deleted", "key of a wrong type"),
    "value of garbage",
}


#: Faults of pipelines whose rows go from worker to worker, and of those whose rows do not.
OF_STRAIGHT = {"inbox killed", "inbox halted"}
OF_BROKER = {"rows of no numbers"}


def fault(name: str) -> Callable[[Fault], Fault]:
    def note(act: Fault) -> Fault:
        FAULTS[name] = act
        return act

    return note


def _of_roles(name: str, number: int) -> None:
    """Three faults: a signal to one role, to two and to all."""

    def act(count: int | None, pipeline: Pipeline, luck: random.Random) -> None:
        roles = luck.sample(pipeline.roles, count or len(pipeline.roles))
        if number == signal.SIGSTOP:
            pids = pipeline.pids()
            _halt([pids[role] for role in roles if role in pids], luck.choice((1.0, 5.0, 30.0)))
            return
        for role in roles:
            pipeline.kill(role, number)

    for words, count in (("", 1), ("two ", 2), ("all ", None)):
        FAULTS[words + name] = partial(act, count)


_of_roles("killed", signal.SIGKILL)
_of_roles("asked to end", signal.SIGTERM)
_of_roles("stopped", signal.SIGSTOP)


@fault("broker halted")
def _halted(pipeline: Pipeline, luck: random.Random) -> None:
    _halt([pipeline.pids()["broker"]], luck.choice((0.5, 4.0, 12.0)))


@fault("fork server killed")
def _fork_server_killed(pipeline: Pipeline, luck: random.Random) -> None:
    """With all the workers that it has forked; the supervisor starts another one."""
    parents = {_parent(pid) for role, pid in pipeline.pids().items() if role != "broker"}
    for pid in parents:
        if b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            if not all(map(pipeline.may_kill, pipeline.roles)):
                return
            for role in pipeline.roles:
                pipeline.kills[role].append(time.monotonic())
            os.kill(pid, signal.SIGKILL)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])


@fault("thread hangs")
def _hangs(pipeline: Pipeline, luck: random.Random) -> None:
    """The one that computes; the lease's thread goes on. The supervisor starts another process."""
    role = luck.choice(pipeline.roles[1:])
    pid = pipeline.pids().get(role)
    if pid is not None and pipeline.may_kill(role):
        _hang(pipeline, role, pid)


@fault("thread of a new process hangs")
def _hangs_anew(pipeline: Pipeline, luck: random.Random) -> None:
    """A worker is killed, and the one in its place hangs before or in its first pass."""

    def is_back() -> bool:
        facts = pipeline.facts()[role]
        return bool(facts["pid"] != before and facts["state"] == "ready")

    role = luck.choice(pipeline.roles[1:])
    before = pipeline.pids().get(role)
    if before is None or not pipeline.may_kill(role):
        return
    pipeline.kill(role, signal.SIGKILL)
    until(is_back, f"nobody has taken the place of {role}")
    if pipeline.may_kill(role):
        _hang(pipeline, role, pipeline.pids()[role])


def _hang(pipeline: Pipeline, role: str, pid: int) -> None:
    """Halt the first thread of ``pid`` until another process has its place, or for long."""
    pipeline.kills[role].append(time.monotonic())
    ptrace = ctypes.CDLL(None).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    if ptrace(_SEIZE, pid, None, None):
        raise PermissionError("this user may not trace processes")
    ptrace(_INTERRUPT, pid, None, None)
    end = time.monotonic() + HANG_SECONDS
    with suppress(ChildProcessError):
        os.waitpid(pid, _WALL)
        while time.monotonic() < end:
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
    copy = weights = pipeline.place / ("copy" + pipeline.target.suffix)
    if pipeline.target.is_dir():
        shutil.copytree(pipeline.target, copy, dirs_exist_ok=True)
        weights = copy / "model.safetensors"
    else:
        shutil.copyfile(pipeline.target, copy)
    with weights.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for at in range(size // 8, size, size // 64):  # some in every layer
            file.seek(at)
            file.write(b"\x3f\x3f")
    done = subprocess.run(
        pipeline.spare_command(number, copy),
        env=pipeline.environment,
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


@fault("inbox killed")
def _inbox_killed(pipeline: Pipeline, luck: random.Random) -> None:
    """With all rows and messages that are on their way to a worker."""
    if inboxes := pipeline.inboxes():
        os.kill(inboxes[luck.choice(sorted(inboxes))], signal.SIGKILL)


@fault("inbox halted")
def _inbox_halted(pipeline: Pipeline, luck: random.Random) -> None:
    if inboxes := pipeline.inboxes():
        _halt([inboxes[luck.choice(sorted(inboxes))]], luck.choice((0.5, 4.0, 12.0)))


@fault("gateway killed")
def _gateway_killed(pipeline: Pipeline, luck: random.Random) -> None:
    """While it streams an answer, whose job ends; another one in its place answers."""
    port = str(_free_port())
    ids = luck.choice(prompts(pipeline.target))
    with _gateway(pipeline, port) as process, _asked_of(port, ids, stream=True) as streamed:
        for _ in range(luck.randrange(1, 40)):
            streamed.readline()
        os.kill(process.pid, luck.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
        with suppress(OSError, HTTPException):
            streamed.read()
    with _gateway(pipeline, port), _asked_of(port, ids, stream=False) as whole:
        answer = json.loads(whole.read())
    if answer["choices"][0]["text"] != text_of(pipeline.target, text_after(pipeline.target, ids)):
        raise RuntimeError("the gateway gave another text")
    until(lambda: not pipeline.broker.exists(f"{TAG}:running"), "a gateway's job has not ended")


@contextmanager
def _gateway(pipeline: Pipeline, port: str) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway on ``port`` that is ready; asked to end after the block."""
    command = (sys.executable, "-m", "workers.gateway", "--port", port)
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        command, env=pipeline.environment, stdout=nowhere, stderr=nowhere
    ) as process:
        try:
            until(lambda: _is_ready(port), "no gateway is ready")
            yield process
        finally:
            process.terminate()
            process.wait(ENDS_SECONDS)


def _is_ready(port: str) -> bool:
    with _DIRECT.open(f"http://127.0.0.1:{port}/ready", timeout=ENDS_SECONDS):
        return True


def _asked_of(port: str, ids: Sequence[int], *, stream: bool) -> Any:
    body = {"prompt": ids, "max_tokens": TOKENS, "temperature": 0, "stream": stream}
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    return _DIRECT.open(Request(url, json.dumps(body).encode(), headers), timeout=ENDS_SECONDS)


@fault("broker killed")
def _broker_killed(pipeline: Pipeline, luck: random.Random) -> None:
    pipeline.kill("broker", signal.SIGKILL)


@fault("broker emptied")
def _emptied(pipeline: Pipeline, luck: random.Random) -> None:
    pipeline.broker.flushall()


@fault("broker full")
def _full(pipeline: Pipeline, luck: random.Random) -> None:
    _configured(pipeline, "maxmemory", "1", luck.choice((1.0, 8.0, 20.0)))


@fault("broker that cannot save")
def _cannot_save(pipeline: Pipeline, luck: random.Random) -> None:
    """A folder takes the place of its file; it refuses writes as long as it has to save."""
    broker = pipeline.broker
    names = [broker.config_get(name)[name] for name in ("dir", "dbfilename")]
    before = broker.config_get("save")["save"]
    Path(*names).mkdir()
    try:
        broker.config_set("save", "3600 1")
        until(lambda: broker.bgsave(), "the broker does not save")
        failed = "rdb_last_bgsave_status"
        until(lambda: broker.info("persistence")[failed] == "err", "the broker has saved")
        time.sleep(luck.choice((1.0, 8.0)))
    finally:
        pipeline.patiently(lambda: broker.config_set("save", before))
        Path(*names).rmdir()


@fault("broker demoted")
def _demoted(pipeline: Pipeline, luck: random.Random) -> None:
    pipeline.broker.replicaof("127.0.0.1", "1")  # where nobody listens
    time.sleep(luck.choice((0.5, 4.0, 15.0)))
    pipeline.patiently(lambda: pipeline.broker.replicaof("NO", "ONE"))


@fault("broker failed over")
def _failed_over(pipeline: Pipeline, luck: random.Random) -> None:
    """To a replica, which takes what comes meanwhile, and back. The URL stays the broker's."""
    broker = pipeline.broker
    program = Path(f"/proc/{pipeline.pids()['broker']}/exe").resolve()
    password = broker.connection_pool.connection_kwargs["password"]
    port, other_port = _free_port(), _free_port()
    broker.config_set("port", port)  # it listens on a socket's file alone
    broker.config_set("masterauth", password)
    command = [*map(str, (program, "--port", other_port, "--bind", "127.0.0.1", "--save", ""))]
    command += ["--requirepass", password, "--masterauth", password]
    command += ["--replicaof", "127.0.0.1", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=pipeline.place) as process:
        try:
            other: Any = redis.Redis(port=other_port, password=password)
            until(lambda: other.info("replication")["master_link_status"] == "up", "no replica")
            _fail_over(broker, other)
            time.sleep(luck.choice((0.0, 4.0, 15.0)))
            _fail_over(other, broker)
        finally:
            process.kill()
    broker.config_set("port", 0)


def _fail_over(primary: Any, replica: Any) -> None:
    kept = "the servers kept their roles"
    until(lambda: primary.execute_command("FAILOVER"), kept)
    until(lambda: replica.info("replication")["role"] == "master", kept)
    until(lambda: primary.info("replication")["master_link_status"] == "up", kept)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
    key = _some_key(pipeline, luck)
    pipeline.broker.delete(key)
    sys.stderr.write(f"deleted: {key.decode()}\n")


@fault("key of a wrong type")
def _key_replaced(pipeline: Pipeline, luck: random.Random) -> None:
    key = _some_key(pipeline, luck)
    with pipeline.broker.pipeline() as changes:  # at once: a worker would make it anew meanwhile
        changes.delete(key)
        changes.zadd(key, {"x": 1.0})
        changes.execute()
    sys.stderr.write(f"replaced: {key.decode()}\n")


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
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
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
    end = time.monotonic() + luck.choice((0.2, 1.0))
    seen: set[Any] = set()
    while time.monotonic() < end:
        for stream in pipeline.broker.scan_iter(f"{TAG}:rows:*"):
            for at, fields in pipeline.broker.xrevrange(stream, count=3):
                if at not in seen and fields[b"d"][-8:] != _NAN:
                    data = fields[b"d"][:-8] + _NAN
                    again = {**fields, b"d": data, b"c": zlib.crc32(data)}
                    seen |= {at, pipeline.broker.xadd(stream, again)}
