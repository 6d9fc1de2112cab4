"""``flowspec.results``: output is put together from its entries by their offsets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowspec.errors import FlowSpecError, GapError, StateError
from flowspec.results import OutputSoFar, Stats

DOCS = Path(__file__).parent.parent / "docs"

PIECES = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=8)


def entries(pieces: list[list[int]]) -> list[dict[str, str]]:
    """The entries that commits of ``pieces`` leave."""
    found = []
    offset = 0
    for ids in pieces:
        texts = [f"<{token}>" for token in ids]
        found.append(
            {
                "kind": "tokens",
                "offset": str(offset),
                "ids": json.dumps(ids),
                "text": "".join(texts),
                "sizes": json.dumps([*map(len, texts)]),
            }
        )
        offset += len(ids)
    return [*found, {"kind": "end", "finish_reason": "length"}]


@given(PIECES, st.data())
def test_entries_that_come_again_change_nothing(
    pieces: list[list[int]], data: st.DataObject
) -> None:
    output = OutputSoFar("a")
    written = [entry for entry in entries(pieces) if entry.get("ids") != "[]"]
    for at, entry in enumerate(written):
        output.take(str(at), entry)
        for again in data.draw(st.lists(st.integers(0, at), max_size=2)):
            assert output.take(str(at), written[again]) is None
    assert output.token_ids == [token for ids in pieces for token in ids]
    assert "".join(output.texts) == "".join(f"<{token}>" for ids in pieces for token in ids)
    assert output.ended


def test_output_of_an_older_version_is_refused_in_one_line() -> None:
    entry, _ = entries([[1]])
    del entry["sizes"]
    with pytest.raises(StateError, match=r"^the output of job a was written by an older version"):
        OutputSoFar("a").take("1", entry)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1), min_size=2, max_size=8), st.data())
def test_output_that_lacks_an_entry_is_no_text(
    pieces: list[list[int]], data: st.DataObject
) -> None:
    written = entries(pieces)
    del written[data.draw(st.integers(0, len(pieces) - 2))]
    output = OutputSoFar("a")
    with pytest.raises(GapError, match=r"^the output of job a is incomplete: its tokens \d+ to"):
        for at, entry in enumerate(written):
            output.take(str(at), entry)


ODD = ["0", "[]", "[1]", "[[", "{}", '["a"]', "[true]", "-1"]
VALUES = st.one_of(st.text(), st.sampled_from(ODD))
NAMES = ["kind", "offset", "ids", "sizes", "text", "logprobs", "stats", "finish_reason", "cause"]


@given(
    st.lists(
        st.fixed_dictionaries(
            {"kind": st.sampled_from(["tokens", "end", "error", "x"])},
            optional=dict.fromkeys(NAMES[1:], VALUES),
        ),
        max_size=4,
    ),
    st.dictionaries(st.sampled_from(["f:max_new_tokens", "strategy"]), VALUES),
)
def test_damaged_output_is_refused_in_one_line(
    written: list[dict[str, str]], known: dict[str, str]
) -> None:
    output = OutputSoFar("a")
    try:
        for at, entry in enumerate(written):
            output.take(str(at), entry)
        found = output.result(known, 2)
    except FlowSpecError as error:
        assert "\n" not in str(error)
    else:
        assert all(type(token) is int for token in (*found.token_ids, *found.prompt_token_ids))
        assert isinstance(found.stats, dict)


def test_the_page_of_stats_has_their_types() -> None:
    rows = (DOCS / "stats.md").read_text(encoding="utf-8").splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    assert {key for cell in cells for key in re.findall(r"`(\w+)`", cell)} == {
        *Stats.__annotations__
    }
