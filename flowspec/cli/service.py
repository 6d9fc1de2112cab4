"""``flowspec up | down | status``: a pipeline that outlives the command.

``up`` starts a supervisor process (this module run as a program), which owns the workers and the
private broker, and waits until the pipeline serves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.table import Table

from flowspec.cli import notes
from flowspec.cli.places import lock_pipeline, note_running, running, state_file, url_or_running
from flowspec.cli.show import console
from flowspec.client import Client
from flowspec.cluster import READY_SECONDS, Cluster, Places, Setup
from flowspec.core.protocol.addresses import DRAFT, SCHEDULER, Address
from flowspec.errors import BrokerError, ClusterError, ConfigError, FlowSpecError, WireError
from flowspec.model.base import placed
from flowspec.observe import NOTE, note
from flowspec.plan.cluster_file import parse_ranges
from flowspec.transport.base import ENDS, FREE, NEEDS, role_of, roles_of, setup_of

_STOP_SECONDS = 15.0
_GIB = 1 << 30
#: The numbers in a pipeline's record.
_COUNTS = frozenset({"stages", "context", "most_rows", "kept_rows"})


def up(setup: Setup, url: str | None) -> None:
    """Start a supervisor and wait until its pipeline serves."""
    found = running()
    if found is not None:
        raise ClusterError(
            f"a pipeline is up already (process {found.pid}); stop it with `flowspec down`"
        )
    if setup.persist is not None and url:
        raise ConfigError(
            "--persist is for a broker of the pipeline's own; leave it out, and set `appendonly "
            "yes` where the given broker is configured"
        )
    setup.check()
    kept = ["--persist", str(setup.persist.resolve())] if setup.persist is not None else []
    log = state_file().with_suffix(".log")
    surroundings = {
        name: value for name, value in os.environ.items() if name != "FLOWSPEC_REDIS_URL"
    }
    lock = lock_pipeline()
    if lock is None:
        raise ClusterError("a pipeline is being started already; wait until it serves")
    with lock, log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flowspec.cli.service", *setup.arguments, *kept],
            # The URL may contain a password, so it must not be an argument that `ps` shows.
            env=surroundings | ({"FLOWSPEC_REDIS_URL": url} if url else {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(lock.fileno(),),
            start_new_session=True,
        )
    try:
        _wait_until_up(process, log)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    _say_up(setup)


def _wait_until_up(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait, and pass on what the supervisor notes meanwhile, as on memory; else ClusterError."""
    deadline = time.monotonic() + READY_SECONDS + _STOP_SECONDS
    with log.open(encoding="utf-8", errors="replace") as lines:
        while running() is None:
            _pass_on(lines)
            if process.poll() is not None:
                said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise ClusterError(
                    said[-1].removeprefix("flowspec: ") if said else "the supervisor stopped"
                )
            if time.monotonic() > deadline:
                raise ClusterError(f"the pipeline did not serve within {READY_SECONDS:g} s")
            time.sleep(0.1)
        _pass_on(lines)


def _pass_on(lines: Iterable[str]) -> None:
    sys.stderr.writelines(line for line in lines if line.startswith(NOTE))


def _say_up(setup: Setup) -> None:
    found = running()
    assert found is not None
    sys.stderr.write(
        f"serving {setup.target} on {counted(setup.stages, 'stage')}; "
        "`flowspec submit`, `watch`, `status` and `down` find it, other programs by the last line\n"
    )
    parts = urlsplit(found.url)
    if parts.scheme == "unix":
        sys.stderr.write(f"redis-cli: REDISCLI_AUTH='{parts.password}' redis-cli -s {parts.path}\n")
    sys.stdout.write(f"export FLOWSPEC_REDIS_URL='{found.url}'\n")


def down() -> None:
    """Stop the supervisor and wait until it is gone."""
    found = running()
    if found is None:
        raise ClusterError(
            "no pipeline of `flowspec up` runs here; workers that you started yourself end on "
            "SIGTERM"
        )
    os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while found.alive:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"process {found.pid} does not stop; end it with `kill -9 {found.pid}`"
            )
        time.sleep(0.05)
    if running() is None:
        state_file().unlink(missing_ok=True)
    sys.stderr.write("stopped\n")


def status(url: str | None, *, as_json: bool) -> None:
    """Show a pipeline's workers and load."""
    with Client(url_or_running(url)) as client:
        pipeline = client.pipeline()
        workers = client.workers()
        lost = client.lost()
        spares: list[dict[str, Any]] = []
        with contextlib.suppress(BrokerError):  # an older ACL file lets no client list them
            spares = client.spares()
        (running_jobs, waiting) = client.load()
    if as_json:
        shown = {
            "pipeline": _values(pipeline),
            "workers": workers,
            "lost": lost,
            "spares": spares,
            "running": running_jobs,
            "waiting": waiting,
        }
        sys.stdout.write(json.dumps(shown) + "\n")
        return
    if not pipeline and role_of(SCHEDULER) in workers:
        raise ClusterError(
            "the scheduler reads its models, which takes a while with new weights; look again"
        )
    if not pipeline:
        raise ClusterError(
            "no pipeline here: no scheduler has announced one; start it with `flowspec up`, or on "
            "several machines with `python -m workers.scheduler`"
        )
    screen = console()
    most = workers.get("scheduler", {}).get("jobs")
    of = f" of at most {most}" if most else ""
    screen.print(
        f"{pipeline['target']} on {counted(int(pipeline['stages']), 'stage')}; "
        f"{running_jobs} running{of}, {waiting} waiting; "
        f"each stage has room for {pipeline['most_rows']} KV rows, one a token"
    )
    roles = ("scheduler", *roles_of(pipeline))
    screen.print(_workers(roles, workers, lost, spares, setup_of(pipeline)))
    ends = workers.get(role_of(DRAFT), {}).get(ENDS)
    if ends is not None:
        screen.print(f"texts end at {' '.join(ends) or 'their length alone'}", markup=False)
    links = _links(roles, workers)
    if links.row_count:
        screen.print(links)
    if why := notes.why_waiting(pipeline, workers, lost):
        raise ClusterError(why)


