"""The clairvoyant: a scheduler that knows the target's text, as a bound for all that do not.

It drafts only along the text, a row per pass of the drafter, and sends only rows of the text. A row
must be among the drafter's candidates at its parent, as drafted in the run; behind a token that is
not, it waits for the target like everyone. It runs in the same simulator with the same costs, so
that every row, pass and message has its price; what it saves are all rows off the text.

It is a bound only up to how it cuts segments and how many are in flight: ``seconds_per_token``
searches a few of these options and takes the fastest run of every text. With a draft head, a
candidate may also be missing here that another order of passes finds, as its proposals depend on
what the target had answered when it drafted.

It is a measuring device, not a system: no text can be known before the target has chosen it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowspec.core.drafting.growth import Growth
from flowspec.core.job.draft_worker import Build
from flowspec.core.run.history import History
from flowspec.core.session.strategy import Occasion, Strategy, View
from flowspec.core.tree.tree import Tree
from flowspec.rehearse.compare.grid import Case, Grid
from flowspec.rehearse.compare.memo import WIDTH
from flowspec.rehearse.compare.texts import Text
from flowspec.strategies.base import check, default_text, read_params
from ops.bench.profile_grids import cell_of
from ops.compare.search import Space, search

NAME = "clairvoyant"
#: Options searched: at most ``TRIED`` of their combinations on about ``FEW`` texts, then the best
#: ``KEPT`` of these on all.
VALUES: Mapping[str, tuple[str, ...]] = {
    "in_flight": ("1", "2", "3", "4", "6", "8", "12", "64"),
    "least": ("1", "2", "3", "4", "6", "8"),
    "most": ("1", "2", "4", "8", "64"),
    "holds": ("off", "on"),
    "redrafts": ("on", "off"),
}
STARTS = ("", "redrafts=off", "in_flight=4", "in_flight=1,holds=on,least=4")
TRIED = 16
FEW = 6
KEPT = 4


@dataclass(frozen=True, slots=True)
class ClairvoyantParams:
    """A segment is sent with at most ``most`` rows, and with fewer than ``least`` only if the
    drafter can get no further; ``in_flight``: segments in flight. ``holds``: a new root waits for
    the rows behind it. ``redrafts``: as of every strategy.
    """

    in_flight: int = 64
    least: int = 1
    most: int = 64
    holds: bool = False
    redrafts: bool = True

    def __post_init__(self) -> None:
        check(self, ("in_flight", 1, 64), ("least", 1, 64), ("most", 1, 256))


class TextGrowth:
    """From the root along ``text``, as far as the drafter's candidates go.

    ``text``: prompt and output; positions in the tree index it. ``most``: rows of the segment,
    which begins with the root if ``leads``.
    """

    def __init__(self, tree: Tree, text: Sequence[int], most: int, *, leads: bool) -> None:
        self._text = text
        self._most = most
        self._lead = [tree.root] if leads else []
        self._tip = tree.root

    def proceed(self, tree: Tree) -> tuple[int, ...]:
        """The last row known of the text, unless its next token is not a candidate."""
        # No row follows the text's last token but one, whose choice ends the text.
        while (at := tree[self._tip].position + 1) < len(self._text) - 1:
            token = self._text[at]
            child = tree.child(self._tip, token)
            if child is None:
                expansion = tree[self._tip].expansion
                if expansion is None:
                    return (self._tip,)
                if token not in expansion.tokens:
                    break
                value = expansion.values[expansion.tokens.index(token)]
                child = tree.add(self._tip, token, value)
            self._tip = child
        return ()

    def segments(self, tree: Tree) -> list[list[int]]:
        """The first rows that were not sent, as one segment."""
        fresh = [*self._lead, *drafted(tree)][: self._most]
        return [fresh] if fresh else []

    def rebase(self, tree: Tree) -> None:
        """All nodes are of the text: what is gone is the past."""
        if self._tip not in tree:
            self._tip = tree.root


def drafted(tree: Tree) -> list[int]:
    """The nodes that are in no segment yet, parents first; the tree is one path."""
    return sorted(node.id for node in tree if not node.selected)


class Clairvoyant(Strategy):
    """Sends only what the target is going to choose."""

    drafts_ahead = True
    accepts_unsent = True
    draft_width = WIDTH
    coupled = True

    def __init__(self, params: ClairvoyantParams, text: Text) -> None:
        super().__init__()
        self.params = params
        self.max_in_flight = params.in_flight
        self.holds_root = params.holds
        self.redrafts = params.redrafts
        self._text = (*text.prompt, *text.output)

    def grow(self, view: View, occasion: Occasion) -> Growth | None:
        leads = self.holds_root and occasion is Occasion.ROUND
        return TextGrowth(view.tree, self._text, self.params.most, leads=leads)

    def may_collect(self, view: View) -> bool:
        tree = view.tree
        return len(drafted(tree)) + (tree.root not in tree.sent) >= self.params.least


def options_of(text: str) -> dict[str, str]:
    """Options as ``name=value,name=value``."""
    pairs = (item.partition("=") for item in text.split(",") if item)
    return {name: value for name, _, value in pairs}


def builder(text: Text) -> Build:
    """Makes the clairvoyant of ``text`` from options as of every strategy."""

    def make(strategy: str, stages: int) -> Strategy:
        options = options_of(strategy.partition(":")[2])
        return Clairvoyant(read_params(ClairvoyantParams, options), text)

    return make


def seconds_per_token(grids: Iterable[Grid], source: str) -> list[float]:
    """By grid, the mean time of all tokens after each text's first, at its one temperature."""
    found = []
    for grid in grids:
        (temperature,) = grid.plan.temperatures
        fastest = Fastest(grid, source, temperature)
        fastest.search()
        found.append(fastest.seconds_per_token)
    return found


