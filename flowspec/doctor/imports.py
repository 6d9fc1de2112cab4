"""Imports packages in a process of its own: a broken one may crash the interpreter, or hang.

``python -m flowspec.doctor.imports MODULE...`` writes one JSON line when it begins with a module,
one when it has imported it, and one about torch at the end.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: How long all imports together may take, seconds: a cold disk takes most of a minute.
IMPORT_SECONDS = 120.0
#: What packages of wrong versions raise; any other error ends the process, which is seen too.
_BROKEN = (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError, LookupError)


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device that torch can use; memory in bytes, ``capability`` of its instruction set."""

    name: str
    total: int
    free: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Imported:
    """``broken``: why a module cannot be imported, by module.

    ``torch_build``: what torch was built for, like ``cuda 12.8`` or ``cpu``; empty if unknown.
    """

    broken: dict[str, str]
    torch_build: str = ""
    torch_threads: int = 0
    accelerators: tuple[Accelerator, ...] = ()


def try_imports(modules: Sequence[str], *, seconds: float = IMPORT_SECONDS) -> Imported:
    """Import ``modules`` in another process; at most ``seconds``."""
    command = [sys.executable, "-m", "flowspec.doctor.imports", *modules]
    # Some packages fetch code from a hub when they are imported.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as late:
        said = (
            late.stdout.decode(errors="replace")
            if isinstance(late.stdout, bytes)
            else late.stdout or ""
        )
        return read(said, f"its import did not end within {seconds:.0f} s")
    except OSError as failed:
        return Imported(dict.fromkeys(modules, f"no process could be started: {failed}"))
    reason = f"its import ended the process with status {done.returncode}"
    return read(done.stdout, reason if done.returncode else "")


def read(said: str, ended_by: str) -> Imported:
    """What the other process wrote; ``ended_by``: why it ended early, empty if it did not."""
    broken: dict[str, str] = {}
    about: dict[str, Any] = {}
    begun = ""
    for line in said.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # a package's own output
        match entry:
            case {"begun": str(module)}:
                begun = module
            case {"module": str(module), "broken": str(reason)}:
                begun = ""
                if reason:
                    broken[module] = reason
            case {"torch": dict(found)}:
                about = found
    if ended_by and begun:
        broken[begun] = ended_by
    devices = tuple(
        Accelerator(str(name), int(total), int(free), (int(major), int(minor)))
        for name, total, free, (major, minor) in about.get("devices", ())
    )
    return Imported(broken, str(about.get("build", "")), int(about.get("threads", 0)), devices)


def main(modules: Sequence[str]) -> None:
    """Import ``modules`` in order, and write a line on each; then one on torch if it is there."""
    broken = {module: _why_broken(module) for module in modules}
    if broken.get("torch") == "":
        _write({"begun": "torch"})
        _write({"torch": _about_torch()})


def _why_broken(module: str) -> str:
    _write({"begun": module})
    reason = ""
    try:
        importlib.import_module(module)
    except _BROKEN as failed:
        lines = str(failed).splitlines()
        reason = f"{type(failed).__name__}: {lines[0] if lines else 'no reason given'}"
    _write({"module": module, "broken": reason})
    return reason


def _about_torch() -> dict[str, object]:
    import torch

    build = "cpu"
    if torch.version.cuda:
        build = f"cuda {torch.version.cuda}"
    elif torch.version.hip:
        build = f"rocm {torch.version.hip}"
    devices = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            name = torch.cuda.get_device_name(number)
            devices.append([name, total, free, torch.cuda.get_device_capability(number)])
    return {"build": build, "threads": torch.get_num_threads(), "devices": devices}


def _write(entry: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(entry) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
