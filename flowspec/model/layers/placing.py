"""Where a block of layers computes, and in which precision: the choice behind --dtype, --device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from flowspec.errors import ConfigError
from flowspec.model.kernels import kernels_for, served
from flowspec.model.kernels.cpu import cpu_flags
from flowspec.model.weights.precision import (
    AUTO,
    PRECISIONS,
    check_built_for,
    check_device,
    check_dtype,
    declared,
)

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
#: The LM head keeps eight bits where the layers have four: its errors would go into the text. In
#: blocks, if they are served, it holds the values of a GGUF file in Q8_0.
_HEAD_OF_QUANTISED, _OTHERWISE = "int8-block", "int8"
#: A head's pass takes a sixth of its time in float32.
_OF_DRAFTERS = "int8-block"


@dataclass(frozen=True)
class Placing:
    """``precision`` of the layers' weights, and ``device``."""

    precision: str = "float32"
    device: torch.device = torch.device("cpu")

    @property
    def rows(self) -> torch.dtype:
        """The type that rows are computed in, and that keys and values have."""
        return _TYPES[PRECISIONS[self.precision].rows_on(self.device.type)]

    @cached_property
    def head(self) -> str:
        """The precision of the LM head."""
        if not PRECISIONS[self.precision].quantised:
            return self.precision
        if self.device.type != "cpu":
            return "bfloat16"
        return _HEAD_OF_QUANTISED if served(_HEAD_OF_QUANTISED, "cpu") else _OTHERWISE

    @cached_property
    def head_rows(self) -> torch.dtype:
        """The type of rows into the LM head, and of logits."""
        return torch.float32 if PRECISIONS[self.head].quantised else self.rows


def place(dtype: str, device: str, config: Mapping[str, Any]) -> Placing:
    """The placing for ``--dtype`` and ``--device`` of a model with ``config``.

    ConfigError if there is no such device, or the precision does not run on it.
    """
    found = choose_device(device)
    precision = choose_precision(dtype, found.type, config)
    kernels_for(precision, found.type)
    return Placing(precision, found)


def place_drafter(
    dtype: str, device: str, own: Mapping[str, Any], beside: Mapping[str, Any]
) -> Placing:
    """The placing for ``--draft-dtype`` and ``--draft-device``; errors as ``place``'s.

    ``auto`` is eight bits on a CPU where their product is compiled, unless the drafter's ``own``
    config declares a quantised precision: its rounding leaves the text as it is. Otherwise what
    ``beside`` declares, the config of the model whose rows it reads.
    """
    declares = PRECISIONS.get(declared(own))
    is_free = dtype == AUTO and not (declares is not None and declares.quantised)
    if is_free and served(_OF_DRAFTERS, choose_device(device).type):
        dtype = _OF_DRAFTERS
    return place(dtype, device, beside)


def choose_device(name: str) -> torch.device:
    """The device ``name``; ``auto`` is the first CUDA device, else MPS, else the CPU."""
    if check_device(name) == AUTO:
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    check_built_for(name)
    kind, _, number = name.partition(":")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} is not here: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device {name} is not here; use --device cpu")
    return torch.device(kind, int(number or 0)) if kind == "cuda" else torch.device(kind)


def choose_precision(dtype: str, device: str, config: Mapping[str, Any]) -> str:
    """The precision for ``--dtype`` on a device of type ``device``.

    ``auto`` is what the config declares; bfloat16 where there is no kernel for a quantised one, and
    float32 on a CPU that has no instructions for bfloat16.
    """
    if check_dtype(dtype) != AUTO:
        return dtype
    stored = declared(config)
    if stored in PRECISIONS and PRECISIONS[stored].quantised:
        if served(stored, device):
            return stored
        stored = "bfloat16"
    if stored not in _TYPES:
        return "float32"
    if stored == "bfloat16" and device == "cpu" and not cpu_flags() & _BFLOAT16_FLAGS:
        return "float32"
    return stored
