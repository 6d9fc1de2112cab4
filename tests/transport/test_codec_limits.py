"""What the decoder costs: bytes of any form, and forms made to cost as much as they can."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import msgpack
import pytest

from flowspec.core.protocol import messages as m
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.errors import WireError
from flowspec.transport.wire import codec, entries
from tests.transport.test_codec import layout

#: Memory that decoding may take: so much for each byte, and what the smallest envelope takes.
TIMES = 16
SMALLEST = 256 << 10
#: Longest that decoding may take, seconds.
SLOWEST = 0.5
MIB = 1 << 20
RUN = RunKey("1732390000000-0", 3)
VALID = [
    codec.encode(message)
    for message in (
        m.Submit(
            RUN, (("f:prompt", "text " * 40),), 1.5, (1, 2), m.Earlier((5, 900), ((7,), (8, 9)))
        ),
        m.Open(RUN, 9, 200, Sampling(), m.Returns(3, True), True, m.Prefix(RUN, 4), (1, 2, 3)),
        m.Segment(
            RUN, 4, 2, (1, 900), (0, 1), (5, 6), (70_000, 3), True, "a", (m.Hop("b", ("c",)),)
        ),
        m.Prune(RUN, 9, (3, 4), 5, (5, 6, 7)),
        m.Answer(RUN, 3, (1, 2), (5, 6), (((5, -0.5), (9, -1.5)), ((6, -0.5),)), 0.25, 2),
        m.Close(RUN, 2, (RUN, RUN)),
        m.Fault(RUN, "why"),
        m.StageReport(RUN, 1, m.Meter(1, 2, 3, 4, 5, 0.5)),
    )
]
#: Bytes that begin something: lists, texts, maps, extensions, numbers.
HEADS = bytes([0x80, 0x8F, 0x90, 0x91, 0x9F, 0xA0, 0xBF, *range(0xC0, 0x100)])


def mutated(random_: random.Random) -> bytes:
    """A valid envelope, changed at some places: bytes, lengths, repetitions, cuts."""
    data = bytearray(random_.choice(VALID))
    for _ in range(random_.randint(1, 6)):
        at = random_.randrange(3, len(data) + 1)
        match random_.randrange(6):
            case 0:
                data[at:at] = bytes([random_.choice(HEADS)])
            case 1:
                data[at : at + 1] = random_.randbytes(1)
            case 2:
                data[at:at] = bytes([random_.choice(HEADS)]) * random_.choice((1, 9, 300, 4000))
            case 3:
                data[at:at] = b"\xdd" + random_.choice((10, 5000, 1 << 20, 1 << 31)).to_bytes(
                    4, "big"
                )
            case 4:
                begin = random_.randrange(len(data))
                data[at:at] = data[begin : begin + 60] * random_.choice((1, 20, 200))
            case _:
                del data[at : at + random_.randint(1, 9)]
        if len(data) < 4:
            break
    return bytes(data)


T = TypeVar("T")
#: ``alone(function, *arguments)``: the result of a call in a process of its own.
Alone = Callable[..., T]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone[T]]:
    """What is measured is all that a process takes, and this one may have further threads."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def decoded(data: bytes, decode: Callable[[bytes], object] = codec.decode) -> tuple[float, int]:
    """Seconds and bytes at most that decoding ``data`` takes; any error but WireError is raised."""

    def run() -> None:
        try:
            decode(data)
        except WireError as error:
            assert "\n" not in str(error)

    began = time.thread_time()
    run()
    seconds = time.thread_time() - began
    tracemalloc.start()  # it makes everything slower
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, peak


def check(cases: Iterable[bytes]) -> None:
    for data in cases:
        seconds, peak = decoded(data)
        assert seconds <= SLOWEST, data[:80]
        assert peak <= TIMES * len(data) + SMALLEST, (len(data), peak, data[:80])


def check_mutated(cases: int) -> None:
    random_ = random.Random(17)
    check(mutated(random_) for _ in range(cases))


@pytest.mark.parametrize(
    "cases", [10_000, pytest.param(1_000_000, marks=(pytest.mark.heavy, pytest.mark.timeout(3000)))]
)
def test_mutated_envelopes_are_refused_at_their_price(cases: int, alone: Alone[None]) -> None:
    alone(check_mutated, cases)


