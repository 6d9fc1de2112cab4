"""Commands, keys and targets in the documents exist, and those that exist are documented."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex

import typer
import yaml

from flowspec.cli.app import app
from flowspec.core.run.share import RunShare
from flowspec.strategies import STRATEGIES
from tests.documents import DOCUMENTS, ROOT, code_spans
from tests.toy import generate
from workers.draft import PLACE, RUNS_ON

README = (ROOT / "README.md").read_text()
STATS = (ROOT / "docs/stats.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
#: First words of the lines in code blocks that are commands and not output.
PROGRAMS = {"make", "flowspec", "python", "redis-cli", "docker", "export", "git", "pip"}


def commands() -> list[str]:
    """Every command in a document's code blocks and code spans."""
    found: set[str] = set()
    for document in DOCUMENTS:
        text = document.read_text()
        blocks = re.findall(r"^```(?:console|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
        found |= {line for line in lines if line.partition(" ")[0] in PROGRAMS}
        spans = [part for span in code_spans(text) for part in span.split("; ")]
        found |= {span for span in spans if span.startswith(("make ", "flowspec ", "python "))}
    return sorted(found)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def check_command(command: str) -> None:
    words = [word for word in shlex.split(command.partition(" #")[0]) if word != "&&"]
    match words[0]:
        case "make":
            assert words[1] in make_targets()
        case "flowspec":
            of_all = typer.main.get_command(app)
            found = of_all.get_command(None, words[1]) or of_all  # type: ignore[attr-defined]
            assert found is not of_all or words[1].startswith("--"), words[1]
            flags = {flag for parameter in found.params for flag in parameter.opts}
            assert {word for word in words[1:] if word.startswith("--")} <= flags
        case "python":
            assert words[1] == "-m"
            module = ROOT / words[2].replace(".", "/")
            source = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
            assert source.is_file()
            shared = ROOT / "ops" / "train" / "teaching.py"  # arguments of every trainer
            text = source.read_text() + shared.read_text()
            for word in words[3:]:
                assert not word.startswith("--") or f'"{word}"' in text, word
        case "docker":
            assert words[1:3] == ["compose", "up"]
        case "redis-cli":
            assert words[1] in ("XADD", "XREAD")  # run by tests/e2e/test_redis_cli.py
        case "git":
            assert words[1] == "clone"
        case "pip":
            assert words[1] == "install"
        case "export":
            assert words[1].startswith(("FLOWSPEC_REDIS_URL=", "FLOWSPEC_PASSWORD="))


def test_every_command_of_the_documents_exists() -> None:
    wrong = []
    for command in commands():
        try:
            check_command(command)
        except AssertionError as error:
            wrong.append(f"{command}: {error}")
    assert not wrong, "\n".join(wrong)


def test_the_documents_are_found() -> None:
    names = {document.relative_to(ROOT).as_posix() for document in DOCUMENTS}
    assert names >= {
        "README.md",
        "CONTRIBUTING.md",
        "lua/README.md",
        "docs/stats.md",
        "ops/bench/RESULTS.md",
    }
    assert any(name.startswith("ops/bench/results/") for name in names)
    assert all(document.is_file() for document in DOCUMENTS)


def test_the_readme_fits_on_one_page() -> None:
    assert len(README.splitlines()) <= 150
    assert "make demo" in README
    assert "make test" in README


def test_every_key_of_the_stats_is_documented_and_no_other() -> None:
    rows = [line.split("|") for line in STATS.splitlines() if line.startswith("| `")]
    documented = {key: row[2] for row in rows for key in code_spans(row[1])}
    finishes = [generate(strategy, 2, count=20).finish for strategy in STRATEGIES]
    stats = {key: value for finish in finishes if finish for key, value in finish.stats.items()}
    rare = {"shares", "resumed_tokens"}  # of jobs that were not alone, or have lost a worker
    assert set(documented) == {*stats, RUNS_ON, *rare}
    shown = {field.name for field in dataclasses.fields(RunShare)}
    assert set(code_spans(documented["shares"])) >= shown
    assert set(code_spans(documented[RUNS_ON])) == set(PLACE)
    for key, value in stats.items():
        if isinstance(value, dict):
            assert set(code_spans(documented[key])) == set(value), key


def test_make_help_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    listed = set(re.findall(r'^\t@echo "make ([\w-]+) ', MAKEFILE, re.MULTILINE))
    assert listed == set(phony[1].split()) - {"help", "venv", "prompts", "clean"}


def test_compose_runs_the_workers_commands() -> None:
    composed = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = composed["services"]
    assert set(services) == {
        "broker",
        "scheduler",
        "draft",
        "verify-1",
        "verify-2",
        "verify-3",
        "verify-4",
    }
    from flowspec.start.boot import parser

    for name, service in services.items():
        if name == "broker":
            shell, flag, script = service["command"]
            assert (shell, flag) == ("sh", "-c")
            assert "noeviction" in script
            assert "requirepass" in script
            assert "${FLOWSPEC_PASSWORD" not in script, "it would show in `ps`"
            continue
        words = shlex.split(service["command"])
        assert words[:2] == ["python", "-m"]
        module = words[2].removeprefix("workers.")
        arguments: argparse.ArgumentParser = parser(module)
        for flag in ("--stages", "--stage", "--target", "--draft"):
            arguments.add_argument(flag)
        given = arguments.parse_args(words[3:])
        if name.startswith("verify-"):
            assert (module, given.stage) == ("verify", name.removeprefix("verify-"))
        assert "FLOWSPEC_REDIS_URL" in service["environment"]
        assert service["build"]["dockerfile"] == "ops/Dockerfile"
    image = (ROOT / "ops/Dockerfile").read_text()
    assert "'.[worker,broker]'" in image, "a worker's inbox is a server of its own"
    copied = re.findall(r"^COPY ([\w./ ]+) ", image, re.MULTILINE)
    assert all((ROOT / path).exists() for paths in copied for path in paths.split())


def test_ci_calls_make_test() -> None:
    assert "exec make test" in (ROOT / ".ci/run").read_text()
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_constraints_pin_everything_exactly() -> None:
    lines = (ROOT / "ops/constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert any(pin.startswith("torch==") for pin in pins)
