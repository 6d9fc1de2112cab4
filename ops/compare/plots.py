"""Charts of a comparison, SVG or PNG by the file's suffix. Needs matplotlib.

A chart shows one panel: rows of one stage count, one temperature and one link; ``charts`` draws
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowspec.core.protocol.addresses import Address, Role
from flowspec.core.protocol.machine import Commit, Compute, Done, Input, Output
from flowspec.core.protocol.messages import Prune
from flowspec.core.protocol.work import DraftPass, Part, Pass
from flowspec.errors import ConfigError, installs
from flowspec.rehearse.compare.report import BenchReport, ReportRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png")
_COLOURS = {
    "useful": "#2a9d6f",
    "wasted": "#e9a15b",
    "void": "#c4c4c4",
    "prompt": "#9aa3b5",
    "draft": "#5b7fc7",
}
_ACCENT = _COLOURS["draft"]
_DARK = "#333333"
_WIDTH = 8.0
#: Heights in inches: of a bar, of a stage's lane, and of the frame above and below them.
_BAR = 0.34
_LANE = 0.3
_FRAME = 1.5


def require() -> None:
    """ConfigError unless matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"charts need matplotlib, which is not installed: {installs('matplotlib')}"
        ) from None


# ---- a run, pass by pass -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """A pass of ``node`` over rows ``ids``; times are in seconds; ``draft``: a drafter's pass."""

    node: Address
    start: float
    end: float
    ids: tuple[int, ...]
    draft: bool


def _parts(work: Pass | DraftPass) -> Iterator[Part]:
    """The rows of each run."""
    if isinstance(work, Pass):
        yield from work.parts
    else:
        yield from (draft.part for draft in work.drafts)


@dataclass
class Timeline:
    """A simulation's tap: its passes in order, and the fates of their rows."""

    spans: list[Interval] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    #: Ids of rows that were accepted or became the root.
    useful: set[int] = field(default_factory=set)
    _running: dict[Address, tuple[float, tuple[int, ...], bool]] = field(default_factory=dict)

    def __call__(self, node: Address, now: float, event: Input, outputs: Sequence[Output]) -> None:
        if isinstance(event, Done) and node in self._running:
            start, ids, draft = self._running.pop(node)
            self.spans.append(Interval(node, start, now, ids, draft))
        for output in outputs:
            if isinstance(output, Compute) and isinstance(output.work, Pass | DraftPass):
                drafting = isinstance(output.work, DraftPass)
                ids = tuple(row for part in _parts(output.work) for row in part.ids)
                self._running[node] = (now, ids, drafting)
            elif isinstance(output, Commit):
                self.commits.append(now)
                for prune in output.prunes:
                    if isinstance(prune.message, Prune):
                        self.useful.update((*prune.message.accepted, prune.message.root))

    def fates(self, span: Interval, prompt_rows: int) -> dict[str, float]:
        """Shares of a pass's rows: prompt, useful and wasted; in a drafter's pass, all drafting."""
        if span.draft:
            return {"draft": 1.0}
        counts = dict.fromkeys(("prompt", "useful", "wasted"), 0)
        for row in span.ids:
            counts[
                "prompt" if row < prompt_rows - 1 else "useful" if row in self.useful else "wasted"
            ] += 1
        return {fate: count / len(span.ids) for fate, count in counts.items()}


