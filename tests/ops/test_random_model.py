"""Random models have the shape and the files of a real one, and are written once."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from flowspec.core.run.key import RunKey
from flowspec.errors import ConfigError
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import open_directory
from flowspec.model.weights.tensors import read_tensor
from ops.bench.pass_parts import (
    PARTS,
    Passes,
    Sections,
    in_turn,
    measured,
    table,
    taken,
    turns_table,
)
from ops.bench.random_model import Shape, random_model
from ops.peer import convert

TINY = Shape(
    hidden=64,
    intermediate=96,
    layers=2,
    heads=4,
    key_heads=2,
    head_dim=16,
    vocabulary=4200,
    context=256,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(TINY, tmp_path_factory.mktemp("random") / "tiny")


def test_all_weights_are_there_in_several_files(tiny: Path) -> None:
    directory = open_directory(str(tiny))
    directory.check_weights()
    entries = [directory.tensor(name) for name in directory.weight_files]
    assert sum(math.prod(entry.shape) for entry in entries) == TINY.weights
    assert {entry.dtype for entry in entries} == {"BF16"}
    assert len({entry.file for entry in entries}) == TINY.layers + 2


def test_weights_are_random_and_norms_are_ones(tiny: Path) -> None:
    directory = open_directory(str(tiny))
    name = "model.layers.1.mlp.down_proj.weight"
    weight = read_tensor(name, directory.tensor(name), torch.float32)
    assert weight.std().item() == pytest.approx(3 / math.sqrt(TINY.intermediate), rel=0.05)
    norm = read_tensor("model.norm.weight", directory.tensor("model.norm.weight"), torch.float32)
    assert torch.equal(norm, torch.ones(TINY.hidden))


def test_the_tokenizer_encodes_as_the_packaged_one_and_fills_the_vocabulary(tiny: Path) -> None:
    directory = open_directory(str(tiny))
    packaged = Tokenizer(open_directory("target"))
    ours = Tokenizer(directory)
    for text in ("Why is the sky blue?", "added-4199"):
        assert ours.encode(text, raw=False) == packaged.encode(text, raw=False)
    assert ours.detokenizer.decode([4199]) == "added-4199"
    assert len(convert.vocabulary(directory)["add_token_list"]) == TINY.vocabulary


def test_a_model_is_written_once(tiny: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in tiny.iterdir()}
    assert random_model(TINY, tiny) == tiny
    assert {file: file.stat().st_mtime_ns for file in tiny.iterdir()} == before


def test_another_shape_in_the_folder_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="has another model"):
        random_model(dataclasses.replace(TINY, layers=3), tiny)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least the packaged tokenizer's 4096"):
        random_model(dataclasses.replace(TINY, vocabulary=4000), tmp_path / "small")
    assert not list(tmp_path.iterdir())


def test_the_default_shape_has_a_billion_weights() -> None:
    assert 1.0e9 < Shape().weights < 1.3e9


def test_a_section_has_its_own_time_only() -> None:
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    sections = Sections(lambda: now[0])
    inner = sections.timed("inner", lambda: spend(2.0))

    def both() -> None:
        spend(1.0)
        inner()
        inner()

    sections.timed("outer", both)()
    assert sections.seconds == {"outer": 1.0, "inner": 4.0}


def test_every_part_of_a_pass_is_timed_and_the_library_left_as_it_was(tiny: Path) -> None:
    from flowspec.model.stage import load_stage

    directory = open_directory(str(tiny))
    stage = load_stage(directory, range(directory.layers))
    found = taken(stage, directory.vocabulary, [1, 4], 2)
    for seconds in found.values():
        assert set(seconds) == {*PARTS, "whole", "short", "paused"}
        assert min(seconds.values()) > 0
    sections = Sections()
    passes = Passes(stage, directory.vocabulary)
    with measured(stage, sections) as run:
        passes.step(run, 2)
    timed = dict(sections.seconds)
    passes.step(stage.run, 2)
    stage.release(RunKey("parts", 1))
    assert sections.seconds == timed
    lines = table({("float32", rows): seconds for rows, seconds in found.items()})
    assert len({line.count("|") for line in lines}) == 1


def test_either_side_is_taken_in_turn_and_ratios_are_of_a_turn() -> None:
    asked: list[object] = []
    ours = iter([1e-3, 6e-3, 3e-3, 4e-3])
    theirs = iter([{1: 2e-3, 8: 10e-3}, {1: 3e-3, 8: 8e-3}])

    def our_pass(rows: int) -> float:
        asked.append(rows)
        return next(ours)

    def their_passes() -> dict[int, float]:
        asked.append("theirs")
        return next(theirs)

    found = in_turn(our_pass, their_passes, [1, 8], 2)
    assert asked == ["theirs", 1, 8, "theirs", 1, 8]
    assert turns_table(found) == [
        "| ms a pass | 1 row | 8 rows |",
        "|---|---|---|",
        "| ours | 2.0 | 5.0 |",
        "| llama.cpp | 2.5 | 9.0 |",
        "| ours over theirs, least to most | 0.75 (0.50 to 1.00) | 0.55 (0.50 to 0.60) |",
    ]
