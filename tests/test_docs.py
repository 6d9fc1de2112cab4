"""What the documents promise: every command and path exists, every example runs."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from flowspec.cli.app import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    ROOT / name
    for name in (
        "README.md",
        "CHANGELOG.md",
        "lua/README.md",
        "ops/bench/RESULTS.md",
        "docs/systems.md",
        "docs/testbed.md",
    )
]


def commands() -> list[str]:
    """Every command line in the blocks of the README and of the testbed's page."""
    texts = README + (ROOT / "docs" / "testbed.md").read_text()
    blocks = re.findall(r"^```(?:console|sh)\n(.*?)^```", texts, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    starts = ("make ", "flowspec ", "python ", "redis-cli ", "docker ", "export ", "git ", "pip ")
    return [line.removeprefix("$ ") for line in lines if line.removeprefix("$ ").startswith(starts)]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_documents_exists(command: str) -> None:
    words = [word for word in shlex.split(command.partition(" #")[0]) if word != "&&"]
    match words[0]:
        case "make":
            assert words[1] in make_targets()
        case "flowspec":
            group = typer.main.get_command(app)
            found = group.get_command(None, words[1])  # type: ignore[attr-defined]
            assert found is not None, words[1]
            flags = {flag for parameter in found.params for flag in parameter.opts}
            assert {word for word in words[2:] if word.startswith("--")} <= flags
        case "python":
            assert words[1] == "-m"
            assert (ROOT / (words[2].replace(".", "/") + ".py")).is_file()
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_path_a_document_names_is_there(document: Path) -> None:
    text = document.read_text()
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    quoted = re.findall(r"`((?:flowspec|workers|lua|ops|tests|docs)/[\w./-]*\w)`", text)
    for path in [*linked, *quoted]:
        assert (ROOT / path).exists() or (document.parent / path).exists(), (
            f"{document.name} names {path}"
        )


def test_the_readme_is_for_a_stranger() -> None:
    assert len(README.splitlines()) < 200
    assert "make demo" in README
    assert "make test" in README


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
    from workers._boot import parser

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
    copied = re.findall(r"^COPY ([\w./ ]+) ", (ROOT / "ops/Dockerfile").read_text(), re.MULTILINE)
    assert all((ROOT / path).exists() for paths in copied for path in paths.split())


def test_ci_calls_make_test() -> None:
    assert "exec make test" in (ROOT / ".ci/run").read_text()
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_constraints_pin_everything_exactly() -> None:
    lines = (ROOT / "ops/constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert any(pin.startswith("torch==") for pin in pins)
