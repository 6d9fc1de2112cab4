"""llama.cpp's RPC split and ours on the same pair, prompts and links, in real time on this machine.

    make peer; python -m ops.bench.peer [--stages 4] [--latencies 0,5,25] [--tokens 48] [--count 6]
                                        [--strategies "autoregressive flowspec chain"]
                                        [--drafts 2,4,8,16,8@0.5] [--prompts FILE.jsonl]
                                        [--repeats 1] [--peer .peer]

Nothing is emulated. Both sides compute in float32 with one thread per process and decode greedily.
Both are stars: client or draft worker (with our broker) in the middle, one link to each stage,
every connection through a TCP relay that adds the latency each way. Theirs is C++, ours Python and
PyTorch. Times are decode only, without loading and prefill. ``--drafts``: llama.cpp's maximum draft
length; ``8@0.5`` ends a draft early at a token whose probability is below 0.5. Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from flowspec.broker.server import PrivateBroker
from flowspec.cli.generate import read_prompts
from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.core.job.stats import repeated_4grams
from flowspec.errors import ConfigError, FlowSpecError
from flowspec.model.directory import default_pair, open_directory
from flowspec.model.text import Tokenizer
from flowspec.strategies import build
from ops.bench.report import machine_line
from ops.peer.install import DEFAULT_FOLDER, Peer, version
from ops.peer.llama import DraftOptions, Llama, LlamaRun, relays, servers

PROMPTS = Path(__file__).parents[2] / "tests" / "data" / "prompts.jsonl"
PLAIN = "llama.cpp"
OURS_PLAIN = "ours, autoregressive"


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """A user's ``text``, its ``ids`` in the chat template, and the text of ids after the first."""

    text: str
    ids: tuple[int, ...]
    rendered: str


#: Decodes a prompt.
System = Callable[[PeerPrompt], LlamaRun]


@dataclass(slots=True)
class Results:
    """Runs of one table. ``tbt``: seconds per token by system, prompt and repeat."""

    tbt: dict[str, list[list[float]]] = field(default_factory=dict)
    same: dict[str, list[bool]] = field(default_factory=dict)
    repeated: list[float] = field(default_factory=list)

    def add(self, system: str, prompt: int, run: LlamaRun, expected: str) -> None:
        """Add a run; ``expected``: the target's own text up to its last whole character."""
        times = self.tbt.setdefault(system, [])
        if len(times) <= prompt:
            times.append([])
        times[prompt].append(run.tbt)
        self.same.setdefault(system, []).append(run.text.startswith(expected))

    def medians(self, system: str) -> list[float]:
        """Seconds per token by prompt, the median over the repeats."""
        return [statistics.median(times) for times in self.tbt[system]]

    def over(self, system: str, other: str) -> str:
        """Speedup over ``other``: the median of the prompts' ratios."""
        if other not in self.tbt:
            return "-"
        ratios = [b / a for a, b in zip(self.medians(system), self.medians(other), strict=True)]
        return f"{statistics.median(ratios):.2f}x"

    def lines(self) -> Iterator[str]:
        """The table, one row per system."""
        yield (
            "| system | ms per token, median | least to most | over llama.cpp plain "
            "| over its own plain | same text |"
        )
        yield "|---|---|---|---|---|---|"
        for system in self.tbt:
            times = [seconds * 1e3 for seconds in self.medians(system)]
            same = self.same[system]
            own = PLAIN if system.startswith(PLAIN) else OURS_PLAIN
            yield (
                f"| {system} | {statistics.median(times):.2f} | {min(times):.2f} to "
                f"{max(times):.2f} "
                f"| {self.over(system, PLAIN)} | {self.over(system, own)} | "
                f"{sum(same)}/{len(same)} |"
            )
        theirs = self.best(ours=False)
        best = self.best(ours=True)
        yield f"\nBest of ours over best of theirs: {best} over {theirs}, {self.over(best, theirs)}"

    def best(self, *, ours: bool) -> str:
        """The system with the lowest median, among ours or theirs."""
        names = [system for system in self.tbt if ours != system.startswith(PLAIN)]
        return min(names, key=lambda system: statistics.median(self.medians(system)))


