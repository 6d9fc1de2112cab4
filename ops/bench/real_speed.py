"""A random model of 1.1 billion weights on real workers, the library and llama.cpp, in real time.

    make peer; python -m ops.bench.real_speed [--busy] [--folder DIR] [--stages 1,2,4]
                                              [--latencies 0,5,25] [--dtypes bfloat16,nf4,int4]
                                              [--tokens 24] [--draws 2] [--rate 0.7]
                                              [--draft-ms 0] [--peer .peer]

The model (``random_model``) has the size of a real one and random text, which nothing can guess.
The drafter is therefore an oracle that knows the text and is right at a settable rate
(``oracle_draft``); drafting takes no time unless ``--draft-ms`` is given. Each draw decides at
which tokens it is right; the draws are those whose share of right tokens is nearest to the rate.

llama.cpp has the same weights in Q4_0 with a head in 8 bits, as ours is. Its plain time a token is
a pass of one row, without sampling. With random weights its own drafts are never right either, so
its time with drafts is computed, as the best over draft lengths k of 1 to 15: a measured pass of
k + 1 rows, at the same latency over RPC, over the expected tokens 1 + p + ... + p^k, or over the
tokens of the draws that ours had. It drafts at the cost of ours, and neither samples nor keeps
books: that favours it.

Both sides have one thread a process and links through relays, as in ``ops.bench.peer``; all
processes share this machine's cores. Times are decode only. Texts of ours are compared with plain
decoding's. A machine with other work is refused unless ``--busy`` is given. Prints Markdown;
progress goes to standard error.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from flowspec.client import Client
from flowspec.cluster import Places, Setup
from flowspec.errors import ConfigError, FlowSpecError, StateError
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import open_directory
from flowspec.model.weights.precision import PRECISIONS
from flowspec.rehearse.compare.hits import right
from flowspec.results import Result, reported
from ops.bench import pass_parts
from ops.bench.arguments import count, counts, latencies
from ops.bench.oracle_draft import TextOracle
from ops.bench.peer import load_words
from ops.bench.random_model import Shape, random_model
from ops.bench.real_table import (
    DRAFTED,
    PLAIN,
    Drafts,
    Linked,
    Ours,
    drafted_table,
    ms,
    passes_table,
    plain_table,
    software_table,
    whole_table,
)
from ops.bench.report import machine_line
from ops.parser import Parser
from ops.peer.batches import TYPE, four_bit, pass_seconds, plain_cpu_seconds
from ops.peer.install import DEFAULT_FOLDER, Peer, version
from ops.peer.llama import relays, servers
from ops.peer.pipelines import OurPipeline, our_processes, seconds_per_token

PROMPT = "Why is the sky blue?"
#: Rows of llama.cpp's passes: plain decoding, and draft lengths. Its product takes four rows at a
#: time, so that other numbers above 6 are never the best.
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
#: Passes of each number of rows.
PASSES = 4
#: Runs of plain decoding in each place.
PLAIN_RUNS = 2
#: Draws among which the most typical ones are chosen.
CANDIDATES = 200
PARTS_REPEATS = 9
CPU_PASSES = 24
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """What is run: the installed peer, the model, and the settings that the arguments give."""

    peer: Peer
    model: Path
    prompt: tuple[int, ...]
    dtypes: tuple[str, ...]
    stages: tuple[int, ...]
    latencies: tuple[float, ...]
    tokens: int
    rate: float
    draft_seconds: float
    seeds: tuple[int, ...]

    @property
    def small(self) -> tuple[str, ...]:
        """The precisions of 4 bits."""
        return tuple(dtype for dtype in self.dtypes if PRECISIONS[dtype].bits == 4)

    @property
    def drafts(self) -> Drafts:
        """The draws of every seed."""
        draws = [hits(self.prompt, self.tokens, self.rate, seed) for seed in self.seeds]
        return Drafts(self.rate, draws, self.draft_seconds)


@dataclass(slots=True)
class Timings:
    """All measurements so far."""

    ours: dict[tuple[str, Linked], Ours] = field(default_factory=dict)
    theirs: dict[Linked, list[dict[int, float]]] = field(default_factory=dict)
    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)


def hits(prompt: Sequence[int], tokens: int, rate: float, seed: int) -> list[bool]:
    """Whether the oracle has each token after the first one of the output."""
    return [right(len(prompt) + at, rate, seed=seed) for at in range(tokens - 1)]


def typical_seeds(prompt: Sequence[int], tokens: int, rate: float, draws: int) -> tuple[int, ...]:
    """The ``draws`` seeds, of the first ``CANDIDATES``, with nearly ``rate`` of tokens right."""

    def distance(seed: int) -> float:
        return abs(statistics.fmean(hits(prompt, tokens, rate, seed)) - rate)

    return tuple(sorted(sorted(range(CANDIDATES), key=distance)[:draws]))


def tell(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def library_seconds(model: Path, prompt: Sequence[int], tokens: int) -> float:
    """Seconds a token of the library's own ``generate`` in bfloat16, after the first token."""
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Stamps(BaseStreamer):
        """The time of every token; the first call is the prompt's."""

        def __init__(self) -> None:
            self.at: list[float] = []

        def put(self, value: object) -> None:
            self.at.append(time.monotonic())

        def end(self) -> None: ...

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    ids = torch.tensor([prompt])
    found = []
    for _ in range(PLAIN_RUNS):
        stamps = Stamps()
        loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            streamer=stamps,
        )
        found.append((stamps.at[-1] - stamps.at[1]) / (len(stamps.at) - 2))
    return statistics.median(found)


