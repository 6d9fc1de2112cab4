"""Memory, cores, threads, disk and clock of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flowspec.doctor.finding import Finding, note, ok, size, warning
from flowspec.model.weights.directory import expanded

SUBJECT = "machine"
#: Longest wait for the system to say whether its clock is set by a time server, seconds.
CLOCK_SECONDS = 2.0
_GIB = 1 << 30
#: Below this, even a small model pushes others out of memory, bytes.
_LITTLE_MEMORY = _GIB
#: Below this, a download of a model of one billion weights fails, bytes.
_LITTLE_DISK = 5 * _GIB
#: Swapped out data that is more than leftovers of idle programs, bytes.
_MUCH_SWAP = _GIB // 4
#: cgroup v1 writes a number near 2 ** 63 for no limit.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Bytes, and cores as numbers of them; None: it cannot be told, or there is no such limit.

    ``quota``: processor time that the container may use, in cores. ``threads``: the value of
    OMP_NUM_THREADS. ``clock_set``: whether a time server sets the clock.
    """

    memory: int | None
    available: int | None
    limit: int | None
    swap_used: int
    cores: int
    allowed_cores: int
    quota: float | None
    load: float
    threads: str | None
    cache: Path
    cache_free: int | None
    clock_step: float
    clock_set: bool | None

    @property
    def usable_cores(self) -> int:
        """Cores that this process gets at a time, at least one."""
        return max(1, int(min(self.allowed_cores, self.quota or self.allowed_cores)))


def gather() -> MachineFacts:
    """What the system says; at most ``CLOCK_SECONDS``."""
    lines = _numbers(_text(Path("/proc/meminfo")))
    limit, used = _memory_limit()
    available = lines.get("MemAvailable")
    if limit is not None and available is not None:
        available = max(0, min(available, limit - used))
    cache = hub_cache(os.environ)
    return MachineFacts(
        memory=lines.get("MemTotal"),
        available=available,
        limit=limit,
        swap_used=lines.get("SwapTotal", 0) - lines.get("SwapFree", 0),
        cores=os.cpu_count() or 1,
        allowed_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        quota=_quota(),
        load=os.getloadavg()[0],
        threads=os.environ.get("OMP_NUM_THREADS"),
        cache=cache,
        cache_free=_free(cache),
        clock_step=time.get_clock_info("monotonic").resolution,
        clock_set=_clock_set(),
    )


def hub_cache(environment: Mapping[str, str]) -> Path:
    """The folder in which models of the hub are kept."""
    if environment.get("HF_HUB_CACHE"):
        return expanded(environment["HF_HUB_CACHE"])
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{base}/huggingface"
    return expanded(home) / "hub"


def _numbers(meminfo: str) -> dict[str, int]:
    """Bytes by name, from the text of /proc/meminfo, which counts in KiB."""
    found = {}
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if value.strip().endswith("kB"):
            found[name] = int(value.split()[0]) * 1024
    return found


def _memory_limit() -> tuple[int | None, int]:
    """The smallest memory limit of the control groups that this process is in, and its use."""
    found: tuple[int | None, int] = (None, 0)
    for group in _groups("memory"):
        for most, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(_text(group / most))
            if limit is not None and limit < min(found[0] or _NO_LIMIT, _NO_LIMIT):
                held = _number(_text(group / used)) or 0
                found = limit, max(0, held - _reclaimable(group))
    return found


def _reclaimable(group: Path) -> int:
    """Bytes of a group's use that only cache files."""
    stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _quota() -> float | None:
    quotas = []
    for group in _groups("cpu"):
        words = _text(group / "cpu.max").split() or [
            _text(group / "cpu.cfs_quota_us").strip(),
            _text(group / "cpu.cfs_period_us").strip(),
        ]
        most, period = _number(words[0]), _number(words[1])
        if most is not None and period and most > 0:
            quotas.append(most / period)
    return min(quotas, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control groups and those above them, both versions' layouts."""
    root = Path("/sys/fs/cgroup")
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        inner = top / name.lstrip("/")
        yield inner
        yield from (above for above in inner.parents if above.is_relative_to(top))


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _free(folder: Path) -> int | None:
    """Free bytes where ``folder`` is, or would be made."""
    try:
        existing = next((each for each in (folder, *folder.parents) if each.exists()), None)
        return shutil.disk_usage(existing).free if existing is not None else None
    except OSError:
        return None


def _clock_set() -> bool | None:
    command = ["timedatectl", "show", "-p", "NTPSynchronized", "--value"]
    try:
        said = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=CLOCK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"yes": True, "no": False}.get(said.stdout.strip())


