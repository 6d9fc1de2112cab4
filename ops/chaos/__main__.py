"""Break a running pipeline at random moments, and check what its users would see.

    python -m ops.chaos [--seeds 25] [--first 0] [--faults 20] [--only NAME]
        [--target FOLDER_OR_GGUF --draft DRAFT]

Each seed starts a pipeline of two stages by `flowspec up`, of the packaged pair or another one, of
every second seed with a broker that keeps its data, of every third with rows that go from worker to
worker, of every fourth with a spare beside, of every fifth with a middle model (the packaged pair
alone), and does so many faults to it: processes that are killed, stopped for a while or asked to
end, one, two or all at once; the server that has forked them; a worker's inbox that is killed or
halted; a gateway in the midst of an answer; a broker that is killed, halted, emptied, full, unable
to save or without replicas; its password changed; failed over to a replica and back, made a replica
of nobody; its keys, entries and scripts deleted, cut, doubled or replaced; rows that are no
numbers; a thread that computes and hangs, for long or since its start; a worker with other weights.
Jobs are in the middle of their text meanwhile. After each fault,

- every job has ended within a bound, with an answer or with one line;
- an answer is the target's own text as transformers' ``generate`` says it, with the documented
  noise of the draw if it is sampled; what came before an error is its beginning;
- the next job is answered, without hands.

At the end no key is without a lifetime that was not there before the first fault, no role has
collected open files, and a pipeline that is asked to stop leaves no process. Nothing here uses the
library: jobs go in and out as with redis-cli.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import redis

from ops.chaos.faults import FAULTS, OF_BROKER, OF_STRAIGHT, TAKES_DATA
from ops.chaos.oracle import expected, problem_of
from ops.chaos.pipeline import ENDS_SECONDS, PAIR, JobText, Pipeline, SentJob
from ops.parser import Parser

STRATEGIES = ("flowspec", "pipedec", "specpipe", "pipespec", "chain", "auto", "autoregressive")
#: By how many open files a role may differ from one moment to another.
MORE_FILES = 8


@dataclass
class SeedResult:
    """What one seed found: problems, one line each, and seconds until all jobs were served."""

    seed: int
    problems: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: Counter[str] = field(default_factory=Counter)


def run(
    seed: int, faults: int, only: str = "", target: Path = PAIR / "target", draft: str = "draft"
) -> SeedResult:
    """Do ``faults`` faults to a pipeline of ``target`` and ``draft``."""
    found = SeedResult(seed)
    luck = random.Random(seed)
    wanted = expected(target)
    spare = luck.choice((1, 2)) if seed % 4 == 0 else 0
    with tempfile.TemporaryDirectory(prefix="chaos-") as place:
        names = {name for name in FAULTS if only in name}
        pipeline = Pipeline(
            Path(place),
            target,
            draft,
            persist=seed % 2 == 1,
            straight=names <= OF_STRAIGHT or (seed % 3 == 0 and not names <= OF_BROKER),
            middle=seed % 5 == 0 and target == PAIR / "target",
            spare=spare,
        )
        possible = sorted(names - (OF_BROKER if pipeline.straight else OF_STRAIGHT))
        try:
            first = next(iter(wanted))  # by all roles: each has its log then
            pipeline.wait([pipeline.submit(first, name) for name in ("flowspec", "pipespec")])
            keys, files = pipeline.lasting_keys(), pipeline.open_files()
            for at in range(faults):
                name = luck.choice(possible)
                if not _suffer(pipeline, luck, name, wanted, found, at):
                    break
            _check_keys(pipeline, keys, found)
            _check_files(files, pipeline.open_files(), found)
        finally:
            pipeline.down()
        if left := pipeline.processes():
            found.problems.append(f"seed {seed}: processes are left: {left}")
    return found


def _suffer(
    pipeline: Pipeline,
    luck: random.Random,
    name: str,
    wanted: dict[JobText, tuple[int, ...]],
    found: SeedResult,
    at: int,
) -> bool:
    """One fault, and what comes of it; False: the pipeline serves no more."""
    where = f"seed {found.seed}, fault {at}, {name}"
    jobs = [
        pipeline.submit(luck.choice(list(wanted)), luck.choice(STRATEGIES))
        for _ in range(luck.choice((1, 1, 2, 3)))
    ]
    _begin(pipeline, jobs[0])
    time.sleep(luck.uniform(0.0, 0.4))
    found.faults[name] += 1
    began = time.monotonic()
    try:
        FAULTS[name](pipeline, luck)
    except (redis.RedisError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        found.problems.append(f"{where}: the fault failed: {error}")
    pipeline.wait(jobs)
    takes = name in TAKES_DATA and not (name == "broker killed" and pipeline.persist)
    for job in jobs:
        found.errors[job.error] += bool(job.error)
        if problem := problem_of(job, wanted[job.prompt], may_be_lost=takes):
            found.problems.append(f"{where}: job {job.id} of {job.strategy} {problem}")
    after = pipeline.submit(luck.choice(list(wanted)), "flowspec")
    pipeline.wait([after])
    found.seconds[name].append(time.monotonic() - began)
    sys.stderr.write(f"{where}: {found.seconds[name][-1]:.1f} s\n")
    if problem := problem_of(after, wanted[after.prompt], may_be_lost=False):
        found.problems.append(f"{where}: the next job {problem} {after.error}")
    elif after.error:
        found.problems.append(f"{where}: the next job ended with {after.error}")
    return bool(after.ended)


def _begin(pipeline: Pipeline, job: SentJob) -> None:
    """Until the job has some tokens, or has ended."""
    until = time.monotonic() + ENDS_SECONDS
    while not job.ids and not job.ended and time.monotonic() < until:
        pipeline.read(job)
        time.sleep(0.01)


def _check_keys(pipeline: Pipeline, before: set[str], found: SeedResult) -> None:
    until = time.monotonic() + 10.0
    while (left := sorted(pipeline.lasting_keys() - before)) and time.monotonic() < until:
        time.sleep(0.2)
    if left:
        found.problems.append(f"seed {found.seed}: keys have no lifetime: {left[:5]}")


def _check_files(before: dict[str, int], after: dict[str, int], found: SeedResult) -> None:
    for role in before.keys() & after.keys():
        if after[role] > before[role] + MORE_FILES:
            found.problems.append(
                f"seed {found.seed}: {role} had {before[role]} files open and has {after[role]}"
            )


def report(results: Sequence[SeedResult]) -> Iterator[str]:
    """A table of the faults, and all problems."""
    yield "| fault | times | seconds until all was served, median | most |"
    yield "|---|---|---|---|"
    seconds: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, taken in result.seconds.items():
            seconds[name] += taken
    for name in sorted(seconds):
        taken = seconds[name]
        yield f"| {name} | {len(taken)} | {statistics.median(taken):.1f} | {max(taken):.1f} |"
    errors = sum((result.errors for result in results), Counter())
    yield f"\nerrors that jobs ended with: {sum(errors.values())}"
    for error, count in errors.most_common():
        yield f"{count:4} {error}"
    problems = [problem for result in results for problem in result.problems]
    yield f"\nproblems: {len(problems)}"
    yield from problems


def main() -> None:
    parser = Parser(prog="python -m ops.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=25)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--target", type=Path, default=PAIR / "target", help="the packaged one")
    parser.add_argument("--draft", default="draft")
    given = parser.parse_args()
    if not any(given.only in name for name in FAULTS):
        parser.error(f"--only is {given.only!r}; expected a part of one of: {', '.join(FAULTS)}")
    results = []
    for seed in range(given.first, given.first + given.seeds):
        results.append(run(seed, given.faults, given.only, given.target.absolute(), given.draft))
        said = "; ".join(results[-1].problems) or "nothing"
        print(f"seed {seed}: {sum(results[-1].faults.values())} faults; found: {said}", flush=True)
    print("\n".join(report(results)))
    sys.exit(any(result.problems for result in results))


if __name__ == "__main__":
    main()
