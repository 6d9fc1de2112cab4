"""Equality: real processes give the target's own text, token for token.

``make test`` runs a grid with one prompt of each kind; ``make test-all`` the whole grid, and with
``PROMPTS=dir`` the prompt sets in that folder. A difference is excused only if the candidates of a
float64 pass of the whole model are closer than float32's rounding; excuses are printed and counted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import pytest

from flowspec.cli.generate import read_prompts
from flowspec.client import Client, Job
from flowspec.cluster import Cluster, Places, Setup
from flowspec.core.run.sampling import Sampling
from flowspec.model.layers.placing import Placing
from flowspec.model.reference import Reference
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.proof import plain
from flowspec.proof.prove import load_blocks
from flowspec.results import Result
from flowspec.strategies import EXACT, build
from tests.e2e.conftest import Clusters, Note
from tests.marks import heavy
from tests.model.block_drafters import save_block_drafter
from tests.model.eagle3_heads import Shape, save_eagle3
from tests.precisions import FOUR_BITS

pytestmark = pytest.mark.live

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.jsonl"
KINDS = ("chat", "code", "mathematics", "instructions", "summaries", "questions")
#: The strategies that share a pipeline with others' jobs.
TOGETHER = [name for name in EXACT if not build(name, 2).pacing.has_barrier]
SAMPLED = [Sampling(1.0, seed=seed) for seed in range(5)] + [
    Sampling(0.6, top_k=80, top_p=0.9, seed=0)
]


def rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in PROMPTS.read_text().splitlines()]


def test_there_are_24_prompts_of_six_kinds() -> None:
    assert [row["kind"] for row in rows()] == [kind for kind in KINDS for _ in range(4)]


@dataclass(frozen=True)
class Case:
    """A job: ``count`` tokens after ``prompt``."""

    prompt: str
    strategy: str
    count: int
    sampling: Sampling

    def submit(self, client: Client) -> Job:
        return client.submit(
            self.prompt,
            strategy=self.strategy,
            max_new_tokens=self.count,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            seed=self.sampling.seed,
        )


class Checker:
    """Compares runs with the oracle; keeps references and excuses."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._tokenizer = Tokenizer(open_directory(default_pair()[0]))
        self._known: dict[tuple[str, int, Sampling], tuple[int, ...]] = {}
        self.tokens = 0
        self.excuses: list[str] = []

    def wanted(self, prompt: str, count: int, sampling: Sampling) -> tuple[int, ...]:
        key = (prompt, count, sampling)
        if key not in self._known:
            ids = self._tokenizer.encode(prompt, raw=False)
            self._known[key] = self._decode(ids, count, sampling)
        return self._known[key]

    def _decode(self, ids: Sequence[int], count: int, sampling: Sampling) -> tuple[int, ...]:
        if sampling.temperature > 0:
            return self._reference.decode(ids, count, sampling)
        return self._reference.generate(ids, count)

    def check(
        self, client: Client, prompt: str, strategy: str, count: int, sampling: Sampling
    ) -> Result:
        """Run one case and compare it."""
        case = Case(prompt, strategy, count, sampling)
        return self.compare(case, case.submit(client).result())

    def compare(self, case: Case, result: Result) -> Result:
        """Compare a result with the oracle; one that was cancelled with the oracle's beginning."""
        prompt, strategy, sampling = case.prompt, case.strategy, case.sampling
        wanted = self.wanted(prompt, case.count, sampling)
        if result.finish_reason == "cancelled":
            wanted = wanted[: len(result.token_ids)]
        self.tokens += len(wanted)
        if result.token_ids == wanted:
            return result
        pairs = enumerate(zip(result.token_ids, wanted, strict=False))
        at, (ours, theirs) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
        excuse = self._reference.excuse(
            result.prompt_token_ids + wanted[:at], ours, theirs, sampling
        )
        assert excuse is not None, (
            f"{strategy}: token {at} of {prompt[:40]!r} is {ours}, not {theirs}"
        )
        self.excuses.append(f"{strategy}, {sampling}, {prompt[:40]!r}: {excuse}")
        assert result.token_ids[:at] == wanted[:at]
        return result

    def report(self, note: Note) -> None:
        """Note what was compared so far for the summary of the test run."""
        for excuse in self.excuses:
            note("equality", f"excused tie: {excuse}")
        note("equality", f"{self.tokens} tokens compared, {len(self.excuses)} ties excused")
        assert len(self.excuses) <= self.tokens / 10_000


@pytest.fixture(scope="module")
def checker(reference: Reference) -> Checker:
    return Checker(reference)