def submit(client: Client, plan: SpeedPlan, strategy: str, tokens: int) -> Result:
    """Run one job."""
    return client.submit(
        prompt_ids=plan.prompt, max_new_tokens=tokens, strategy=strategy, reuse=False
    ).result()


def run_plain(running: OurPipeline, plan: SpeedPlan, found: Ours) -> tuple[int, ...]:
    """Decode plainly into ``found``; return the output's ids."""
    ids: tuple[int, ...] = ()
    for _ in range(PLAIN_RUNS):
        before = {role: cpu_seconds(pid) for role, pid in running.pids.items()}
        result = submit(running.client, plan, PLAIN, plan.tokens)
        ids = result.token_ids
        token = seconds_per_token(result)
        found.times.setdefault(PLAIN, []).append(token)
        found.passes.append(token * sum(map(reported, result.stats["stage_busy"])))
        for role, pid in running.pids.items():
            # With the prompt, which is one more pass of more rows.
            spent = (cpu_seconds(pid) - before[role]) / len(ids)
            found.cpu.setdefault(role, []).append(spent)
    return ids


def run_drafted(
    running: OurPipeline, plan: SpeedPlan, found: Ours, ids: tuple[int, ...], oracle: Path
) -> None:
    """Decode with drafts of every seed into ``found``; StateError for another text than ``ids``."""
    for at, seed in enumerate((plan.seeds[0], *plan.seeds)):
        known = (*plan.prompt, *ids)
        TextOracle(known, plan.rate, seed, plan.draft_seconds).write(oracle)
        for strategy in DRAFTED:
            result = submit(running.client, plan, strategy, plan.tokens)
            if result.token_ids != ids:
                raise StateError(f"{strategy} gave another text than {PLAIN}")
            if at:  # the first run of a place, in which auto learns its times, is not counted
                found.times.setdefault(strategy, []).append(seconds_per_token(result))


def take_ours(plan: SpeedPlan, taken: Timings, dtype: str, stages: int) -> None:
    """All strategies in one precision at every latency; llama.cpp before the first of 4 bits."""
    setup = Setup(str(plan.model), "ngram", stages, places=Places(dtype=dtype, device="cpu"))
    with tempfile.TemporaryDirectory(prefix="flowspec-real-") as name:
        folder = Path(name)
        oracle = folder / "oracle.json"
        programs = {"draft": ("ops.bench.oracle_draft", "--oracle", str(oracle))}
        with our_processes(setup, 0.0, folder, programs) as running:
            for latency in plan.latencies:
                place = Linked(stages, latency)
                if dtype == plan.small[0]:
                    take_theirs(plan, taken, place, folder)
                running.links.set_latency(latency / 1e3)
                found = taken.ours[dtype, place] = Ours()
                ids = run_plain(running, plan, found)
                if taken.texts.setdefault(dtype, ids) != ids:
                    raise StateError(f"plain decoding in {dtype} gave two texts")
                run_drafted(running, plan, found, ids, oracle)
                times = ", ".join(f"{how} {ms(found.of(how))}" for how in found.times)
                tell(f"ours, {dtype}, {stages} stages, {latency:g} ms: {times} ms a token")


def take_theirs(plan: SpeedPlan, taken: Timings, place: Linked, logs: Path) -> None:
    """llama.cpp's passes in one place; with one stage and no latency also in one process."""
    layers = open_directory(str(plan.model)).layers
    file = four_bit(plan.peer, plan.model)

    def passes(addresses: Sequence[str]) -> dict[int, float]:
        return pass_seconds(
            plan.peer, file, addresses, layers, ROWS, prompt=len(plan.prompt), passes=PASSES
        )

    if place == Linked(1, 0.0):
        taken.theirs.setdefault(Linked(0, 0.0), []).append(passes(()))
    with (
        servers(plan.peer, place.stages, logs) as at,
        relays(at, place.latency / 1e3, logs / "theirs.log") as links,
    ):
        found = passes([f"127.0.0.1:{port}" for port in links.ports])
    taken.theirs.setdefault(place, []).append(found)
    tell(f"llama.cpp, {place.stages} stages, {place.latency:g} ms: {ms(found[1])} ms a token")


