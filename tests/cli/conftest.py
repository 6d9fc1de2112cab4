from __future__ import annotations

from collections.abc import Callable

import pytest

from flowspec.cli import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """``command(*arguments)`` runs the command line in this process: status, stdout and stderr."""
    monkeypatch.delenv("FLOWSPEC_REDIS_URL", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["flowspec", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run
