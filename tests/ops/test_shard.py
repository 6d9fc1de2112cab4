"""The benchmark of a shard: its passes and processes, perplexity, lone rows, kernels, tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from flowspec.errors import ConfigError
from flowspec.model.kernels import KERNELS
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import Placing
from flowspec.model.weights.directory import ModelDirectory, default_pair, open_directory
from ops.bench import kernel_times, lone_rows, text_loss
from ops.bench import shard as program
from ops.bench.kernel_times import LayerLinears
from ops.bench.shard import MeasuredShard
from ops.bench.shard_model import LINEARS, linears_of, load_shard, shard_pass
from ops.bench.shard_process import Loaded, ShardProcess
from tests.model.families import save
from tests.precisions import FOUR_BITS

TEXT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelDirectory]:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    yield open_directory(str(save(config, tmp_path_factory.mktemp("small"))))


def test_a_pass_can_be_repeated_and_gives_logits_of_every_row(small: ModelDirectory) -> None:
    run = shard_pass(load_shard(small, "bfloat16"), 8, 3)
    first = run()
    assert first.shape == (3, 128)
    assert torch.equal(first, run())


@pytest.mark.heavy
def test_a_process_tells_its_load_and_takes_turns(small: ModelDirectory) -> None:
    with ShardProcess(small.path, "int8", 4, [1, 3]) as shard:
        block = load_shard(small, "int8")
        assert (shard.loaded.nbytes, tuple(shard.loaded.kernels)) == (block.nbytes, block.kernels)
        assert shard.loaded.peak > 0
        for _ in range(2):
            assert all(seconds > 0 for seconds in shard.turn().values())
        assert set(shard.turn()) == {1, 3}


@pytest.mark.heavy
def test_a_process_that_cannot_load_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ended"):
        ShardProcess(tmp_path / "nothing", "float32", 4, [1])


def test_a_row_of_the_table_has_every_figure() -> None:
    loaded = Loaded(("onednn", "x"), 200 << 20, 220 << 20, ("attention",))
    shards = {"int8": MeasuredShard(loaded, {1: 0.0105, 16: 0.25})}
    nats = {"int8": [(0.0, 0.5), (1.0, 2.0)]}
    lines = list(program.table(shards, [1, 16], ["a", "b"], nats))
    assert lines[2] == (
        "| int8 | onednn, x | 200 | 1.10 | 10 | 250 | 1.000, 1.649 | 2.718, 7.389 | no: attention |"
    )
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


def test_shapes_of_linears_are_the_models(small: ModelDirectory) -> None:
    assert linears_of(small) == (
        *((64, 64), (32, 64), (32, 64), (64, 64)),
        *((128, 64), (128, 64), (64, 128)),
    )
    assert LINEARS[1] == (512, 2048)


def test_what_a_heads_precision_costs_is_by_text_and_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "MOST_TOKENS", 1)
    monkeypatch.setattr(sys, "argv", ["shard", "--head", "--precisions", f"float32,{FOUR_BITS}"])
    program.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5, "float32 has no other head"
    name, head, one, every = lines[4].strip("| ").split(" | ")
    wanted = (FOUR_BITS, Placing(FOUR_BITS).head, every)
    assert (name, head, one) == wanted, "there is one text"
    assert 0 < abs(float(one.removesuffix("%"))) < 2


@pytest.mark.heavy
def test_the_program_measures_every_precision(
    small: ModelDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "MOST_TOKENS", 1)
    words = ["--model", str(small.path), "--rows", "1,2", "--context", "4", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["shard", *words, "--precisions", "float32,bfloat16"])
    program.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| float32", "| bfloat16"]
    assert "tests/data/prompts.jsonl" in lines[0]


def test_the_loss_is_the_librarys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(text_loss, "CONTEXT", 20)
    monkeypatch.setattr(text_loss, "PASS_ROWS", 8)
    file = tmp_path / "text.jsonl"
    file.write_text(f'{{"prompt": {TEXT!r}}}\n'.replace("'", '"') * 3)
    directory = open_directory(default_pair()[0])
    pieces = text_loss.pieces(directory, file, 45)
    one = len(pieces) // 2
    assert pieces[:one] == pieces[one:], "the third prompt is beyond the limit"
    assert {len(piece) for piece in pieces[: one - 1]} == {20}
    nats = text_loss.loss(text_loss.load_target(directory, Placing("float32")), pieces)
    library = text_loss.library_loss(text_loss.load_library(directory, "float32"), pieces)
    count = sum(map(len, pieces)) - len(pieces)
    whole = AutoModelForCausalLM.from_pretrained(default_pair()[0], dtype=torch.float32)
    with torch.inference_mode():
        given = [torch.tensor([piece]) for piece in pieces]
        expected = sum(float(whole(ids, labels=ids).loss) * (ids.numel() - 1) for ids in given)
    assert nats == pytest.approx(expected / count, rel=1e-5)
    assert library == pytest.approx(expected / count, rel=1e-5)


class Crowded(LayerBlock):
    """A block whose last row depends on how many rows come with it."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().logits(hidden).clone()
        if len(hidden) > 1:
            found[-1, 7] += 1e3
        return found


