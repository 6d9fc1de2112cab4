"""Several requests at once: our pipeline beside llama.cpp's server with as many slots, real time.

    make peer; python -m ops.bench.peer_jobs [--jobs 1,4,8] [--latencies 0,5] [--stages 4]
                                             [--tokens 48] [--rounds 3] [--count 12] [--busy]
                                             [--strategies "autoregressive auto"] [--drafts 3]
                                             [--prompts FILE] [--peer .peer]

Nothing is emulated: models, links, precision and threads as of ``ops.bench.peer``. A closed loop:
``--count`` prompts of the measuring half, so many at once that a next one begins when one ends, on
both sides by as many threads of one process. Tokens per second of all of them, prefill included.
Either side has equally many settings: ``--strategies`` of ours; plain decoding and ``--drafts`` of
theirs. A setting of ours and one of theirs take ``--rounds`` turns; medians over the rounds.

A machine with other work is refused unless ``--busy`` is given. Prints Markdown; progress goes to
standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from flowspec.client import Client
from flowspec.cluster import Setup
from flowspec.errors import ConfigError, FlowSpecError
from flowspec.model.directory import default_pair, open_directory
from flowspec.strategies import build
from ops.bench.arguments import count, counts, latencies
from ops.bench.peer import PROMPTS, load_words
from ops.bench.report import machine_line
from ops.parser import Parser
from ops.peer.closed_loop import Round, Serve, closed_loop
from ops.peer.install import DEFAULT_FOLDER, Peer, version
from ops.peer.llama import DraftOptions, Llama, relays, servers, split_options
from ops.peer.pipelines import known, our_pipeline, our_processes
from ops.peer.prompts import PeerPrompt, chosen
from ops.peer.server import Completion, llama_server
from ops.peer.settings import drafting


@dataclass(frozen=True, slots=True)
class ClosedLoops:
    """How much is run: settings of ours and of theirs (None: plain decoding), in pairs."""

    strategies: tuple[str, ...]
    drafts: tuple[DraftOptions | None, ...]
    tokens: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Site:
    """Where both sides run: the ``peer``, our ``setup``, seconds of ``latency`` each way."""

    peer: Peer
    setup: Setup
    latency: float


@dataclass(frozen=True, slots=True)
class SettingRounds:
    """The rounds of one setting with so many at once."""

    setting: str
    rounds: tuple[Round, ...]

    @property
    def rate(self) -> float:
        """Tokens per second, the median over the rounds."""
        return statistics.median(one.rate for one in self.rounds)

    @property
    def same(self) -> str:
        """How many texts were the target's own, of how many."""
        return f"{sum(one.same for one in self.rounds)}/{sum(one.prompts for one in self.rounds)}"


def our_serve(clients: Sequence[Client], strategy: str, tokens: int) -> Serve:
    """Decode with ``strategy``; every call takes the next of ``clients``."""
    turn = cycle(clients)

    def serve(prompt: PeerPrompt) -> Completion:
        job = next(turn).submit(
            prompt_ids=prompt.ids, max_new_tokens=tokens, strategy=strategy, reuse=False
        )
        result = job.result()
        return Completion(result.text, len(result.token_ids))

    return serve


@contextlib.contextmanager
def our_clients(setup: Setup, latency: float, logs: Path) -> Iterator[list[Client]]:
    """A pipeline, and a client for each of its jobs at once."""
    with our_processes(setup, latency, logs) as running, contextlib.ExitStack() as stack:
        yield [stack.enter_context(Client(running.url)) for _ in range(setup.jobs)]


def compared(
    site: Site,
    clients: Sequence[Client],
    prompts: Sequence[PeerPrompt],
    comparison: ClosedLoops,
    jobs: int,
) -> tuple[list[SettingRounds], list[SettingRounds]]:
    """Cells of ours and of theirs with ``jobs`` at once, in pairs whose rounds take turns."""
    ours, theirs = [], []
    for strategy, drafts in zip(comparison.strategies, comparison.drafts, strict=True):
        name = "plain" if drafts is None else str(drafts)
        _tell(f"{site.latency * 1e3:g} ms, {jobs} at once: {strategy} and {name}")
        one = our_serve(clients[:jobs], strategy, comparison.tokens)
        with _their_serve(site, jobs, drafts, comparison.tokens) as other:
            rounds = _turns(one, other, prompts, jobs, comparison.rounds)
        ours.append(SettingRounds(strategy, tuple(first for first, _ in rounds)))
        theirs.append(SettingRounds(name, tuple(second for _, second in rounds)))
    return ours, theirs


def _turns(
    one: Serve, other: Serve, prompts: Sequence[PeerPrompt], jobs: int, rounds: int
) -> list[tuple[Round, Round]]:
    """Rounds of both in turn; who begins changes. One round before counts for nothing."""
    for serve in (one, other):
        closed_loop(serve, prompts[:jobs], jobs)
    found = []
    for turn in range(rounds):
        if turn % 2:
            second = closed_loop(other, prompts, jobs)
            found.append((closed_loop(one, prompts, jobs), second))
        else:
            first = closed_loop(one, prompts, jobs)
            found.append((first, closed_loop(other, prompts, jobs)))
    return found


