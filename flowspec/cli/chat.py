"""``flowspec chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flowspec.cli.private import check_after, pipeline_at
from flowspec.cli.show import Screen
from flowspec.client import Client, Job
from flowspec.cluster import Setup
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.run.turns import Turn
from flowspec.errors import FlowSpecError, JobError, JobFailed
from flowspec.results import Result
from flowspec.strategies import build

PROMPT = "> "
QUIT, NEW = "/quit", "/new"
_HINT = f"Ctrl-C stops an answer, {NEW} begins anew, {QUIT} or Ctrl-D ends"


@dataclass(frozen=True, slots=True)
class ChatFlags:
    """The flags of ``chat``; ``url``: of a running pipeline, None: a private one."""

    setup: Setup
    sampling: Sampling
    strategy: str
    max_new_tokens: int
    system: str
    url: str | None


def chat(request: ChatFlags) -> None:
    """Converse until the input ends.

    Without a terminal each line of stdin is a message, and only the answers are on stdout.
    """
    build(request.strategy, request.setup.stages)
    screen = Screen(as_json=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    with (
        pipeline_at(request.url, request.setup, screen) as pipeline,
        Client(pipeline.url, follows=True) as client,
    ):
        if sys.stdin.isatty():
            sys.stderr.write(f"{_HINT}\n")
        Conversation(client, request, pipeline.check).run(_messages())


def _end(number: int, frame: object) -> None:
    """End the conversation, and a private pipeline with it."""
    sys.exit(128 + number)


def _messages() -> Iterator[str]:
    """What the user says, line by line; Ctrl-C drops a line that is being written."""
    asks = sys.stdin.isatty()
    if not asks and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    if asks:
        # Gives the line its history and its keys, where the system has it.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            yield input(PROMPT if asks else "")
        except KeyboardInterrupt:
            if not asks:
                raise
            sys.stderr.write(f"\n{_HINT}\n")
        except EOFError:
            if asks:
                sys.stderr.write("\n")
            return


class Conversation:
    """The turns so far, and the next one; ``check``: as in ``private.PipelineAt``."""

    def __init__(self, client: Client, request: ChatFlags, check: Callable[[], None]) -> None:
        self._client = client
        self._request = request
        self._check = check
        self.turns: list[Turn] = []
        self._begin()

    def _begin(self) -> None:
        system = self._request.system
        self.turns = [Turn("system", system)] if system else []

    def run(self, messages: Iterator[str]) -> None:
        """Answer ``messages``, which may hold commands."""
        for message in messages:
            match message.strip():
                case "":
                    continue
                case said if said == QUIT:
                    return
                case said if said == NEW:
                    self._begin()
                case said:
                    self._answer(said)

    def _answer(self, said: str) -> None:
        """Answer ``said``; if that fails, it was not said."""
        try:
            job = self._client.submit_spec(self._spec(said))
            result, seconds = self._show(job)
        except (JobFailed, JobError) as error:
            check_after(error, self._check)
            sys.stderr.write(f"flowspec: {error}\n")
            return
        except FlowSpecError as error:
            check_after(error, self._check)
            raise
        self.turns += [Turn("user", said), Turn("assistant", result.text.strip())]
        sys.stdout.flush()  # both may be one file
        sys.stderr.write(f"{figures(result, seconds)}\n")

    def _spec(self, said: str) -> JobSpec:
        request = self._request
        return JobSpec(
            messages=(*self.turns, Turn("user", said)),
            max_new_tokens=request.max_new_tokens,
            sampling=request.sampling,
            strategy=request.strategy,
        )

    def _show(self, job: Job) -> tuple[Result, float]:
        """Write the answer as it comes; it, and the seconds from its first token to its last.

        Ctrl-C ends it with what has come.
        """
        first = last = 0.0
        try:
            for chunk in job.stream():
                last = time.monotonic()
                first = first or last
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            job.cancel()
            result = job.result()
        except OSError:  # nobody sees the text
            with contextlib.suppress(FlowSpecError):
                job.cancel()
            raise
        else:
            result = job.so_far()
        finally:
            sys.stdout.write("\n")
        return result, last - first


def figures(result: Result, seconds: float) -> str:
    """How fast an answer came, and how much of it was guessed, in one line.

    ``seconds``: from its first token to its last, for an answer that was stopped and so has no
    figures of its own.
    """
    tokens = len(result.token_ids)
    speed = result.stats.get("tokens_per_second")
    if speed is None and seconds > 0:
        speed = (tokens - 1) / seconds
    rate = result.stats.get("hit_rate")
    cached = result.stats.get("cached_tokens")
    parts = [
        f"{tokens} tokens",
        f"{speed:.1f} tokens/s" if speed else "",
        f"{rate:.0%} guessed" if rate is not None else "",
        f"{cached} tokens of the prompt known" if cached else "",
        "stopped" if result.finish_reason == "cancelled" else "",
    ]
    return f"[{', '.join(filter(None, parts))}]"
