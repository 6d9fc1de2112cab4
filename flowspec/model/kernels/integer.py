"""4-bit and 8-bit products in C, for CPUs with AVX2; this machine's compiler makes them, once.

torch's products for these precisions read a CPU without AVX-512 at a third of its memory's speed.
A row's sums are integers, and exact, within a block of 32 inputs: ``integer.c``.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from flowspec.model.kernels.base import Packed
from flowspec.model.kernels.cpu import cpu_flags
from flowspec.model.weights.quantise import Weight, unpacked
from flowspec.model.weights.tensor_files import user_cache

_SOURCE = Path(__file__).with_suffix(".c")
#: A compiler is asked for no more than these instructions, so all such machines compute the same.
_NEEDED = {"avx2": "-mavx2", "fma": "-mfma"}
_OPTIONS = (
    *("-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-shared", "-fPIC"),
)
_COMPILERS = ("cc", "gcc")
_COMPILE_SECONDS = 60.0
#: Inputs that the products read at once, by bits.
_TOGETHER = {4: 64, 8: 32}
#: Weights repacked at a time; bounds the memory of the intermediate forms.
_SLICE = 1 << 20


class Integer:
    """Codes of ``bits`` by rows of 16 bits, with a scale each."""

    device = "cpu"

    def __init__(self, bits: int) -> None:
        self.name = f"cc-w{bits}a16"
        self.precisions = (f"int{bits}",)
        self._bits = bits

    def missing(self) -> str:
        if not cpu_flags() >= _NEEDED.keys():
            return "this CPU has no AVX2 instructions"
        found = _library()
        return found if isinstance(found, str) else ""

    def takes(self, outputs: int, inputs: int) -> bool:
        return inputs % _TOGETHER[self._bits] == 0

    def pack(self, weight: Weight, rows: torch.dtype, device: torch.device) -> Packed:
        library = _library()
        assert weight.scales is not None and not isinstance(library, str)
        codes = weight.codes if self._bits == 8 else _in_words(weight.codes)
        scales = weight.scales.contiguous()
        outputs, inputs = weight.shape

        def multiply(given: torch.Tensor) -> torch.Tensor:
            kept = given.contiguous()
            products = kept.new_empty((kept.shape[0], outputs))
            if library.multiply(
                *(self._bits, codes.data_ptr(), scales.data_ptr(), outputs, inputs),
                *(kept.data_ptr(), kept.shape[0], kept.dtype == torch.bfloat16),
                *(products.data_ptr(), torch.get_num_threads()),
            ):
                raise MemoryError(f"no memory for a product of {kept.shape[0]} rows")
            return products

        return Packed(multiply, codes.nbytes + scales.nbytes)


def _in_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes of four bits in words of 16 bits: four inputs that are 16 apart, the first lowest."""
    words = torch.empty((codes.shape[0], codes.shape[1] // 2), dtype=torch.int16)
    step = max(1, _SLICE // (2 * codes.shape[1]))
    for at in range(0, codes.shape[0], step):
        part = unpacked(codes[at : at + step]).short()
        first, second, third, fourth = part.view(len(part), -1, 4, 16).unbind(-2)
        words[at : at + step] = (first | second << 4 | third << 8 | fourth << 12).flatten(-2)
    return words


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | str:
    """The compiled source, from the user's cache after the first time; or why there is none."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return "there is no C compiler: install gcc"
    command = [compiler, *_NEEDED.values(), *_OPTIONS]
    key = hashlib.sha256("\0".join(command).encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    try:
        made = user_cache() / "kernels" / f"{_SOURCE.stem}-{key}.so"
        if not made.is_file():
            made.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=made.parent) as folder:
                partial = Path(folder) / made.name
                _compile([*command, str(_SOURCE), "-o", str(partial), "-lm"])
                partial.rename(made)
        library = ctypes.CDLL(str(made))
    except subprocess.SubprocessError as error:
        return f"{compiler} cannot compile {_SOURCE.name}: {error}"
    except OSError as error:
        return f"the compiled {_SOURCE.name} cannot be kept or read: {error.strerror or error}"
    size, address, number = ctypes.c_long, ctypes.c_void_p, ctypes.c_int
    library.multiply.argtypes = [
        *(number, address, address, size, size),
        *(address, size, number, address, number),
    ]
    return library


def _compile(command: list[str]) -> None:
    """Run ``command``; SubprocessError with its first error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise subprocess.SubprocessError((errors or ["no error was said"])[0].strip())
