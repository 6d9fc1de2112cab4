"""Long prompts among decoding jobs, in simulation: what they cost them, and how long they take.

    python -m ops.bench.long_prompt [--profiles rtx3090-70b,jetson-7b,a100-70b] [--jobs 7]
                                    [--rows 1500] [--long 1] [--tokens 192]

While ``--jobs`` jobs decode, ``--long`` prompts of ``--rows`` tokens are submitted at once. The
times are a profile's, the drafts those of ``ops/bench/many.py`` at T = 0. *Kept*: the decoding
jobs' tokens per second from the prompts' submission to the last one's first token, over that of as
long a time before. The largest gap between two commits of a job is that of the same times. *TTFT*:
the last one's, beside the others and without them. Over several moments of submission: means, and
the largest gaps. Prints Markdown.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from flowspec.cli.generate import read_prompts
from flowspec.drivers.sim import RunRecord
from flowspec.emulation.profile import Profile
from flowspec.emulation.profiles import load
from flowspec.errors import FlowSpecError
from flowspec.testbed.hits import Kind
from flowspec.testbed.texts import Text
from ops.bench.arguments import count
from ops.bench.loops import Loop, job_names, tokens_until
from ops.bench.many import PROFILES, PROMPTS, fitted, pipeline_of, random_texts
from ops.parser import Parser

STRATEGIES = ("autoregressive", "auto")
#: Tokens of the long prompt's own text.
ANSWERED = 8
#: When the prompt comes, as shares of the time that the jobs take without it.
MOMENTS = (0.4, 0.5, 0.6)


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """Figures of long prompts that come at once; seconds.

    ``kept``: the others' rate beside it over the one before. ``gap``, ``before``: their largest
    gaps beside and before them. ``ttft``, ``alone``: until the first token of the last one, beside
    the others and without them.
    """

    kept: float
    gap: float
    before: float
    ttft: float
    alone: float


class Scene:
    """The last ``long`` of ``texts`` are the long prompts', the others the decoding jobs'."""

    def __init__(
        self, profile: Profile, texts: Sequence[Text], kinds: Sequence[Kind], long: int = 1
    ) -> None:
        self._pipeline = pipeline_of(profile, texts, kinds)
        names = job_names(len(texts))
        self._others, self._long = names[:-long], names[-long:]

    def figures(self, strategy: str) -> Iterator[LongPrompt]:
        """The figures of prompts at ``MOMENTS``, all jobs with ``strategy``."""
        alone = self._last_first_token(self._run(strategy, dict.fromkeys(self._long, 0.0)))
        at_once = dict.fromkeys(self._others, 0.0)
        undisturbed = self._run(strategy, at_once)
        end = min(undisturbed[job].committed_at[-1][0] for job in self._others)
        for moment in MOMENTS:
            at = moment * end
            records = self._run(strategy, {**at_once, **dict.fromkeys(self._long, at)})
            first = self._last_first_token(records)
            before = self._rate_and_gap(records, 2 * at - first, at)
            beside = self._rate_and_gap(records, at, first)
            yield LongPrompt(beside[0] / before[0], beside[1], before[1], first - at, alone)

    def _last_first_token(self, records: Mapping[str, RunRecord]) -> float:
        """When the last of the long prompts had its first token."""
        return max(records[job].committed_at[0][0] for job in self._long)

    def _run(self, strategy: str, times: Mapping[str, float]) -> Mapping[str, RunRecord]:
        return Loop(self._pipeline, strategy).submitted(times)

    def _rate_and_gap(
        self, records: Mapping[str, RunRecord], begin: float, end: float
    ) -> tuple[float, float]:
        """The others' tokens per second from ``begin`` to ``end``, and their largest gap then."""
        others = [records[job] for job in self._others]
        tokens = sum(
            tokens_until(one.committed_at, end) - tokens_until(one.committed_at, begin)
            for one in others
        )
        gaps = [
            later - at
            for one in others
            for (at, _), (later, _) in itertools.pairwise(one.committed_at)
            if later > begin and at < end
        ]
        return tokens / (end - begin), max(gaps)


def rows(
    profiles: Sequence[Profile], texts: Sequence[Text], kinds: Sequence[Kind], long: int
) -> Iterator[str]:
    """A row per profile and strategy; ``long``: how many of ``texts`` are the long prompts'."""
    yield (
        "| profile | jobs decode with | kept | largest gap, ms | before | over before "
        "| TTFT, s | alone | over alone |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for profile in profiles:
        scene = Scene(profile, texts, kinds, long)
        for strategy in STRATEGIES:
            found = np.array([astuple(one) for one in scene.figures(strategy)])
            kept, _, _, ttft, alone = found.mean(axis=0)
            _, gap, before, _, _ = found.max(axis=0)
            gaps = f"{gap * 1e3:.0f} | {before * 1e3:.0f}"
            yield (
                f"| {profile.name} | {strategy} | {kept:.2f} | {gaps} "
                f"| {gap / before:.2f} | {ttft:.2f} | {alone:.2f} | {ttft / alone:.2f} |"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = Parser(prog="python -m ops.bench.long_prompt", description=__doc__)
    add = parser.add_argument
    add("--profiles", default=PROFILES, help=f"by commas ({PROFILES})")
    add("--jobs", type=count, default=7, help="that decode (7)")
    add("--rows", type=count, default=1500, help="of the prompt (1500)")
    add("--long", type=count, default=1, help="prompts at once (1)")
    add("--tokens", type=count, default=192, help="of every decoding job's text (192)")
    add("--prompts", type=Path, default=PROMPTS, help="a .jsonl file (that of the tests)")
    options = parser.parse_args(arguments)
    try:
        profiles = [load(name) for name in options.profiles.split(",")]
        kinds, lengths = fitted(read_prompts(options.prompts), [0.0], options.tokens)
        texts = random_texts(lengths, options.tokens, options.jobs)
        long = random_texts([options.rows], ANSWERED, options.long)
        print(
            f"Prompts of {options.rows} tokens, {options.long} at once, among {options.jobs} jobs "
            f"that decode, T = 0; over {len(MOMENTS)} moments of submission.\n",
            flush=True,
        )
        for line in rows(profiles, [*texts, *long], kinds[0.0], options.long):
            print(line, flush=True)
    except FlowSpecError as error:
        sys.exit(f"long_prompt: {error}")


if __name__ == "__main__":
    main()
