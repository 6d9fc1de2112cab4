"""``flowspec shard``: cut a model into a folder for each stage."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from flowspec.cli.places import DEFAULT_STAGES
from flowspec.cli.show import console
from flowspec.errors import ConfigError
from flowspec.model.drafters.kinds import NGRAM
from flowspec.model.drafters.sources import open_models
from flowspec.model.weights.directory import all_tensors, fetch_weights, layer_ranges
from flowspec.transport.base import command_of


def shard(
    target: str,
    out: Path,
    stages: int | None,
    layers: str | None,
    dtype: str | None,
    *,
    head: bool,
) -> None:
    """Write the shards of ``target`` into ``out``; ConfigError for invalid flags."""
    if stages is not None and layers is not None:
        raise ConfigError("--layers says how many stages there are; leave out --stages")
    open_models(target, NGRAM)
    from flowspec.model.shards import ShardPlan, check_shard_dtype, parse_blocks, write_shards

    precision = check_shard_dtype(dtype)
    directory = fetch_weights(target, all_tensors)
    blocks = (
        parse_blocks(layers, directory.layers)
        if layers is not None
        else layer_ranges(directory.layers, stages or DEFAULT_STAGES)
    )
    screen = console(stderr=True)

    def told(name: str, nbytes: int) -> None:
        screen.print(f"wrote {out / name}: {nbytes / 1e6:.1f} MB", markup=False, soft_wrap=True)

    write_shards(directory, ShardPlan(blocks, precision, head), out, told)
    same = "" if layers is None else f" --layers '{layers}'"
    where = out.absolute()

    def start(role: str, folder: str) -> str:
        return f"  {command_of(role)} --target {shlex.quote(str(where / folder))}"

    lines = [
        "to start it, with FLOWSPEC_REDIS_URL set to the broker's URL and each folder on its box:",
        f"{start('scheduler', 'draft')} --stages {len(blocks)}{same}",
        start("draft", "draft"),
        *(start(f"verify-{stage}", f"stage-{stage}") for stage in range(1, len(blocks) + 1)),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