def plan_of(given: argparse.Namespace) -> SpeedPlan:
    """The plan that the arguments describe; ConfigError for a precision that does not exist."""
    dtypes = tuple(given.dtypes.split(","))
    unknown = [dtype for dtype in dtypes if dtype not in PRECISIONS]
    if unknown:
        raise ConfigError(f"--dtypes {unknown[0]!r}; expected some of {', '.join(PRECISIONS)}")
    peer = Peer(given.peer.absolute())
    peer.check()
    model = random_model(Shape(), given.folder)
    prompt = Tokenizer(open_directory(str(model))).encode(PROMPT, raw=False)
    return SpeedPlan(
        peer,
        model,
        prompt,
        dtypes,
        tuple(given.stages),
        tuple(given.latencies),
        given.tokens,
        given.rate,
        given.draft_ms / 1e3,
        typical_seeds(prompt, given.tokens, given.rate, given.draws),
    )


def report(given: argparse.Namespace) -> None:
    """Measure, and print all tables."""
    load = load_words(busy=given.busy)
    plan = plan_of(given)
    four_bit(plan.peer, plan.model)
    torch.set_num_threads(1)
    taken = Timings()
    parts = pass_parts.broken_down(plan.model, plan.small, [1, 4, 16], PARTS_REPEATS)
    tell("parts taken")
    library = library_seconds(plan.model, plan.prompt, plan.tokens)
    tell(f"generate: {ms(library)} ms a token")
    for stages in plan.stages:
        for dtype in plan.dtypes:
            take_ours(plan, taken, dtype, stages)
    shares = statistics.fmean(statistics.fmean(draw) for draw in plan.drafts.right)
    print(f"{machine_line()}; {load}; llama.cpp of llama-cpp-python {version()}")
    print(
        f"\nT = 0, {plan.tokens} tokens after a prompt of {len(plan.prompt)}. The drafter is right "
        f"at rate {plan.rate:g} ({shares:.2f} in the {len(plan.seeds)} draws); drafting takes "
        f"{plan.draft_seconds * 1e3:g} ms a pass. Every text of ours was plain decoding's. All "
        "processes share the cores, so that more stages than cores slow each other.\n\n"
        f"llama.cpp: {TYPE}, head in 8 bits; means of {PASSES} passes, without sampling. Its times "
        "with drafts are computed from these passes, with drafts as right and as cheap as ours: "
        "no overhead of its own is counted. *whole*: one process without RPC, beside ours with one "
        "stage."
    )
    whole = taken.theirs[Linked(0, 0.0)]
    spent = plain_cpu_seconds(
        plan.peer,
        four_bit(plan.peer, plan.model),
        prompt=len(plan.prompt),
        passes=CPU_PASSES,
    )
    print(
        f"In one process, CPU ms of a pass of one row: llama.cpp {ms(spent)} (wall "
        f"{ms(whole[0][1])}); ours "
        + ", ".join(f"{dtype} {ms(parts[dtype, 1]['whole'])}" for dtype in plan.small)
        + "."
    )
    sections = {
        "Plain decoding, 4 bits, ms a token": plain_table(taken.ours, taken.theirs, plan.small),
        "With drafts, 4 bits, ms a token": drafted_table(
            taken.ours, taken.theirs, plan.small, plan.drafts
        ),
        f"bfloat16, ms a token; the library's `generate`: {ms(library)}": whole_table(
            taken.ours, library, "bfloat16"
        ),
        "One pass of ours in one process by part, CPU ms": iter(pass_parts.table(parts)),
        "One token of plain decoding of ours, ms": software_table(taken.ours),
        "llama.cpp's passes, ms by rows": passes_table(taken.theirs),
    }
    for title, lines in sections.items():
        print(f"\n### {title}\n")
        print("\n".join(lines), flush=True)
    print(f"\nLoad at the end: {os.getloadavg()[0]:.1f}.")


def parser() -> Parser:
    """The command line."""
    made = Parser(description=(__doc__ or "").partition("\n")[0])
    add = made.add_argument
    add("--busy", action="store_true", help="run beside other work; its times are void")
    add("--folder", type=Path, help="the model's folder; written if it is not there")
    add("--stages", type=counts, default="1,2,4", help="by commas")
    add("--latencies", type=latencies, default="0,5,25", help="ms each way, by commas")
    add("--dtypes", default="bfloat16,nf4,int4", help="our precisions, by commas")
    add("--tokens", type=count, default=24, help="of every text (24)")
    add("--draws", type=count, default=2, help="draws of the drafter's hits (2)")
    add("--rate", type=float, default=0.7, help="of the drafter's first rank (0.7)")
    add("--draft-ms", type=float, default=0.0, help="of a pass of the drafter (0)")
    add("--peer", type=Path, default=DEFAULT_FOLDER, help="the folder of `make peer`")
    return made


def main() -> None:
    try:
        report(parser().parse_args())
    except FlowSpecError as error:
        sys.exit(f"real_speed: {error}")


if __name__ == "__main__":
    main()