@pytest.mark.gate
@pytest.mark.parametrize("stages", [heavy(1), 4, heavy(12)])
def test_a_prompt_of_each_kind(
    checker: Checker, clusters: Clusters, stages: int, record_property: Note
) -> None:
    with Client(clusters(stages).url) as client:
        for at, sampling in enumerate(SAMPLED):
            prompt = rows()[4 * at]["prompt"]
            checker.check(client, prompt, "flowspec", 16, sampling if at % 2 else Sampling())
    checker.report(record_property)


@pytest.mark.gate
@pytest.mark.parametrize("stages", [heavy(1), 4, heavy(12)])
def test_a_prompt_by_every_strategy(
    checker: Checker, clusters: Clusters, stages: int, record_property: Note
) -> None:
    with Client(clusters(stages).url) as client:
        for at, strategy in enumerate((*EXACT, "flowspec:lockstep=on", "specpipe:width=auto")):
            sampling = (Sampling(), SAMPLED[0], SAMPLED[-1])[(at + stages) % 3]
            checker.check(client, rows()[0]["prompt"], strategy, 16, sampling)
    checker.report(record_property)


@pytest.mark.parametrize("draft", ["head", "draft+ngram"])
def test_every_draft_source(checker: Checker, draft: str, record_property: Note) -> None:
    with Cluster(Setup("target", draft, 2)) as cluster, Client(cluster.url) as client:
        for strategy in ("flowspec", "pipedec_head", "specpipe", "chain", "auto"):
            for row, sampling in zip(rows()[::12], (Sampling(), SAMPLED[-1]), strict=True):
                checker.check(client, row["prompt"], strategy, 16, sampling)
    checker.report(record_property)


def test_a_block_drafter(checker: Checker, tmp_path: Path) -> None:
    """A random one: verify workers sum up what it taps, and most of its tokens are wrong."""
    target = open_directory("target")
    drafter = save_block_drafter(
        tmp_path,
        vocabulary=target.vocabulary,
        hidden=target.hidden_size,
        num_target_layers=target.layers,
    )
    setup = Setup("target", f"{drafter.path}:ngram", 3)
    with Cluster(setup) as cluster, Client(cluster.url) as client:
        for strategy, sampling in (("flowspec", Sampling()), ("auto", Sampling(1.0, seed=3))):
            result = checker.check(client, rows()[4]["prompt"], strategy, 24, sampling)
            assert result.stats["draft_passes"] > 0


@pytest.mark.heavy
def test_a_head_that_reads_inside_the_target(
    checker: Checker, tmp_path: Path, record_property: Note
) -> None:
    """A random one, whose taps lie on three of four stages; no job without it carries a sum."""
    head = save_eagle3(tmp_path, open_directory("target"), Shape(hidden=192, layers=()))
    with (
        Cluster(Setup("target", f"{head.path}:ngram", 4)) as cluster,
        Client(cluster.url) as client,
    ):
        for strategy in ("flowspec", "specpipe", "autoregressive", "auto"):
            for row, sampling in zip(rows()[::12], (Sampling(), SAMPLED[-1]), strict=True):
                checker.check(client, row["prompt"], strategy, 16, sampling)
    checker.report(record_property)


@pytest.mark.heavy
def test_drafters_that_take_turns(checker: Checker, record_property: Note) -> None:
    """All strategies except auto draft with the first one."""
    with Cluster(Setup("target", "draft:head", 2)) as cluster, Client(cluster.url) as client:
        for row, sampling in zip(rows()[::12], (Sampling(), SAMPLED[-1]), strict=True):
            checker.check(client, row["prompt"], "chain", 16, sampling)
            decisions = checker.check(client, row["prompt"], "auto", 72, sampling).stats[
                "decisions"
            ]
            assert {entry["drafter"] for entry in decisions if "drafter" in entry} == {
                "draft",
                "head",
            }
    checker.report(record_property)


