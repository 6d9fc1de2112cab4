"""``ops.bench.peer``: settings, prompts, estimate, load, and a run with stub pipelines."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from flowspec.cluster import Setup
from flowspec.errors import ClusterError, ConfigError
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import default_pair, open_directory
from ops.bench import peer as program
from ops.bench.peer import PROMPTS, QUIET
from ops.bench.text_loss import CONTEXT, load_library, load_target
from ops.peer.duration import Extent
from ops.peer.install import Peer
from ops.peer.llama import DraftOptions, Llama, LlamaRun
from ops.peer.perplexity import perplexity, pieces
from ops.peer.pipelines import known
from ops.peer.prompts import PeerPrompt, chosen
from ops.peer.settings import CUT, DRAFTS, LENGTHS, LOOKUPS, STRATEGIES, check, drafting
from tests.gguf_files import HIDDEN, write
from tests.model.eagle3_heads import HEAD_DIM, HEADS, Shape, save_eagle3

TARGET = default_pair()[0]
#: Of our pipelines, in the order of their start.
DRAFTERS: list[str] = []
FEW = ("--strategies", "autoregressive chain", "--drafts", "4", "--finalists", "1")


@dataclass
class StubClient:
    """A client whose jobs give one text, in 20 ms per token."""

    text: str = "one two\N{REPLACEMENT CHARACTER}"
    jobs: list[dict[str, Any]] = field(default_factory=list)

    def submit(self, **job: Any) -> SimpleNamespace:
        self.jobs.append(job)
        result = SimpleNamespace(
            text=self.text, token_ids=(1, 2, 3), stats={"decode_seconds": 0.04}
        )
        return SimpleNamespace(result=lambda: result)


class StubLlama:
    """Encodes as the target does; 10 ms per token without drafts, 40 ms with."""

    head = None

    def __init__(self, ids: dict[str, tuple[int, ...]]) -> None:
        self.ids = ids

    def token_ids(self, prompt: str) -> tuple[int, ...]:
        return self.ids[prompt]

    def plain(self, prompt: str, tokens: int) -> LlamaRun:
        return LlamaRun("one two three", 0.01)

    def speculative(self, prompt: str, tokens: int, by: DraftOptions) -> LlamaRun:
        return LlamaRun("one other", 0.04)


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str | Path
) -> str:
    """What the program prints."""
    monkeypatch.setattr(sys, "argv", ["peer", *map(str, words)])
    program.main()
    return capsys.readouterr().out


# ---- settings ------------------------------------------------------------------------------------


def test_the_peer_has_every_length_with_and_without_the_cut_and_ours_as_many_settings() -> None:
    drafts = [drafting(text) for text in DRAFTS]
    assert {(one.most, one.least) for one in drafts} == {
        (most, least) for most in LENGTHS for least in (0.0, CUT)
    }
    assert LENGTHS == (2, 3, 4, 6, 8, 12, 16)
    check(STRATEGIES, drafts, 4)
    assert len(STRATEGIES) == len(DRAFTS) + 1
    check(STRATEGIES, [drafting(text) for text in LOOKUPS], 4)


def test_a_side_with_more_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ours has 3 settings, llama\.cpp 2 "):
        check(("autoregressive", "chain", "auto"), [DraftOptions(4)], 4)
    with pytest.raises(ConfigError, match="--strategies has a setting twice"):
        check(("chain", "chain"), [DraftOptions(4)], 4)
    with pytest.raises(ConfigError, match="unknown strategy 'nosuch'"):
        check(("autoregressive", "nosuch"), [DraftOptions(4)], 4)


@pytest.mark.parametrize("text", ["", "0", "x", "4@x", "4@1", "4@-0.5", "@0.5", "x4", "0x4", "2x"])
def test_a_draft_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a draft"):
        drafting(text)


@pytest.mark.parametrize("text", ["", "x", "0,x", "-1", "0,1000", "nan"])
def test_latencies_out_of_range_are_refused_with_the_range(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        said(monkeypatch, capsys, f"--latencies={text}")
    assert capsys.readouterr().err.endswith(
        f"argument --latencies: {text!r}, expected milliseconds from 0 to below 1000, by commas\n"
    )


@pytest.mark.parametrize("flag", ["--stages", "--tokens", "--count", "--finalists"])
@pytest.mark.parametrize("text", ["", "x", "0", "-2", "1.5"])
def test_a_count_that_is_none_is_refused_with_what_is_expected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, text: str
) -> None:
    with pytest.raises(SystemExit):
        said(monkeypatch, capsys, f"{flag}={text}")
    assert capsys.readouterr().err.endswith(
        f"argument {flag}: {text!r}, expected an integer of at least 1\n"
    )


# ---- prompts -------------------------------------------------------------------------------------


def test_tuning_and_measuring_prompts_are_disjoint_and_a_dozen_can_be_measured() -> None:
    tuning = chosen(PROMPTS, "tuning", 3, 48, TARGET)
    measuring = chosen(PROMPTS, "measuring", 12, 48, TARGET)
    assert (len(tuning), len(measuring)) == (3, 12)
    assert len({prompt.text for prompt in [*tuning, *measuring]}) == 15


def test_more_prompts_than_a_half_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"13 measuring prompts are wanted: .* has 12 that fit"):
        chosen(PROMPTS, "measuring", 13, 48, TARGET)


def test_the_expected_text_is_the_targets_own_up_to_its_last_whole_character() -> None:
    client = StubClient()
    prompt = PeerPrompt("p", (5, 6), "<p>")
    (found,) = known(StubLlama({"<p>": (5, 6)}), client, [prompt], 8)  # type: ignore[arg-type]
    assert (found.text, found.ids, found.expected) == ("p", (5, 6), "one two")
    assert client.jobs == [
        {
            "prompt_ids": (5, 6),
            "max_new_tokens": 8,
            "strategy": "autoregressive",
            "reuse": False,
        }
    ]


def test_a_prompt_that_llama_encodes_differently_is_refused() -> None:
    with pytest.raises(ConfigError, match="encodes the prompt 'p' to other token ids"):
        known(
            StubLlama({"<p>": (5, 7)}),  # type: ignore[arg-type]
            StubClient(),  # type: ignore[arg-type]
            [PeerPrompt("p", (5, 6), "<p>")],
            8,
        )


# ---- the estimate and the load -------------------------------------------------------------------

COUNTS = st.integers(1, 20)


@given(COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS, st.integers(0, 200))
def test_every_flag_that_bounds_the_run_bounds_the_estimate(
    stages: int,
    settings: int,
    tuning: int,
    finalists: int,
    measured: int,
    repeats: int,
    tokens: int,
    milliseconds: int,
) -> None:
    names = ("stages", "settings", "tuning", "finalists", "measured", "repeats", "tokens")
    counts = (stages, settings, tuning, finalists, measured, repeats, tokens)
    latency = milliseconds / 1e3
    least = Extent(*counts).seconds(latency)
    for at, name in enumerate(names):
        more = Extent(*counts[:at], counts[at] + 1, *counts[at + 1 :]).seconds(latency)
        assert more > least or (name == "stages" and latency == 0)
    assert Extent(*counts).seconds(latency + 0.01) > least


def test_the_estimate_needs_no_peer_and_no_idle_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 9.0, 9.0))
    line = said(monkeypatch, capsys, "--estimate", "--latencies", "0,5", "--peer", tmp_path)
    total, *each = (int(number) for number in re.findall(r"(\d+) (?:minutes|at)", line))
    assert len(each) == 2
    assert sum(each) <= total <= sum(each) + 2
    assert "153 runs of 48 tokens of either side at each latency" in line


def test_a_busy_machine_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (QUIET + 0.1, 0.0, 0.0))
    monkeypatch.setattr(sys, "argv", ["peer", "--peer", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^peer: the machine's load is 0\.6, .*--busy[^\n]*$"):
        program.main()


def test_an_idle_machine_is_not_refused_for_its_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (QUIET, 9.0, 9.0))
    monkeypatch.setattr(sys, "argv", ["peer", "--peer", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"llama\.cpp is not installed; run `make peer`"):
        program.main()


def test_a_target_without_a_head_has_lookups_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    write(file)
    words = ("--target", file, "--draft", "ngram", "--drafts", "2x8,3")
    settings = ("--strategies", "auto chain autoregressive")
    monkeypatch.setattr(sys, "argv", ["peer", *map(str, words), *settings])
    with pytest.raises(SystemExit, match=r"^peer: --draft ngram has no EAGLE-3 head, [^\n]*$"):
        program.main()


def test_a_head_becomes_one_of_llama_cpp(tmp_path: Path) -> None:
    """By its names; the rotary halves interleaved, and each token by the target's number."""
    whole = tmp_path / "model.gguf"
    write(whole)
    target = open_directory(str(whole))
    head = save_eagle3(tmp_path / "head", target, Shape(hidden=HIDDEN, layers=(0, 1, 2)))
    file = program.head_of(str(whole), str(head.path), whole, tmp_path)
    found = GGUFReader(file)
    assert found.fields["general.architecture"].contents() == "eagle3"
    assert found.fields["eagle3.target_layers"].contents() == [0, 1, 2]
    tokens = found.fields["tokenizer.ggml.tokens"].contents()
    assert tokens == GGUFReader(whole).fields["tokenizer.ggml.tokens"].contents()
    tensors = {tensor.name: tensor for tensor in found.tensors}
    stored = load_file(head.path / "model.safetensors")
    ids = stored["d2t"].numpy() + np.arange(len(stored["d2t"]))
    assert tensors["d2t"].data.tolist() == ids.tolist()
    queries = tensors["blk.0.attn_q.weight"]
    values = quants.dequantize(queries.data, queries.tensor_type)
    halves = values.reshape(HEADS, HEAD_DIM // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
    wanted = stored["midlayer.self_attn.q_proj.weight"].numpy()
    assert np.abs(halves - wanted).max() <= np.abs(wanted).max() / 127
    assert len(tensors) == 14
    llama = tool(tmp_path, "llama-speculative-simple", f'echo "$@" > {tmp_path}/words; exit 1')
    with pytest.raises(ClusterError):
        replace(llama, head=file).speculative("<p>", 10, DraftOptions(3))
    words = (tmp_path / "words").read_text()
    assert "--spec-type draft-eagle3 --spec-draft-n-max 3 --spec-draft-p-min 0.0" in words
    assert f"-md {file}" in words


# ---- a whole run ---------------------------------------------------------------------------------


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stubs for both pipelines; the folder of an installed peer."""
    peer = Peer(tmp_path)
    for file in peer.missing():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    halves = {"tuning": 2, "measuring": 6}
    ids = {
        prompt.rendered: prompt.ids
        for half, count in halves.items()
        for prompt in chosen(PROMPTS, half, count, 48, TARGET)
    }

    @contextlib.contextmanager
    def ours(setup: Setup, *_: object) -> Iterator[StubClient]:
        DRAFTERS.append(setup.draft)
        yield StubClient()

    @contextlib.contextmanager
    def theirs(*_: object) -> Iterator[StubLlama]:
        yield StubLlama(ids)

    monkeypatch.setattr(program, "our_pipeline", ours)
    monkeypatch.setattr(program, "their_pipeline", theirs)
    monkeypatch.setattr(program, "Llama", lambda *_: StubLlama(ids))
    return tmp_path


def test_a_setting_may_have_a_drafter_and_a_pipeline_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stubs: Path
) -> None:
    amount = ("--tuning", "2", "--count", "6", "--repeats", "1", "--latencies", "0", "--busy")
    settings = ("--strategies", "autoregressive chain@ngram", "--drafts", "2")
    DRAFTERS.clear()
    page = said(monkeypatch, capsys, "--peer", stubs, *settings, *amount)
    assert "ours, chain@ngram" in page
    assert [default_pair()[1], default_pair()[1], "ngram"] == DRAFTERS


@pytest.mark.parametrize("load", [0.2, 3.0])
def test_the_report_has_a_claim_per_latency_and_says_if_its_times_are_void(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stubs: Path, load: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    amount = ("--tuning", "2", "--count", "6", "--repeats", "2", "--latencies", "0,5")
    page = said(monkeypatch, capsys, "--busy", "--peer", stubs, *FEW, *amount)
    assert ("all times are void" in page) == (load > QUIET)
    assert "2 settings of either side on 2 tuning prompts; the 1 fastest" in page
    assert [line for line in page.splitlines() if line.startswith("### ")] == [
        "### 0 ms each way",
        "### 5 ms each way",
    ]
    claims = [line for line in page.splitlines() if line.startswith("Best of ours")]
    # Of theirs, plain decoding is a finalist; its drafts, tuned only, gave another text.
    assert [claim.partition("theirs: ")[2] for claim in claims] == [
        "ours, autoregressive against llama.cpp, 0.50 (0.50 to 0.50): slower. "
        "Same text: 16/16 runs of ours, 14/16 of theirs."
    ] * 2


# ---- llama.cpp's tools ---------------------------------------------------------------------------


def tool(folder: Path, name: str, body: str) -> Llama:
    """llama.cpp with one tool, a shell script."""
    peer = Peer(folder)
    file = peer.tool(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return Llama(peer, ("a:1", "b:2"), 4, 64, folder / "model.gguf")


def test_the_draft_settings_reach_the_tool(tmp_path: Path) -> None:
    llama = tool(
        tmp_path,
        "llama-speculative-simple",
        f'echo "$@" > {tmp_path}/words; echo "<p>one two"; '
        "echo 'decoded   10 tokens in    0.500 seconds' >&2",
    )
    assert llama.speculative("<p>", 10, DraftOptions(6, 0.5)) == LlamaRun("one two\n", 0.05)
    words = (tmp_path / "words").read_text()
    assert "--spec-draft-n-max 6 --spec-draft-p-min 0.5" in words
    assert "--rpc a:1,b:2" in words
    assert f"-m {tmp_path}/model.gguf" in words
    llama.speculative("<p>", 10, drafting("3x8"))
    words = (tmp_path / "words").read_text()
    assert "--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8" in words
    assert "-md" not in words


def test_a_run_without_a_report_is_repeated_and_then_an_error(tmp_path: Path) -> None:
    llama = tool(tmp_path, "llama-speculative-simple", f"echo run >> {tmp_path}/runs")
    with pytest.raises(ClusterError, match="gave no report in 4 runs"):
        llama.speculative("<p>", 10, DraftOptions(6))
    assert (tmp_path / "runs").read_text() == "run\n" * 4


def test_perplexity_is_that_of_the_second_halves_as_the_library_computes_it(tmp_path: Path) -> None:
    target = open_directory(TARGET)
    (piece, *_) = pieces(target, "Two and two are four. " * 200)
    assert len(piece) == CONTEXT
    assert piece[0] == 0, "the tokenizer's first token"
    found = perplexity(load_target(target, Placing()), [piece])
    logits = torch.from_numpy(load_library(target, "float32").logits(piece)).double()
    half = CONTEXT // 2
    wanted = torch.nn.functional.cross_entropy(logits[half:-1], torch.tensor(piece[half + 1 :]))
    assert found == pytest.approx(float(wanted.exp()), rel=1e-4)
    with pytest.raises(ConfigError, match="give 512 or more"):
        pieces(target, "short")


def test_llamas_perplexity_is_read_from_its_report(tmp_path: Path) -> None:
    estimate = "Final estimate: PPL = 12.3456 +/- 0.1"
    llama = tool(
        tmp_path, "llama-perplexity", f'echo "$@" > {tmp_path}/words; echo "{estimate}" >&2'
    )
    assert llama.perplexity(tmp_path / "text", 7) == 12.3456
    words = (tmp_path / "words").read_text()
    assert f"-f {tmp_path}/text --chunks 7" in words
    assert "--no-escape" in words
    with pytest.raises(ClusterError, match="gave no estimate"):
        tool(tmp_path, "llama-perplexity", "true").perplexity(tmp_path / "text", 7)
