"""What was float32 alone takes part in other precisions: attention paths, drafters, heads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flowspec.core.protocol.messages import Returns
from flowspec.core.protocol.work import Draft, DraftDone, Part, Pruned
from flowspec.core.run.key import RunKey
from flowspec.core.run.sampling import Sampling
from flowspec.model.base import DraftExecutor, HasFacts
from flowspec.model.drafters.language_model import ModelDrafter
from flowspec.model.drafters.sources import load_sources
from flowspec.model.kernels import served
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import place
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.model.weights.precision import AUTO
from flowspec.proof import plain
from tests.marks import crossed
from tests.precisions import SERVED

TARGET = open_directory(default_pair()[0])
RUN = RunKey("j", 1)
PROMPT = Tokenizer(TARGET).encode("Tom has 5 apples and buys 7 more. Then he", raw=False)
WIDTH = 8
PRECISIONS = ["bfloat16", "float16", "int8", "nf4", "int4", "nf4-double"]


def part(ids: Sequence[int], parents: Sequence[int], tokens: Sequence[int], context: int) -> Part:
    positions = ids if context else [len(PROMPT)] * len(ids)
    return Part(
        run=RUN,
        segment=0,
        ids=tuple(ids),
        parents=tuple(parents),
        positions=tuple(positions),
        tokens=tuple(tokens),
        offsets=(),
        context=context,
        pruned=None if context else Pruned((), ()),
        answers=(len(ids) - 1,) if context else tuple(range(len(ids))),
    )


def passes() -> list[Part]:
    """The prompt as context, then four siblings below it."""
    length = len(PROMPT)
    prompt = part(range(length), range(-1, length - 1), PROMPT, length)
    return [prompt, part(range(length, length + 4), [length - 1] * 4, [7, 90, 91, 92], 0)]


def proposals(drafter: DraftExecutor) -> list[tuple[int, ...]]:
    drafter.allocate(RUN, 100, Sampling(), Returns(hidden=drafter.wants_hidden))
    if drafter.wants_hidden:
        whole = LayerBlock(TARGET, range(TARGET.layers), first=True, last=True)
        text = plain.decode([whole], TARGET, PROMPT, 1, Sampling())
        drafter.learn(RUN, range(len(PROMPT)), text.hidden)
    done: list[DraftDone] = [drafter.run(Draft(each, WIDTH)) for each in passes()]
    return [tokens for one in done for tokens in one.tokens]


@pytest.mark.parametrize(("source", "precision"), crossed(["draft", "head"], SERVED))
def test_drafters_propose_nearly_what_they_do_in_float32(source: str, precision: str) -> None:
    exact = proposals(load_sources(source, TARGET))
    found = proposals(load_sources(source, TARGET, dtype=precision))
    assert [len(tokens) for tokens in found] == [WIDTH] * 5
    common = sum(len(set(one) & set(other)) for one, other in zip(exact, found, strict=True))
    assert common >= 0.7 * WIDTH * 5


@pytest.mark.parametrize("source", ["draft", "head"])
def test_drafters_of_a_pipeline_have_eight_bits_where_those_of_simulations_do_not(
    source: str,
) -> None:
    def precision(dtype: str | None) -> object:
        drafter = load_sources(source, TARGET, dtype=dtype)
        assert isinstance(drafter, HasFacts)
        return drafter.facts()["precision"]

    declared = place(AUTO, "cpu", TARGET.config).precision
    assert precision(None) == declared
    assert precision(AUTO) == ("int8-block" if served("int8-block", "cpu") else declared)


def test_a_drafter_with_another_vocabulary_proposes_and_reads_what_both_have() -> None:
    """Models of one tokenizer pad their vocabularies differently."""
    block = LayerBlock(open_directory(default_pair()[1]), range(2), first=True, last=True)
    fewer = ModelDrafter(block, 100)
    assert max(max(tokens) for tokens in proposals(fewer)) < 100
    more = ModelDrafter(block, 1 << 20)
    more.allocate(RUN, 100, Sampling(), Returns())
    length = len(PROMPT)
    unknown = part(range(length), range(-1, length - 1), (*PROMPT[:-1], 1 << 19), length)
    assert len(more.run(Draft(unknown, WIDTH)).tokens[0]) == WIDTH
