"""Every strategy with a block drafter: the text is the target's, and a pass serves many levels."""

from __future__ import annotations

import pytest

from flowspec.core.run.sampling import Sampling
from flowspec.strategies import EXACT
from tests.marks import crossed
from tests.toy import PROMPT, TARGET, generate
from tests.toy_blocks import ToyBlocks

GREEDY = Sampling()
SAMPLED = Sampling(temperature=1.0, seed=1)
VARIANTS = [
    *EXACT,
    "flowspec:lockstep=on",
    "pipedec:barrier=off",
    "specpipe:levels=2",
    "specpipe:width=auto",
    "chain:window=5,in_flight=3",
    "static_tree:overlap=on",
]


@pytest.mark.parametrize(
    ("variant", "shape"), crossed(VARIANTS, [(1, 4, 0.8), (3, 1, 0.6), (4, 5, 0.9)], keep=3)
)
def test_ids_equal_plain_decoding(variant: str, shape: tuple[int, int, float]) -> None:
    """``shape``: stages, levels of a block, and how many of its tokens are right."""
    stages, levels, hit_rate = shape
    for sampling in (GREEDY, SAMPLED):
        drafter = ToyBlocks(levels, hit_rate)
        record = generate(variant, stages, sampling=sampling, count=24, drafter=drafter)
        assert record.finish is not None
        assert record.finish.error == ""
        assert tuple(record.tokens) == TARGET.decode(PROMPT, 24, sampling)
        assert record.finish.stats["draft_passes"] >= drafter.passes


@pytest.mark.parametrize("variant", ["naive_pp", "pruned_pp", "speculative", "static_tree"])
def test_a_round_takes_one_pass(variant: str) -> None:
    """The tree of a round is at most eight levels deep; the last round may end before it drafts."""
    drafter = ToyBlocks(8, 0.8)
    record = generate(variant, 4, count=48, drafter=drafter)
    assert record.finish is not None
    rounds = record.finish.stats["rounds"]
    assert drafter.passes == drafter.blocks
    assert drafter.passes in (rounds, rounds - 1)
    assert record.finish.stats["draft_passes"] == drafter.passes


def test_flowspec_drafts_once_per_root() -> None:
    """Proposals are dropped at every verdict, as a head's are, and one pass gives all levels."""
    drafter = ToyBlocks(8, 0.9)
    record = generate("flowspec:expand=off", 4, count=48, drafter=drafter)
    commits = len(record.committed_at)
    assert drafter.passes <= commits


def test_further_levels_come_from_further_passes() -> None:
    """A tree of seven levels by blocks of two takes four passes: for levels 1, 3, 5 and 7."""
    drafter = ToyBlocks(2, 1.0)
    record = generate("naive_pp", 4, count=48, drafter=drafter)
    assert record.finish is not None
    rounds = record.finish.stats["rounds"]
    assert 4 * (rounds - 1) <= drafter.passes <= 4 * rounds


def test_a_wide_layer_takes_few_blocks() -> None:
    """The best eight of a level have one each; others share theirs."""
    drafter = ToyBlocks(8, 0.7)
    generate("specpipe:width=64", 4, count=30, drafter=drafter)
    assert drafter.blocks <= 12 * drafter.passes
