"""Functions in C, which this machine's compiler makes once, for x86 CPUs with AVX2."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import torch

from flowspec.model.kernels.cpu import cpu_flags
from flowspec.model.weights.tensor_files import user_cache
from flowspec.observe import note

#: Types of rows that the sources take.
ROWS = (torch.float32, torch.bfloat16)
_FOLDER = Path(__file__).parent
_SOURCES = ("integer.c", "attention.c", "layers.c")
_SHARED = "numbers.h"
_NEEDED = {"avx2": "-mavx2", "fma": "-mfma", "f16c": "-mf16c"}
#: Where these are too, sums of integers take fewer instructions. They are exact, and floating-point
#: numbers are computed in the order of the source, so all machines compute the same.
_FASTER = {"avx512_vnni": "-mavx512vnni", "avx512bw": "-mavx512bw", "avx512vl": "-mavx512vl"}
_OPTIONS = (
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-shared", "-fPIC", "-Wl,-Bsymbolic"),
)
#: The first that there is: torch's threads are those of gcc's OpenMP.
_COMPILERS = ("gcc", "cc")
_COMPILE_SECONDS = 60.0
#: Code that others might have written is not run.
_MODE = 0o700
_OTHERS_WRITE = 0o022


@lru_cache
def compiled() -> ctypes.CDLL | str:
    """The sources beside this file as a library, from the user's cache after the first time.

    What is missing if it cannot be had.
    """
    if not cpu_flags() >= _NEEDED.keys():
        return "this is no x86 CPU with AVX2, FMA and F16C instructions"
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return "there is no C compiler: install gcc"
    command = [compiler, *_NEEDED.values(), *_OPTIONS]
    try:
        if cpu_flags() >= _FASTER.keys():
            with contextlib.suppress(subprocess.SubprocessError):  # an old compiler lacks them
                return _loaded([*command, *_FASTER.values()])
        return _loaded(command)
    except subprocess.SubprocessError as error:
        return f"{compiler} cannot compile the kernels: {error}"
    except OSError as error:
        return f"the compiled kernels cannot be kept or read: {error.strerror or error}"


def _loaded(command: list[str]) -> ctypes.CDLL:
    made = _made(command)
    try:
        return ctypes.CDLL(str(made))
    except OSError:  # cut short as the machine stopped
        made.unlink(missing_ok=True)
        return ctypes.CDLL(str(_made(command)))


def _made(command: list[str]) -> Path:
    """The library by ``command``; one process compiles it, the others wait."""
    texts = [(_FOLDER / name).read_bytes() for name in (_SHARED, *_SOURCES)]
    parts = [*command, *platform.libc_ver()]
    key = hashlib.sha256(b"\0".join([*map(str.encode, parts), *texts])).hexdigest()[:16]
    folder = user_cache() / "kernels"
    folder.mkdir(mode=_MODE, parents=True, exist_ok=True)
    made = folder / f"{key}.so"
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file():
            partial = made.with_suffix(".partial")
            sources = [str(_FOLDER / source) for source in _SOURCES]
            note(f"compiling the kernels into {folder}")
            _compile([*command, *sources, "-o", str(partial), "-lm"])
            partial.chmod(_MODE)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.rename(made)
    for path in (folder, made):
        about = path.stat()
        if about.st_uid != os.geteuid() or about.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"{path} can be written by other users; delete it")
    return made


def _compile(command: list[str]) -> None:
    """Run ``command``; SubprocessError with its first error."""
    done = subprocess.run(
        command,
        capture_output=True,
        timeout=_COMPILE_SECONDS,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines() or ["it said nothing"]
        said = next((line for line in lines if "error" in line), lines[-1])
        raise subprocess.SubprocessError(said.strip())