def of_kind(kind: int, inner: bytes, size: int) -> bytes:
    """An envelope of ``size`` bytes whose third part is a list of as many ``inner`` as fit."""
    head = bytes([0x94, codec.VERSION, kind]) + msgpack.packb(["j", 1]) + b"\xdd"
    count = (size - len(head) - 4) // len(inner)
    return head + count.to_bytes(4, "big") + inner * count


@pytest.mark.parametrize("kind", [0, 2, 4, 8, 11])
@pytest.mark.parametrize("size", [4000, 100_000, MIB, 8 * MIB])
@pytest.mark.parametrize(
    "inner",
    [b"\x90", b"\x80", b"\x91\xc0", b"\xe0", b"\xa3\xc4\x80\x41", b"\xdc\x1f\xff", b"\xc4\x00"],
)
def test_what_costs_much_more_than_its_bytes_is_refused_before_it_is_built(
    inner: bytes, size: int, kind: int, alone: Alone[tuple[float, int]]
) -> None:
    data = of_kind(kind, inner, size)
    seconds, peak = alone(decoded, data)
    assert seconds <= SLOWEST
    may_be_groups = kind == 0 and inner == b"\x91\xc0" and size < MIB
    assert peak <= (40 * size if may_be_groups else SMALLEST)
    with pytest.raises(WireError):
        codec.decode(data)


@pytest.mark.parametrize("size", [4000, 100_000, 780_000])
@pytest.mark.parametrize("inner", [b"\x05", b"\xcd\xff\xff", b"\xcb" + b"\x3f" * 8])
def test_lists_of_numbers_cost_no_more_than_they_may(
    inner: bytes, size: int, alone: Alone[None]
) -> None:
    alone(check, [of_kind(kind, inner, size) for kind in range(len(m.MESSAGES))])


def test_the_dearest_forms_of_what_is_sent(alone: Alone[tuple[float, int]]) -> None:
    """Lists of one token, and a pair of numbers for each row: the two that may cost more."""
    ids = tuple(range(300, 4300))
    groups = tuple((token,) for token in ids)
    submit = codec.encode(m.Submit(RUN, (("f:prompt", "x"),), earlier=m.Earlier(ids, groups)))
    _, peak = alone(decoded, submit)
    assert peak <= 40 * len(submit)
    top = tuple(((token, 0.0), (token, 0.0)) for token in ids)
    answer = codec.encode(m.Answer(RUN, 3, ids, ids, top))
    _, peak = alone(decoded, answer)
    assert peak <= 24 * len(answer)


def test_a_huge_declared_shape_allocates_nothing(alone: Alone[tuple[float, int]]) -> None:
    _, peak = alone(decoded, layout(shape=[1 << 27, 1 << 27]), codec.decode_rows)
    assert peak < 100_000


def test_a_job_at_its_limits_travels() -> None:
    """Whatever a scheduler admits reaches the draft worker."""
    ids = tuple(range(100_000, 300_000))
    groups = tuple((token,) for token in ids[:50_000])
    fields = (("f:messages", "x" * (8 << 20)),)
    for job in (m.Submit(RUN, fields), m.Submit(RUN, fields, earlier=m.Earlier(ids, groups))):
        assert codec.decode(codec.encode(job)) == job


def test_the_widest_segment_and_answer_travel() -> None:
    ids = tuple(range(1 << 20, (1 << 20) + 1536))
    top = tuple(tuple((token, -float(rank)) for rank in range(21)) for token in ids)
    for message in (
        m.Segment(RUN, 1, 1, ids, ids, ids, ids, route=(m.Hop("3/decode/9", ("1", "2")),) * 40),
        m.Answer(RUN, 1, ids, ids, top),
        m.Answer(RUN, 1, ids, (1,) * 1536, (((1, -0.5),),) * 1536),
        m.Prune(RUN, 5, ids, 3, ids),
    ):
        assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize(
    "flat",
    [
        [b"f", b"d0", *[b"a", b"1"] * 20, *[b"q", b"1"] * 2],
        [b"f", b"d0", *[b"q", b"1"] * 3000],
        [b"a", b"1"] * 3000,
    ],
)
def test_entries_of_too_many_fields_are_refused(flat: list[bytes]) -> None:
    with pytest.raises(WireError, match="fields"):
        entries.parts(flat)


def test_rows_of_a_job_with_a_long_name_are_refused() -> None:
    with pytest.raises(WireError, match="name has 65 characters"):
        entries.rows({b"j": b"j" * 65, b"e": b"1", b"s": b"1"})
