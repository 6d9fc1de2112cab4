"""``auto`` against all other systems, tuned, on every profile, in simulation.

    python -m ops.bench.auto --prompts DIR [--tuned FILE.json] [--jobs 2] [--profiles jetson-7b,...]
        [--drafts head,slm] [--temperatures 0,1] [--per-file 8] [--tuning-per-file 8]
        [--tokens 64] [--only-tune]

Options of the others are searched on the tuning half of the last ``--tuning-per-file`` prompts of
every file in DIR; everything is measured on the measuring half of the last ``--per-file``.
``--tuned`` keeps the options in a file as soon as a profile's are found, and searches only for
those it lacks. Every temperature and draft is one piece of work, for all profiles: they share the
texts and the drafter's proposals. ``--jobs`` runs so many at once, each with up to 2 GB. Prints
Markdown (``ops/bench/results/auto.md``), progress on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from flowspec.cli.outputs import check_writable
from flowspec.errors import ConfigError, FlowSpecError
from flowspec.rehearse.compare.grid import BenchPlan, Grid, run_together
from flowspec.rehearse.compare.naming import canonical
from flowspec.rehearse.compare.prompts import Prompt, halve
from flowspec.rehearse.devices.profile import Profile
from flowspec.rehearse.devices.profiles import load, names
from ops.bench import auto_tuning
from ops.bench.arguments import count, prompt_sets, temperatures
from ops.bench.auto_table import AUTO, BASELINE, Place, tables
from ops.bench.auto_tuning import EFFORT, Conditions, Found, packaged_models
from ops.bench.clairvoyant import seconds_per_token
from ops.bench.profile_grids import cell_of, grids_on
from ops.bench.systems import show
from ops.compare.tuning import Effort
from ops.parser import Parser
from ops.prompts import HELD_OUT, last_prompts

OTHERS = (
    *("flowspec", "pipedec", "specpipe", "pipespec", "chain"),
    *("static_tree", "naive_pp", "pruned_pp", "speculative"),
)
DRAFTS = ("head", "slm")
#: The packaged profiles of pipelines, and of those over a wide area network two.
PROFILES = tuple(name for name in names() if name != "wan-25ms" and load(name).stages[0] > 1)
#: Systems measured per place, untuned and tuned: the fastest on the tuning prompts.
MEASURED = 2
#: Fewest measuring prompts.
LEAST = 24


@dataclass(frozen=True, slots=True)
class Matchup:
    """What to tune and measure; ``known``: options found earlier.

    ``least``: fewest measuring prompts; 0: only tune. ``tuned``: the file in which options are kept
    as they are found; None: they are not.
    """

    profiles: Sequence[Profile]
    tuning: Sequence[Prompt]
    measuring: Sequence[Prompt]
    tokens: int
    known: Sequence[Found] = ()
    others: tuple[str, ...] = OTHERS
    effort: Effort = EFFORT
    least: int = LEAST
    seed: int = 1
    tuned: Path | None = None

    @property
    def conditions(self) -> Conditions:
        """What the options found for this request depend on."""
        return Conditions(
            self.tuning, self.tokens, self.seed, packaged_models(), self.others, self.profiles
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """The options of every other system at one temperature with one draft, and what was
    measured.
    """

    found: Sequence[Found]
    places: Sequence[Place]


def prompts_in(folder: Path, per_file: int, half: str) -> list[Prompt]:
    """A half of the last ``per_file`` prompts of every file of ``folder``, counted from its end.

    So no prompt is in both halves, whatever their numbers.
    """
    return halve(reversed(last_prompts(folder, per_file)), half)


def take(request: Matchup, where: tuple[float, str]) -> Piece:
    """Tune and measure every profile at a temperature with a draft.

    ConfigError, before anything is tuned, if fewer than ``request.least`` prompts can be measured.
    """
    if not request.least:
        return Piece(_options(request, where), ())
    grids = _grids(request, request.profiles, where, request.measuring)
    kept = len(grids[0].cases)
    if kept < request.least:
        raise ConfigError(
            f"{kept} of {len(request.measuring)} measuring prompts can be used, the others repeat "
            f"themselves or do not fit; expected {request.least} or more: raise --per-file"
        )
    found = _options(request, where)
    return Piece(found, _measured(grids, where, found))


def _options(request: Matchup, where: tuple[float, str]) -> list[Found]:
    """The options of ``request.others`` for every profile; new ones are kept."""
    known = {one.place: one for one in request.known}
    wanted = list(product([profile.name for profile in request.profiles], request.others))
    temperature, draft = where
    lacking = [
        profile
        for profile in request.profiles
        if any((profile.name, *where, other) not in known for other in request.others)
    ]
    if lacking:
        _say(f"tuning {len(lacking)} profiles at T={temperature:g} with {draft}")
        grids = _grids(request, lacking, where, request.tuning)
        fresh = auto_tuning.tune(
            grids, draft, request.others, request.effort, partial(_keep, request), _say
        )
        known |= {one.place: one for one in fresh}
    return [known[profile, temperature, draft, other] for profile, other in wanted]


def _keep(request: Matchup, found: Sequence[Found]) -> None:
    if request.tuned is not None:
        auto_tuning.add(request.tuned, request.conditions, request.effort, found)


def _grids(
    request: Matchup,
    profiles: Sequence[Profile],
    where: tuple[float, str],
    prompts: Sequence[Prompt],
) -> list[Grid]:
    """A grid per profile; they share texts and drafters."""
    temperature, draft = where
    plan = BenchPlan(
        profiles[0],
        (*request.others, AUTO),
        (draft,),
        (temperature,),
        tokens=request.tokens,
        seed=request.seed,
        no_loops=True,
    )
    return grids_on(profiles, plan, prompts)


def _measured(
    grids: Sequence[Grid], where: tuple[float, str], found: Sequence[Found]
) -> list[Place]:
    """What was measured on every grid."""
    temperature, draft = where
    source = canonical(draft)
    chosen = [_chosen(found, grid) for grid in grids]
    runs = []
    for grid, (before, after) in zip(grids, chosen, strict=True):
        texts = dict.fromkeys((AUTO, *before, *after))
        cells = [cell_of(grid, text, source, temperature) for text in texts]
        plain = cell_of(grid, BASELINE, "-", temperature)
        runs.append((grid, dict.fromkeys([plain, *cells], source)))
    kept = len(grids[0].cases)
    _say(f"measuring {len(grids)} profiles at T={temperature:g} with {draft} on {kept} prompts")
    rows = run_together(runs)
    bounds = seconds_per_token(grids, source)
    return [
        Place(
            grid.plan.profile.name,
            grid.plan.stages[0],
            temperature,
            draft,
            {row.strategy: row for row in its},
            before,
            after,
            bound,
        )
        for grid, (before, after), its, bound in zip(grids, chosen, rows, bounds, strict=True)
    ]


def _chosen(found: Sequence[Found], grid: Grid) -> tuple[list[str], list[str]]:
    """The texts of the ``MEASURED`` fastest on the tuning prompts, before and after tuning."""
    here = [one for one in found if one.profile == grid.plan.profile.name]
    before = sorted(here, key=lambda one: one.finalists[one.strategy])
    after = sorted(here, key=lambda one: one.finalists[one.found])
    return (
        [one.strategy for one in before[:MEASURED]],
        [one.found for one in after[:MEASURED]],
    )


def taken(request: Matchup, where: Sequence[tuple[float, str]], jobs: int = 1) -> list[Piece]:
    """``take`` for every temperature and draft of ``where``, ``jobs`` at once.

    The first error ends it as soon as the pieces that have begun are done.
    """
    if jobs == 1:
        return [take(request, one) for one in where]
    with ProcessPoolExecutor(jobs) as pool:
        pieces = [pool.submit(take, request, one) for one in where]
        try:
            for piece in as_completed(pieces):
                piece.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [piece.result() for piece in pieces]


def run(request: Matchup, where: Sequence[tuple[float, str]], jobs: int) -> None:
    """Print the tables; options that ``request.tuned`` has are not searched again."""
    if request.tuned is not None and request.tuned.exists():
        known = auto_tuning.load(request.tuned, request.conditions, request.effort)
        request = replace(request, known=known)
    every = taken(request, where, jobs)
    if request.least:
        places = [place for one in every for place in one.places]
        found = [entry for one in every for entry in one.found]
        kept = str(request.tuned or "")
        show("\n".join(tables(places, found, request.effort, request.tokens, kept)))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--prompts", type=prompt_sets, required=True, help="a folder of .jsonl files")
    add("--profiles", default=",".join(PROFILES), help="by commas")
    add("--per-file", type=count, default=HELD_OUT, help=f"last prompts of each file ({HELD_OUT})")
    add("--tuning-per-file", type=count, default=HELD_OUT, help=f"those to tune on ({HELD_OUT})")
    add("--least", type=count, default=LEAST, help=f"fewest measuring prompts ({LEAST})")
    add("--drafts", default=",".join(DRAFTS), help="by commas (head,slm)")
    add("--temperatures", type=temperatures, default="0,1", help="by commas (0,1)")
    add("--tokens", type=count, default=64, help="of every text (64)")
    add("--tuned", type=Path, metavar="FILE", help="keep found options in FILE")
    add("--only-tune", action="store_true", help="measure nothing")
    add("--jobs", type=count, default=1, help="processes (1)")
    given = parser.parse_args()
    try:
        if given.only_tune and given.tuned is None:
            raise ConfigError("--only-tune needs --tuned, or what is found is lost; name a file")
        if given.tuned is not None:
            check_writable("--tuned", given.tuned)
        request = Matchup(
            [load(name) for name in given.profiles.split(",")],
            prompts_in(given.prompts, given.tuning_per_file, "tuning"),
            prompts_in(given.prompts, given.per_file, "measuring"),
            given.tokens,
            least=0 if given.only_tune else given.least,
            tuned=given.tuned,
        )
        where = product(given.temperatures, given.drafts.split(","))
        run(request, list(where), given.jobs)
    except FlowSpecError as error:
        sys.exit(f"flowspec: {error}")


if __name__ == "__main__":
    main()
