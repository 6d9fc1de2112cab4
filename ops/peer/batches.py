"""llama.cpp's own 4-bit weights, and the seconds of its passes by their number of rows."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

from flowspec.errors import ClusterError
from flowspec.model.weights.directory import open_directory
from ops.peer.convert import convert
from ops.peer.install import Peer
from ops.peer.llama import RUN_SECONDS, split_options

#: 4 bits a weight and a scale for 32, as our int4; the head keeps eight bits, as ours does.
QUANTISATION = ("--output-tensor-type", "q8_0", "--token-embedding-type", "q8_0")
TYPE = "Q4_0"
_CONVERT_SECONDS = 900.0


def four_bit(peer: Peer, model: Path) -> Path:
    """``model`` in llama.cpp's 4 bits, beside its folder; written unless it is there."""
    file = model.with_name(f"{model.name}-{TYPE.lower()}.gguf")
    if file.exists():
        return file
    whole = model.with_name(f"{model.name}-f32.gguf")
    partial = file.with_name(file.name + ".partial")
    convert(open_directory(str(model)), whole, peer.packages)
    try:
        _run([peer.tool("llama-quantize"), *QUANTISATION, whole, partial, TYPE, "1"])
    finally:
        whole.unlink(missing_ok=True)
    return partial.rename(file)


def pass_seconds(
    peer: Peer,
    file: Path,
    addresses: Sequence[str],
    layers: int,
    rows: Sequence[int],
    *,
    prompt: int,
    passes: int,
) -> dict[int, float]:
    """Mean seconds of ``passes`` passes, by their number of rows, each of another sequence.

    All rows get logits, and none a sample. ``addresses``: of RPC servers; none: the whole model in
    one process. One thread.
    """
    split = split_options(addresses, layers) if addresses else []
    slots = prompt + max(rows) * passes
    options: dict[str, object] = {
        "-c": slots + 64,
        "-b": 512,
        "-ub": 512,
        "-t": 1,
        "-tb": 1,
        "-npp": prompt,
        "-ntg": passes,
        "-npl": ",".join(map(str, rows)),
        "--output-format": "jsonl",
    }
    flat = [str(part) for option in options.items() for part in option]
    said = _run([peer.tool("llama-batched-bench"), "-m", file, *flat, "-pps", *split])
    return parsed(said)


def plain_cpu_seconds(peer: Peer, file: Path, *, prompt: int, passes: int) -> float:
    """CPU seconds of a pass of one row in one process.

    The median of three differences between a run with ``passes`` passes more and one without.
    """

    def spent(many: int) -> float:
        before = _children_seconds()
        pass_seconds(peer, file, (), 0, [1], prompt=prompt, passes=many)
        return _children_seconds() - before

    return statistics.median((spent(1 + passes) - spent(1)) / passes for _ in range(3))


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def parsed(said: str) -> dict[int, float]:
    """Seconds of a pass by rows, from the tool's lines; ClusterError if it printed none."""
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if not lines:
        raise ClusterError("llama-batched-bench printed no times")
    return {int(line["pl"]): float(line["t_tg"]) / int(line["tg"]) for line in lines}


def _run(command: Sequence[str | Path]) -> str:
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(RUN_SECONDS, _CONVERT_SECONDS),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{name} did not end within {_CONVERT_SECONDS:g} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or "it printed nothing"
        raise ClusterError(f"{name} ended with status {done.returncode}: {said.splitlines()[-1]}")
    return done.stdout.decode(errors="replace")