def ours(
    client: Client, strategy: str, prompt: PeerPrompt, tokens: int
) -> tuple[LlamaRun, tuple[int, ...]]:
    """Run one job in our pipeline; the run and its output ids."""
    result = client.submit(prompt_ids=prompt.ids, max_new_tokens=tokens, strategy=strategy).result()
    seconds = float(result.stats["decode_seconds"])
    return LlamaRun(result.text, seconds / max(1, len(result.token_ids) - 1)), result.token_ids


@contextlib.contextmanager
def our_pipeline(setup: Setup, latency: float, logs: Path) -> Iterator[Client]:
    """A pipeline whose links to the stages have ``latency`` seconds each way."""
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(PrivateBroker())
        url = urlsplit(broker.url)
        ports = stack.enter_context(relays([url.path] * setup.stages, latency, logs / "ours.log"))
        spokes = {
            f"verify-{at}": f"redis://:{url.password}@127.0.0.1:{port}/0"
            for at, port in enumerate(ports, 1)
        }
        cluster = stack.enter_context(Cluster(setup, url=broker.url, urls=spokes))
        yield stack.enter_context(Client(cluster.url))


@contextlib.contextmanager
def their_pipeline(peer: Peer, setup: Setup, latency: float, logs: Path) -> Iterator[Llama]:
    """llama.cpp whose links to the stages have ``latency`` seconds each way."""
    target = open_directory(setup.target)
    with (
        servers(peer, setup.stages, logs) as addresses,
        relays(addresses, latency, logs / "theirs.log") as ports,
    ):
        yield Llama(peer, [f"127.0.0.1:{port}" for port in ports], target.layers, target.context)


def systems(
    llama: Llama,
    client: Client,
    strategies: Sequence[str],
    draftings: Sequence[DraftOptions],
    tokens: int,
) -> dict[str, System]:
    """Functions that decode ``tokens`` tokens of a prompt, by system name."""
    theirs: dict[str, System] = {PLAIN: lambda prompt: llama.plain(prompt.rendered, tokens)}
    for by in draftings:
        theirs[f"{PLAIN}, {by}"] = partial(_drafted, llama, tokens, by)
    return theirs | {f"ours, {name}": partial(_ours, client, tokens, name) for name in strategies}


def _drafted(llama: Llama, tokens: int, by: DraftOptions, prompt: PeerPrompt) -> LlamaRun:
    return llama.speculative(prompt.rendered, tokens, by)


def _ours(client: Client, tokens: int, strategy: str, prompt: PeerPrompt) -> LlamaRun:
    return ours(client, strategy, prompt, tokens)[0]


def table(
    llama: Llama,
    client: Client,
    found: Mapping[str, System],
    prompts: Sequence[PeerPrompt],
    tokens: int,
    repeats: int,
) -> Results:
    """Run every system on every prompt in turn; each prompt starts with a different system."""
    results = Results({system: [] for system in found})
    for at, prompt in enumerate(prompts):
        if llama.token_ids(prompt.rendered) != prompt.ids:
            raise ConfigError(
                f"llama.cpp encodes the prompt {prompt.text[:40]!r} to other token ids; expected "
                "the same"
            )
        truth, ids = ours(client, "autoregressive", prompt, tokens)
        results.repeated.append(repeated_4grams(ids))
        expected = truth.text.rstrip("\N{REPLACEMENT CHARACTER}")
        for repeat in range(repeats):
            first = (at + repeat) % len(found)
            for system in [*found, *found][first : first + len(found)]:
                results.add(system, at, found[system](prompt), expected)
    return results


