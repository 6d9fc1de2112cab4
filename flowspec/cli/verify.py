"""``flowspec verify``: the proof of a pair on this machine, as a report."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from flowspec.cli.bench import prompts_in
from flowspec.cli.generate import read_prompts
from flowspec.cli.places import draft_for
from flowspec.cli.show import console
from flowspec.core.run.sampling import Sampling
from flowspec.model.base import placed
from flowspec.model.drafters.sources import labels, load_sources, open_models, taps_of
from flowspec.model.weights.directory import all_tensors, default_pair, fetch_weights, layer_ranges
from flowspec.proof.library import MOST_TIMES
from flowspec.proof.prove import (
    Difference,
    Proof,
    ProofPlan,
    load_blocks,
    load_tap_shares,
    prove,
)
from flowspec.strategies import build

#: Packaged prompts that are used if none are given.
DEFAULT_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """The flags of the command; None: not given."""

    target: str | None
    draft: str | None
    dtype: str
    device: str
    draft_dtype: str
    stages: int
    tokens: int
    strategies: tuple[str, ...]
    prompts: Path | None
    as_json: bool


def verify(wanted: Wanted) -> int:
    """Prove, report, and return the exit status: 0 if the proof holds."""
    from flowspec.model.layers.placing import place
    from flowspec.model.text.tokenizer import Tokenizer

    packaged_target, packaged_draft = default_pair()
    draft = draft_for(wanted.target, wanted.draft, packaged_draft)
    name = wanted.target or packaged_target
    opened, _ = open_models(name, draft)
    plan = _plan(wanted)
    prompts = _prompts(wanted.prompts)
    placing = place(wanted.dtype, wanted.device, opened.config)
    ranges = layer_ranges(opened.layers, min(plan.stages, opened.layers))
    with console(stderr=True).status("loading") as line:
        target = fetch_weights(name, all_tensors)
        blocks = load_blocks(target, ranges, placing)
        drafter = load_sources(draft, target, dtype=wanted.draft_dtype, device=str(placing.device))
        tokenizer = Tokenizer(target)
        encoded = [tokenizer.encode(prompt, raw=False) for prompt in prompts]
        shares = load_tap_shares(blocks, ranges, taps_of(draft, target))
        proof = prove(target, blocks, drafter, encoded, plan, line.update, shares)
    if wanted.as_json:
        said = dataclasses.asdict(proof) | {
            "same_model": proof.same_model,
            "same_rows": proof.same_rows,
            "holds": proof.holds,
        }
        sys.stdout.write(json.dumps(said, allow_nan=True) + "\n")
    else:
        _report(proof, ":".join(labels(draft)))
    return 0 if proof.holds else 1


def _prompts(file: Path | None) -> list[str]:
    if file is not None:
        return read_prompts(file)
    return [prompt.text for prompt in prompts_in(None)[:DEFAULT_PROMPTS]]


def _plan(wanted: Wanted) -> ProofPlan:
    strategies = wanted.strategies or ProofPlan().strategies
    for strategy in strategies:
        build(strategy, wanted.stages)
    return ProofPlan(strategies=strategies, stages=wanted.stages, tokens=wanted.tokens)


def _report(proof: Proof, draft: str) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for what, found in _lines(proof, draft):
        table.add_row(what, found)
    screen = console()
    screen.print(table)
    for difference in proof.differences:
        screen.print(f"  {_described(difference)}", soft_wrap=True)
    screen.print(f"the proof {_verdict(proof)}")


def _verdict(proof: Proof) -> str:
    if proof.holds:
        return "holds: nothing is lost"
    if not proof.same_rows:
        return "FAILS: rows of shared passes are others than the same rows alone"
    if proof.same_model:
        return "FAILS: the pipeline changes texts"
    return "FAILS: the stages compute another model than the library"


def _lines(proof: Proof, draft: str) -> Iterator[tuple[str, str]]:
    for number, facts in enumerate(proof.facts, 1):
        yield f"stage {number}", str(placed(facts))
    rows = proof.rows
    yield (
        "a small copy",
        f"differs from the library's by {proof.structure:.0e} of the largest logit",
    )
    apart = f", at most {rows.divergence:.1e} nats apart" if rows.divergence else ""
    yield (
        "rows of shared passes",
        f"{rows.equal} of {rows.rows} have the bits of a lone row; {rows.flips} other choices"
        f"{apart}",
    )
    dependent = ", ".join(rows.parts)
    yield "rows depend on others", dependent or "in no kernel, at no tested number of rows"
    failed = sum(not difference.tie for difference in proof.differences)
    ties = len(proof.differences) - failed
    yield (
        "against plain decoding",
        f"{proof.runs} runs, {proof.compared} tokens: {failed} differ, {ties} near ties",
    )
    yield from _library_lines(proof)
    for kind, shares in zip(("greedy", "sampled"), proof.acceptance, strict=True):
        if shares:
            shown = "  ".join(f"{share:.2f}" for share in shares)
            yield f"drafts right, {kind}", f"{shown}  (1 to {len(shares)} in a row, by {draft})"


def _library_lines(proof: Proof) -> Iterator[tuple[str, str]]:
    found = proof.against_library
    if found is None:
        yield "against the library", f"not compared: {proof.skipped}"
        return
    verdict = "same model" if proof.same_model else "NOT the same model"
    yield (
        "against the library",
        f"{verdict}: {found.ours.divergence:.1e} nats a token; its own rounding is "
        f"{found.rounding:.1e}, and {MOST_TIMES:g} times that may be rounding; best token the same "
        f"at {found.ours.same:.1%} of {found.ours.positions} positions",
    )
    if found.cost.divergence:
        yield (
            f"what {proof.facts[0]['precision']} costs",
            f"{found.cost.divergence:.1e} nats a token from the weights as they are in the files, "
            f"best token the same at {found.cost.same:.1%}",
        )


def _described(difference: Difference) -> str:
    kind = "near tie" if difference.tie else "DIFFERENCE"
    return (
        f"{kind}: {difference.strategy}, {_named(difference.sampling)}, token {difference.at} is "
        f"{difference.ours}, plainly {difference.theirs}, {difference.gap:.1e} apart"
    )


def _named(sampling: Sampling) -> str:
    if sampling.temperature == 0:
        return "greedy"
    return f"T={sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}"
