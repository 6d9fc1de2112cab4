"""GPUs: whether torch can use one, its memory, and the precisions it is fast in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowspec.doctor.finding import Finding, error, ok, size, warning
from flowspec.doctor.imports import Accelerator, Imported
from flowspec.model.weights.precision import AUTO, PRECISIONS

SUBJECT = "gpu"
#: The first instruction set with bfloat16.
_WITH_BFLOAT16 = (8, 0)
_DRIVER = Path("/proc/driver/nvidia/version")
_INSTALL = (
    "install torch built for the driver's CUDA version: see pytorch.org/get-started, "
    "and the driver's version in `nvidia-smi`"
)


@dataclass(frozen=True, slots=True)
class GraphicsFacts:
    """``driver``: version of the NVIDIA driver, empty if none is loaded.

    ``hidden``: the value of CUDA_VISIBLE_DEVICES if it is set, which may hide every GPU.
    """

    driver: str
    hidden: str | None
    build: str
    devices: tuple[Accelerator, ...]


def gather(imported: Imported) -> GraphicsFacts:
    try:
        match = re.search(r"\d+(?:\.\d+)+", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        match = None
    return GraphicsFacts(
        match[0] if match else "",
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        imported.torch_build,
        imported.accelerators,
    )


def check(graphics: GraphicsFacts, dtype: str, device: str) -> Iterator[Finding]:
    """``device``: an error is due only if a GPU was asked for."""
    for number, found in enumerate(graphics.devices):
        driver = f", driver {graphics.driver}" if graphics.driver else ""
        yield ok(
            SUBJECT,
            f"{number}: {found.name}, {size(found.free)} of {size(found.total)} free, "
            f"torch for {graphics.build}{driver}",
        )
    if device.startswith("cuda"):
        yield from _asked(graphics, dtype, device)
    elif graphics.driver and not graphics.devices:
        reason, remedy = _why_unused(graphics)
        yield warning(SUBJECT, f"there is a GPU, but {reason}", remedy)
    elif not graphics.devices:
        yield ok(SUBJECT, "none; passes run on the processor")


def _asked(graphics: GraphicsFacts, dtype: str, device: str) -> Iterator[Finding]:
    number = int(device.partition(":")[2] or 0)
    if not graphics.devices:
        reason, remedy = _why_unused(graphics)
        yield error(SUBJECT, f"--device is {device}, but {reason}", remedy)
    elif number >= len(graphics.devices):
        yield error(
            SUBJECT,
            f"--device is {device}, and torch sees {len(graphics.devices)} GPU",
            f"give cuda:0 to cuda:{len(graphics.devices) - 1}",
        )
    elif _emulates(graphics.devices[number], dtype):
        yield warning(
            SUBJECT,
            f"{graphics.devices[number].name} emulates bfloat16, which {dtype} computes in",
            "choose --dtype float16 or float32",
        )


def _emulates(device: Accelerator, dtype: str) -> bool:
    old = device.capability < _WITH_BFLOAT16
    return old and dtype != AUTO and PRECISIONS[dtype].rows == "bfloat16"


def _why_unused(graphics: GraphicsFacts) -> tuple[str, str]:
    """The reason, and what to do."""
    if not graphics.build:
        return "torch is not installed, or cannot be imported", _INSTALL
    if graphics.build == "cpu":
        return "torch is built without CUDA", _INSTALL
    if not graphics.driver:
        return (
            "no NVIDIA driver is loaded",
            "install the driver; in a container, start it with the GPUs (--gpus all)",
        )
    if graphics.hidden is not None and graphics.hidden.strip() in ("", "-1"):
        return (
            "CUDA_VISIBLE_DEVICES hides it",
            "unset CUDA_VISIBLE_DEVICES, or set it to the GPU's number",
        )
    return f"torch for {graphics.build} cannot use it with driver {graphics.driver}", _INSTALL
