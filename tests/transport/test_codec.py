"""The wire: all messages round-trip; malformed ones are refused before they allocate or run."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.protocol import messages as m
from flowspec.core.protocol.row_types import BFLOAT16
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import WireError
from flowspec.transport.wire import codec, entries
from tests.marks import examples

INTS = st.integers(0, (1 << 63) - 1)
IDS = st.lists(st.integers(-1, 1 << 40), max_size=20).map(tuple)
TEXT = st.text(max_size=16)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
RUNS = st.builds(RunKey, TEXT, INTS)
HOPS = st.lists(st.builds(m.Hop, TEXT, st.lists(TEXT, max_size=3).map(tuple)), max_size=3).map(
    tuple
)
PAIRS = st.lists(st.tuples(INTS, FLOATS), max_size=3).map(tuple)
SAMPLINGS = st.builds(Sampling, st.floats(0, 9), st.integers(0, 99), st.floats(0.1, 1), INTS)


def columns(rows: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(-1, 1 << 40), min_size=rows, max_size=rows).map(tuple)


def segments(rows: int) -> st.SearchStrategy[m.Segment]:
    return st.builds(
        m.Segment,
        run=RUNS,
        segment=INTS,
        round=INTS,
        ids=columns(rows),
        parents=columns(rows),
        positions=columns(rows),
        tokens=st.one_of(st.just(()), columns(rows)),
        marker=st.booleans(),
        task=TEXT,
        route=HOPS,
        seconds=FLOATS,
        rows=INTS,
        together=INTS,
    )


def answers(rows: int) -> st.SearchStrategy[m.Answer]:
    best = st.lists(PAIRS, min_size=rows, max_size=rows).map(tuple)
    return st.builds(
        m.Answer,
        run=RUNS,
        segment=INTS,
        ids=columns(rows),
        tokens=columns(rows),
        top=st.one_of(st.just(()), best),
        seconds=FLOATS,
    )


MESSAGES = st.one_of(
    st.builds(
        m.Submit,
        run=RUNS,
        fields=st.lists(st.tuples(TEXT, TEXT), max_size=4).map(tuple),
        queued_seconds=FLOATS,
    ),
    st.builds(
        m.Open,
        run=RUNS,
        prompt_length=INTS,
        capacity=INTS,
        sampling=SAMPLINGS,
        returns=st.builds(m.Returns, top=st.integers(0, 9), hidden=st.booleans()),
        record=st.booleans(),
        prefix=st.none() | st.builds(m.Prefix, RUNS, INTS),
    ),
    st.integers(0, 8).flatmap(segments),
    st.builds(m.Prune, run=RUNS, offset=INTS, accepted=IDS, root=INTS, retained=IDS),
    st.integers(0, 8).flatmap(answers),
    st.builds(m.Close, run=RUNS, keep=INTS, kept=st.lists(RUNS, max_size=3).map(tuple)),
    st.builds(m.Revoke, run=RUNS),
    st.builds(
        m.StageReport,
        run=RUNS,
        stage=INTS,
        meter=st.builds(m.Meter, INTS, INTS, INTS, INTS, INTS, FLOATS),
    ),
    st.builds(m.Fault, run=RUNS, reason=TEXT),
    st.builds(m.Synced, run=RUNS, task=TEXT),
    st.builds(m.PrefixLost, run=RUNS, stage=INTS),
    st.builds(m.Retain, run=RUNS, keep=INTS, kept=st.lists(RUNS, max_size=3).map(tuple)),
)


@given(MESSAGES)
def test_messages_round_trip(message: m.Message) -> None:
    assert codec.decode(codec.encode(message)) == message


def test_every_message_has_a_strategy_here() -> None:
    found: set[type] = set()

    @given(MESSAGES)
    @settings(max_examples=400, database=None)
    def collect(message: m.Message) -> None:
        found.add(type(message))

    collect()
    assert found == set(m.MESSAGES)


@given(MESSAGES, st.data())
@settings(max_examples=examples(300))
def test_damaged_envelopes_are_refused_or_read_as_some_message(
    message: m.Message, data: st.DataObject
) -> None:
    raw = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for damaged in (bytes(raw), bytes(raw[:cut]), bytes(raw) + b"\x00"):
        try:
            read = codec.decode(damaged)
        except WireError as error:
            assert "\n" not in str(error)
        else:
            assert isinstance(read, m.Message)
            assert codec.decode(codec.encode(read)) == read


@given(MESSAGES, st.binary(min_size=1, max_size=8))
def test_an_envelope_is_exactly_one_message(message: m.Message, more: bytes) -> None:
    raw = codec.encode(message)
    for other in (raw + more, raw + raw, raw[:-1]):
        with pytest.raises(WireError):
            codec.decode(other)


@given(st.binary(max_size=400))
@settings(max_examples=examples(500))
def test_noise_is_refused(noise: bytes) -> None:
    for decode in (codec.decode, codec.decode_rows):
        with pytest.raises(WireError):
            decode(noise)


def packed(*parts: object) -> bytes:
    return msgpack.packb([codec.VERSION, *parts])


#: An encoded run.
RUN = ["j", 1]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (msgpack.packb([99, 5, RUN]), "version"),
        (msgpack.packb([codec.VERSION - 1, 5, RUN]), "version"),
        (packed(77, RUN), "unknown kind"),
        (packed(True, RUN), "unknown kind"),
        (packed(-1, RUN), "unknown kind"),
        (packed(6, ["j" * 65, 1]), "at most 64"),
        (packed(8, ["j" * 65, 1], "why"), "65 characters; 64 bytes fit"),
        (packed(8, ["é" * 33, 1], "why"), "64 bytes fit"),
        (packed(6), "1 fields"),
        (packed(6, RUN, 2), "1 fields"),
        (packed(6, "j"), "RunKey does not have its 2 fields"),
        (packed(6, ["j"]), "2 fields"),
        (packed(6, ["j", 1, 2]), "2 fields"),
        (packed(6, [1, "j"]), "expected text"),
        (packed(6, ["j", "1"]), "expected an integer"),
        (packed(6, ["j", True]), "expected an integer"),
        (packed(6, ["j", -2]), "out of range"),
        (packed(6, ["j", -200]), "out of range"),
        (packed(6, ["j", 1 << 63]), "expected an integer"),
        (packed(6, [b"j", 1]), "not msgpack"),
        (packed(6, [{"a": 1}, 1]), "not msgpack"),
        (packed(3, RUN, 1, [1.5], 1, []), "list of integers"),
        (packed(3, RUN, 1, [True], 1, []), "list of integers"),
        (packed(3, RUN, 1, [-5], 1, []), "out of range"),
        (packed(7, RUN, 1, [0, 0, 0, 0, 0, float("nan")]), "finite number"),
        (packed(1, RUN, 1, 1, [-1.0, 0, 1.0, 0], [0, False], False, None, []), "temperature"),
        (packed(1, RUN, 1, 1, [0.0, 0, 1.0, 0], [0, False], False, [RUN], []), "Prefix does not"),
        (packed(1, RUN, 1, 1, [0.0, 0, 1.0, 0], [0, False], False, 5, []), "Prefix does not"),
        (packed(1, RUN, -1, 1, [0.0, 0, 1.0, 0], [0, False], False, None, []), "negative"),
        (packed(1, RUN, 1, 1, [0.0, 0, 1.0, 0], [0, False], False, [RUN, -1], []), "negative"),
        (msgpack.packb({"a": 1}), "not of version"),
        (b"\xc1", "not of version"),
        (packed(5, b"")[:3] + b"\xc1", "not msgpack"),
        (b"\x91" * 3000, "not of version"),
        (packed(5, b"\x91" * 3000)[:3] + b"\x91" * 3000, "too many lists"),
    ],
)
def test_malformed_envelopes_get_one_reason(data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        codec.decode(data)


def test_oversized_envelopes_are_refused_unread() -> None:
    empty = codec.encode(m.Revoke(RunKey("j", 1)))
    with pytest.raises(WireError, match="at most 1048576 are accepted"):
        codec.decode(empty + b"\x00" * codec.MAX_ENVELOPE)


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", "<u8", "|b1"])
@pytest.mark.parametrize("shape", [(0, 4), (1,), (17, 192), (2, 3, 4)])
def test_rows_round_trip_and_any_client_of_the_package_reads_them(
    dtype: str, shape: tuple[int, ...]
) -> None:
    rows = (np.random.default_rng(0).normal(size=shape) * 9).astype(dtype)
    data = codec.encode_rows(rows)
    ours = codec.decode_rows(data)
    assert ours.dtype == rows.dtype
    assert (ours == rows).all()
    assert not ours.flags.writeable
    theirs = msgpack.unpackb(data, object_hook=msgpack_numpy.decode)
    assert (theirs == rows).all()


def test_bfloat16_rows_travel_in_two_bytes_and_keep_their_bits() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (7, 64), dtype=np.uint16)
    rows = bits.view(BFLOAT16)
    data = codec.encode_rows(rows)
    assert len(data) < bits.nbytes + 80
    ours = codec.decode_rows(data)
    assert ours.dtype == BFLOAT16
    assert (ours["bfloat16"] == bits).all()
    theirs = msgpack.unpackb(data, object_hook=msgpack_numpy.decode)
    assert (theirs["bfloat16"] == bits).all()


def layout(**changes: Any) -> bytes:
    rows = np.zeros((2, 3), dtype=np.float32)
    found = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2, 3], b"data": rows.tobytes()}
    for name, value in changes.items():
        found[name.encode()] = value
    return msgpack.packb(found)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was run",))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (layout(type="|O", data=pickle.dumps(Bomb())), "type"),
        (layout(kind=b"O", data=pickle.dumps(Bomb())), "type"),
        (layout(kind=b"V", type=[["a", "<f4"]]), "type"),
        (layout(kind=b"V", type=[["bfloat16", "<f4"]]), "type"),
        (layout(kind=b"V", type=[["bfloat16", "<u2"]]), "do not fill"),
        (layout(type=[["bfloat16", "<u2"]]), "type"),
        (layout(type="<i4"), "type"),
        (layout(type=">f4"), "type"),
        (layout(type="<f8"), "do not fill"),
        (layout(shape=[2, 4]), "do not fill"),
        (layout(shape=[-2, -3]), "no list of sizes"),
        (layout(shape=[2.0, 3]), "no list of sizes"),
        (layout(shape=[1 << 62, 1 << 62]), "no list of sizes"),
        (layout(shape=[1 << 27, 1 << 27]), "do not fill"),
        (layout(shape=[2, 3, 1, 1, 1]), "not msgpack"),
        (layout(shape="23"), "no list of sizes"),
        (layout(data="text of 24 characters...."), "not msgpack|do not fill"),
        (layout(nd=False), "type"),
        (layout(extra=1), "layout"),
        (layout()[:-5], "not msgpack"),
        (layout() + b"x", "not msgpack"),
        (msgpack.packb(np.float32(1), default=msgpack_numpy.encode), "layout"),
        (msgpack.packb([1, 2]), "layout"),
        (msgpack.packb({b"complex": True, b"data": "1j"}), "layout"),
    ],
)
def test_rows_that_are_no_plain_array_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        codec.decode_rows(data)


def test_oversized_rows_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_ROWS", 100)
    with pytest.raises(WireError, match="at most 100"):
        codec.decode_rows(b"\x00" * 101)


def test_rows_of_other_types_are_not_written() -> None:
    with pytest.raises(WireError, match="cannot travel"):
        codec.encode_rows(np.array(["a"], dtype=object))


@given(st.data())
@settings(max_examples=examples(300))
def test_rows_that_were_changed_on_the_way_are_refused(data: st.DataObject) -> None:
    """Any bit: a sign, for one, makes other rows of the same form."""
    sent = dict(pairs_of(entries.payload_fields(codec.encode_rows(np.ones((3, 5), np.float32)))))
    assert entries.payload(sent) == sent[b"d"]
    changed = bytearray(sent[b"d"])
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError, match="changed on the way"):
        entries.payload(sent | {b"d": bytes(changed)})


def pairs_of(flat: list[bytes | str | int]) -> Iterator[tuple[bytes, bytes]]:
    """Names and values as a server keeps them."""
    kept = [value if isinstance(value, bytes) else str(value).encode() for value in flat]
    return zip(kept[::2], kept[1::2], strict=True)


@given(st.data())
@settings(max_examples=examples(300))
def test_damaged_rows_are_refused_or_are_an_array(data: st.DataObject) -> None:
    raw = bytearray(codec.encode_rows(np.ones((3, 5), dtype=np.float32)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        rows = codec.decode_rows(bytes(raw))
    except WireError:
        return
    assert rows.dtype.str in codec.ROW_DTYPES or rows.dtype == BFLOAT16


def test_the_packages_own_decoder_is_never_called() -> None:
    from pathlib import Path

    for file in Path(codec.__file__).parent.parent.rglob("*.py"):
        text = file.read_text()
        assert "msgpack_numpy.decode" not in text
        assert "msgpack_numpy.unpackb" not in text
        assert "msgpack_numpy.patch" not in text
        assert "pickle" not in text or file.name == "codec.py"


@pytest.mark.parametrize(
    "fields",
    [
        [2, RUN, 1, 1, [5, 6], [4], [1, 2], [], False, "", [], 0.0, 0, 0],
        [2, RUN, 1, 1, [5, 6], [4, 5], [], [], False, "", [], 0.0, 0, 0],
        [2, RUN, 1, 1, [5, 6], [4, 5], [1, 2], [7], False, "", [], 0.0, 0, 0],
        [4, RUN, 1, [5, 6], [7], [], 0.0, 0],
        [4, RUN, 1, [5, 6], [7, 8], [[]], 0.0, 0],
    ],
)
def test_columns_of_different_length_are_refused(fields: list[Any]) -> None:
    with pytest.raises(WireError, match="differ in length"):
        codec.decode(msgpack.packb([codec.VERSION, *fields]))


def test_what_no_reader_would_accept_is_not_written() -> None:
    with pytest.raises(WireError, match="cannot travel"):
        codec.encode(m.Close(RunKey("j", 1 << 70)))
    with pytest.raises(WireError, match="cannot travel"):
        codec.encode(m.Fault(RunKey("j", 1), "x" * codec.MAX_ENVELOPE))
