"""FlowSpec's mechanisms one by one, in simulation, with the default pair's real acceptance.

    python -m ops.bench.ablation [--lockstep] [--coupled] [--stages 4] [--tokens 64] [--seeds 3]
                                 [--prompts FILE.jsonl|DIR]

Runs the live machines under the virtual clock: a stage's pass costs 1, a growth's drafting 1, a
link nothing. The target's text is computed once by plain decoding; the draft model drafts.
``--lockstep`` keeps the papers' barrier. Drafting is uncoupled, as in the papers, unless
``--coupled`` is given. Prints Markdown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.core.run.sampling import Sampling
from flowspec.model.weights.directory import default_pair, open_directory
from ops.bench.simulated import PROMPTS, prompts_of, simulate, texts
from ops.parser import Parser

ROWS = (
    ("autoregressive", "autoregressive"),
    ("naive_pp", "naive_pp"),
    ("pruned_pp", "pruned_pp"),
    ("flowspec without score order", "flowspec:order=generation"),
    ("flowspec without context-aware merge", "flowspec:merge=off"),
    ("flowspec without score-aware expansion", "flowspec:expand=off"),
    ("flowspec whole", "flowspec"),
)


@dataclass
class Sum:
    """Sums over many runs. ``tokens`` leaves out each run's first, which prefill yields."""

    tokens: float = 0
    steps: float = 0
    rounds: float = 0
    hits: float = 0
    useful: float = 0
    wasted: float = 0
    void: float = 0

    def add(self, stats: dict[str, Any]) -> None:
        tokens = stats["tokens"] - 1
        self.tokens += tokens
        self.steps += stats["steps"] or 0
        self.rounds += stats["rounds"]
        self.hits += (stats["hit_rate"] or 0) * tokens
        for fate in ("useful", "wasted", "void"):
            setattr(self, fate, getattr(self, fate) + stats["rows"][fate])

    def row(self, name: str, fewest: float) -> str:
        shares = " / ".join(
            f"{count / self.tokens:.1f}" for count in (self.useful, self.wasted, self.void)
        )
        return (
            f"| {name} | {self.tokens / self.steps:.4f} | {self.steps:.0f} | "
            f"{self.steps / fewest:.3f} "
            f"| {self.tokens / self.rounds:.2f} | {self.hits / self.tokens:.3f} | {shares} |"
        )


def switched(strategy: str, *, coupled: bool, lockstep: bool) -> str:
    """``strategy`` with the options that this run's flags set."""
    switches = [] if strategy == "autoregressive" or coupled else ["coupled=off"]
    switches += ["lockstep=on"] if lockstep else []
    if not switches:
        return strategy
    return f"{strategy}{',' if ':' in strategy else ':'}{','.join(switches)}"


def main() -> None:
    parser = Parser()
    parser.add_argument("--lockstep", action="store_true", help="keep the papers' barrier")
    parser.add_argument(
        "--coupled", action="store_true", help="let the drafter see the noise at T = 1"
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3, help="seeds at T = 1")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    given = parser.parse_args()
    from flowspec.core.session.stats import repeated_4grams
    from flowspec.model.drafters.language_model import load_drafter
    from flowspec.rehearse.compare.memo import MemoDrafter

    prompts = prompts_of(given.prompts)
    target = open_directory(default_pair()[0])
    drafter = MemoDrafter(load_drafter(open_directory(default_pair()[1])))
    for temperature, seeds in ((0.0, [0]), (1.0, list(range(given.seeds)))):
        samplings = [Sampling(temperature, seed=seed) for seed in seeds]
        runs = texts(prompts, samplings, given.tokens, target)
        repeated = sum(repeated_4grams(run.output) for run in runs) / len(runs)
        print(
            f"\nT = {temperature:g}, {given.stages} stages, {len(runs)} runs; repeated 4-grams "
            f"{repeated:.0%}\n"
        )
        columns = (
            "tokens per step",
            "steps",
            "over whole",
            "tokens per round",
            "hit rate",
            "useful / wasted / void",
        )
        print(f"| | {' | '.join(columns)} |")
        print("|---|---|---|---|---|---|---|")
        sums = {name: Sum() for name, _ in ROWS}
        for run in runs:
            for name, strategy in ROWS:
                full = switched(strategy, coupled=given.coupled, lockstep=given.lockstep)
                sums[name].add(simulate(run, full, given.stages, target, drafter))
            drafter.forget()
        for name, total in sums.items():
            print(total.row(name, sums["flowspec whole"].steps), flush=True)


if __name__ == "__main__":
    main()
