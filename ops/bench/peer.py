"""llama.cpp's RPC split and ours on the same pair, prompts and links, in real time on this machine.

    make peer; python -m ops.bench.peer [--estimate] [--busy] [--latencies 0,5,25] [--stages 4]
                                        [--tokens 48] [--tuning 3] [--count 12] [--repeats 3]
                                        [--finalists 3] [--strategies "autoregressive flowspec"]
                                        [--drafts 2,4,8,8@0.5] [--prompts FILE] [--peer .peer]
                                        [--target FILE.gguf [--draft ngram]]

Nothing is emulated. Both sides compute with one thread per process and decode greedily: the
packaged pair in float32, or one ``--target``, theirs as llama.cpp computes its file, ours as
``--dtype auto`` does, which may choose another token now and then.
Both are stars: client or draft worker (with our broker) in the middle, one link to each stage,
every connection through a TCP relay that adds the latency each way. Theirs is C++, ours Python and
PyTorch. Times are decode only, without loading and prefill.

Either side has equally many settings (``ops.peer.settings``): ``--strategies`` of ours, where
``chain@ngram`` has that drafter and a pipeline beside the others'; plain
decoding and ``--drafts`` of theirs, maximum draft lengths, where ``8@0.5`` ends a draft early at a
token whose probability is below 0.5, and ``2x8`` drafts 8 tokens behind the last place where the
last 2 came before. A ``--target`` has drafts of the first kind if ``--draft`` has an EAGLE-3 head:
llama.cpp drafts with it too. At each latency every setting
decodes ``--tuning`` prompts of the tuning half once; the ``--finalists`` fastest of either side
decode ``--count`` prompts of the measuring half ``--repeats`` times, the sides in turn. A ratio is
the median over prompts of the median over repeats of their time over ours, with its 95% interval by
order statistics; it is called faster or slower only if the interval excludes 1.

A machine with other work is refused unless ``--busy`` is given. ``--estimate`` prints how long the
run takes and ends. Prints Markdown; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowspec.cluster import Setup
from flowspec.errors import ConfigError, FlowSpecError
from flowspec.model.drafters.eagle3_layout import is_eagle3
from flowspec.model.drafters.sources import taps_of
from flowspec.model.weights.directory import default_pair, open_directory
from ops.bench.arguments import count, latencies
from ops.bench.report import machine_line
from ops.parser import Parser
from ops.peer.duration import Extent
from ops.peer.head import convert_head
from ops.peer.install import DEFAULT_FOLDER, Peer, version
from ops.peer.llama import DraftOptions, Llama
from ops.peer.page import Taken, page, take
from ops.peer.pipelines import known, our_pipeline, sides, their_pipeline, warm_up
from ops.peer.prompts import PeerPrompt, chosen
from ops.peer.settings import DRAFTS, LOOKUPS, STRATEGIES, check, drafting, parted

PROMPTS = Path(__file__).parents[2] / "tests" / "data" / "prompts.jsonl"
#: Highest load average, over a minute, of a machine without other work.
QUIET = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """The installed ``peer``, our ``setup``, the settings of both, and how much is run.

    ``file``: the target in GGUF. ``head``: what drafts for it in llama.cpp, as ``Llama``'s.
    """

    peer: Peer
    setup: Setup
    file: Path
    head: Path | None
    strategies: tuple[str, ...]
    drafts: tuple[DraftOptions, ...]
    extent: Extent


def load_words(*, busy: bool) -> str:
    """The machine's load in words; ConfigError if it has other work, unless ``busy``."""
    load = os.getloadavg()[0]
    if load <= QUIET:
        return f"load {load:.1f} at the start"
    if not busy:
        raise ConfigError(
            f"the machine's load is {load:.1f}, expected at most {QUIET}: times beside other work "
            "are void; wait until it is idle, or give --busy to run all the same"
        )
    return f"load {load:.1f} at the start: other work ran beside this, all times are void"


def plan_of(given: argparse.Namespace, folder: Path) -> Plan:
    """The plan that the arguments describe; ConfigError for settings that are not valid.

    ``folder``: where a head is converted into.
    """
    strategies = tuple(given.strategies.split())
    usual = DRAFTS if given.target is None else LOOKUPS
    drafts = tuple(drafting(text) for text in (given.drafts or ",".join(usual)).split(","))
    check(strategies, drafts, given.stages)
    extent = Extent(
        stages=given.stages,
        settings=len(strategies),
        tuning=given.tuning,
        finalists=min(given.finalists, len(strategies)),
        measured=given.count,
        repeats=given.repeats,
        tokens=given.tokens,
    )
    peer = Peer(given.peer.absolute())
    target, draft = default_pair() if given.target is None else (str(given.target), given.draft)
    file = given.target or peer.model("target")
    head = None
    if given.target is not None and not all(one.lookup for one in drafts):
        head = head_of(target, draft, given.target, folder)
    return Plan(peer, Setup(target, draft, given.stages), file, head, strategies, drafts, extent)


def head_of(target: str, draft: str, whole: Path, folder: Path) -> Path:
    """The EAGLE-3 head in ``draft`` as a GGUF file; ConfigError if there is none."""
    directory = open_directory(target)
    taps = taps_of(draft, directory)
    head = None if taps is None else open_directory(taps.drafter)
    if head is None or not is_eagle3(head):
        raise ConfigError(
            f"--draft {draft} has no EAGLE-3 head, which llama.cpp would draft with; give --drafts "
            "like 2x8 alone"
        )
    file = folder / "head.gguf"
    convert_head(head, directory, whole, file)
    return file


