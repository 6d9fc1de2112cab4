"""The precisions of a stage's weights and rows, by name, and the bytes they take. Needs no torch.

*Weights* are those of the linear layers; norms, the embedding and biases stay in the rows' type.
*Rows* are what a pass computes in, what travels between stages and what the KV cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from flowspec.errors import ConfigError

#: Chooses the checkpoint's own precision, if this device computes in it well.
AUTO = "auto"
#: Weights of nf4 and fp4 that share a scale, along a row of the matrix.
FOUR_BIT_BLOCK = 64

#: What inputs of a matrix with blocks are multiples of, and outputs of one in four bits: the
#: longest block, and the rows that bitsandbytes packs together.
_EVEN_INPUTS = FOUR_BIT_BLOCK
_EVEN_OUTPUTS = 32


@dataclass(frozen=True, slots=True)
class Precision:
    """``bits`` a weight, and a scale of ``scale_bits`` for every ``block`` of them.

    ``block`` 0: one scale for a row of the matrix, or none. ``rows``: the element type of rows.
    ``table``: that of the 4-bit values, ``nf4`` or ``fp4``. ``double``: scales are stored in eight
    bits, with a scale of their own for each row of the matrix; ``scale_bits`` is what a CPU's
    kernel, which takes none in eight bits, holds in memory.
    """

    name: str
    bits: int
    rows: str
    scale_bits: int = 0
    block: int = 0
    table: str = ""
    double: bool = False

    @property
    def quantised(self) -> bool:
        """Whether weights are integers or codes with scales."""
        return self.bits < 16

    def weight_bytes(self, shape: Sequence[int]) -> int:
        """Bytes in memory of a linear layer's weights of ``shape``, ``[..., outputs, inputs]``."""
        held = self.for_matrix(shape)
        scales = math.prod(shape[:-1]) * (shape[-1] // held.block if held.block else 1)
        return math.prod(shape) * held.bits // 8 + scales * held.scale_bits // 8

    def for_matrix(self, shape: Sequence[int]) -> Precision:
        """The precision that a matrix ``[..., outputs, inputs]`` is held in.

        One whose blocks or groups of rows do not come out even is in eight bits, with a scale a
        row.
        """
        outputs, inputs = shape[-2:]
        even = inputs % _EVEN_INPUTS == 0 and (self.bits > 4 or outputs % _EVEN_OUTPUTS == 0)
        return self if even or not self.block else PRECISIONS["int8"]

    def rows_on(self, device: str) -> str:
        """The element type of rows on a device of type ``device``.

        The CPU's kernel for float16 weights computes in float32.
        """
        return "float32" if (self.rows, device) == ("float16", "cpu") else self.rows

    def row_bytes(self, device: str) -> int:
        """Bytes of one value of a row, and of one of a key or a value in the KV cache."""
        return 4 if self.rows_on(device) == "float32" else 2


def _four_bit(table: str, *, double: bool = False) -> Precision:
    name = f"{table}-double" if double else table
    return Precision(name, 4, "bfloat16", 16, FOUR_BIT_BLOCK, table, double)


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", 32, "float32"),
        Precision("bfloat16", 16, "bfloat16"),
        Precision("float16", 16, "float16"),
        Precision("int8", 8, "bfloat16", scale_bits=32),
        Precision("int8-block", 8, "bfloat16", scale_bits=32, block=32),
        _four_bit("nf4"),
        _four_bit("fp4"),
        _four_bit("nf4", double=True),
        _four_bit("fp4", double=True),
        Precision("int4", 4, "bfloat16", scale_bits=32, block=32),
    )
}
#: What ``--dtype`` takes.
DTYPES = (AUTO, *PRECISIONS)


#: Kinds of devices.
DEVICES = ("cpu", "cuda", "mps")


#: Where the config of a GGUF file says which precision is for its layers, and which keeps their
#: codes.
OWN = "flowspec_precision"
KEPT = "flowspec_keeps"


def declared(config: Mapping[str, Any]) -> str:
    """The precision that a checkpoint has, by its ``config``; empty: it does not say."""
    return str(config.get(OWN) or config.get("dtype") or config.get("torch_dtype") or "")


def check_device(name: str) -> str:
    """``name`` if it has the form of a device; ConfigError otherwise."""
    kind, colon, number = name.partition(":")
    numbered = kind == "cuda" and number.isascii() and number.isdigit()
    if name != AUTO and (kind not in DEVICES or (bool(colon) and not numbered)):
        raise ConfigError(f"{name!r} is unknown; expected auto, cpu, cuda, cuda:N or mps", "device")
    return name


def check_built_for(name: str) -> None:
    """ConfigError if the installed torch is built without the device ``name``; imports no torch."""
    if name.startswith("cuda") and (torch := version("torch")).endswith("+cpu"):
        raise ConfigError(
            f"device {name} is not here: torch {torch} is built without CUDA; use --device cpu, "
            "or install a CUDA build of torch"
        )


def by_stage(text: str, stages: int, check: Callable[[str], str]) -> str:
    """``text`` if it is one name that ``check`` accepts, or one for each of ``stages``, by spaces.

    ConfigError otherwise.
    """
    names = [check(name) for name in text.split()]
    if len(names) not in (1, stages):
        raise ConfigError(f"{text!r} names {len(names)} of {stages} stages; expected one, or all")
    return " ".join(names)


def of_stage(text: str, stage: int) -> str:
    """The name for ``stage``, from 1, in what ``by_stage`` returned."""
    names = text.split()
    return names[0] if len(names) == 1 else names[stage - 1]


def of_all(text: str) -> str:
    """The name that every stage has in what ``by_stage`` returned; ``auto`` if they differ."""
    names = set(text.split())
    return names.pop() if len(names) == 1 else AUTO


def check_dtype(name: str) -> str:
    """``name`` if it is one of ``DTYPES``; ConfigError otherwise."""
    if name not in DTYPES:
        raise ConfigError(f"{name!r} is unknown; expected one of {', '.join(DTYPES)}", "dtype")
    return name
