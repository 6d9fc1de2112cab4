"""``flowspec generate``: one or many prompts through a private pipeline, or a running one."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from flowspec.cli import notes
from flowspec.cli.outputs import check_writable, linked
from flowspec.cli.private import check_after, pipeline_at
from flowspec.cli.show import Screen
from flowspec.client import Client, Job
from flowspec.cluster import Setup
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.errors import ConfigError, FlowSpecError, JobError, JobFailed
from flowspec.rehearse.replay import merge
from flowspec.results import Result
from flowspec.strategies import build
from flowspec.transport.base import drafts_of, middles_of


@dataclass(frozen=True, slots=True)
class Request:
    """The flags of ``generate``, without the prompts."""

    setup: Setup
    sampling: Sampling
    strategy: str
    max_new_tokens: int
    raw: bool
    as_json: bool
    with_stats: bool
    record: Path | None
    url: str | None

    def spec(self, prompt: str) -> JobSpec:
        """The job for one prompt."""
        return JobSpec(
            prompt=prompt,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            strategy=self.strategy,
            raw=self.raw,
            record=self.record is not None,
        )


def run(request: Request, prompt: str | None, prompts: Path | None) -> None:
    """Answer every prompt, as many at once as the request says; print the answers in order.

    Ctrl-C cancels the jobs, prints their committed text, and stops a private pipeline.
    """
    specs = [request.spec(text) for text in _prompts(prompt, prompts)]
    build(request.strategy, request.setup.stages)
    if request.record is not None:
        _check_record(request.record, len(specs))
    request = _without_unused_middles(request)
    screen = Screen(as_json=request.as_json, with_stats=request.with_stats)
    failed = False
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    with (
        pipeline_at(request.url, request.setup, screen) as pipeline,
        Client(pipeline.url, follows=True) as client,
    ):
        record = client.pipeline()
        notes.first_of_several([request.strategy], [drafts_of(record)])
        notes.unused_middles(request.strategy, middles_of(record), running=True)
        together = request.setup.jobs > 1 and len(specs) > 1
        if request.url is not None and together:
            notes.waits(client)
        if request.url is not None or together:
            notes.alone(request.strategy)
        if together:
            failed = not _Together(client, request, screen, pipeline.check).answer(specs)
        else:
            for spec in specs:
                failed |= not _answer(client, spec, request, screen, pipeline.check)
    if failed:
        sys.exit(1)


def _interrupt(number: int, frame: object) -> None:
    """End a run on SIGTERM or SIGHUP as on Ctrl-C, so that no committed text is lost."""
    raise KeyboardInterrupt(number)


def _check_record(file: Path, runs: int) -> None:
    if runs != 1:
        raise ConfigError(f"--record keeps one run; {runs} prompts were given")
    check_writable("--record", file)


def _without_unused_middles(request: Request) -> Request:
    """Drop middle models from a private pipeline whose strategy does not use them."""
    middles = request.setup.middles
    if request.url is not None or build(request.strategy, 1).uses_middles:
        return request
    notes.unused_middles(request.strategy, middles, running=False)
    return replace(request, setup=replace(request.setup, middles=()))


def _answer(
    client: Client, spec: JobSpec, request: Request, screen: Screen, check: Callable[[], None]
) -> bool:
    """Answer one prompt; False if its job failed, which does not affect the others."""
    job = client.submit_spec(spec)
    try:
        with screen.streaming(client, supervised=request.url is None) as show:
            for chunk in job.stream():
                show(chunk)
    except KeyboardInterrupt:
        screen.result(_cancelled(job))
        raise
    except FlowSpecError as error:
        screen.broken_off()
        check_after(error, check)
        screen.error(str(error))
        return False
    except OSError:  # nobody sees the text
        with contextlib.suppress(FlowSpecError):
            job.cancel()
        raise
    screen.result(job.so_far())
    if request.record is not None:
        _save(request.record, job.recording())
    return True


class _Together:
    """Several prompts at once: so many jobs are submitted as may run, and a next one at an end."""

    def __init__(
        self, client: Client, request: Request, screen: Screen, check: Callable[[], None]
    ) -> None:
        self._client = client
        self._most = request.setup.jobs
        self._screen = screen
        self._check = check
        self._unshown: deque[Job] = deque()  # in the order of their prompts
        self._failed = False

    def answer(self, specs: Sequence[JobSpec]) -> bool:
        """Answer ``specs``; whether no job failed. A failed one does not affect the others."""
        left = deque(specs)
        waits: set[Future[Result]] = set()
        pool = ThreadPoolExecutor(self._most)
        try:
            while left or self._unshown:
                while left and len(waits) < self._most:
                    job = self._client.submit_spec(left.popleft())
                    self._unshown.append(job)
                    waits.add(pool.submit(job.result))
                ended, waits = wait(waits, return_when=FIRST_COMPLETED)
                for answer in ended:
                    with contextlib.suppress(JobFailed):  # the job knows its error
                        answer.result()
                self._show_ended()
        except KeyboardInterrupt:
            self._cancel()
            for job in self._unshown:
                self._screen.result(_cancelled(job), streamed=False)
            raise
        except FlowSpecError as error:
            check_after(error, self._check)
            raise
        except OSError:  # nobody sees the text
            with contextlib.suppress(FlowSpecError):
                self._cancel()
            raise
        finally:
            pool.shutdown(wait=False)
        return not self._failed

    def _running(self) -> list[Job]:
        return [job for job in self._unshown if not job.ended]

    def _show_ended(self) -> None:
        """Print the jobs that have ended, up to the first that has not."""
        while self._unshown and self._unshown[0].ended:
            job = self._unshown.popleft()
            if not job.error:
                self._screen.result(job.so_far(), streamed=False)
                continue
            check_after(JobFailed(job.error), self._check)
            self._screen.error(job.error)
            self._failed = True

    def _cancel(self) -> None:
        for job in self._running():
            job.cancel()


def _cancelled(job: Job) -> Result:
    """End an interrupted job and read what was committed until then."""
    job.cancel()
    with contextlib.suppress(FlowSpecError):
        return job.result()
    return job.so_far()


def _save(path: Path, lines: Sequence[str]) -> None:
    """Write a recording, complete or not at all; private, because it contains the prompt."""
    path = linked(path)
    draft = path.with_name(path.name + ".partial")
    try:
        draft.touch(mode=0o600)
        draft.write_text("\n".join(merge(lines)) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"the recording cannot be written to {path}: {error}") from None


def _prompts(prompt: str | None, file: Path | None) -> list[str]:
    if (prompt is None) == (file is None):
        raise ConfigError("give either a PROMPT or --prompts FILE.jsonl")
    if prompt is not None:
        return [prompt]
    assert file is not None
    return read_prompts(file)


def read_prompts(file: Path) -> list[str]:
    """Prompts of a JSON-lines file: each line's ``prompt``, or the first of its ``turns``."""
    try:
        lines = file.read_text("utf-8-sig").split("\n")  # a text may contain other line ends
    except (OSError, ValueError) as error:
        raise ConfigError(f"prompts file {file} cannot be read: {error}") from None
    found = [
        _prompt_of(line, f"{file}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise ConfigError(f"prompts file {file} has no prompts")
    return found


def _prompt_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError:
        raise ConfigError(f"{where} is not valid JSON") from None
    if isinstance(row, dict):
        turns = row.get("turns")
        text = row.get("prompt")
        if text is None:
            text = turns[0] if isinstance(turns, list) and turns else None
        if isinstance(text, str):
            try:
                JobSpec(text)
            except JobError as error:
                raise ConfigError(f"{where}: {error}") from None
            return text
    raise ConfigError(f'{where} has neither "prompt" nor "turns"')
