"""Every event and every error of the code is explained in docs/operations.md."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from flowspec import errors
from flowspec.transport.connections.answers import ANSWERS
from tests.documents import ROOT

OPERATIONS = (ROOT / "docs/operations.md").read_text()
#: Clients of Redis, whose ``info`` asks the server.
NO_LOGGERS = {"client", "self._redis"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def events(file: Path) -> Iterator[str]:
    """The first arguments, if they are texts, of calls of loggers' methods in ``file``."""
    source = file.read_text(encoding="utf-8")
    if "observe import" not in source and "structlog" not in source and "_log." not in source:
        return
    for node in ast.walk(ast.parse(source)):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if not is_call or not node.args or node.func.attr not in LEVELS:  # type: ignore[attr-defined]
            continue
        if ast.unparse(node.func.value) in NO_LOGGERS:  # type: ignore[attr-defined]
            continue
        first = node.args[0]  # type: ignore[attr-defined]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def test_every_event_is_explained() -> None:
    found = {
        event
        for folder in ("flowspec", "workers")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for event in events(file)
    }
    assert {"job assigned", "entry refused", "request", "write refused"} <= found
    missing = {event for event in found if f"`{event}`" not in OPERATIONS}
    assert not missing


def test_every_error_is_explained() -> None:
    kinds = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.FlowSpecError)
    }
    assert not {name for name in kinds if f"| `{name}` |" not in OPERATIONS}


def test_every_cause_is_explained() -> None:
    from flowspec.core.protocol import causes

    named = [value for name, value in vars(causes).items() if name.isupper() and " " not in value]
    assert len(named) == 7
    assert not [cause for cause in named if f"| `{cause}` |" not in OPERATIONS]


def test_every_answer_of_a_broker_is_explained() -> None:
    assert not [code for code in ANSWERS if f"`{code}`" not in OPERATIONS]
