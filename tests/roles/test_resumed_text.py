"""A text that goes on behind what earlier runs have committed continues in whole characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.protocol.machine import Allocate, Commit
from flowspec.core.protocol.messages import Returns
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.roles.performers import DraftPerformer
from tests.toy import TARGET
from tests.toy_model import ToyDrafter

TOKENIZER = Tokenizer(open_directory(default_pair()[0]))
#: Characters of one to four bytes: what a commit ends in may be half of one.
TEXT = "né 水 🙂 open(f) — ключ"
IDS = TOKENIZER.encode(TEXT, raw=True)


def commit(run: RunKey, ids: tuple[int, ...], *, last: bool) -> Commit:
    return Commit(run, 0, 0, len(ids), ids, "eos" if last else "", (), ())


@given(st.lists(st.integers(1, 3), min_size=len(IDS)), st.integers(0, len(IDS)))
def test_the_pieces_of_two_runs_are_those_of_one(sizes: list[int], kept: int) -> None:
    performer = DraftPerformer(ToyDrafter(TARGET, 1.0), TOKENIZER)
    groups: list[tuple[int, ...]] = []
    left = IDS
    for size in sizes:
        if left:
            groups.append(left[:size])
            left = left[size:]
    first, second = RunKey("j", 1), RunKey("j", 3)
    performer.allocate(Allocate(first, 64, Sampling(), Returns()))
    whole = [
        performer.written(commit(first, group, last=at == len(groups) - 1)).text
        for at, group in enumerate(groups)
    ]
    committed = tuple(groups[:kept])
    performer.allocate(Allocate(second, 64, Sampling(), Returns(), committed=committed))
    rest = [
        performer.written(commit(second, group, last=at == len(groups) - 1)).text
        for at, group in enumerate(groups)
        if at >= kept
    ]
    assert rest == whole[kept:]