def _workers(
    roles: Sequence[str],
    workers: Mapping[str, Mapping[str, Any]],
    lost: Sequence[str],
    spares: Sequence[Mapping[str, Any]],
    setup: str,
) -> Table:
    """A row for each role, and for each spare.

    Columns in which nobody has anything, or more than 0, are left out, and versions if all are one.
    """
    columns: dict[str, list[object]] = {"worker": [*roles]}
    differ = len({info.get("version") for info in (*workers.values(), *spares)}) > 1
    for role in roles:
        info = workers.get(role, {})
        other = role != "scheduler" and info.get("setup") not in (None, setup)
        absent = "lost" if role in lost else "not started"
        cells = {
            "state": "other setup" if other else info.get("state", absent),
            "host": info.get("host"),
            "process": info.get("pid"),
            "version": info.get("version") if differ else None,
            "passes": info.get("passes"),
            "refused": info.get("refused"),
            "KV blocks": _blocks(info),
            "needs": _memory(info),
            "runs on": placed(info),
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    for spare in spares:
        cells = {
            "worker": f"spare of {', '.join(spare['roles'])}",
            "state": "waits",
            "host": spare["host"],
            "process": spare["pid"],
            "version": spare.get("version") if differ else None,
        }
        for name, column in columns.items():
            column.append(cells.get(name))
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(*kept, box=None, pad_edge=False)
    for row in zip(*kept.values(), strict=True):
        table.add_row(*("-" if cell is None else str(cell) for cell in row))
    return table


def _memory(info: Mapping[str, Any]) -> str | None:
    """What a stage needs, and what was free before it loaded; None: it does not say."""
    needs, free = info.get(NEEDS), info.get(FREE)
    return f"{needs / _GIB:.1f} of {free / _GIB:.1f} GiB" if needs and free else None


def _values(record: Mapping[str, str]) -> dict[str, Any]:
    """The pipeline's record with lists, objects and numbers as such, not as their text."""
    return {
        name: json.loads(text) if name in _COUNTS or text.startswith(("[", "{")) else text
        for name, text in record.items()
    }


def _blocks(info: Mapping[str, Any]) -> str | None:
    """Blocks in use of a worker's pool, how many there are, and are shared; None: no pool."""
    found = info.get("kv", {})
    if "blocks" not in found:
        return None
    used = found["blocks"] - found["free"]
    return f"{used} of {found['blocks']}, {found['shared']} shared"


def _links(roles: Sequence[str], workers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Each link on which rows or answers travel: straight or not, and what it costs."""
    table = Table(*("from", "to", "rows go", "latency ms", "Mbit/s", ""), box=None, pad_edge=False)
    for role in roles:
        for to, link in workers.get(role, {}).get("links", {}).items():
            cells = (link.get("way"), link.get("latency_ms"), link.get("mbit"), link.get("reason"))
            table.add_row(
                role, _receiver(to), *("" if cell is None else str(cell) for cell in cells)
            )
    return table


def _receiver(address: str) -> str:
    """The role at ``address``, from another worker's lease; what is no address, as it is."""
    try:
        return role_of(Address.parse(address))
    except WireError:
        return address


def counted(number: int, noun: str) -> str:
    """``number`` with its noun, like ``1 stage`` or ``4 stages``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class _Supervisor:
    """The process behind ``flowspec up``, which has locked the lock file for it."""

    def __init__(self, setup: Setup, url: str | None) -> None:
        self._cluster = Cluster(setup, url=url, say=note)
        self._target = setup.target
        self._stopped = False
        self._serving = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        self._stopped = True
        if not self._serving:
            raise SystemExit(0)

    def run(self) -> None:
        try:
            self._cluster.start()
            note_running(self._cluster.url, self._target)
            self._serving = True
            while not self._stopped and self._cluster.report():
                time.sleep(0.2)
        finally:
            self._cluster.stop()


def _main() -> None:
    parser = argparse.ArgumentParser()
    places = ("--dtype", "--device", "--draft-dtype", "--draft-device")
    for flag in ("--target", "--draft", "--rows", "--kv", *places):
        parser.add_argument(flag)
    for flag in ("--stages", "--jobs"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--middle", action="append", default=[])
    parser.add_argument("--layers", type=parse_ranges)
    for flag in ("--context", "--keep-rows", "--most-rows"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--persist", type=Path)
    given = parser.parse_args()
    setup = Setup(
        given.target,
        given.draft,
        given.stages,
        tuple(given.middle),
        places=Places(given.dtype, given.device, given.draft_dtype, given.draft_device),
        layers=given.layers,
        context=given.context,
        rows=given.rows,
        jobs=given.jobs,
        keep_rows=given.keep_rows,
        most_rows=given.most_rows,
        kv=given.kv,
        persist=given.persist,
    )
    try:
        _Supervisor(setup, os.environ.get("FLOWSPEC_REDIS_URL")).run()
    except FlowSpecError as error:
        sys.stderr.write(f"flowspec: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    _main()
