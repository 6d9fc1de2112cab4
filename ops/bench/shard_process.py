"""One precision of a shard in a process of its own, timed in turns with the others.

    python -m ops.bench.shard_process FOLDER PRECISION CONTEXT ROWS...

Prints one line of JSON with the facts of the load. Then for every line that it reads it makes a
pass over each count of rows, and prints the seconds of CPU time by count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from flowspec.errors import ConfigError, FlowSpecError

ROOT = Path(__file__).parents[2]
#: Untimed passes over each count of rows before the first that counts.
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Loaded:
    """A shard after its load.

    ``peak``: bytes of resident memory at its highest while loading, above those before it.
    ``dependent``: parts whose rows depend on what shares their pass.
    """

    kernels: tuple[str, ...]
    nbytes: int
    peak: int
    dependent: tuple[str, ...]


class ShardProcess:
    """The parent's side: ``loaded``, and ``turn`` for one pass over each count of rows."""

    def __init__(self, folder: Path, precision: str, context: int, rows: Sequence[int]) -> None:
        words = [str(folder.absolute()), precision, str(context), *map(str, rows)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ops.bench.shard_process", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.loaded = Loaded(**self._answer())
        except BaseException:
            self.close()
            raise

    def turn(self) -> dict[int, float]:
        """Seconds of a pass by its rows."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return {int(rows): seconds for rows, seconds in self._answer().items()}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> ShardProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError("a process of the benchmark ended; its error is above")
        answer: Mapping[str, Any] = json.loads(line)
        return answer


def _memory(entry: str) -> int:
    """Bytes of this process's ``entry`` in ``/proc/self/status``."""
    return (
        int(Path("/proc/self/status").read_text(encoding="utf-8").split(f"{entry}:")[1].split()[0])
        << 10
    )


def _serve(folder: str, precision: str, context: int, counts: Sequence[int]) -> None:
    import torch
    from transformers.models.llama import modeling_llama

    from flowspec.model.kernels import kernels_for
    from flowspec.model.weights.directory import open_directory
    from ops.bench.shard_model import load_shard, shard_pass

    del modeling_llama
    torch.set_num_threads(1)
    directory = open_directory(folder)
    kernels_for(precision, "cpu")
    before = _memory("VmRSS")
    block = load_shard(directory, precision)
    peak = _memory("VmHWM") - before
    loaded = Loaded(block.kernels, block.nbytes, peak, block.dependent_parts())
    passes = {count: shard_pass(block, context, count) for count in counts}
    for run in passes.values():
        for _ in range(WARM_UP):
            run()
    print(json.dumps(asdict(loaded)), flush=True)
    for _ in sys.stdin:
        seconds = {}
        for count, run in passes.items():
            began = time.thread_time()
            run()
            seconds[count] = time.thread_time() - began
        print(json.dumps(seconds), flush=True)


def main() -> None:
    folder, precision, context, *counts = sys.argv[1:]
    try:
        _serve(folder, precision, int(context), [int(count) for count in counts])
    except FlowSpecError as error:
        sys.exit(f"shard: {error}")


if __name__ == "__main__":
    main()
