"""Strategies over plain decoding on real workers: the default, ``auto``, must not cost time.

    python -m ops.bench.default_pays --prompts DIR [--target FOLDER] [--draft ngram]
        [--stages 1,2,4] [--latencies 0,5] [--dtypes float32,bfloat16,int8,nf4,int4]
        [--strategies auto] [--count 8] [--tokens 64]

For every place, a precision, number of stages and latency of the links, a pipeline of processes
with one torch thread each decodes every prompt plainly and by every strategy, in turns, after one
prompt more for each. The draft worker keeps what it measures, as in use. Prompts are the last of
the files in DIR, in turn. Texts must be equal. Prints Markdown; progress goes to standard error.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from flowspec.client import Client
from flowspec.cluster import Places, Setup
from flowspec.errors import ConfigError, FlowSpecError, StateError
from flowspec.model.weights.directory import default_pair
from flowspec.results import Result, reported
from ops.bench.arguments import count, counts, latencies, prompt_sets
from ops.parser import Parser
from ops.peer.pipelines import our_pipeline, seconds_per_token
from ops.prompts import last_of_sets

PLAIN = "autoregressive"


def spread(folder: Path, number: int) -> list[str]:
    """``number`` of the last prompts of the files in ``folder``, one of each in turn."""
    sets = last_of_sets(folder).values()
    turns = [prompt for turn in zip(*sets, strict=False) for prompt in turn]
    if len(turns) < number:
        raise ConfigError(f"{folder} has {len(turns)} prompts to measure on; expected {number}")
    return turns[:number]


def decoded(
    client: Client, prompts: list[str], strategies: Sequence[str], tokens: int
) -> dict[str, list[Result]]:
    """The answers to each prompt but the first, by strategy; StateError if their texts differ."""
    found: dict[str, list[Result]] = {strategy: [] for strategy in strategies}
    for at, prompt in enumerate(prompts):
        turn = at % len(strategies)
        for strategy in (*strategies[turn:], *strategies[:turn]):
            job = client.submit(prompt, strategy=strategy, max_new_tokens=tokens, reuse=False)
            found[strategy].append(job.result())
        if len({results[-1].token_ids for results in found.values()}) > 1:
            raise StateError(f"strategies gave different texts of prompt {at + 1}")
    return {strategy: results[1:] for strategy, results in found.items()}


def cells(plain: list[Result], results: list[Result]) -> list[str]:
    """Tokens a step, times a token in milliseconds, and their ratio."""
    steps = [reported(result.stats["tokens_per_step"]) for result in results]
    times = [[seconds_per_token(result) for result in one] for one in (plain, results)]
    ratios = [other / one for one, other in zip(*times, strict=True)]
    return [
        f"{statistics.mean(steps):.2f}",
        *(f"{statistics.median(one) * 1e3:.1f}" for one in times),
        f"{statistics.median(ratios):.2f}, {max(ratios):.2f}",
    ]


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--prompts", type=prompt_sets, required=True, help="folder of .jsonl files")
    add("--target", default=default_pair()[0], metavar="FOLDER", help="(the packaged one)")
    add("--draft", default="ngram", help="drafter (ngram)")
    add("--stages", type=counts, default="1,2,4", help="by commas (1,2,4)")
    add("--latencies", type=latencies, default="0,5", help="milliseconds, by commas (0,5)")
    add("--dtypes", default="float32,bfloat16,int8,nf4,int4", help="by commas")
    add("--strategies", default="auto", help="besides plain decoding, by spaces (auto)")
    add("--count", type=count, default=8, help="prompts (8)")
    add("--tokens", type=count, default=64, help="of every answer (64)")
    given = parser.parse_args()
    prompts = spread(given.prompts, given.count + 1)
    strategies = [PLAIN, *given.strategies.split()]
    print("*Ratio*: the median of the prompts' ratios, and the largest.\n")
    print(
        "| precision | stages | latency, ms | strategy | tokens a step | plain, ms a token "
        "| ms a token | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    try:
        for dtype, stages in product(given.dtypes.split(","), given.stages):
            setup = Setup(given.target, given.draft, stages, places=Places(dtype))
            for latency in given.latencies:
                print(f"{dtype}, {stages} stages, {latency:g} ms", file=sys.stderr, flush=True)
                with (
                    tempfile.TemporaryDirectory() as logs,
                    our_pipeline(setup, latency / 1e3, Path(logs)) as client,
                ):
                    found = decoded(client, prompts, strategies, given.tokens)
                place = [dtype, str(stages), f"{latency:g}"]
                for strategy in strategies[1:]:
                    shown = cells(found[PLAIN], found[strategy])
                    row = [*place, f"`{strategy}`", *shown]
                    print(f"| {' | '.join(row)} |", flush=True)
    except FlowSpecError as error:
        sys.exit(f"default_pays: {error}")


if __name__ == "__main__":
    main()