@contextlib.contextmanager
def _their_serve(
    site: Site, jobs: int, drafts: DraftOptions | None, tokens: int
) -> Iterator[Serve]:
    target = open_directory(site.setup.target)
    with (
        tempfile.TemporaryDirectory(prefix="flowspec-peer-") as folder,
        servers(site.peer, site.setup.stages, Path(folder)) as addresses,
        relays(addresses, site.latency, Path(folder) / "theirs.log") as links,
        llama_server(
            site.peer,
            split_options([f"127.0.0.1:{port}" for port in links.ports], target.layers),
            target.context,
            jobs,
            drafts,
            Path(folder) / "server.log",
        ) as server,
    ):
        yield lambda prompt: server.complete(prompt.ids, tokens)


def row(
    latency: float, jobs: int, ours: Sequence[SettingRounds], theirs: Sequence[SettingRounds]
) -> str:
    """A Markdown row: every setting's rate, the best of either and their ratio."""
    best, other = (max(side, key=lambda cell: cell.rate) for side in (ours, theirs))
    cells = [
        f"{latency * 1e3:g} ms",
        str(jobs),
        *(f"{cell.rate:.1f}" for cell in (*ours, *theirs)),
        f"{best.setting} {best.rate:.1f}",
        f"{other.setting} {other.rate:.1f}",
        f"{best.rate / other.rate:.2f}",
        " ".join(cell.same for cell in (*ours, *theirs)),
    ]
    return f"| {' | '.join(cells)} |"


def head(comparison: ClosedLoops) -> str:
    """The table's head."""
    theirs = ["plain" if drafts is None else str(drafts) for drafts in comparison.drafts]
    columns = [
        *("each way", "at once"),
        *(f"ours, {name}" for name in comparison.strategies),
        *(f"llama.cpp, {name}" for name in theirs),
        *("best of ours", "best of theirs", "ratio", "same text"),
    ]
    return f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


def report(given: argparse.Namespace) -> None:
    """Print the table, a row as soon as it is known."""
    strategies = tuple(given.strategies.split())
    drafts = (None, *(drafting(text) for text in given.drafts.split(",")))
    if len(strategies) != len(drafts):
        raise ConfigError(
            f"ours has {len(strategies)} settings, llama.cpp {len(drafts)} (--drafts and plain "
            "decoding); give as many of either"
        )
    for strategy in strategies:
        build(strategy, given.stages)
    load = load_words(busy=given.busy)
    comparison = ClosedLoops(strategies, drafts, given.tokens, given.rounds)
    setup = Setup(*default_pair(), given.stages, jobs=max(given.jobs))
    peer = Peer(given.peer.absolute())
    peer.check()
    setup.check()
    prompts = _prompts(peer, setup, given)
    print(f"{machine_line()}; {load}; llama.cpp of llama-cpp-python {version()}")
    print(
        f"\n{given.stages} stages, T = 0, {len(prompts)} prompts of {given.tokens} tokens in a "
        f"closed loop, {given.rounds} rounds in turn. Tokens per second of all requests, prefill "
        "included; medians over the rounds.\n"
    )
    print(head(comparison), flush=True)
    for milliseconds in given.latencies:
        site = Site(peer, setup, milliseconds / 1e3)
        with (
            tempfile.TemporaryDirectory(prefix="flowspec-peer-") as folder,
            our_clients(setup, site.latency, Path(folder)) as clients,
        ):
            for jobs in given.jobs:
                cells = compared(site, clients, prompts, comparison, jobs)
                print(row(site.latency, jobs, *cells), flush=True)


def _prompts(peer: Peer, setup: Setup, given: argparse.Namespace) -> list[PeerPrompt]:
    """Prompts of the measuring half with the target's own text."""
    found = chosen(given.prompts, "measuring", given.count, given.tokens, setup.target)
    target = open_directory(setup.target)
    with (
        tempfile.TemporaryDirectory(prefix="flowspec-peer-") as folder,
        our_pipeline(replace(setup, jobs=1), 0.0, Path(folder)) as client,
    ):
        return known(Llama(peer, (), target.layers, target.context), client, found, given.tokens)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parser() -> Parser:
    """The command line."""
    made = Parser(description=(__doc__ or "").partition("\n")[0])
    add = made.add_argument
    add("--busy", action="store_true", help="run beside other work; its times are void")
    add("--jobs", type=counts, default="1,4,8", help="requests at once, by commas")
    add("--latencies", type=latencies, default="0,5", help="ms each way, by commas")
    add("--stages", type=count, default=4)
    add("--tokens", type=count, default=48, help="of every text (48)")
    add("--rounds", type=count, default=3, help="of either side (3)")
    add("--count", type=count, default=12, help="prompts of a round (12)")
    add("--strategies", default="autoregressive auto", help="our settings, by spaces")
    add("--drafts", default="3", help="llama.cpp's settings but plain, by commas")
    add("--prompts", type=Path, default=PROMPTS, help="a .jsonl file or a folder of them")
    add("--peer", type=Path, default=DEFAULT_FOLDER, help="the folder of `make peer`")
    return made


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        report(parser().parse_args())
    except FlowSpecError as error:
        sys.exit(f"peer_jobs: {error}")


if __name__ == "__main__":
    main()
