"""A wrong command line gets one line that points to the command's help."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
import redis
from typer.main import get_command

from flowspec.cli.app import app
from flowspec.cli.places import running, state_file
from flowspec.doctor.machine import hub_cache
from flowspec.transport.connections.answers import error_of
from flowspec.transport.wire.codec import VERSION
from tests.cli.conftest import Command

#: Where no broker is.
NOBODY = "redis://localhost:1/0"


@pytest.mark.parametrize(
    ("arguments", "said", "help_of"),
    [
        (["generate", "hi", "--stages", "x"], "'--stages'", "flowspec generate"),
        (["generate", "hi", "--stages"], "requires an argument", "flowspec generate"),
        (["generate", "hi", "--frob"], "No such option", "flowspec generate"),
        (["simulate", "hi", "there"], "extra argument", "flowspec simulate"),
        (["replay"], "Missing argument", "flowspec replay"),
        (["bench", "--compare", "a"], "'--compare'", "flowspec bench"),
        (["frob"], "No such command", "flowspec"),
        (["--frob"], "No such option", "flowspec"),
    ],
)
def test_wrong_usage_points_to_the_help_of_its_command(
    command: Command, arguments: list[str], said: str, help_of: str
) -> None:
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert said in err and err.endswith(f"; see `{help_of} --help`\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("flowspec gen", "generate"),
        ("flowspec submit --prio", "--priority"),
        ("flowspec generate --strategy pipe", "pipedec"),
    ],
)
def test_a_shell_completes_commands_flags_and_strategies(words: str, wanted: str) -> None:
    asked = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
        "_FLOWSPEC_COMPLETE": "complete_bash",
    }
    program = Path(sys.executable).with_name("flowspec")
    done = subprocess.run(
        [program], env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert wanted in done.stdout.split()


@pytest.mark.parametrize("name", [("status",), ("generate", "hi"), ("submit", "hi")])
def test_a_pipeline_that_is_gone_is_named_with_what_names_it(
    command: Command, monkeypatch: pytest.MonkeyPatch, name: tuple[str, ...]
) -> None:
    monkeypatch.setattr("flowspec.transport.connections.redis_client.FIRST_SECONDS", 0.1)
    where = ("--redis-url", "redis://localhost:1")
    status, out, err = command(*name, *where)
    assert (status, out) == (1, "")
    why = "flowspec: cannot reach the broker at redis://localhost:1: Connection refused; "
    assert err.startswith(why + "start a pipeline with `flowspec up`, or name a running one")
    monkeypatch.setenv("FLOWSPEC_REDIS_URL", "redis://:secret@localhost:1")
    status, out, err = command(*name)
    stale = "flowspec: cannot reach the broker at redis://:***@localhost:1: Connection refused; "
    stale += "FLOWSPEC_REDIS_URL names it: start it again, or unset that if this pipeline is gone"
    assert err == f"{stale}\n"


def test_a_pipeline_that_up_had_started_is_said_to_have_ended(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("flowspec.transport.connections.redis_client.FIRST_SECONDS", 0.1)
    monkeypatch.setattr("flowspec.transport.connections.connection.DEFAULT_URL", NOBODY)
    monkeypatch.setattr("flowspec.async_client.DEFAULT_URL", NOBODY)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert "has ended" not in command("status")[2]
    state_file().parent.mkdir()
    state_file().write_text('{"pid": 4194305, "url": "unix:///gone"}')
    status, _, err = command("status")
    assert status == 1
    assert "refused; the pipeline that ran here has ended; start a pipeline" in err
    assert "has ended" not in command("status", "--redis-url", "redis://localhost:1/2")[2]


def test_a_broker_that_answers_is_the_one_that_was_meant(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = error_of(redis.ResponseError("BUSY Valkey is busy running a script."), "h")
    monkeypatch.setattr("flowspec.cli.service.status", Mock(side_effect=busy))
    assert command("status") == (1, "", f"flowspec: {busy}\n")


def test_the_version_is_the_packages_and_the_wires(command: Command) -> None:
    assert command("--version") == (0, f"flowspec {version('flowspec')}, wire {VERSION}\n", "")


def test_an_interrupt_while_the_commands_are_imported_is_quiet() -> None:
    """Which takes longer than anything else of most commands."""
    interrupted = """
import sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "flowspec.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
import flowspec.__main__
"""
    done = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("name", [(), ("generate",), ("status",)])
def test_h_is_help(command: Command, name: tuple[str, ...]) -> None:
    assert command(*name, "-h") == command(*name, "--help")


def test_every_option_says_what_it_is_and_which_numbers_it_takes() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    options = [
        (name, one)
        for name, command in commands.items()
        for one in command.params
        if one.param_type_name == "option" and one.name != "help"
    ]
    assert len(options) > 100
    assert [(name, one.name) for name, one in options if not one.help] == []
    free = {one.name for _, one in options if one.bare_type in (int, float) and one.min is None}
    assert free <= {"seed"}, free


def test_the_help_says_what_drafts(command: Command) -> None:
    for name in ("simulate", "bench"):
        status, out, _ = command(name, "--help")
        assert status == 0
        words = " ".join(out.replace("│", " ").split())
        assert (
            "slm (or draft: the packaged small model), head, ngram; a profile must have times"
            in words
        )


def test_the_package_can_be_run_where_no_script_is_on_the_path() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flowspec", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "COMMAND" in done.stdout


#: What says where a user's own files are.
PLACES = ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME")
#: The number of the user ``nobody``.
NOBODY_NUMBER = 65534
#: A place below a file, which nobody can make, root neither.
NOWHERE = "/dev/null/none"


#: Commands with places that cannot be, with a folder that may not be entered, and without a home.
ABSENT: tuple[tuple[str, ...], ...] = (
    ("up",),
    ("generate", "hi", "--record", f"{NOWHERE}/r"),
    ("acl", "--out", f"{NOWHERE}/a"),
    ("plan", "--boxes", "local:1", "--out", f"{NOWHERE}/p.toml"),
    ("profile", "--out", f"{NOWHERE}/p.toml"),
    ("bench", "--profile", "laptop-cpu", "--out", f"{NOWHERE}/b.md"),
    ("simulate", "hi", "--profile", f"{NOWHERE}/p.toml"),
    ("shard", NOWHERE, "--out", f"{NOWHERE}/s"),
    ("convert", f"{NOWHERE}.gguf", "--out", f"{NOWHERE}/c"),
    ("replay", NOWHERE),
    ("generate", "--prompts", NOWHERE),
    ("generate", "hi", "--target", NOWHERE),
    ("serve", "--api-key-file", NOWHERE),
    ("up", "--cluster", NOWHERE),
    ("verify", NOWHERE),
    ("down",),
    ("status",),
    ("submit", "hi"),
    ("watch", "1-1"),
    ("cancel", "1-1"),
    ("chat", "--target", NOWHERE),
)
CLOSED: tuple[tuple[str, ...], ...] = (
    ("up", "--target", "{}"),
    ("up", "--cluster", "{}/p.toml"),
    ("acl", "--out", "{}/a"),
    ("plan", "--boxes", "local:1", "--out", "{}/p.toml"),
    ("profile", "--out", "{}/p.toml"),
    ("bench", "--profile", "laptop-cpu", "--out", "{}/b.md"),
    ("simulate", "hi", "--profile", "{}/p.toml"),
    ("shard", "{}", "--out", "{}/s"),
    ("convert", "{}/x.gguf", "--out", "{}/c"),
    ("replay", "{}/r"),
    ("generate", "--prompts", "{}/r"),
    ("generate", "hi", "--record", "{}/r"),
    ("generate", "hi", "--target", "{}/x.gguf"),
    ("chat", "--target", "{}"),
    ("serve", "--api-key-file", "{}/keys"),
    ("verify", "{}"),
    ("status",),
    ("submit", "hi"),
    ("watch", "1-1"),
    ("cancel", "1-1"),
    ("down",),
)
HOMELESS: tuple[tuple[str, ...], ...] = (
    ("up", "--target", NOWHERE),
    ("status", "--redis-url", NOBODY),
    ("status",),
    ("submit", "hi"),
    ("watch", "1-1"),
    ("cancel", "1-1"),
    ("chat", "--target", NOWHERE),
    ("serve", "--target", NOWHERE),
    ("verify", NOWHERE),
    ("down",),
    ("generate", "hi", "--target", NOWHERE),
    ("generate", "hi", "--target", "~nobody-of-this-name/x"),
    ("plan", "--boxes", "local:1", "--target", NOWHERE),
    ("profile", "--target", NOWHERE),
    ("bench", "--profile", NOWHERE),
    ("simulate", "hi", "--profile", NOWHERE),
    ("acl", "--out", NOWHERE),
    ("shard", NOWHERE, "--out", NOWHERE),
    ("convert", f"{NOWHERE}.gguf", "--out", NOWHERE),
    ("replay", NOWHERE),
)
#: What reads and writes nothing, and what reports on places instead of failing on them.
ELSEWHERE = {"strategies", "doctor"}


@pytest.mark.parametrize("walk", [ABSENT, CLOSED, HOMELESS])
def test_every_command_is_tried_in_bad_places(walk: tuple[tuple[str, ...], ...]) -> None:
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert {words[0] for words in walk} == commands - ELSEWHERE


@pytest.mark.parametrize("home", [NOWHERE, None])
def test_the_doctor_examines_all_else_without_a_home(
    command: Command, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    _without_home(monkeypatch)
    if home is not None:
        for name in PLACES:
            monkeypatch.setenv(name, home)
    status, out, err = command("doctor", "--target", "draft", "--draft", "ngram")
    assert err == ""
    assert status in (0, 1)
    for subject in ("machine", "kernels"):
        assert subject in out


@pytest.mark.parametrize("words", ABSENT, ids=" ".join)
def test_a_place_that_cannot_be_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    _have_nobody(monkeypatch)
    for name in PLACES:
        monkeypatch.setenv(name, NOWHERE)
    status, out, err = command(*words)
    assert status in (1, 2)
    assert out == ""
    assert err.startswith("flowspec: ") and err.count("\n") == 1


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder of mode 000 for whoever runs this; root, who may do all, is nobody meanwhile."""
    folder = tmp_path / "closed"
    folder.mkdir()
    for name in ("p.toml", "x.gguf", "r", "keys"):
        (folder / name).write_text("", encoding="utf-8")
    folder.chmod(0)
    before = os.geteuid()
    if not before:
        os.seteuid(NOBODY_NUMBER)
    yield folder
    os.seteuid(before)
    folder.chmod(0o700)