def searched(*, hidden: bool) -> Space:
    """The options to search; ``hidden``: the drafter drafts from the target's hidden rows."""
    values = {name: tried for name, tried in VALUES.items() if hidden or name != "redrafts"}
    defaults = {
        field.name: default_text(field)
        for field in dataclasses.fields(ClairvoyantParams)
        if field.name in values
    }
    given = [options_of(start) for start in STARTS]
    starts = [
        {**defaults, **{name: value for name, value in start.items() if name in values}}
        for start in given
    ]
    return Space(NAME, {}, values, tuple(starts))


class Fastest:
    """The fastest run of every text of ``grid`` so far."""

    def __init__(self, grid: Grid, source: str, temperature: float) -> None:
        self._grid = grid
        self._source = source
        self._cell = cell_of(grid, NAME, source, temperature)
        self._seconds: dict[int, float] = {}

    @property
    def seconds_per_token(self) -> float:
        """The mean time of a token over the texts that were run."""
        return _per_token(self._seconds, self._grid.cases)

    def search(self) -> None:
        """Run the options worth trying."""
        cases = self._grid.cases
        few = cases[:: max(1, len(cases) // FEW)]
        space = searched(hidden="head" in self._source)
        costs = search(space, lambda strategy: self.cost(strategy, few), TRIED)
        for strategy in list(costs)[:KEPT]:
            self.cost(strategy, cases)

    def cost(self, strategy: str, cases: Sequence[Case]) -> float:
        """The mean time of a token of ``cases`` with the options in ``strategy``."""
        seconds = {case.number: self._run(case, strategy) for case in cases}
        for number, its in seconds.items():
            self._seconds[number] = min(its, self._seconds.get(number, its))
        return _per_token(seconds, cases)

    def _run(self, case: Case, strategy: str) -> float:
        cell = dataclasses.replace(self._cell, strategy=strategy)
        ran = self._grid.simulate(case, cell, self._source, History(), make=builder(case.text))
        return float(ran.stats["decode_seconds"])


def _per_token(seconds: Mapping[int, float], cases: Iterable[Case]) -> float:
    """Per token after each text's first, of those with ``seconds``, by number."""
    tokens = sum(len(case.text.output) - 1 for case in cases if case.number in seconds)
    return sum(seconds.values()) / tokens
