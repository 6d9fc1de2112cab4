"""How much memory a device of this machine has left for a worker."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_LIMIT = Path("/sys/fs/cgroup/memory.max")
_USED = Path("/sys/fs/cgroup/memory.current")
_SYSTEM = Path("/proc/meminfo")


def available_bytes(device: str = "cpu") -> int:
    """Bytes that are free on ``device``; on the CPU also within the container's limit."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    found = _available()
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        found = min(
            found, int(_LIMIT.read_text(encoding="utf-8")) - int(_USED.read_text(encoding="utf-8"))
        )
    return found


def _available() -> int:
    if _SYSTEM.exists():
        for line in _SYSTEM.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
