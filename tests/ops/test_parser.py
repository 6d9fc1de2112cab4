"""A program's wrong argument gives one line."""

from __future__ import annotations

import pytest

from ops.parser import Parser


def test_a_wrong_argument_is_one_line_without_usage(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="x")
    parser.add_argument("--count", type=int)
    with pytest.raises(SystemExit) as raised:
        parser.parse_args(["--count", "many"])
    assert raised.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "x: argument --count: invalid int value: 'many'\n"
