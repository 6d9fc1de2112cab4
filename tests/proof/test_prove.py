"""The proof holds for the packaged pair in every precision, and finds what is broken."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flowspec.core.run.sampling import Sampling, choose
from flowspec.errors import ConfigError
from flowspec.model.drafters.sources import load_sources
from flowspec.model.layers import block as block_module
from flowspec.model.layers import loading
from flowspec.model.layers.architecture import read_config
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import default_pair, layer_ranges, open_directory
from flowspec.proof import library
from flowspec.proof import prove as verify
from flowspec.proof.plain import PlainText
from flowspec.proof.prove import Proof, ProofPlan, load_blocks, prove
from tests.marks import heavy
from tests.precisions import FOUR_BITS, SERVED

TARGET = open_directory(default_pair()[0])
QUICK = ProofPlan(strategies=("flowspec",), stages=2, tokens=16, samplings=(Sampling(),))
#: Precisions in which broken models must be found, the first in `make test`.
WRONG = ["float32", heavy("bfloat16"), heavy(FOUR_BITS)]
LOW = [FOUR_BITS, heavy("float32"), heavy("bfloat16")]
#: Precisions of `make test-all` only.
OTHERS = tuple(name for name in ("int8", "fp4", "int4") if name in SERVED and name != FOUR_BITS)
PROMPT = "Tom has 5 apples and buys 7 more. How many apples does he have?"


def proof(plan: ProofPlan = QUICK, placing: Placing | None = None) -> Proof:
    torch.set_num_threads(1)
    ranges = layer_ranges(TARGET.layers, plan.stages)
    blocks = load_blocks(TARGET, ranges, placing or Placing())
    prompt = Tokenizer(TARGET).encode(PROMPT, raw=False)
    return prove(TARGET, blocks, load_sources("draft", TARGET), [prompt], plan)


@pytest.mark.parametrize(
    "precision",
    ["bfloat16", FOUR_BITS, *map(heavy, OTHERS)],
)
def test_nothing_is_lost_in_precisions_whose_rows_are_independent(precision: str) -> None:
    sampled = replace(QUICK, samplings=(Sampling(), Sampling(0.8, top_p=0.9, seed=3)))
    found = proof(sampled, Placing(precision))
    assert found.rows.parts == ()
    assert found.rows.equal == found.rows.rows
    assert found.rows.flips == 0
    assert found.differences == ()
    assert found.same_model
    assert found.holds
    assert found.compared == 32
    # Ours are no farther from the exact ones than the library's own in the same type.
    assert found.against_library is not None
    assert found.against_library.ours.divergence < 2 * found.against_library.rounding
    assert 0 <= found.against_library.cost.divergence < 0.2
    assert (found.against_library.cost.divergence > 0) == (precision != "bfloat16")


@pytest.mark.parametrize("precision", ["float32", heavy("float16")])
def test_float32_rows_differ_in_a_tie_of_rounding_at_most(precision: str) -> None:
    found = proof(placing=Placing(precision))
    assert found.rows.parts == ()
    assert found.rows.equal >= 0.8 * found.rows.rows
    assert found.differences == ()
    assert found.holds


def test_the_share_of_right_drafts_falls_with_depth() -> None:
    greedy, sampled = proof().acceptance
    assert list(greedy) == sorted(greedy, reverse=True)
    assert 0.3 < greedy[0] < 0.95
    assert sampled == ()


@pytest.mark.parametrize("temperature", [0.1, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (2, 1.0), (0, 0.6), (3, 0.8)])
def test_a_gap_is_what_the_logits_must_move_for_the_other_token(
    temperature: float, top_k: int, top_p: float
) -> None:
    """A choice by logits that are up to ``most`` off is within twice that."""
    changed = 0
    for seed in range(1000):
        drawn = np.random.default_rng(seed)
        most = 10.0 ** drawn.uniform(-3, -1)
        own = drawn.uniform(-1, 1, 5).astype(np.float32)
        sampling = Sampling(temperature, top_k, top_p, seed)
        theirs = choose(own, sampling, 1)
        ours = choose(own.astype(np.float64) + drawn.uniform(-most, most, 5), sampling, 1)
        if ours != theirs:
            changed += 1
            text = PlainText((0,), (theirs,), sampling, own[None], np.zeros((1, 1), np.float32))
            assert verify._gap(text, 0, ours, theirs) <= 2 * most * (1 + 1e-9)
    assert changed > 3


def test_a_gap_is_in_logits_at_any_temperature() -> None:
    own = np.array([[2.0, 1.0, -1.0]], np.float32)
    for sampling, expected in (
        (Sampling(), 1),
        (Sampling(0.01), 1),
        (Sampling(0.5, top_k=1), 1),
        (
            Sampling(0.5, top_p=0.5),
            0.5 * abs(math.log(1 / (1 + math.exp(-2) + math.exp(-6)) / 0.5)),
        ),
    ):
        text = PlainText((0,), (0,), sampling, own, np.zeros((1, 1), np.float32))
        assert verify._gap(text, 0, 1, 0) == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("precision", WRONG)
def test_a_mask_that_lets_siblings_see_each_other_is_found(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    def blind(context: int, parents: tuple[int, ...], new: int) -> np.ndarray:
        mask = np.tri(len(parents), dtype=np.bool_)[len(parents) - new :]
        return np.concatenate((np.ones((new, context), dtype=np.bool_), mask), axis=1)

    monkeypatch.setattr(block_module, "full_mask", blind)
    found = proof(placing=Placing(precision))
    assert not found.same_model  # of the small copy's tree; a text alone has no siblings
    if precision == "float32":
        assert any(not difference.tie for difference in found.differences)
    assert not found.holds


@pytest.mark.parametrize("precision", LOW)
def test_swapped_layers_are_found(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    loader = loading.Loader
    stored_name = loader._stored_name

    def swapped(self: Any, name: str) -> str:
        stored = stored_name(self, name)
        for one, other in ((".layers.4.", ".layers.5."), (".layers.5.", ".layers.4.")):
            if one in stored:
                return stored.replace(one, other)
        return stored

    monkeypatch.setattr(loader, "_stored_name", swapped)
    found = proof(placing=Placing(precision))
    assert found.differences == ()  # plain decoding by the same blocks is wrong alike
    assert not found.same_model
    assert not found.holds


@pytest.mark.parametrize("precision", LOW)
def test_a_wrong_base_of_the_rotary_embedding_is_found(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    def based(*args: Any) -> Any:
        config = read_config(*args)
        config.rope_parameters = {**config.rope_parameters, "rope_theta": 12_000.0}
        return config

    monkeypatch.setattr(block_module, "read_config", based)
    found = proof(placing=Placing(precision))
    assert not found.same_model
    assert not found.holds


def test_rows_that_depend_on_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden rows with a scale for the whole pass, as dynamic int8 has."""
    run = LayerBlock.run

    def rounded(self: LayerBlock, *rest: Any) -> torch.Tensor:
        hidden = run(self, *rest)
        scale = hidden.abs().max() / 127
        return (hidden / scale).round() * scale

    monkeypatch.setattr(LayerBlock, "run", rounded)
    found = proof()
    assert found.rows.equal < found.rows.rows
    assert not found.same_model


