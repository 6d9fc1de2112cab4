"""The time to the first token of a second turn, with and without the rows of the first one.

    python -m ops.bench.prefix [--drafts slm,head] [--strategies a,b,...] [--stages 4]
                               [--before 600] [--new 24] [--rounds 5]
                               [--at-once 4]
                               [--emulated jetson-7b,...] [--emulated-rounds 1] [--stretch 3]

A first turn of ``--before`` tokens, the last 24 of them its answer; a second one that adds
``--new``. Per round and strategy: that turn with reuse, without, and a prompt of the new tokens
alone, the turns of other texts each time. Median milliseconds of time to first token by the draft
worker's clock, without the wait in the queue: *measured* on a private pipeline of real processes
with the packaged models, *emulated* in nominal time on each of ``--emulated`` with the first draft.

``--at-once`` answers, at T = 1 with seeds of their own, to a prompt of ``--before`` tokens, on real
processes that run as many: the first's and the last's time to first token, and the time until all
have ended, with the prompt's rows shared and without. Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ops.parser import Parser

os.environ.setdefault("OMP_NUM_THREADS", "1")

from flowspec.cli.generate import read_prompts
from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.core.run.sampling import Sampling
from flowspec.emulation.profiles import load
from flowspec.errors import FlowSpecError, StateError
from flowspec.model.directory import PACKAGED_HEAD, default_pair, open_directory
from flowspec.model.text import Tokenizer
from flowspec.results import reported
from flowspec.testbed.texts import Text
from ops.bench.arguments import count
from ops.bench.emulate import EmulatedCluster
from ops.bench.report import machine_line
from ops.bench.simulated import PROMPTS

ANSWER = 24
#: Rounds of real processes at the start that count for nothing.
WARM = 1
STRATEGIES = ("autoregressive", "flowspec", "auto")
#: Token ids of a prompt, a strategy, and whether rows are kept and reused; the output ids, seconds
#: to the first of them, and how many of the prompt's rows were kept.
Ask = Callable[[tuple[int, ...], str, bool], tuple[tuple[int, ...], float, int]]


@dataclass(frozen=True, slots=True)
class TurnsPlan:
    """What is measured: see the module's docstring. ``prompts``: token ids of distinct texts."""

    strategies: tuple[str, ...]
    stages: int
    before: int
    new: int
    rounds: int
    emulated_rounds: int
    prompts: Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SecondTurn:
    """Seconds to the first token of a second turn: with reuse, without, and of its new tokens."""

    reused: float
    whole: float
    alone: float


def turns(ask: Ask, plan: TurnsPlan, strategy: str, texts: Iterator[tuple[int, ...]]) -> SecondTurn:
    """One round; StateError if rows were not kept, or other tokens follow without them."""
    first = next(texts)[: plan.before - ANSWER]
    answer, _, _ = ask(first, strategy, True)
    new = next(texts)[: plan.new]
    second = (*first, *answer, *new)
    with_rows, reused, cached = ask(second, strategy, True)
    without, whole, _ = ask(second, strategy, False)
    _, alone, _ = ask(new, strategy, False)
    if with_rows != without or cached < len(first):
        raise StateError(f"{strategy}: {cached} rows were known, and the texts should be equal")
    return SecondTurn(reused, whole, alone)


def rounds(ask: Ask, plan: TurnsPlan, count: int, warm: int = 0) -> dict[str, SecondTurn]:
    """Medians of ``count`` rounds by strategy, which take turns."""
    found: dict[str, list[SecondTurn]] = {strategy: [] for strategy in plan.strategies}
    texts = itertools.cycle(plan.prompts)
    for _ in range(warm + count):
        for strategy, seen in found.items():
            seen.append(turns(ask, plan, strategy, texts))
    return {strategy: _median(seen[warm:]) for strategy, seen in found.items()}


def _median(seen: Sequence[SecondTurn]) -> SecondTurn:
    columns = [[getattr(one, name) for one in seen] for name in ("reused", "whole", "alone")]
    return SecondTurn(*map(statistics.median, columns))


