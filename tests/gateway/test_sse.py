"""Events are one line each, whatever is in them."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from flowspec.gateway.sse import event


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_event_is_one_line_to_every_reader(text: str) -> None:
    written = event({"text": text}).decode()
    line, *rest = written.splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": text}


def test_line_ends_beyond_ascii() -> None:
    assert event({"text": "a\x85b\u2028c\u2029\n"}).count(b"\n") == 2
