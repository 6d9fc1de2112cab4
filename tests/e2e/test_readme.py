"""The README's transcript is the demo's output; its Python runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowspec.model.drafters.sources import check_sources
from flowspec.model.reference import Reference
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import open_directory
from tests.e2e.conftest import Clusters

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
MODEL = ROOT / ".venv" / "SmolLM2-135M-Instruct.gguf"


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
    assert sum(file.stat().st_size for file in head.path.iterdir()) < 15 << 20
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
