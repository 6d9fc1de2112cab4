"""The share of a token's time that fences, leases, checksums and recordings take.

    python -m ops.bench.safeguards [--target DIR --draft NAME] [--repeats 40] [--tokens 96]

Pipelines of real processes on two stages, beside each other, and the same text from each in turn.
One is as it is. In others something is left out of all processes: *checksums*, of rows and of
recordings, are 0; *fences*: scripts take every caller as a holder of the job, and every epoch as
its own. In one *leases* are renewed ten times a second, as they tell when a worker is ready. In the
first the text is also recorded. *Ratio*: the median over turns of a text's time with the safeguard,
or with more of it, over that without in the same turn, and its 95% interval by order statistics.
Prints Markdown.
"""

from __future__ import annotations

import hashlib
import os
import re
import statistics
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from flowspec.client import Client
from flowspec.cluster import Cluster, Setup
from flowspec.core.protocol.lease import TERMS
from flowspec.model.weights.directory import default_pair
from flowspec.rehearse.compare.report import Estimate
from flowspec.transport.connections import scripts
from ops.bench.arguments import count
from ops.bench.report import machine_line
from ops.parser import Parser
from ops.peer.pipelines import seconds_per_token

PROMPT = "Describe how to open a text file in Python."
STRATEGIES = ("autoregressive", "flowspec")
LEFT_OUT = ("checksums", "fences", "checksums,fences")
#: What is changed in a process, by commas; a fork server is only for processes of one value.
VARIABLE = "SAFEGUARDS_CHANGED"
_ROOT = Path(__file__).parents[2]


def change(parts: Sequence[str]) -> None:
    """Leave checksums or fences out of this process, or renew its lease ten times a second."""
    if "checksums" in parts:
        zlib.crc32 = lambda *_: 0
    if "leases" in parts:
        object.__setattr__(TERMS, "renew_seconds", 0.1)
    if "fences" in parts:
        read = scripts.read
        scripts.read = lambda file, includes: unfenced(read(file, includes))


def unfenced(script: scripts.Script) -> scripts.Script:
    """``script`` without the look at its caller's generation and the run's epoch."""
    text = re.sub(
        r"local function fenced\(.*?\nend\n",
        "local function fenced() return true end\n",
        script.text,
        flags=re.DOTALL,
    )
    return replace(script, text=text, sha=hashlib.sha1(text.encode()).hexdigest())


@contextmanager
def pipeline(pair: tuple[str, str], changed: str) -> Iterator[str]:
    """The URL of a pipeline in whose processes ``changed`` is."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        own = "import os\nfrom ops.bench.safeguards import change\n"
        own += f"change(os.environ.get({VARIABLE!r}, '').split(','))\n"
        (Path(folder) / "sitecustomize.py").write_text(own, encoding="utf-8")
        before = dict(os.environ)
        os.environ |= {VARIABLE: changed, "PYTHONPATH": f"{folder}:{_ROOT}"}
        stack.callback(os.environ.update, before)
        stack.callback(os.environ.clear)
        yield stack.enter_context(Cluster(Setup(*pair, 2))).url


def milliseconds(client: Client, strategy: str, tokens: int, *, record: bool) -> float:
    """Milliseconds per token of a text after its first."""
    job = client.submit(
        PROMPT, max_new_tokens=tokens, strategy=strategy, record=record, reuse=False
    )
    done = job.result()
    return seconds_per_token(done) * 1e3


def tables(pair: tuple[str, str], repeats: int, tokens: int) -> Iterator[str]:
    """A line for every strategy and part."""
    yield "| strategy | | ms a token | ratio (95%) |"
    yield "|---|---|---|---|"
    with ExitStack() as stack:
        whole, *others = (
            stack.enter_context(Client(stack.enter_context(pipeline(pair, changed))))
            for changed in ("", *LEFT_OUT, "leases")
        )
        ways = [(whole, False), *((other, False) for other in others), (whole, True)]
        for strategy in STRATEGIES:
            taken: list[list[float]] = [[] for _ in ways]
            for turn in range(repeats + 2):
                for times, (client, record) in zip(taken, ways, strict=True):
                    found = milliseconds(client, strategy, tokens, record=record)
                    times += [found] if turn >= 2 else []  # a pipeline's first texts are slower
            yield f"| {strategy} | as it is | {statistics.median(taken[0]):.3f} | |"
            for name, times in zip(LEFT_OUT, taken[1:-2], strict=True):
                yield _line(strategy, f"without {name}", times, taken[0], times)
            yield _line(strategy, "leases renewed tenfold", taken[-2], taken[-2], taken[0])
            yield _line(strategy, "recorded", taken[-1], taken[-1], taken[0])


def _line(
    strategy: str, name: str, own: Sequence[float], over: Sequence[float], under: Sequence[float]
) -> str:
    found = Estimate.of([one / other for one, other in zip(over, under, strict=True)])
    assert found is not None
    interval = f" ({found.low:.3f} to {found.high:.3f})" if found.low is not None else ""
    return f"| {strategy} | {name} | {statistics.median(own):.3f} | {found.median:.3f}{interval} |"


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    target, draft = default_pair()
    parser.add_argument("--target", default=target, metavar="FOLDER", help="(packaged)")
    parser.add_argument("--draft", default=draft, help="drafter (packaged)")
    parser.add_argument("--repeats", type=count, default=40)
    parser.add_argument("--tokens", type=count, default=96)
    given = parser.parse_args()
    print(f"{machine_line()}; {given.repeats} turns of {given.tokens} tokens, two stages, T = 0\n")
    for line in tables((given.target, given.draft), given.repeats, given.tokens):
        print(line, flush=True)


if __name__ == "__main__":
    main()
