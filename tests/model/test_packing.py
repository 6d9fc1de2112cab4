"""Weights packed in pieces and slices give the products, bit for bit, of weights packed at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flowspec.model.kernels import KERNELS
from flowspec.model.kernels import four_bit as four_bit_kernels
from flowspec.model.kernels.base import Kernel
from flowspec.model.layers.packing import pack
from flowspec.model.weights.precision import PRECISIONS
from flowspec.model.weights.quantise import Weight, quantise
from tests.precisions import FOUR_BITS, SERVED

CPU = torch.device("cpu")
CASES = [
    pytest.param(kernel, precision, id=f"{kernel.name}-{precision}")
    for kernel in KERNELS
    if kernel.device == "cpu"
    for precision in kernel.precisions
]
#: Peak over the size of the packed weights, MiB: what else a first load brings, such as oneDNN's
#: tables, and one slice in all its forms.
ELSE_MIB = 24
LOADING = """
import sys
from flowspec.model.kernels.four_bit import bitsandbytes
from flowspec.model.layers.block import LayerBlock
from flowspec.model.weights.directory import open_directory
from flowspec.model.layers.placing import Placing
from transformers.models.llama import modeling_llama

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024

bitsandbytes()
before = peak()
directory = open_directory(sys.argv[1])
placing = Placing(sys.argv[2])
block = LayerBlock(directory, range(2), first=True, last=True, placing=placing)
print(peak() - before, block.nbytes / 2**20)
"""


def products(kernel: Kernel, precision: str, shape: tuple[int, int], piece: int) -> list[bytes]:
    """The bytes of products with 1, 2 and 16 rows."""
    source = torch.Generator().manual_seed(shape[0])
    values = torch.randn(shape, generator=source)

    def read(rows: range) -> Weight:
        return quantise([values[rows.start : rows.stop]], (len(rows), shape[1]), precision)

    row_type = getattr(torch, PRECISIONS[precision].rows_on("cpu"))
    packed = pack(read, shape, kernel, row_type, CPU, piece)
    rows = torch.randn((16, shape[1]), generator=source).to(row_type)
    return [packed.multiply(rows[:count]).float().numpy().tobytes() for count in (1, 2, 16)]


@pytest.mark.parametrize("shape", [(576, 256), (608, 1024)])
@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_pieces_give_the_same_bits(kernel: Kernel, precision: str, shape: tuple[int, int]) -> None:
    if kernel.missing():
        pytest.skip(kernel.missing())
    whole = products(kernel, precision, shape, shape[0] * shape[1])
    assert products(kernel, precision, shape, 100 * shape[1]) == whole
    assert products(kernel, precision, shape, 1) == whole


@pytest.mark.parametrize(("kernel", "precision"), CASES)
def test_slices_give_the_same_bits(
    kernel: Kernel, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel.missing():
        pytest.skip(kernel.missing())
    whole = products(kernel, precision, (608, 256), 1 << 30)
    monkeypatch.setattr(four_bit_kernels, "_SLICE", 1 << 14)
    assert products(kernel, precision, (608, 256), 1 << 30) == whole


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two wide layers and a head, 225 MB in bfloat16."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.heavy
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
@pytest.mark.parametrize(
    "precision",
    [
        FOUR_BITS,
        *(pytest.param(name, marks=pytest.mark.heavy) for name in SERVED if name != FOUR_BITS),
    ],
)
def test_peak_memory_is_the_final_size_and_a_fifth(wide: Path, precision: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(wide), precision],
        capture_output=True,
        text=True,
        check=True,
        env={name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    peak, final = map(float, done.stdout.split())
    print(f"{precision}: peak {peak:.0f} MiB, weights {final:.0f} MiB")
    assert peak <= 1.2 * final + ELSE_MIB
