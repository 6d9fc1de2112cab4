"""``auto`` beside other jobs: what it measures there is not compared with plain decoding alone."""

from __future__ import annotations

import pytest

from flowspec.core.protocol.messages import Answer
from flowspec.core.run.history import History
from flowspec.core.run.key import RunKey
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.session.strategy import Occasion, View
from flowspec.core.tree.tree import Tree
from flowspec.strategies import build


def decoded_by(history: History, tokens: int, rates: dict[bool, float], rows: int) -> set[bool]:
    """Decode a job of ``tokens`` tokens; whether each of its choices was plain decoding.

    ``rates``: tokens per second by whether it decodes plainly. ``rows``: of its share; 0: alone.
    """
    auto = build("auto", 2)
    auto.use_history(history)
    found = set()
    seconds = 0.0
    lone = RoundTrip(1, 1 / rates[True], alone=True)
    tree = Tree(1)
    tree.plant(token=1, position=1, parent=0)
    for decoded in range(tokens):
        view = View(tree, 1, 0, decoded=decoded, decode_seconds=seconds, rows=rows)
        auto.observe_answer(view, Answer(RunKey("j", 1), 1, (1,), (1,)), lone)
        auto.grow(view, Occasion.VERDICT)
        found.add(auto.is_plain)
        seconds += 1 / rates[auto.is_plain]
    return found


@pytest.mark.parametrize("rows", [1, 8])
def test_what_a_drafter_does_beside_other_jobs_is_not_compared_with_plain_decoding(
    rows: int,
) -> None:
    """A busy hour made lone jobs decode plainly, at half the speed, for thousands of tokens."""
    history = History()
    for _ in range(11):
        decoded_by(history, 64, {False: 2.0, True: 1.0}, 0)
    for _ in range(12):
        assert decoded_by(history, 128, {False: 0.5, True: 0.5}, rows) == {False}
    for _ in range(20):
        assert decoded_by(history, 64, {False: 2.0, True: 1.0}, 0) == {False}