@pytest.mark.parametrize("compared", [heavy(True), False])
def test_a_lone_row_that_is_computed_wrong_is_no_near_tie(
    compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of shared passes are the library's; whatever the pipelines' texts are."""
    logits = LayerBlock.logits

    def wrong(self: LayerBlock, hidden: torch.Tensor) -> torch.Tensor:
        found = logits(self, hidden)
        return found.flip(-1) if len(hidden) == 1 else found

    monkeypatch.setattr(LayerBlock, "logits", wrong)
    if not compared:
        monkeypatch.setattr(verify, "available_bytes", lambda: 1000)
    found = proof()
    assert found.against_library is None or found.against_library.same_model
    assert not found.same_rows
    assert not found.holds


def test_without_memory_for_the_library_the_proof_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "available_bytes", lambda: 1000)
    found = proof()
    assert found.against_library is None
    assert "the library's whole model needs" in found.skipped
    assert found.holds


def test_prompts_that_leave_no_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="no prompt leaves room for 5000 tokens"):
        proof(replace(QUICK, tokens=5000))


def test_divergence_is_zero_for_equal_distributions_alone() -> None:
    one = np.random.default_rng(0).normal(size=(5, 9)).astype(np.float32)
    assert library.agreement([one], [one + 3]).divergence == pytest.approx(0, abs=1e-6)
    other = library.agreement([one], [one[:, ::-1]])
    assert other.divergence > 0.1
    assert other.positions == 5
