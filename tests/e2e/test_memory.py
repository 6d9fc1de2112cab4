"""A verify worker's memory: its shard, an interpreter and a small rest; a GGUF file's load."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.model.layers.block import tensor_prefixes
from flowspec.model.weights.directory import default_pair, layer_ranges, open_directory
from ops.bench.shard_process import ShardProcess
from tests import gguf_files

pytestmark = pytest.mark.live

STAGES = 4
#: Modules that a worker imports before it reads its first weight.
IMPORTS = (
    "import workers.verify; from flowspec.model.stage import load_stage; "
    "from transformers.models.llama import modeling_llama; "
    "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
)


def write_model(folder: Path) -> None:
    """A random Llama of 1.6 GB in float32 with the packaged draft's vocabulary."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=9,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        folder, max_shard_size="500MB"
    )
    for file in Path(default_pair()[0]).iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)


def peak_kib(pid: int) -> int:
    """Peak resident memory of a process so far, KiB."""
    return int(
        Path(f"/proc/{pid}/status").read_text(encoding="utf-8").split("VmHWM:")[1].split()[0]
    )


@pytest.mark.heavy
def test_peak_memory_is_the_shard_plus_15_percent_plus_the_interpreter(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    directory = open_directory(str(tmp_path / "model"))
    whole = sum(file.stat().st_size for file in set(directory.weight_files.values()))
    assert whole >= 1.5e9
    bare = int(
        subprocess.run(
            [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True
        ).stdout
    )
    with Cluster(Setup(str(directory.path), default_pair()[1], STAGES)) as cluster:
        with Client(cluster.url) as client:
            client.submit("How much is this?", max_new_tokens=6).result()
        peaks = [peak_kib(cluster.pids[f"verify-{stage}"]) for stage in range(1, STAGES + 1)]
    print(f"\nWhole model: {whole / 2**20:.0f} MiB.\n")
    print("| stage | shard, MiB | peak, MiB | shards over bare |\n|---|---|---|---|")
    print(f"| bare interpreter with imports | | {bare / 1024:.0f} | |")
    for stage, (layers, peak) in enumerate(
        zip(layer_ranges(directory.layers, STAGES), peaks, strict=True), start=1
    ):
        prefixes = tensor_prefixes(directory, layers)
        entries = [
            directory.tensor(name) for name in directory.weight_files if name.startswith(prefixes)
        ]
        shard = sum(entry.end - entry.start for entry in entries) / 1024
        share = (peak - bare) / shard
        print(f"| {stage} | {shard / 1024:.0f} | {peak / 1024:.0f} | {share:.2f} |")
        assert peak <= 1.15 * shard + bare


@pytest.mark.heavy
def test_loading_a_gguf_file_takes_at_most_a_fifth_more_than_its_layers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"HIDDEN": 2048, "FEED": 8192, "HEADS": 32, "KEYS": 8, "SIZE": 64, "LAYERS": 8}
    for name, value in sizes.items():
        monkeypatch.setattr(gguf_files, name, value)
    precisions = {
        "Q4_1": ("int4", "bfloat16"),
        "Q4_K": ("int4",),
        "Q8_0": ("int8-block", "nf4"),
        "Q6_K": ("int8-block", "bfloat16", "float32"),
        "F16": ("float16", "bfloat16", "int8"),
    }
    print("\n| file, MiB | precision | layers, MiB | peak, MiB | ratio |\n|---|---|---|---|---|")
    for kind, wanted in precisions.items():
        file = tmp_path / f"{kind}.gguf"
        gguf_files.write(file, "llama", kind)
        for precision in wanted:
            with ShardProcess(file, precision, 64, [1]) as process:
                loaded = process.loaded
            written, layers, peak = (
                size >> 20 for size in (file.stat().st_size, loaded.nbytes, loaded.peak)
            )
            ratio = loaded.peak / loaded.nbytes
            print(f"| {kind}, {written} | {precision} | {layers} | {peak} | {ratio:.2f} |")
            assert loaded.peak <= 1.2 * loaded.nbytes
        file.unlink()