def chosen(file: Path, count: int, tokens: int, target: str) -> list[PeerPrompt]:
    """``count`` prompts, evenly spaced in ``file``, that leave room for ``tokens`` tokens."""
    directory = open_directory(target)
    tokenizer = Tokenizer(directory)
    found = []
    for text in read_prompts(file):
        ids = tokenizer.encode(text, raw=False)
        # A draft may exceed the requested number of tokens.
        if len(ids) + tokens + 64 <= directory.context:
            found.append(PeerPrompt(text, ids, tokenizer.decode(list(ids))))
    if not 1 <= count <= len(found):
        raise ConfigError(
            f"--count {count}: {file} has {len(found)} prompts that fit; expected 1 to {len(found)}"
        )
    stride = len(found) // count
    return found[stride // 2 :: stride][:count]


def drafting(text: str) -> DraftOptions:
    """Parse ``8`` or ``8@0.5``; ConfigError for anything else."""
    most, _, least = text.partition("@")
    try:
        made = DraftOptions(int(most), float(least or 0))
    except ValueError:
        made = DraftOptions(0)
    if made.most < 1 or not 0 <= made.least < 1:
        raise ConfigError(
            f"--drafts {text!r} is not a draft; expected a length of 1 or more, optionally with "
            "@ and a probability"
        )
    return made


def report(given: argparse.Namespace) -> None:
    """Print one table per latency."""
    peer = Peer(given.peer.absolute())
    setup = Setup(*default_pair(), given.stages)
    peer.check()
    setup.check()
    strategies = given.strategies.split()
    if not strategies:
        raise ConfigError(
            "--strategies is empty; expected one or more, such as 'autoregressive flowspec'"
        )
    for strategy in strategies:
        build(strategy, given.stages)
    draftings = [drafting(text) for text in given.drafts.split(",")]
    prompts = chosen(given.prompts, given.count, given.tokens, setup.target)
    print(
        f"{machine_line()}; load {os.getloadavg()[0]:.1f}; llama.cpp of llama-cpp-python "
        f"{version()}"
    )
    for latency in given.latencies:
        with (
            tempfile.TemporaryDirectory(prefix="flowspec-peer-") as folder,
            their_pipeline(peer, setup, latency / 1e3, Path(folder)) as llama,
            our_pipeline(setup, latency / 1e3, Path(folder)) as client,
        ):
            for strategy in strategies:  # warm up: a strategy's first job is slower
                ours(client, strategy, prompts[0], 8)
            found = systems(llama, client, strategies, draftings, given.tokens)
            results = table(llama, client, found, prompts, given.tokens, given.repeats)
        print(
            f"\n{given.stages} stages, {latency:g} ms each way, T = 0, {len(prompts)} prompts x "
            f"{given.tokens} tokens, "
            f"{given.repeats} repeats; repeated 4-grams {statistics.mean(results.repeated):.0%}\n"
        )
        print("\n".join(results.lines()), flush=True)


def _milliseconds(text: str) -> list[float]:
    """Parse comma-separated latencies; ValueError for anything else."""
    found = [float(part) for part in text.split(",")]
    if not all(0 <= latency < 1e3 for latency in found):
        raise ValueError(text)
    return found


def _count(text: str) -> int:
    """Parse an integer above 0; ValueError for anything else."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=_count, default=4)
    parser.add_argument(
        "--latencies",
        type=_milliseconds,
        default="0,5,25",
        help="milliseconds each way, separated by commas",
    )
    parser.add_argument("--tokens", type=_count, default=48)
    parser.add_argument("--count", type=_count, default=6)
    parser.add_argument(
        "--strategies", default="autoregressive flowspec chain", help="separated by spaces"
    )
    parser.add_argument("--drafts", default="2,4,8,16,8@0.5")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--repeats", type=_count, default=1)
    parser.add_argument("--peer", type=Path, default=DEFAULT_FOLDER)
    try:
        report(parser.parse_args())
    except FlowSpecError as error:
        sys.exit(f"peer: {error}")


if __name__ == "__main__":
    main()
