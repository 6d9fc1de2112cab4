"""``auto`` against the papers' systems and chains, profile by profile, in simulation.

    python -m ops.bench.auto --prompts DIR [--profiles jetson-7b,...] [--per-file 8] [--tokens 64]

Milliseconds per token over all tokens, of the measuring half of the first ``--per-file`` prompts of
every file in DIR, prompts whose text repeats itself left out, at the first stage count of each
profile. ``over best``: the best of the others with the same drafts over ``auto``. The second table
lets either side have the better of the two drafts, and ``auto`` choose one itself. Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flowspec.cli.generate import read_prompts
from flowspec.emulation.profile import Profile
from flowspec.emulation.profiles import load, names
from flowspec.errors import FlowSpecError
from flowspec.testbed.grid import BenchPlan, Grid
from flowspec.testbed.prompts import Prompt, halve
from flowspec.testbed.report import ReportRow
from ops.bench.systems import show

BASELINE = "autoregressive"
AUTO = "auto"
OTHERS = ("flowspec", "pipedec", "specpipe", "pipespec", "chain", "chain:window=1")
DRAFTS = ("head", "slm")
CHOICE = "head:slm"
TEMPERATURES = (0.0, 1.0)

#: Milliseconds per token by (strategy, draft source).
Times = dict[tuple[str, str], float]


def prompts_in(folder: Path, per_file: int) -> list[Prompt]:
    """The measuring half of the first ``per_file`` prompts of every file of ``folder``."""
    return halve(
        (
            Prompt(file.stem, text)
            for file in sorted(folder.glob("*.jsonl"))
            for text in read_prompts(file)[:per_file]
        ),
        "measuring",
    )


def measure(profile: Profile, prompts: Sequence[Prompt], tokens: int) -> list[ReportRow]:
    """Every strategy with every draft at every temperature."""
    plan = BenchPlan(
        profile,
        (*OTHERS, AUTO),
        (*DRAFTS, CHOICE),
        TEMPERATURES,
        profile.stages[:1],
        tokens,
        no_loops=True,
    )
    return Grid(plan, prompts).run()


def times_at(rows: Sequence[ReportRow], temperature: float) -> Times:
    """Times of all rows at ``temperature``; the name of a middle model is left out."""
    return {
        (row.strategy, row.source.partition(",")[0]): row.tbt["mean"] * 1e3
        for row in rows
        if row.temperature == temperature
    }


def line_of_draft(place: str, temperature: float, draft: str, times: Times) -> str:
    """One row of the first table."""
    auto = times[AUTO, draft]
    others = [times[name, draft] for name in OTHERS]
    cells = [times[BASELINE, "-"], *others, auto]
    shown = " | ".join(_number(cell) for cell in cells)
    return f"| {place} | {temperature:g} | {draft} | {shown} | {min(others) / auto:.2f} |"


def line_of_best(name: str, temperature: float, times: Times) -> str:
    """One row of the second table."""
    best = min(((one, draft) for one in OTHERS for draft in DRAFTS), key=times.__getitem__)
    ours = min(DRAFTS, key=lambda draft: times[AUTO, draft])
    least = times[best]
    chosen = times[AUTO, CHOICE]
    return (
        f"| {name} | {temperature:g} | {', '.join(best)}: {_number(least)} "
        f"| {ours}: {_number(times[AUTO, ours])} | {least / times[AUTO, ours]:.2f} "
        f"| {_number(chosen)}, {least / chosen:.2f} |"
    )


def _number(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds >= 10 else f"{milliseconds:.2f}"


def run(profiles: Sequence[Profile], prompts: Sequence[Prompt], tokens: int) -> None:
    """Both tables; the first one row by row as it is computed."""
    columns = ("profile, stages", "T", "draft", BASELINE, *OTHERS, AUTO, "over best")
    show(f"| {' | '.join(columns)} |")
    show("|---" * len(columns) + "|")
    best = []
    for profile in profiles:
        rows = measure(profile, prompts, tokens)
        for temperature in TEMPERATURES:
            times = times_at(rows, temperature)
            for draft in DRAFTS:
                place = f"{profile.name}, {profile.stages[0]}"
                show(line_of_draft(place, temperature, draft, times))
            best.append(line_of_best(profile.name, temperature, times))
    show("\n| profile | T | best of the others | auto | over it | auto, choosing the draft |")
    show("|---|---|---|---|---|---|")
    for line in best:
        show(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=Path, required=True, help="a folder of .jsonl files")
    parser.add_argument("--profiles", default=",".join(names()), help="by commas; default: all")
    parser.add_argument("--per-file", type=int, default=8, help="prompts of each file (8)")
    parser.add_argument("--tokens", type=int, default=64, help="of every text (64)")
    given = parser.parse_args()
    try:
        profiles = [load(name) for name in given.profiles.split(",")]
        run(profiles, prompts_in(given.prompts, given.per_file), given.tokens)
    except FlowSpecError as error:
        sys.exit(f"flowspec: {error}")


if __name__ == "__main__":
    main()
