"""Make the recordings that ``tests/rehearse/test_replay.py`` replays.

    python -m tests.make_recordings [--only TEXT] [--into FOLDER]

One is a run of real workers with the packaged models; its times differ at every making. The others
are simulated runs of the toy models and made equal again, so that a file that changes shows a
change of the machines' behaviour. Their drafter gives many candidates equal values, so that ties
decide, and their stages and links differ in speed, so that prunes meet segments everywhere. Prints
each file's size. Run it when behaviour was meant to change, and say in the commit what changed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol.addresses import DRAFT, Address, Role, middle_address, stage_address
from flowspec.core.protocol.machine import Input, Output
from flowspec.core.protocol.messages import Earlier
from flowspec.core.protocol.work import Draft, DraftDone, DraftPass, Encode, EncodeDone, Pass, Work
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.model.base import RowArray
from flowspec.rehearse.replay import header, merge
from flowspec.rehearse.simulator import Costs, RunRecord, Simulation
from flowspec.roles.record import Recorder
from flowspec.strategies import build
from ops.parser import Parser
from tests.toy_model import ToyDrafter, ToyMiddle, ToyStage, ToyTarget

FOLDER = Path(__file__).parent.parent / "tests" / "recordings"
TARGET = ToyTarget()
PROMPT = tuple((35 + at * 3) % 60 + 2 for at in range(6))
SAMPLED = Sampling(temperature=1.0, seed=3)
#: A tree of two dozen nodes, so that a step of a recording stays readable.
BEAM = "width=3,loops=3,nodes=20,segment=7,merge_nodes=12,expand_nodes=8"
#: Values by rank, two ranks alike: multiples of 1/4 add up exactly.
VALUES = tuple(-0.25 * (1 + (rank + 1) // 2) for rank in range(64))


@dataclass(frozen=True, slots=True)
class Recording:
    """One job of ``tokens`` tokens on ``stages`` stages.

    ``middles``: by middle model, how often it agrees with the target. ``hidden``: the drafter is a
    draft head. ``draft_seconds``: of a pass of the drafter. ``beside``: jobs that share its passes,
    which are not recorded. ``lost_after``: committed tokens after which the run is lost; the
    recording is of the next one. 0: it is not lost.
    """

    strategy: str
    stages: int
    tokens: int = 12
    sampling: Sampling = Sampling()
    middles: tuple[float, ...] = ()
    hidden: bool = False
    draft_seconds: float = 0.25
    beside: int = 0
    lost_after: int = 0


RECORDINGS: Mapping[str, Recording] = {
    "auto-2-stages-T0": Recording("auto", 2, tokens=18),
    "auto-fixed-2-stages-T0": Recording("auto:rows=3", 2, tokens=8),
    "auto-slow-drafter-3-stages-T0": Recording("auto", 3, tokens=12, draft_seconds=2.5),
    "autoregressive-2-stages-T1": Recording("autoregressive", 2, tokens=6, sampling=SAMPLED),
    "chain-2-stages-T1": Recording("chain:in_flight=4", 2, tokens=9, sampling=SAMPLED),
    "flowspec-2-stages-T0": Recording(f"flowspec:{BEAM}", 2),
    "flowspec-beside-others-2-stages-T1": Recording(
        f"flowspec:{BEAM}", 2, tokens=12, sampling=SAMPLED, beside=2
    ),
    "flowspec-head-2-stages-T0": Recording(f"flowspec:{BEAM}", 2, tokens=8, hidden=True),
    "flowspec-lockstep-3-stages-T1": Recording(
        f"flowspec:{BEAM},lockstep=on", 3, tokens=11, sampling=SAMPLED
    ),
    "flowspec-resumed-2-stages-T0": Recording(f"flowspec:{BEAM}", 2, lost_after=5),
    "naive_pp-2-stages-T0": Recording("naive_pp:width=3,loops=3,nodes=20", 2),
    "pipedec-3-stages-T0": Recording("pipedec:width=5,children=3", 3, tokens=9),
    "pipedec_head-3-stages-T1": Recording(
        "pipedec_head:width=4,children=3", 3, tokens=8, sampling=SAMPLED, hidden=True
    ),
    "pipespec-3-models-T1": Recording(
        "pipespec:window=8,lookahead=2", 2, tokens=10, sampling=SAMPLED, middles=(0.8,)
    ),
    "pruned_pp-3-stages-T0": Recording("pruned_pp:width=3,loops=3,nodes=20,segment=3", 3, tokens=9),
    "specpipe-3-stages-T0": Recording("specpipe:width=6,children=3,levels=2", 3, tokens=9),
    "specpipe_db-2-stages-T0": Recording("specpipe_db:width=4,children=3", 2, tokens=12, beside=2),
    "specpipe_lossy_nucleus-2-stages-T1": Recording(
        "specpipe_lossy_nucleus:width=4,children=3", 2, tokens=8, sampling=SAMPLED
    ),
    "specpipe_lossy_relaxed-2-stages-T0": Recording(
        "specpipe_lossy_relaxed:width=4,children=3", 2, tokens=8
    ),
    "speculative-2-models-T0": Recording("speculative:lookahead=4", 2),
    "static_tree-2-stages-T0": Recording("static_tree:shape=1-2-2,overlap=on", 2),
}


#: The run of real workers: its name, and the arguments of ``flowspec generate``.
LIVE = "live-flowspec-2-stages-T1"
LIVE_ARGUMENTS = (
    *("Why is the sky blue?", "--strategy", f"flowspec:{BEAM}", "--stages", "2"),
    *("--temperature", "1", "--seed", "3", "--max-new-tokens", "10", "--json"),
)


class TyingDrafter(ToyDrafter):
    """A toy drafter whose candidates have few different values; optionally a draft head."""

    def __init__(self, hit_rate: float, *, hidden: bool = False) -> None:
        super().__init__(TARGET, hit_rate)
        self.wants_hidden = hidden

    def run(self, work: Draft) -> DraftDone:
        done = super().run(work)
        # Less after an odd token, so that a later node's candidates may be above an earlier one's.
        less = [work.part.tokens[row] % 2 / 2 for row in work.part.answers]
        values = (
            tuple(value - lower for value in VALUES[: len(tokens)])
            for tokens, lower in zip(done.tokens, less, strict=True)
        )
        return replace(done, values=tuple(values))

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        """It drafts from tokens alone."""


def seconds(draft: float, node: Address, work: Work) -> float:
    """Seconds of work: unequal stages, and a drafter whose passes take ``draft``."""
    if isinstance(work, DraftPass):
        return draft
    if node.role is Role.MIDDLE:
        return 0.5
    if isinstance(work, Pass):
        rows = sum(len(part.ids) for part in work.parts)
        return {1: 1.0, 2: 1.75}.get(node.number, 0.625) + rows / 8
    return 0.0


def record(wanted: Recording) -> list[str]:
    """The lines of a recording."""
    limits = Limits(
        wanted.stages,
        TARGET.context,
        TARGET.vocabulary,
        TARGET.eos,
        middles=len(wanted.middles),
        hidden=wanted.hidden,
    )
    drafter = TyingDrafter(0.8, hidden=wanted.hidden)
    nodes: dict[Address, Any] = {DRAFT: (DraftMachine(limits, build), drafter)}
    for stage in range(1, wanted.stages + 1):
        machine = StageMachine(stage, wanted.stages)
        nodes[stage_address(stage)] = (machine, ToyStage(TARGET, stage, wanted.stages))
    for model, agreement in enumerate(wanted.middles, 1):
        machine = StageMachine(1, wanted.stages, middle=model)
        nodes[middle_address(model)] = (machine, ToyMiddle(TARGET, agreement))
    lines = defaultdict[RunKey, list[str]](list)

    def emit(run: RunKey, line: str) -> None:
        lines[run].append(line)

    recorders = {
        address: Recorder(address, emit, header(limits) if address == DRAFT else "")
        for address in nodes
    }

    def tap(address: Address, now: float, event: Input, outputs: list[Output]) -> None:
        recorders[address].step(now, event, outputs)
        committed = simulation.jobs["j"].tokens
        if wanted.lost_after and not ledger.jobs["j"].again and len(committed) >= wanted.lost_after:
            begin_again(simulation.jobs["j"])

    def begin_again(lost: RunRecord) -> None:
        ends = [0, *(end for _, end in lost.committed_at)]
        groups = tuple(tuple(lost.tokens[begin:end]) for begin, end in pairwise(ends))
        told = ledger.revoke("j", tuple(nodes), again=1).deliveries
        submit = ledger.assign("j", 1, earlier=Earlier(PROMPT, groups)).deliveries
        for delivery in told + submit:
            simulation.post(delivery.to, delivery.envelope, simulation.now)
        run = submit[0].envelope.message.run
        simulation.runs[run] = RunRecord(tokens=list(lost.tokens))

    def encode(work: Encode) -> EncodeDone:
        return EncodeDone(PROMPT)

    costs = Costs(partial(seconds, wanted.draft_seconds), lambda source, target, envelope: 0.375)
    simulation = Simulation(nodes, costs, encode=encode, tap=tap)
    ledger = simulation.ledger
    spec = JobSpec(
        prompt="a toy prompt",
        max_new_tokens=wanted.tokens,
        sampling=wanted.sampling,
        strategy=wanted.strategy,
        record=True,
    )
    simulation.submit("j", spec)
    for at in range(wanted.beside):
        other = replace(spec, prompt="another", max_new_tokens=wanted.tokens // 2, record=False)
        simulation.submit(f"k{at}", other, at=1.0 + at)
    simulation.run()
    return merge(lines[max(lines)])


def record_live(file: Path) -> None:
    """Run ``LIVE`` and keep its recording in ``file``; CalledProcessError if it fails."""
    command = (sys.executable, "-m", "flowspec", "generate", *LIVE_ARGUMENTS)
    subprocess.run([*command, "--record", str(file)], check=True, stdout=subprocess.DEVNULL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = Parser(prog="python -m tests.make_recordings", description=__doc__)
    parser.add_argument("--only", default="", help="recordings whose name contains TEXT")
    parser.add_argument("--into", type=Path, default=FOLDER, help="the folder to write to")
    options = parser.parse_args(arguments)
    names = (*RECORDINGS, LIVE)
    wanted = [name for name in names if options.only in name]
    if not wanted:
        parser.error(
            f"--only: no recording's name contains {options.only!r}; expected a part of one of "
            + ", ".join(names)
        )
    for name in wanted:
        file = options.into / f"{name}.jsonl"
        if name == LIVE:
            try:
                record_live(file)
            except subprocess.CalledProcessError as error:
                sys.exit(
                    f"recordings: {LIVE}: {shlex.join(error.cmd)} ended with status "
                    f"{error.returncode}"
                )
        else:
            file.write_text(
                "".join(f"{line}\n" for line in record(RECORDINGS[name])), encoding="utf-8"
            )
        print(f"{name}: {file.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