@pytest.mark.parametrize("words", CLOSED, ids=" ".join)
def test_a_folder_that_may_not_be_entered_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, closed: Path, words: tuple[str, ...]
) -> None:
    _have_nobody(monkeypatch)
    for name in PLACES:
        monkeypatch.setenv(name, str(closed))
    status, out, err = command(*(word.format(closed) for word in words))
    assert status in (1, 2)
    assert out == ""
    assert err.startswith("flowspec: ") and err.count("\n") == 1, err


@pytest.mark.parametrize("words", HOMELESS, ids=" ".join)
def test_a_user_without_a_home_is_told_in_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """As in a container under a number that has no entry."""
    _without_home(monkeypatch)
    _have_nobody(monkeypatch)
    status, out, err = command(*words)
    assert status in (1, 2)
    assert out == ""
    assert err.startswith("flowspec: ") and err.count("\n") == 1


def test_a_user_without_a_home_has_places(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_home(monkeypatch)
    assert running() is None
    assert hub_cache({"HF_HOME": "/models"}) == Path("/models/hub")
    assert hub_cache({}).name == "hub"
    with pytest.raises(OSError, match="no home folder; set HOME or XDG_STATE_HOME"):
        state_file()


def _without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(number: int) -> None:
        raise KeyError(number)

    for name in PLACES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_entry)


def _have_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker is where one is looked for."""
    monkeypatch.setattr("flowspec.transport.connections.redis_client.FIRST_SECONDS", 0.1)
    monkeypatch.setattr("flowspec.async_client.DEFAULT_URL", NOBODY)