def test_rows_that_depend_on_their_company_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = open_directory(default_pair()[0])
    texts = [tuple(range(5, 5 + length)) for length in (24, 9)]
    ours = lone_rows.load_target(lone_rows.OURS, "float32", directory)
    found = lone_rows.compare(ours, texts, 8)
    assert (found.rows, found.equal, found.largest, found.flips) == (33, 33, 0.0, 0)
    monkeypatch.setitem(lone_rows.BLOCKS, "crowded", Crowded)
    crowded = lone_rows.load_target("crowded", "float32", directory)
    found = lone_rows.compare(crowded, texts, 8)
    assert (found.rows, found.equal, found.flips) == (33, 29, 4)
    assert found.largest == pytest.approx(1e3, rel=1e-3)


def test_the_librarys_attention_sees_the_same_rows_as_ours() -> None:
    directory = open_directory(default_pair()[0])
    rows = {}
    for kind in lone_rows.BLOCKS:
        block = lone_rows.load_target(kind, "float32", directory)
        rows[kind] = lone_rows._passes(block, tuple(range(5, 30)), 10)[1]
    ours, library = rows[lone_rows.OURS], rows[lone_rows.LIBRARY]
    assert abs(ours - library).max() < 1e-3
    assert (ours != library).any(), "they are not two computations"


def test_texts_are_as_long_as_asked_for() -> None:
    directory = open_directory(default_pair()[0])
    texts = lone_rows.texts(directory, program.PROMPTS, 2, 48)
    assert len(texts) == 2 and len(set(texts)) == 2
    assert max(map(len, texts)) == 48


def test_every_kernel_of_the_processor_is_timed() -> None:
    here = {kernel.name for kernel in KERNELS if kernel.device == "cpu" and not kernel.missing()}
    assert {kernel.name for kernel, _ in kernel_times.usable()} == here | {"torch"}
    lines = list(kernel_times.table([(64, 64), (32, 64)], 1))
    assert len(lines) == 2 + len(kernel_times.usable())
    assert {line.count("|") for line in lines} == {lines[0].count("|")}


def test_medians_leave_the_first_repeat_out(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([9.0, 1.0, 5.0, 2.0])
    monkeypatch.setattr(LayerLinears, "seconds", lambda self, inputs: next(taken))
    layer = LayerLinears("x", "float32", torch.float32, ())
    assert kernel_times.medians([layer], [4], 3) == {(0, 4): 2.0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--precisions", "nf5"], "'nf5', expected some of float32"),
        (["--rows", "1,none"], "expected integers of at least 1"),
    ],
)
def test_a_wrong_argument_gives_one_line(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["shard", *words])
    with pytest.raises(SystemExit):
        program.main()
    assert said in capsys.readouterr().err


def test_a_new_model_is_written_in_parts_and_can_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ops.bench import shard_model

    small = {"HIDDEN": 64, "INTERMEDIATE": 128, "HEADS": 4, "KEY_HEADS": 2}
    for name, value in small.items():
        monkeypatch.setattr(shard_model, name, value)
    shard_model.write_model(tmp_path)
    directory = open_directory(str(tmp_path))
    assert directory.layers == 4
    assert shard_pass(load_shard(directory, "bfloat16"), 4, 2)().shape == (2, 32_000)
