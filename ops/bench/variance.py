"""How much live runs differ: every strategy several times on the same prompt, in real time.

    python -m ops.bench.variance [--stages 2] [--strategies "autoregressive flowspec specpipe"]
                                 [--repeats 5] [--tokens 32] [--prompt TEXT]

The packaged pair, real workers over a private broker on this machine, greedy. Repeats alternate
between strategies, each beginning with another one, after an unmeasured run of each. Times are
decode only. FlowSpec (Table 3) repeats its comparison three times; a simulated run has no noise.
Prints Markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowspec.cli.bench import strategies_of
from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.errors import ConfigError, FlowSpecError
from flowspec.model.directory import default_pair
from flowspec.results import reported
from ops.bench.arguments import count
from ops.parser import Parser

PROMPT = "Explain how to read a file line by line and count the words in it."


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds per token of one strategy, by repeat."""

    times: tuple[float, ...]

    @property
    def variation(self) -> float:
        """Standard deviation over mean; 0 for a single repeat."""
        if len(self.times) < 2:
            return 0.0
        return statistics.stdev(self.times) / statistics.fmean(self.times)

    def row(self, strategy: str) -> str:
        """A Markdown row."""
        return (
            f"| {strategy} | {statistics.median(self.times):.2f} | {min(self.times):.2f} to "
            f"{max(self.times):.2f} | {max(self.times) / min(self.times):.2f} "
            f"| {self.variation:.1%} |"
        )


def measured(
    client: Client, strategies: Sequence[str], prompt: str, repeats: int, tokens: int
) -> dict[str, Spread]:
    """Milliseconds per token of every strategy; ConfigError if a text differs from the first."""
    texts = {_run(client, strategy, prompt, tokens)[1] for strategy in strategies}
    times: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    for repeat in range(repeats):
        first = repeat % len(strategies)
        for strategy in [*strategies[first:], *strategies[:first]]:
            seconds, ids = _run(client, strategy, prompt, tokens)
            texts.add(ids)
            times[strategy].append(seconds * 1e3)
    if len(texts) > 1:
        raise ConfigError("the strategies gave different texts; expected exact ones alone")
    return {strategy: Spread(tuple(found)) for strategy, found in times.items()}


def _run(client: Client, strategy: str, prompt: str, tokens: int) -> tuple[float, tuple[int, ...]]:
    """Seconds per token after the first, and the output ids."""
    job = client.submit(prompt, max_new_tokens=tokens, strategy=strategy, reuse=False)
    result = job.result()
    count = max(1, len(result.token_ids) - 1)
    return reported(result.stats["decode_seconds"]) / count, tuple(result.token_ids)


def print_table(spreads: Mapping[str, Spread], about: str) -> None:
    """Print the spreads, one row per strategy."""
    print(about + "\n")
    print("| strategy | ms per token, median | least to most | most over least | deviation |")
    print("|---|---|---|---|---|")
    for strategy, spread in spreads.items():
        print(spread.row(strategy))


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=count, default=2, help="of the pipeline (2)")
    parser.add_argument(
        "--strategies",
        default="autoregressive naive_pp flowspec pipedec specpipe pipespec static_tree chain auto",
        help="by spaces",
    )
    parser.add_argument("--repeats", type=count, default=5, help="of every strategy (5)")
    parser.add_argument("--tokens", type=count, default=32, help="of every text (32)")
    parser.add_argument("--prompt", default=PROMPT, help="of all runs")
    given = parser.parse_args()
    if given.tokens < 2:
        parser.error("argument --tokens: '1', expected an integer of at least 2")
    target, draft = default_pair()
    try:
        with Cluster(Setup(target, draft, given.stages)) as cluster, Client(cluster.url) as client:
            strategies = strategies_of([given.strategies])
            spreads = measured(client, strategies, given.prompt, given.repeats, given.tokens)
    except FlowSpecError as error:
        parser.exit(1, f"variance: {error}\n")
    print_table(
        spreads,
        f"{given.repeats} repeats, {given.stages} stages, {given.tokens} tokens, greedy, the "
        "packaged pair in real time.",
    )


if __name__ == "__main__":
    main()