def timeline(taken: Timeline, prompt_rows: int, seconds: float, title: str) -> Figure:
    """The passes of every device from shortly before the first token, for ``seconds``.

    A pass is a box, split by the fates of its rows; lines are commits. ``prompt_rows``: rows of
    the prompt.
    """
    from matplotlib.patches import Patch

    nodes = sorted({span.node for span in taken.spans}, key=_lane)
    figure, axes = _canvas(_LANE * len(nodes) + _FRAME, title)
    begin = taken.commits[0] - 0.1 * seconds
    for span in taken.spans:
        if span.end < begin or span.start > begin + seconds:
            continue
        bottom = nodes.index(span.node) + 0.4
        for fate, share in taken.fates(span, prompt_rows).items():
            if share > 0:
                height = 0.8 * share
                axes.broken_barh(
                    [(span.start, span.end - span.start)],
                    (bottom - height, height),
                    facecolor=_COLOURS[fate],
                    edgecolor="white",
                    linewidth=0.4,
                )
                bottom -= height
    commits = [when for when in taken.commits if begin <= when <= begin + seconds]
    axes.vlines(commits, -0.5, len(nodes) - 0.5, color=_DARK, linewidth=0.7, linestyles=(0, (2, 2)))
    axes.set(
        xlim=(begin, begin + seconds), ylim=(len(nodes) - 0.5, -0.5), xlabel="simulated seconds"
    )
    axes.set_yticks(range(len(nodes)), [_device(node) for node in nodes])
    shown = {
        "draft": "drafting",
        "prompt": "prompt",
        "useful": "useful rows",
        "wasted": "wasted rows",
    }
    handles = [Patch(facecolor=_COLOURS[fate], label=label) for fate, label in shown.items()]
    _legend(figure, handles)
    return figure


def _lane(node: Address) -> tuple[int, int]:
    """From the top: the drafter, the middle models, the stages."""
    return (Role.DRAFT, Role.MIDDLE, Role.VERIFY).index(node.role), node.number


def _device(node: Address) -> str:
    kind = {Role.DRAFT: "draft", Role.MIDDLE: "middle", Role.VERIFY: "stage"}[node.role]
    return f"{kind} {node.number}" if node.number else kind


# ---- comparisons ---------------------------------------------------------------------------------


