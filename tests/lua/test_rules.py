"""The rules of ``lua/README.md`` for every script, and the loader that enforces them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowspec.core.protocol.codes import Code
from flowspec.errors import ConfigError
from flowspec.transport.connections.scripts import load, read

LUA = Path(__file__).parent.parent.parent / "lua"


def test_every_file_is_loaded_and_has_tests() -> None:
    files = {file.name.rpartition("-")[0] for file in LUA.glob("*.lua")}
    assert set(load()) == files
    tests = "\n".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    for name in files:
        calls = (f'call("{name}"', f'call_list("{name}"')
        assert any(known in tests for known in calls), f"{name} has no test of its own"


#: The commands that only read; every other one counts as a write.
READS = {
    "EXISTS",
    "GET",
    "HEXISTS",
    "HGET",
    "HMGET",
    "LLEN",
    "LPOS",
    "SCARD",
    "SISMEMBER",
    "TIME",
    "TYPE",
    "XINFO",
    "XLEN",
    "XRANGE",
}
#: Refusals in each script's main part.
REFUSALS = {
    "admit": 2,
    "assign": 5,
    "claim": 1,
    "commit_verdict": 6,
    "drop_mistyped": 1,
    "finish": 1,
    "open_job": 2,
    "place": 3,
    "publish": 2,
    "publish_together": 3,
    "record": 0,
    "release": 1,
    "renew_intake": 3,
    "revoke": 4,
    "set_pipeline": 1,
    "trim": 1,
}
#: Codes that are returned after writes, as the script's header says: admit ends a refused job,
#: publish still carries out the completions.
AFTER_WRITES = {"admit": {Code.DUP, Code.FULL}, "publish": {Code.DUP}}

#: Scripts that return a list of codes, one for each of several messages.
LISTS = {"publish_together"}


def code_of(file: Path) -> str:
    """A file without its comments."""
    return re.sub(r"--[^\n]*", "", file.read_text(encoding="utf-8"))


def writing_functions() -> set[str]:
    """The included functions that write, themselves or through another one."""
    bodies = {
        match[1]: match[0]
        for file in (LUA / "include").glob("*.lua")
        for match in re.finditer(
            r"^(?:local function )?(\w+)(?: = function)?\(.*?^end$",
            code_of(file),
            re.MULTILINE | re.DOTALL,
        )
    }
    writing: set[str] = set()
    for _ in bodies:
        writing |= {name for name, body in bodies.items() if writes(body, writing - {name})}
    return writing


def writes(code: str, functions: set[str]) -> bool:
    """Whether ``code`` has a command that writes or a call of one of ``functions``."""
    commands = set(re.findall(r"redis\.p?call\('(\w+)'", code))
    assert len(commands) or not re.search(r"redis\.p?call", code), "a command is not a literal"
    return bool(commands - READS) or bool(set(re.findall(r"(\w+)\(", code)) & functions)


def statements(code: str) -> list[str]:
    """The statements of a main part, each with its whole block."""
    return [part for part in re.split(r"\n(?=(?!end\b|else)\w)", code) if part.strip()]


def test_the_functions_that_write_are_found() -> None:
    assert writing_functions() == {
        "append",
        "append_together",
        "counted",
        "graph_deliver",
        "graph_release",
        "graph_latest",
        "graph_complete",
        "graph_create",
        "wake",
    }


def test_keys_come_in_keys() -> None:
    for file in [*LUA.glob("*.lua"), *LUA.glob("include/*.lua")]:
        assert "KEYS *" not in code_of(file)
        assert not re.search(r"redis\.call\('\w+', *['\"][^'\"]*:", code_of(file)), (
            "a key is built inside the script"
        )


@pytest.mark.parametrize("file", sorted(LUA.glob("*.lua")), ids=lambda file: file.stem)
def test_no_refusal_comes_after_a_write(file: Path) -> None:
    name = file.stem.rpartition("-")[0]
    functions = writing_functions()
    refusals: list[Code] = []
    written = False
    for statement in statements(code_of(file)):
        found = [Code(int(code)) for code in re.findall(r"\breturn ([1-5])\b", statement)]
        # A whole loop counts as a write, since its next turn comes after the write of this one.
        written = written or writes(statement, functions)
        assert not (found and written), statement
        refusals += found
    assert len(refusals) == REFUSALS[name]
    assert written, "it changes nothing"
    header = re.search(
        r"^-- returns((?:.*\n-- )*.*)", file.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert header is not None
    documented = {code for code in Code if re.search(rf"\b{code.name}\b", header[1])}
    assert documented == {Code.OK, *refusals} | AFTER_WRITES.get(name, set())
    returned = set(re.findall(r"\breturn (\w+)", code_of(file))) - set("012345")
    answers = {"answer"} if name in AFTER_WRITES else set()
    assert returned == (answers if name not in LISTS else {"answers"})


def test_the_table_of_codes_is_the_enum() -> None:
    table = re.findall(r"^\| (\d) \| (\w+) \|", (LUA / "README.md").read_text(), re.MULTILINE)
    assert {name: int(number) for number, name in table} == {code.name: code.value for code in Code}


def bad(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    with pytest.raises(ConfigError) as raised:
        read(folder / name, folder)
    return str(raised.value)


def test_the_loader_refuses_what_breaks_the_rules(tmp_path: Path) -> None:
    good = "-- thing: does\n-- KEYS[1] job\n-- returns OK\nreturn 0\n"
    (tmp_path / "thing-1.lua").write_text(good)
    assert read(tmp_path / "thing-1.lua", tmp_path).keys == 1
    assert "not named like" in bad(tmp_path, "thing.lua", good)
    assert "its name says 2" in bad(tmp_path, "thing-2.lua", good)
    assert "its name says n" in bad(tmp_path, "thing-n.lua", good)
    assert "must name it" in bad(tmp_path, "other-1.lua", good)
    assert "must name it" in bad(tmp_path, "thing-1.lua", good.replace("KEYS[1]", "KEYS[2]"))
    assert "what it returns" in bad(tmp_path, "thing-1.lua", good.replace("returns", "gives"))
    assert "there is no" in bad(tmp_path, "thing-1.lua", good + "-- include nothing\n")
    (tmp_path / "a.lua").write_text("-- include b\n")
    assert "must not include" in bad(tmp_path, "thing-1.lua", good + "-- include a\n")
