"""The rules of ``lua/README.md`` for every script, and the loader that enforces them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowspec.broker.scripts import load, read
from flowspec.core.protocol.codes import Code
from flowspec.errors import ConfigError

LUA = Path(__file__).parent.parent.parent / "lua"


def test_every_file_is_loaded_and_has_tests() -> None:
    files = {file.name.rpartition("-")[0] for file in LUA.glob("*.lua")}
    assert set(load()) == files
    tests = "\n".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    for name in files:
        assert f'call("{name}"' in tests, f"{name} has no test of its own"


@pytest.mark.parametrize("script", load().values(), ids=lambda script: script.name)
def test_keys_come_in_keys_and_checks_before_writes(script: object) -> None:
    body = re.sub(r"--[^\n]*", "", script.text)  # type: ignore[attr-defined]
    assert "KEYS *" not in body
    assert not re.search(r"redis\.call\('\w+', *['\"][^'\"]*:", body), (
        "a key is built inside the script"
    )
    writes = [
        m.start() for m in re.finditer(r"redis\.call\('(?:XADD|HSET|SET|SADD|RPUSH|LPOP)'", body)
    ]
    functions = [m.end() for m in re.finditer(r"^end$", body, re.MULTILINE)]
    main = max(functions, default=0)
    refusals = [m.start() for m in re.finditer(r"return [2345]\b", body) if m.start() > main]
    first_write = min((write for write in writes if write > main), default=len(body))
    assert all(refusal < first_write for refusal in refusals)


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
