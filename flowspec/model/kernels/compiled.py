"""Functions in C, which this machine's compiler makes once, for x86 CPUs with AVX2."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from flowspec.model.kernels.cpu import cpu_flags
from flowspec.model.weights.tensor_files import user_cache

_FOLDER = Path(__file__).parent
_SHARED = _FOLDER / "numbers.h"
#: A compiler is asked for no more than these instructions, so all such machines compute the same.
_NEEDED = {"avx2": "-mavx2", "fma": "-mfma"}
_OPTIONS = (
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-shared", "-fPIC"),
)
_COMPILERS = ("cc", "gcc")
_COMPILE_SECONDS = 60.0


@lru_cache
def compiled(source: str) -> ctypes.CDLL | str:
    """``source``, a file beside this one, from the user's cache after the first time.

    What is missing if it cannot be had.
    """
    if not cpu_flags() >= _NEEDED.keys():
        return "this CPU has no AVX2 instructions"
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return "there is no C compiler: install gcc"
    file = _FOLDER / source
    command = [compiler, *_NEEDED.values(), *_OPTIONS]
    whole = "\0".join(command).encode() + _SHARED.read_bytes() + file.read_bytes()
    key = hashlib.sha256(whole).hexdigest()[:16]
    try:
        made = user_cache() / "kernels" / f"{file.stem}-{key}.so"
        if not made.is_file():
            made.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=made.parent) as folder:
                partial = Path(folder) / made.name
                _compile([*command, str(file), "-o", str(partial), "-lm"])
                partial.rename(made)
        return ctypes.CDLL(str(made))
    except subprocess.SubprocessError as error:
        return f"{compiler} cannot compile {source}: {error}"
    except OSError as error:
        return f"the compiled {source} cannot be kept or read: {error.strerror or error}"


def _compile(command: list[str]) -> None:
    """Run ``command``; SubprocessError with its first error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise subprocess.SubprocessError((errors or ["no error was said"])[0].strip())