def tbt(rows: Sequence[ReportRow], title: str) -> Figure:
    """Time between tokens by strategy: a bar for the mean, a mark for the 99th percentile."""
    figure, axes = _canvas(_BAR * len(rows) + _FRAME, title)
    at = np.arange(len(rows))
    means, highs = ([row.tbt[key] * 1e3 for row in rows] for key in ("mean", "p99"))
    axes.barh(at, means, 0.62, color=_ACCENT, label="mean")
    axes.plot(
        highs,
        at,
        linestyle="none",
        marker="|",
        markersize=11,
        markeredgewidth=2,
        color=_DARK,
        label="p99",
    )
    for place, mean in zip(at, means, strict=True):
        axes.annotate(
            f"{mean:.0f}",
            (mean, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set(xlabel="simulated ms between tokens", xlim=(0, None))
    _names(axes, rows)
    _legend(figure, axes.get_legend_handles_labels()[0])
    return figure


def speedup(
    rows: Sequence[ReportRow], sets: Mapping[int, str], baseline: str, title: str
) -> Figure:
    """Median speedup over ``baseline`` by prompt set; ``sets``: set by prompt number."""
    names = list(dict.fromkeys(sets.values()))
    found = np.array([[_median(row, sets, name) for name in names] for row in rows])
    figure, axes = _canvas(_BAR * len(rows) + _FRAME + 0.5, title)
    most = max(2.0, float(np.nanmax(found)))
    axes.imshow(
        np.log(found),
        cmap="RdYlGn",
        vmin=-np.log(most),
        vmax=np.log(most),
        aspect="auto",
        alpha=0.75,
    )
    for (down, right), value in np.ndenumerate(found):
        axes.annotate(f"{value:.2f}", (right, down), ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set_xlabel(f"tokens/s over {baseline}, median by prompt set")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    _names(axes, rows)
    return figure


def _median(row: ReportRow, sets: Mapping[int, str], name: str) -> float:
    ratios = [ratio for at, ratio in (row.speedups or {}).items() if sets[at] == name]
    return float(np.median(ratios)) if ratios else float("nan")


def fates(rows: Sequence[ReportRow], title: str) -> Figure:
    """Rows sent per stage and output token, by fate."""
    figure, axes = _canvas(_BAR * len(rows) + _FRAME, title)
    at = np.arange(len(rows))
    left = np.zeros(len(rows))
    for fate in ("useful", "wasted", "void"):
        counts = np.array(
            [row.rows[fate] / (row.tokens - row.prompts) / row.stages for row in rows]
        )
        axes.barh(at, counts, 0.62, left=left, color=_COLOURS[fate], label=fate)
        left = left + counts
    axes.set(xlabel="rows per stage and token", xlim=(0, None))
    _names(axes, rows)
    _legend(figure, axes.get_legend_handles_labels()[0])
    return figure


def sweep(rows: Sequence[ReportRow], swept: str, title: str) -> Figure:
    """Tokens/s over ``latency`` or ``mbit`` of the links; bars are intervals, if there are any.

    A strategy has one colour, a draft source one line style.
    """
    from matplotlib import colormaps

    figure, axes = _canvas(4.5, title)
    across = {"latency": "link latency one way, ms", "mbit": "link bandwidth, Mbit/s"}
    strategies, sources = (
        [*dict.fromkeys(getattr(row, name) for row in rows)] for name in ("strategy", "source")
    )
    colours = colormaps["tab10" if len(strategies) <= 10 else "tab20"]
    drafting = [source for source in sources if source != "-"]
    for strategy, source in dict.fromkeys((row.strategy, row.source) for row in rows):
        points = [
            (row, row.tokens_per_second)
            for row in rows
            if (row.strategy, row.source) == (strategy, source)
        ]
        known = sorted(
            ((_place(row, swept), speed) for row, speed in points if speed),
            key=lambda point: point[0],
        )
        ends = [
            (
                speed.median - (speed.low or speed.median),
                (speed.high or speed.median) - speed.median,
            )
            for _, speed in known
        ]
        axes.errorbar(
            [at for at, _ in known],
            [speed.median for _, speed in known],
            np.array(ends).T,
            capsize=2,
            elinewidth=0.6,
            marker="o",
            markersize=4,
            color=colours(strategies.index(strategy)),
            label=_label(points[0][0]),
            linestyle=("-", "--", ":", "-.")[
                drafting.index(source) % 4 if source in drafting else 0
            ],
        )
    axes.set(xlabel=across[swept], ylabel="tokens/s, simulated", ylim=(0, None))
    if swept == "mbit":
        places = sorted({_place(row, swept) for row in rows})
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
    axes.grid(alpha=0.25)
    _legend(figure, axes.get_legend_handles_labels()[0])
    return figure


def _place(row: ReportRow, swept: str) -> float:
    return row.latency_ms if swept == "latency" else row.mbit


# ---- all of them ---------------------------------------------------------------------------------


def charts(report: BenchReport) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """Every chart of a report: its file name without suffix, and the function that draws it."""
    head = report.header
    sets = {int(at): name for at, name in head["prompts"]["sets"].items()}
    baseline = head["baseline"]
    what = f"{head['profile']['name']}, {head['how']}"
    panels = dict.fromkeys((row.stages, row.temperature) for row in report.rows)
    for stages, temperature in panels:
        all_rows = [
            row for row in report.rows if (row.stages, row.temperature) == (stages, temperature)
        ]
        rows = [row for row in all_rows if not row.swept]
        end = f"{stages}-stages-T{temperature:g}"
        title = f"{what}, {stages} stages, T = {temperature:g}"
        yield f"tbt-{end}", partial(tbt, rows, title)
        others = [row for row in rows if row.strategy != baseline]
        if others:
            yield f"speedup-{end}", partial(speedup, others, sets, baseline, title)
        yield f"rows-{end}", partial(fates, rows, title)
        for swept in sorted({row.swept for row in all_rows} - {""}):
            line = [row for row in all_rows if row.swept in ("", swept)]
            yield f"sweep-{swept}-{end}", partial(sweep, line, swept, title)


def save(figure: Figure, file: Path) -> None:
    """Write ``figure``; ConfigError for a suffix not in ``FORMATS`` or a file not writable."""
    if file.suffix not in FORMATS:
        raise ConfigError(
            f"a plot cannot be written to {file}; "
            f"expected a name that ends in {' or '.join(FORMATS)}"
        )
    try:
        figure.savefig(file, dpi=150)
    except OSError as error:
        raise ConfigError(f"the plot cannot be written to {file}: {error}") from None


def _canvas(height: float, title: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _label(row: ReportRow) -> str:
    return row.strategy if row.source == "-" else f"{row.strategy}, {row.source}"


def _names(axes: Axes, rows: Sequence[ReportRow]) -> None:
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    figure.legend(
        handles=list(handles), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
