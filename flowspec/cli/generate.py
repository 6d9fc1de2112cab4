"""``flowspec generate``: one or many prompts through a private pipeline, or a running one."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowspec.broker.base import drafts_of
from flowspec.cli import notes
from flowspec.cli.show import Screen
from flowspec.client import Client, Job, Result
from flowspec.cluster import Cluster, Setup
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.drivers.replay import merge
from flowspec.errors import ClusterError, ConfigError, FlowSpecError, JobError
from flowspec.strategies import build


@dataclass(frozen=True, slots=True)
class Request:
    """What the flags ask for, the prompts apart."""

    setup: Setup
    sampling: Sampling
    strategy: str
    max_new_tokens: int
    raw: bool
    as_json: bool
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
    """Answer every prompt in turn. Ctrl-C ends the job, keeps what was committed, and stops
    everything.
    """
    specs = [request.spec(text) for text in _prompts(prompt, prompts)]
    build(request.strategy, request.setup.stages)
    if request.record is not None:
        _check_record(request.record, len(specs))
    screen = Screen(as_json=request.as_json)
    failed = False
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    with _pipeline(request, screen) as pipeline, Client(pipeline.url) as client:
        notes.first_of_several([request.strategy], [drafts_of(client.pipeline())])
        for spec in specs:
            failed |= not _answer(client, spec, request, screen, pipeline.check)
    if failed:
        sys.exit(1)


def _interrupt(number: int, frame: object) -> None:
    """A closed terminal or a polite kill ends a run as Ctrl-C does: nothing committed is lost."""
    raise KeyboardInterrupt


def _check_record(file: Path, runs: int) -> None:
    if runs != 1:
        raise ConfigError(f"--record keeps one run; {runs} prompts were given")
    if not file.name or file.is_dir():
        raise ConfigError(f"--record: {file} is a folder; name a file")
    if not file.parent.is_dir():
        raise ConfigError(f"--record: folder {file.parent} does not exist")


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """Where jobs go; ``check`` raises ClusterError if one of our own processes has stopped."""

    url: str
    check: Callable[[], None] = lambda: None


@contextlib.contextmanager
def _pipeline(request: Request, screen: Screen) -> Iterator[_Pipeline]:
    if request.url is not None:
        yield _Pipeline(request.url)
        return
    cluster = Cluster(request.setup)
    try:
        with screen.starting() as progress:
            cluster.start(progress)
        yield _Pipeline(cluster.url, cluster.check)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        cluster.stop()


def _answer(
    client: Client, spec: JobSpec, request: Request, screen: Screen, check: Callable[[], None]
) -> bool:
    """One prompt; False if its job failed, which the others do not suffer from."""
    job = client.submit_spec(spec)
    try:
        with screen.streaming(client) as show:
            for chunk in job.stream():
                show(chunk)
    except KeyboardInterrupt:
        screen.result(_cancelled(job))
        raise
    except FlowSpecError as error:
        screen.broken_off(job.so_far())
        try:
            check()
        except ClusterError as cause:
            raise ClusterError(f"{str(error).partition(';')[0]}: {cause}") from None
        screen.error(str(error))
        return False
    screen.result(job.so_far())
    if request.record is not None:
        _save(request.record, job.recording())
    return True


def _cancelled(job: Job) -> Result:
    """End an interrupted job and read what was committed until then."""
    job.cancel()
    with contextlib.suppress(FlowSpecError):
        return job.result()
    return job.so_far()


def _save(path: Path, lines: Sequence[str]) -> None:
    """Written beside its place first: a recording is there whole or not at all; it holds the
    prompt.
    """
    draft = path.with_name(path.name + ".partial")
    try:
        draft.touch(mode=0o600)
        draft.write_text("\n".join(merge(lines)) + "\n")
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
        lines = file.read_text("utf-8-sig").split("\n")  # other line ends may stand inside a text
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
        raise ConfigError(f"{where} is no JSON") from None
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