def measured(plan: TurnsPlan, draft: str) -> dict[str, SecondTurn]:
    """On real processes."""
    setup = Setup(default_pair()[0], _folder(draft), plan.stages)
    with Cluster(setup) as cluster, Client(cluster.url) as client:

        def ask(
            prompt: tuple[int, ...], strategy: str, reuse: bool
        ) -> tuple[tuple[int, ...], float, int]:
            result = client.submit(
                prompt_ids=prompt, max_new_tokens=ANSWER, strategy=strategy, reuse=reuse
            ).result()
            stats = result.stats
            seconds = reported(stats["ttft_seconds"]) - reported(stats["queue_seconds"])
            return result.token_ids, seconds, reported(stats["cached_tokens"])

        return rounds(ask, plan, plan.rounds, WARM)


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Seconds of several answers to one prompt: to the first's and the last's token, to the end."""

    first: float
    last: float
    all: float


def at_once(plan: TurnsPlan, draft: str, number: int) -> dict[str, tuple[AtOnce, AtOnce]]:
    """Medians by strategy of ``number`` answers at once, with shared rows and without."""
    texts = itertools.cycle(plan.prompts)
    found: dict[str, tuple[AtOnce, AtOnce]] = {}
    setup = Setup(default_pair()[0], _folder(draft), plan.stages, jobs=number)
    with Cluster(setup) as cluster, Client(cluster.url) as client:
        for strategy in plan.strategies:
            seen: tuple[list[AtOnce], list[AtOnce]] = ([], [])
            for at in range(WARM + plan.rounds):
                prompt = (2 + at, *next(texts)[: plan.before - 1])
                for reuse, times in zip((True, False), seen, strict=True):
                    times.append(_answers(client, prompt, strategy, number, reuse=reuse))
            found[strategy] = (_median_answers(seen[0]), _median_answers(seen[1]))
    return found


def _answers(
    client: Client, prompt: tuple[int, ...], strategy: str, number: int, *, reuse: bool
) -> AtOnce:
    began = time.monotonic()
    jobs = [
        client.submit(
            prompt_ids=prompt,
            max_new_tokens=ANSWER,
            strategy=strategy,
            temperature=1.0,
            seed=seed,
            reuse=reuse,
            cache_salt=f"{strategy} {began}",
        )
        for seed in range(number)
    ]
    results = [job.result() for job in jobs]
    seconds = [reported(result.stats["ttft_seconds"]) for result in results]
    return AtOnce(min(seconds), max(seconds), time.monotonic() - began)


def _median_answers(seen: Sequence[AtOnce]) -> AtOnce:
    columns = [[getattr(one, name) for one in seen[WARM:]] for name in ("first", "last", "all")]
    return AtOnce(*map(statistics.median, columns))


def at_once_table(draft: str, found: dict[str, tuple[AtOnce, AtOnce]]) -> list[str]:
    """The rows of one draft: shared and apart, by turns."""
    lines = []
    for strategy, (shared, apart) in found.items():
        pairs = ((shared.first, apart.first), (shared.last, apart.last), (shared.all, apart.all))
        times = " | ".join(f"{one * 1e3:.0f} | {other * 1e3:.0f}" for one, other in pairs)
        lines.append(f"| {draft} | {strategy} | {times} | {shared.last / apart.last:.2f} |")
    return lines


def emulated(plan: TurnsPlan, draft: str, profile: str, stretch: float) -> dict[str, SecondTurn]:
    """On emulated devices, in nominal seconds."""
    cluster = EmulatedCluster(
        load(profile),
        plan.stages,
        models=(default_pair()[0], _folder(draft)),
        source=draft,
        stretch=stretch,
    )
    with cluster:
        before = cluster.counts()

        def ask(
            prompt: tuple[int, ...], strategy: str, reuse: bool
        ) -> tuple[tuple[int, ...], float, int]:
            text = Text(prompt, (0,) * ANSWER, Sampling())
            run, output = cluster.run(text, strategy, reuse=reuse)
            seconds = run.stats["ttft_seconds"] - run.stats["queue_seconds"]
            return output, seconds, run.stats["cached_tokens"]

        found = rounds(ask, plan, plan.emulated_rounds)
        (cluster.counts() - before).check(stretch)
        return found


def _folder(draft: str) -> str:
    return PACKAGED_HEAD if draft == "head" else default_pair()[1]


def table(name: str, found: dict[str, SecondTurn]) -> list[str]:
    """The rows of one place."""
    lines = []
    for strategy, seen in found.items():
        times = " | ".join(f"{one * 1e3:.1f}" for one in (seen.reused, seen.whole, seen.alone))
        ratios = f"{seen.reused / seen.whole:.2f} | {seen.reused / seen.alone:.2f}"
        lines.append(f"| {name} | {strategy} | {times} | {ratios} |")
    return lines


def prompts(length: int) -> list[tuple[int, ...]]:
    """Token ids of texts of at least ``length``, each with another beginning."""
    tokenizer = Tokenizer(open_directory(default_pair()[0]))
    rows = [tokenizer.encode(prompt, raw=True) for prompt in read_prompts(PROMPTS)]
    found = []
    for at in range(len(rows)):
        text = [token for row in (*rows[at:], *rows[:at]) for token in row]
        found.append(tuple(itertools.islice(itertools.cycle(text), length)))
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _plan(given: argparse.Namespace) -> TurnsPlan:
    return TurnsPlan(
        given.strategies,
        given.stages,
        given.before,
        given.new,
        given.rounds,
        given.emulated_rounds,
        prompts(given.before),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = Parser(prog="python -m ops.bench.prefix", description=__doc__)
    parser.add_argument("--drafts", type=_names, default=("slm", "head"))
    parser.add_argument("--strategies", type=_names, default=STRATEGIES)
    parser.add_argument("--stages", type=count, default=4)
    parser.add_argument("--before", type=count, default=600)
    parser.add_argument("--new", type=count, default=24)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--at-once", type=count, default=4)
    parser.add_argument("--emulated", type=_names, default=())
    parser.add_argument("--emulated-rounds", type=count, default=1)
    parser.add_argument("--stretch", type=float, default=3.0)
    given = parser.parse_args(arguments)
    plan = _plan(given)
    try:
        lines = []
        for draft in given.drafts:
            lines += table(f"measured | {draft}", measured(plan, draft))
        for profile in given.emulated:
            draft = given.drafts[0]
            found = emulated(plan, draft, profile, given.stretch)
            lines += table(f"{profile}, emulated | {draft}", found)
        answers = []
        for draft in given.drafts:
            answers += at_once_table(draft, at_once(plan, draft, given.at_once))
    except FlowSpecError as error:
        sys.exit(f"ops.bench.prefix: {error}")
    print(f"Measured on {machine_line()}: differs from run to run.\n")
    print(
        f"{plan.stages} stages; {plan.before} tokens before, {plan.new} new; "
        f"medians of {plan.rounds} rounds, {plan.emulated_rounds} emulated; ms\n"
    )
    print("| place | draft | strategy | reuse | without | new alone | of without | of new alone |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    print(f"\n{given.at_once} answers at once to a prompt of {plan.before} tokens; ms\n")
    print(
        "| draft | strategy | first token, shared | apart | last one's, shared | apart "
        "| all ended, shared | apart | last one's of apart |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(answers))


if __name__ == "__main__":
    main()