def check(machine: MachineFacts) -> Iterator[Finding]:
    yield from _memory(machine)
    yield from _cores(machine)
    yield from _threads(machine)
    yield from _disk(machine)
    yield from _clock(machine)


def _memory(machine: MachineFacts) -> Iterator[Finding]:
    if machine.memory is None or machine.available is None:
        yield note(
            SUBJECT,
            "how much memory is free cannot be told on this system",
            "compare the sizes of the models with its memory yourself",
        )
        return
    limited = machine.limit is not None and machine.limit < machine.memory
    whole = f"{size(machine.limit or 0)} allowed by the container, " if limited else ""
    found = f"memory: {whole}{size(machine.memory)} in the machine, {size(machine.available)} free"
    if machine.available < _LITTLE_MEMORY:
        yield warning(
            SUBJECT,
            found,
            "raise the container's memory limit" if limited else "end other programs",
        )
    else:
        yield ok(SUBJECT, found)
    if machine.swap_used > _MUCH_SWAP:
        yield warning(
            SUBJECT,
            f"{size(machine.swap_used)} are swapped out; a pass that needs them waits for the disk",
            "end other programs, use fewer layers on this machine, or a smaller --dtype",
        )


def _cores(machine: MachineFacts) -> Iterator[Finding]:
    usable = machine.usable_cores
    if usable < machine.cores:
        yield note(
            SUBJECT,
            f"{usable} of {machine.cores} cores may be used here",
            "raise the container's processor limit or the process's affinity if more should be",
        )
    else:
        yield ok(SUBJECT, f"{machine.cores} cores")
    if machine.load > machine.cores:
        yield warning(
            SUBJECT,
            f"{machine.load:.1f} programs compete for {machine.cores} cores",
            "end other programs; while they run, every pass takes longer",
        )


def _threads(machine: MachineFacts) -> Iterator[Finding]:
    given, usable = machine.threads, machine.usable_cores
    if given is None:
        if usable > 1:
            yield note(
                SUBJECT,
                f"OMP_NUM_THREADS is not set: each worker computes on 1 of {usable} cores",
                f"where one worker has the machine alone, set OMP_NUM_THREADS={usable} for it",
            )
        return
    count = _number(given)
    if count is None or count < 1:
        yield warning(
            SUBJECT,
            f"OMP_NUM_THREADS is {given!r}, which is no number of threads",
            f"set it to 1, or to {usable} where one worker has the machine alone",
        )
    elif count > usable:
        yield warning(
            SUBJECT,
            f"OMP_NUM_THREADS is {count}, and {usable} cores may be used: threads would take turns",
            f"set it to {usable} or less",
        )
    else:
        yield ok(SUBJECT, f"OMP_NUM_THREADS is {count}: each worker has as many threads")


def _disk(machine: MachineFacts) -> Iterator[Finding]:
    if machine.cache_free is None:
        return
    found = f"{size(machine.cache_free)} free for models of the hub, in {machine.cache}"
    if machine.cache_free < _LITTLE_DISK:
        yield warning(SUBJECT, found, "free some, or set HF_HOME to a folder on a larger disk")
    else:
        yield ok(SUBJECT, found)


def _clock(machine: MachineFacts) -> Iterator[Finding]:
    if machine.clock_step > 0.001:
        yield warning(
            SUBJECT,
            f"the clock advances in steps of {machine.clock_step * 1000:.0f} ms: "
            "passes are timed that coarsely",
            "choose a finer clock source for the kernel or the virtual machine",
        )
    if machine.clock_set is False:
        yield note(
            SUBJECT,
            "no time server sets the clock; texts do not depend on it, but times in the logs of "
            "several machines do",
            "run `timedatectl set-ntp true`",
        )
    elif machine.clock_set:
        yield ok(SUBJECT, "a time server sets the clock")
