"""The README's transcript is the demo's output; its commands and its Python run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from flowspec.model.drafters.sources import check_sources
from flowspec.model.reference import Reference
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import open_directory
from flowspec.transport.connections.server import PrivateBroker
from tests.e2e.conftest import MODEL, Clusters, redis_cli, surroundings

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def demo() -> tuple[str, int, str]:
    """The demo's prompt, number of tokens and draft."""
    makefile = (ROOT / "Makefile").read_text()
    prompt = re.search(r"^QUESTION := (.*)$", makefile, re.MULTILINE)
    count = re.search(r'generate "\$\(QUESTION\)" --max-new-tokens (\d+)', makefile)
    draft = re.search(r"--target \$\(MODEL\) --draft ([\w:+-]+)\)", makefile)
    assert prompt is not None
    assert count is not None
    assert draft is not None
    return prompt[1], int(count[1]), draft[1]


def test_the_transcript_is_what_the_demo_says() -> None:
    if not MODEL.is_file():
        pytest.skip("the demo's model is not there: `make smollm2` fetches it")
    prompt, count, _ = demo()
    directory = open_directory(str(MODEL))
    tokenizer = Tokenizer(directory)
    ids = tokenizer.encode(prompt, raw=False)
    answer = Reference(directory).generate(ids, count)
    text = tokenizer.detokenizer.decode(
        list(answer[:-1] if answer[-1] in directory.eos else answer)
    )
    transcript = block("console")
    assert transcript.startswith("$ make demo\n")
    assert f"\n{text.strip()}\n" in transcript
    line = rf"^{len(answer)} tokens; [\d.]+ tokens/s, hit rate [\d.]+$"
    assert re.search(line, transcript, re.MULTILINE)


@pytest.mark.gate
@pytest.mark.live
def test_the_demo_answers_what_the_transcript_says() -> None:
    """In the file's own four bits, by this machine's kernels."""
    if not MODEL.is_file():
        pytest.skip("the demo's model is not there: `make smollm2` fetches it")
    prompt, count, draft = demo()
    command = [sys.executable, "-m", "flowspec", "generate", prompt, "--target", str(MODEL)]
    options = ["--draft", draft, "--max-new-tokens", str(count)]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert f"\n{done.stdout.strip()}\n" in block("console")


def test_the_head_that_the_demo_drafts_with_is_small_and_fits_its_model() -> None:
    if not MODEL.is_file():
        pytest.skip("the demo's model is not there: `make smollm2` fetches it")
    check_sources(open_directory(str(MODEL)), "smollm2-head")
    head = open_directory("smollm2-head")
    assert sum(file.stat().st_size for file in head.path.iterdir()) <= 15_000_000
    assert "/" not in json.dumps({**head.config})


@pytest.mark.gate
@pytest.mark.live
def test_the_python_of_the_readme_runs(
    clusters: Clusters, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOWSPEC_REDIS_URL", clusters(2).url)
    exec(compile(block("python"), "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert float(shown.split()[-1]) > 0
    assert len(shown) > 40


def shell(command: str, place: Path, **more: str) -> str:
    """What a command of the README prints in ``place``; it has FlowSpec's on its path."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        env=here(place) | more,
        input="Hello\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def here(place: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return surroundings(place) | {"PATH": path}


def sh_blocks() -> list[list[str]]:
    """The lines of each block of shell commands."""
    found = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [block.splitlines() for block in found]


def block_with(command: str) -> list[str]:
    (found,) = (lines for lines in sh_blocks() if any(line.startswith(command) for line in lines))
    return found


def test_every_block_of_the_readme_has_its_test() -> None:
    """``make`` is run by CI and by the demo's test, containers by nobody here."""
    tested = ("make demo", "flowspec generate", "flowspec up", "flowspec serve")
    tested += ("python -m workers", "docker compose", "flowspec simulate")
    known = [block_with(command) for command in tested]
    assert all(lines in known for lines in sh_blocks())
    assert set(re.findall(r"^```(\w+)", README, re.MULTILINE)) == {"sh", "console", "python"}


@pytest.mark.live
@pytest.mark.parametrize("first", ["flowspec generate", "flowspec simulate"])
def test_the_commands_of_a_block_run(first: str, place: Path) -> None:
    (place / "question.txt").write_text("Why is the sky blue?")
    for line in block_with(first):
        assert shell(line, place) or " --out " in line, line


@pytest.mark.gate
@pytest.mark.live
def test_a_pipeline_is_used_as_the_readme_does(place: Path) -> None:
    """And its broker is asked by hand as ``up`` says."""
    up, status, submit, watch, cancel, down = block_with("flowspec up")
    said = shell(f"exec 2>&1; {up}", place)
    try:
        assert "export FLOWSPEC_REDIS_URL=" in said
        (by_hand,) = re.findall(r"^redis-cli: (.+)$", said, re.MULTILINE)
        assert shell(f"{by_hand.replace('redis-cli', redis_cli())} PING", place) == "PONG\n"
        assert "verify" in shell(status, place)
        job = shell(submit, place).strip()
        assert len(shell(watch.replace("JOB", job), place)) > 40
        shell(cancel.replace("JOB", job), place)
    finally:
        shell(down, place)


@pytest.mark.live
def test_the_gateway_starts_and_answers_as_the_readme_says(place: Path) -> None:
    line, *asking = block_with("flowspec serve")
    curl, url, _, header, _, body = shlex.split("".join(line.rstrip("\\") for line in asking))
    assert (curl, header) == ("curl", "Content-Type: application/json")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    words = shlex.split(line.replace("8000", port), comments=True)
    with subprocess.Popen(words, env=here(place), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert port in process.stdout.readline()
        answer = httpx2.post(url.replace("8000", port), json=json.loads(body), timeout=60)
        assert answer.json()["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.live
def test_workers_of_several_machines_start_as_the_readme_says(place: Path) -> None:
    address, *workers = block_with("python -m workers")
    assert shlex.split(address)[1] == "FLOWSPEC_REDIS_URL=redis://:PASSWORD@broker.lan:6379/0"
    with ExitStack() as ending, PrivateBroker() as broker:
        for line in workers:
            words = line.replace("models/big", "target").replace("models/small", "draft")
            process = subprocess.Popen(
                ["bash", "-c", f"exec {words}"],
                env=here(place) | {"FLOWSPEC_REDIS_URL": broker.url},
                stderr=subprocess.DEVNULL,
            )
            ending.callback(process.wait, 60)
            ending.callback(process.terminate)
        asked = 'flowspec generate "Why is the sky blue?"'
        assert len(shell(asked, place, FLOWSPEC_REDIS_URL=broker.url)) > 40