def test_a_chain_of_three_models(checker: Checker, record_property: Note) -> None:
    with (
        Cluster(Setup("target", "draft", 2, ("medium",))) as cluster,
        Client(cluster.url) as client,
    ):
        for strategy in ("pipespec", "speculative"):
            for row, sampling in zip(rows()[::12], (Sampling(), SAMPLED[-1]), strict=True):
                checker.check(client, row["prompt"], strategy, 16, sampling)
    checker.report(record_property)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("precision", "every"),
    [(FOUR_BITS, 8), heavy(FOUR_BITS, 3), heavy("bfloat16", 3), heavy("int8", 3)],
)
def test_low_precision_is_equal_without_excuses(precision: str, every: int) -> None:
    """Against plain decoding by the same kernels: one process, one row a pass.

    ``every``: one of so many strategies for each sampling.
    """
    target = open_directory(default_pair()[0])
    tokenizer = Tokenizer(target)
    whole = load_blocks(target, [range(target.layers)], Placing(precision))
    setup = Setup("target", "draft", 2, places=Places(dtype=precision))
    with Cluster(setup) as cluster, Client(cluster.url) as client:
        for at, sampling in enumerate((Sampling(), SAMPLED[0], SAMPLED[-1])):
            prompt = rows()[5 * at]["prompt"]
            ids = tokenizer.encode(prompt, raw=False)
            wanted = plain.decode(whole, target, ids, 16, sampling).output
            for strategy in (*EXACT[at::every], "auto"):
                result = Case(prompt, strategy, 16, sampling).submit(client).result()
                assert result.token_ids == wanted, (strategy, sampling)
            assert [stage["precision"] for stage in result.stats["runs_on"]] == [precision] * 2


def mixed(strategies: Sequence[str], longest: int) -> Iterator[Case]:
    """Jobs of ``strategies``, all samplings, prompts, and lengths up to ``longest``; no end."""
    prompts = (row["prompt"] for row in cycle(rows()))
    lengths = cycle((longest, longest // 3, longest // 2, 5, longest))
    samplings = cycle((Sampling(), *SAMPLED))
    for case in zip(prompts, cycle(strategies), lengths, samplings, strict=False):
        yield Case(*case)


def run_together(client: Client, cases: Iterable[Case]) -> list[tuple[Case, Result]]:
    """All ``cases`` at once; every fifth is cancelled after its first token."""
    jobs = [(case, case.submit(client)) for case in cases]
    for _, job in jobs[::5]:
        next(iter(job.stream()))
        job.cancel()
    return [(case, job.result()) for case, job in jobs]


@pytest.mark.gate
@pytest.mark.parametrize(
    ("strategies", "rounds", "longest"),
    [(TOGETHER, 1, 24), heavy(TOGETHER, 24, 80), heavy(EXACT, 2, 24)],
)
def test_jobs_at_once_get_what_each_gets_alone(
    checker: Checker, strategies: Sequence[str], rounds: int, longest: int, record_property: Note
) -> None:
    """Sixteen at a time; what they share, passes and bundles, depends on when they come."""
    compared = checker.tokens
    company = 0
    cases = mixed(strategies, longest)
    with Cluster(Setup("target", "draft", 2, jobs=16)) as cluster, Client(cluster.url) as client:
        for _ in range(rounds):
            for case, result in run_together(client, islice(cases, 16)):
                checker.compare(case, result)
                shares = result.stats.get("shares") or []
                company = max(company, *(share["jobs"] for share in shares), 0)
    assert checker.tokens - compared >= rounds * 16 * longest * 0.33
    assert company >= (8 if strategies is TOGETHER else 4), "few jobs ever decoded at once"
    checker.report(record_property)


@pytest.mark.heavy
@pytest.mark.parametrize("stages", [1, 4, 6, 12])
def test_the_whole_grid(
    checker: Checker, clusters: Clusters, stages: int, record_property: Note
) -> None:
    """Every strategy with every prompt; samplings alternate, so that each meets all of both."""
    samplings = (Sampling(), *SAMPLED)
    with Client(clusters(stages).url) as client:
        for at, row in enumerate(rows()):
            for turn, strategy in enumerate(EXACT, at):
                checker.check(client, row["prompt"], strategy, 64, samplings[turn % len(samplings)])
    checker.report(record_property)


@pytest.mark.heavy
@pytest.mark.parametrize("stages", [1, 4])
def test_public_prompt_sets(
    checker: Checker, clusters: Clusters, stages: int, record_property: Note
) -> None:
    folder = os.environ.get("FLOWSPEC_PROMPTS", "")
    files = sorted(Path(folder).glob("*.jsonl")) if folder else []
    assert files, "no prompt sets: run `make test-all PROMPTS=dir` with a folder of .jsonl files"
    context = open_directory(default_pair()[0]).context
    with Client(clusters(stages).url) as client:
        for file in files:
            usable = [
                p
                for p in read_prompts(file)
                if len(checker._tokenizer.encode(p, raw=False)) < context - 64
            ]
            for at, prompt in enumerate(usable[:4]):
                for strategy in EXACT[at::4]:
                    for sampling in (Sampling(), Sampling(1.0, seed=0)):
                        checker.check(client, prompt, strategy, 64, sampling)
    checker.report(record_property)