def drafters_of(plan: Plan) -> dict[str, str]:
    """The drafter of each of our settings."""
    return {name: parted(name)[1] or plan.setup.draft for name in plan.strategies}


def prompts_of(plan: Plan, file: Path) -> tuple[list[PeerPrompt], list[PeerPrompt]]:
    """Tuning and measuring prompts with the target's own text, which needs no latency."""
    extent = plan.extent
    tuning, measuring = (
        chosen(file, half, count, extent.tokens, plan.setup.target)
        for half, count in (("tuning", extent.tuning), ("measuring", extent.measured))
    )
    target = open_directory(plan.setup.target)
    llama = Llama(plan.peer, (), target.layers, target.context, plan.file)
    with (
        tempfile.TemporaryDirectory(prefix="flowspec-peer-") as folder,
        our_pipeline(plan.setup, 0.0, Path(folder)) as client,
    ):
        return (
            known(llama, client, tuning, extent.tokens),
            known(llama, client, measuring, extent.tokens),
        )


def taken_at(
    plan: Plan, milliseconds: float, tuning: Sequence[PeerPrompt], measuring: Sequence[PeerPrompt]
) -> Taken:
    """Both phases behind links of one latency each way."""
    extent = plan.extent
    latency = milliseconds / 1e3
    drafters = drafters_of(plan)
    with contextlib.ExitStack() as stack:

        def logs() -> Path:
            made = tempfile.TemporaryDirectory(prefix="flowspec-peer-")
            return Path(stack.enter_context(made))

        llama = stack.enter_context(
            their_pipeline(plan.peer, plan.setup, plan.file, plan.head, latency, logs())
        )
        pipelines = {
            drafter: stack.enter_context(
                our_pipeline(replace(plan.setup, draft=drafter), latency, logs())
            )
            for drafter in dict.fromkeys(drafters.values())
        }
        clients = {name: pipelines[drafter] for name, drafter in drafters.items()}
        warm_up(clients, tuning[0])
        return take(
            sides(llama, clients, plan.drafts, extent.tokens),
            tuning,
            measuring,
            finalists=extent.finalists,
            repeats=extent.repeats,
            tell=lambda line: print(f"{milliseconds:g} ms: {line}", file=sys.stderr, flush=True),
        )


def report(given: argparse.Namespace) -> None:
    """Print the estimate, or the tables of every latency as soon as they are known."""
    with tempfile.TemporaryDirectory(prefix="flowspec-peer-") as folder:
        _report(given, plan_of(given, Path(folder)))


def _report(given: argparse.Namespace, plan: Plan) -> None:
    extent = plan.extent
    if given.estimate:
        print(extent.told(given.latencies))
        return
    load = load_words(busy=given.busy)
    plan.peer.check()
    for drafter in set(drafters_of(plan).values()):
        replace(plan.setup, draft=drafter).check()
    tuning, measuring = prompts_of(plan, given.prompts)
    print(f"{machine_line()}; {load}; llama.cpp of llama-cpp-python {version()}")
    print(
        f"\n{extent.stages} stages, T = 0, {extent.tokens} tokens. {extent.settings} settings of "
        f"either side on {extent.tuning} tuning prompts; the {extent.finalists} fastest of either "
        f"on {extent.measured} measuring prompts x {extent.repeats} repeats, the sides in turn. "
        "Times are geometric means over prompts, ratios medians with 95% intervals. Repeated "
        f"4-grams {statistics.mean(prompt.repeated for prompt in measuring):.0%}."
    )
    for milliseconds in given.latencies:
        taken = taken_at(plan, milliseconds, tuning, measuring)
        print(f"\n### {milliseconds:g} ms each way\n\n" + "\n".join(page(taken)), flush=True)


def parser() -> Parser:
    """The command line."""
    made = Parser(description=(__doc__ or "").partition("\n")[0])
    add = made.add_argument
    add("--estimate", action="store_true", help="print how long the run takes, and end")
    add("--busy", action="store_true", help="run beside other work; its times are void")
    add("--stages", type=count, default=4)
    add("--latencies", type=latencies, default="0,5,25", help="ms each way, by commas")
    add("--tokens", type=count, default=48, help="of every text (48)")
    add("--tuning", type=count, default=3, help="prompts to choose settings on (3)")
    add("--count", type=count, default=12, help="prompts to measure on (12)")
    add("--repeats", type=count, default=3, help="of every measured prompt (3)")
    add("--finalists", type=count, default=3, help="settings measured of either side (3)")
    add("--strategies", default=" ".join(STRATEGIES), help="our settings, by spaces")
    add("--drafts", help="llama.cpp's settings but plain, by commas")
    add("--target", type=Path, metavar="FILE.gguf", help="one model, in place of the packaged pair")
    add("--draft", default="ngram", help="what drafts for --target here (ngram)")
    add("--prompts", type=Path, default=PROMPTS, help="a .jsonl file or a folder of them")
    add("--peer", type=Path, default=DEFAULT_FOLDER, help="the folder of `make peer`")
    return made


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        report(parser().parse_args())
    except FlowSpecError as error:
        sys.exit(f"peer: {error}")


if __name__ == "__main__":
    main()
