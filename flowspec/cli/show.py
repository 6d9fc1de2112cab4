"""Output for the user: streamed text, a live status line and a final table, or JSON lines."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from flowspec.cli import notes
from flowspec.client import Client
from flowspec.core.run.logprobs import TokenLogprobs
from flowspec.errors import FlowSpecError
from flowspec.observe import note
from flowspec.rehearse.replay import replay_file
from flowspec.results import Chunk, Result
from flowspec.strategies import describe
from flowspec.strategies.auto.decisions import tokens_by_drafter

#: Characters of the streamed text's end that are laid out above the status line.
_TAIL_CHARACTERS = 8000
#: After how long without a token it is looked what keeps it, seconds.
PAUSE_SECONDS = 5.0
#: After how long it must still be so before it is said, seconds.
AGAIN_SECONDS = 3.0
#: Width of a line without a terminal, characters.
_ENDLESS = 10_000


def console(*, stderr: bool = False) -> Console:
    """A console without highlighting; unless it is a terminal, it does not wrap lines."""
    found = Console(stderr=stderr, highlight=False)
    if not found.is_terminal:
        found.width = _ENDLESS
    return found


class Screen:
    """Text goes to stdout, all else to stderr; with ``as_json`` stdout has only JSON lines.

    ``with_stats``: an answer is followed by all that was measured, not by one line.
    """

    def __init__(self, *, as_json: bool, with_stats: bool = False) -> None:
        self._json = as_json
        self._with_stats = with_stats
        self._errors = console(stderr=True)
        self._text: list[str] = []  # of the job shown last

    @property
    def _live(self) -> bool:
        return self._errors.is_terminal

    @contextlib.contextmanager
    def starting(self) -> Iterator[Callable[[int, int], None]]:
        """Show a line while workers start; yields the function to call with (ready, of)."""
        if not self._live:
            yield lambda ready, of: None
            return
        with self._errors.status("starting the pipeline") as line:
            yield lambda ready, of: line.update(
                f"starting the pipeline: {ready} of {of} workers ready"
            )

    @contextlib.contextmanager
    def streaming(
        self, client: Client, *, supervised: bool = False
    ) -> Iterator[Callable[[Chunk], None]]:
        """Show a job's output as it arrives; yields the function to call with each piece.

        Why nothing arrives is said too, as far as the pipeline knows, unless it is ``supervised``
        here: then its supervisor does.
        """
        self._text = []
        plain = not self._json and not (self._live and sys.stdout.isatty())
        if not self._live:
            keep = self._write if plain else self._keep
            if supervised:
                yield keep
                return
            with _pauses_explained(client) as heard:

                def hear(chunk: Chunk) -> None:
                    heard()
                    keep(chunk)

                yield hear
            return
        status = StatusLine(client, explains=not supervised)
        tail = ""
        with Live(status, console=self._errors, refresh_per_second=8, transient=True) as live:

            def show(chunk: Chunk) -> None:
                nonlocal tail
                status.count(chunk)
                if plain:
                    self._write(chunk)
                else:  # stdout is this terminal, or gets JSON: the text goes above the status line
                    self._keep(chunk)
                    tail = self._last_lines(tail + chunk.text)
                    live.update(Group(Text(tail), status))

            yield show

    def _last_lines(self, text: str) -> str:
        """As much of the end of ``text`` as fits above the status line."""
        rows = Text(text[-_TAIL_CHARACTERS:]).wrap(self._errors, self._errors.width)
        return "\n".join(row.plain for row in rows[-max(1, self._errors.height - 2) :])

    def broken_off(self) -> None:
        """Print the text so far if it was only shown live, else end its line."""
        text = "".join(self._text)
        if self._json or not text:
            return
        shown = not (self._live and sys.stdout.isatty())
        sys.stdout.write(("" if shown else text) + "\n")
        sys.stdout.flush()

    def _keep(self, chunk: Chunk) -> None:
        self._text.append(chunk.text)

    def _write(self, chunk: Chunk) -> None:
        self._keep(chunk)
        sys.stdout.write(chunk.text)
        sys.stdout.flush()

    def result(self, result: Result, *, streamed: bool = True) -> None:
        """Print a job's end: one JSON object, or the text (unless printed) and how fast it came.

        ``streamed``: whether its output went through ``streaming``.
        """
        if self._json:
            sys.stdout.write(json.dumps(as_object(result)) + "\n")
            sys.stdout.flush()
            return
        shown = streamed and not (self._live and sys.stdout.isatty())
        sys.stdout.write(("" if shown else result.text) + "\n")
        sys.stdout.flush()
        self._errors.print(summary(result), markup=False, soft_wrap=True)
        if self._with_stats:
            self._errors.print(table(result))

    def error(self, text: str) -> None:
        """Print a job's error as one line."""
        self._errors.print(f"flowspec: {text}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _pauses_explained(client: Client) -> Iterator[Callable[[], None]]:
    """Say why nothing comes for a while, once a pause; yields what to call when something does."""
    heard, ended = threading.Event(), threading.Event()

    def explain() -> None:
        said = ""
        begins = True
        begun = told = False  # whether text has come, and that it has stopped is said: once
        while not ended.is_set():
            if heard.is_set():
                heard.clear()
                said = ""
                begun = True
            else:
                with contextlib.suppress(FlowSpecError):  # a broker that is away ends the reading
                    why = notes.why_waiting_at(client)
                    # A role that is just taken again has no holder for a moment.
                    if why not in ("", said) and not begins:
                        ended.wait(AGAIN_SECONDS)
                        why = why if why == notes.why_waiting_at(client) else ""
                    if begun and not (why or told):
                        why, told = notes.SILENT, True
                    if why and why != said and not (heard.is_set() or ended.is_set()):
                        note(why)
                    said = why
            begins = False
            ended.wait(PAUSE_SECONDS)

    watcher = threading.Thread(target=explain, name="pauses", daemon=True)
    watcher.start()
    try:
        yield heard.set
    finally:
        ended.set()


@dataclass(frozen=True, slots=True)
class JobReport:
    """A worker's last report: its clock and its counters."""

    at: float
    passes: int
    busy_seconds: float


class StatusLine:
    """Tokens, tokens/s, tokens per step, and each stage's load between its last two reports.

    ``explains``: it says instead why nothing has come for a while, as far as the pipeline knows.
    """

    def __init__(self, client: Client, *, explains: bool = False) -> None:
        self._client = client
        self._explains = explains
        self._heard = -math.inf
        self._why = ""
        self._spinner = Spinner("dots")
        self._tokens = 0
        self._began: float | None = None
        self._looked = -math.inf
        self._reports: dict[str, JobReport] = {}
        self._since: dict[str, JobReport] = {}  # role -> the difference of its last two reports

    def count(self, chunk: Chunk) -> None:
        """Count the tokens of ``chunk``."""
        self._heard = time.monotonic()
        self._began = self._began or self._heard
        self._tokens += len(chunk.token_ids)

    def __rich__(self) -> Spinner:
        now = time.monotonic()
        if now - self._looked > 1.0:
            self._looked = now
            pauses = self._explains and now - self._heard > PAUSE_SECONDS
            with contextlib.suppress(FlowSpecError):  # a broker that is away ends the reading
                self._look()
                silent = notes.SILENT if self._began else ""
                self._why = (notes.why_waiting_at(self._client) or silent) if pauses else ""
        seconds = now - self._began if self._began is not None else 0.0
        speed = f"  {(self._tokens - 1) / seconds:.1f} tokens/s" if seconds else ""
        beside = f"; {self._why}" if self._why else f"{speed}{self._stages(seconds)}"
        self._spinner.update(text=Text(f"{self._tokens} tokens{beside}"))
        return self._spinner

    def _look(self) -> None:
        """Read the workers' reports, which each makes about once per second."""
        for role, info in sorted(self._client.workers().items()):
            if not role.startswith("verify-") or "at" not in info:
                continue
            new = JobReport(float(info["at"]), int(info["passes"]), float(info["busy_seconds"]))
            old = self._reports.setdefault(role, new)
            if new.at > old.at:
                self._since[role] = JobReport(
                    new.at - old.at, new.passes - old.passes, new.busy_seconds - old.busy_seconds
                )
                self._reports[role] = new

    def _stages(self, seconds: float) -> str:
        passes = [
            since.busy_seconds / since.passes for since in self._since.values() if since.passes > 0
        ]
        if not passes or not max(passes):
            return ""
        per_step = f"  {self._tokens * max(passes) / seconds:.2f} tokens/step" if seconds else ""
        in_order = sorted(self._since, key=lambda role: int(role.rpartition("-")[2]))
        busy = [self._since[role].busy_seconds / self._since[role].at for role in in_order]
        shares = " ".join(f"{min(1.0, share):.0%}" for share in busy)
        return f"{per_step}  stage busy {shares}"


def as_object(result: Result) -> dict[str, object]:
    """A result as ``--json`` prints it."""
    return {
        "prompt_token_ids": list(result.prompt_token_ids),
        "token_ids": list(result.token_ids),
        "text": result.text,
        "strategy": result.strategy,
        "finish_reason": result.finish_reason,
        "stats": dict(result.stats),
        **({"logprobs": [_scores(one) for one in result.logprobs]} if result.logprobs else {}),
    }


def _scores(one: TokenLogprobs) -> dict[str, object]:
    top = [[other.id, other.logprob] for other in one.top]
    return {"id": one.chosen.id, "logprob": one.chosen.logprob, "top": top}


def summary(result: Result) -> str:
    """How a job ended and how fast it was, in one line."""
    asked = result.max_new_tokens
    tokens = len(result.token_ids)
    why = " until it was cancelled" if result.finish_reason == "cancelled" else ""
    if result.finish_reason == "length" and asked is not None:
        full = f" of the {asked} asked for: the context is full"
        why = full if tokens < asked else ", as many as asked for"
    noun = "token" if tokens == 1 else "tokens"
    speed = result.stats.get("tokens_per_second")
    hits, drafted = (result.stats.get(name) for name in ("hit_rate", "draft_passes"))
    figures = [
        f"{speed:.1f} tokens/s" if speed is not None else "",
        f"hit rate {hits:.2f}" if hits is not None and drafted else "",
    ]
    return "; ".join(filter(None, [f"{tokens} {noun}{why}", ", ".join(filter(None, figures))]))


def table(result: Result) -> Table:
    """A result as a table."""
    stats = result.stats
    rows: Mapping[str, object] = {**result.stats.get("rows", {})}

    def number(name: str, digits: int = 0) -> str:
        return _number(stats.get(name), digits)

    shown = Table(show_header=False, box=None, pad_edge=False)
    made = tokens_by_drafter(stats)
    by_draft = "  ".join(f"{draft} {tokens}" for draft, tokens in made.items())
    for name, value in (
        ("strategy", result.strategy),
        ("finished by", result.finish_reason),
        (
            "tokens",
            f"{number('tokens')} in {number('rounds')} rounds, {number('segments')} segments",
        ),
        (
            "time to first token",
            f"{number('ttft_seconds', 3)} s, of which queued {number('queue_seconds', 3)} s",
        ),
        ("decode", f"{number('decode_seconds', 3)} s, {number('tokens_per_second', 1)} tokens/s"),
        (
            "tokens per step / round",
            f"{number('tokens_per_step', 2)} / {number('tokens_per_round', 2)}",
        ),
        *([("tokens by draft", by_draft)] if made else []),
        ("hit rate", number("hit_rate", 2)),
        (
            "rows",
            "  ".join(f"{fate} {_number(rows.get(fate))}" for fate in ("useful", "wasted", "void")),
        ),
        ("stage busy", "  ".join(_share(busy) for busy in stats.get("stage_busy") or [])),
        ("repeated 4-grams", _share(stats.get("repeated_4grams"))),
    ):
        shown.add_row(f"{name}  ", value)
    return shown


def _number(value: object, digits: int = 0) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def _share(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, int | float) else "-"


def strategies(*, as_json: bool) -> None:
    """``flowspec strategies``."""
    if as_json:
        for entry in describe():
            sys.stdout.write(
                json.dumps({**dataclasses.asdict(entry), "options": dict(entry.options)}) + "\n"
            )
        return
    shown = console()
    for entry in describe():
        options = "  ".join(f"{name}={default}" for name, default in entry.options)
        facts = [f"source: {entry.source}", f"options: {options}"]
        if entry.runs_alone:
            facts.append("runs alone: other jobs wait until such a one has ended")
        shown.print(f"[bold]{entry.name}[/bold]  {entry.summary}")
        for fact in facts:
            for line in textwrap.wrap(fact, shown.width - 4):
                shown.print(f"    {line}", markup=False)


def replay(recording: Path) -> None:
    """``flowspec replay``."""
    done = replay_file(recording)
    sys.stdout.write(
        f"{done.steps} steps of {', '.join(done.nodes)} replayed exactly; {len(done.tokens)} "
        "tokens committed\n"
    )
