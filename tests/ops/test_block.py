"""The script that trains a block drafter, on small inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from flowspec.errors import ModelError
from flowspec.model.drafters.block_drafter import load_block_drafter
from flowspec.model.drafters.block_layout import check_block_drafter
from flowspec.model.weights.directory import ModelDirectory, open_directory
from ops.train import block as script
from ops.train.teaching import Teacher
from tests.model.block_drafters import MASK, TAPS, Published, save_block_drafter
from tests.model.families import FAMILIES, save

LEVELS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    return open_directory(str(save(FAMILIES["qwen3"], tmp_path_factory.mktemp("target"))))


@pytest.fixture
def teacher(target: ModelDirectory) -> Teacher:
    torch.manual_seed(1)
    return Teacher(target.path, "cpu")


def test_blocks_are_within_the_text_and_half_have_one_known_token() -> None:
    rng = np.random.default_rng(0)
    blocks = script.place_blocks(rng, 400, 6, LEVELS, 40, "cpu")
    numbers = blocks.number.bincount()
    known = blocks.number[blocks.known].bincount()
    assert torch.equal(numbers - known, torch.full((400,), LEVELS))
    assert known.min() >= 1 and known.max() <= 6
    assert 160 < int((known == 1).sum()) < 300
    assert blocks.first.min() >= 1
    assert blocks.positions.max() < 40
    starts = blocks.positions == blocks.first
    assert torch.equal(blocks.number[starts], torch.arange(400))
    assert bool(blocks.known[starts].all())


def test_what_is_trained_is_the_published_pass(
    target: ModelDirectory, teacher: Teacher, tmp_path: Path
) -> None:
    """All blocks of a batch at once give the rows that each gives after its own context."""
    folder = save_block_drafter(tmp_path)
    trainee = script.continued(folder, target)
    published = Published(folder, target)
    blocks = script.place_blocks(np.random.default_rng(2), 7, 5, LEVELS, 30, "cpu")
    ids = torch.randint(120, (2, 30))
    with torch.no_grad():
        _, tapped = teacher.rows(ids, trainee.taps)
        tokens = torch.where(blocks.known, ids[:, blocks.positions], MASK)
        rows = trainee(tapped, teacher.embedding[tokens], blocks)
    for row, text in enumerate(ids.tolist()):
        sums = published.sums(text)
        for number in range(7):
            own = blocks.number == number
            first = int(blocks.first[own][0])
            wanted = published.rows(sums[:first], tokens[row, own].tolist())[-LEVELS:]
            found = rows[row, number * LEVELS : (number + 1) * LEVELS]
            assert torch.allclose(found, wanted, atol=2e-4)


def test_a_drafter_that_has_the_targets_rows_agrees_with_it(
    target: ModelDirectory, teacher: Teacher, tmp_path: Path
) -> None:
    trainee = script.continued(save_block_drafter(tmp_path), target)
    ids = torch.randint(120, (3, 40))
    features = teacher.features(ids)

    class Oracle(torch.nn.Module):
        levels = LEVELS
        mask = MASK
        taps = TAPS

        def forward(
            self, tapped: torch.Tensor, embedded: torch.Tensor, blocks: script.Blocks
        ) -> torch.Tensor:
            rows = features[:, blocks.positions[blocks.asked] - 1].clone()
            rows[:, 2] *= -1.0
            return rows

    found = script.agreement(Oracle(), teacher, ids, 8, 2)  # type: ignore[arg-type]
    assert found == [1.0, 1.0, 0.0, 1.0]
    assert max(script.agreement(trainee, teacher, ids, 8, 2)) < 0.5


@pytest.mark.heavy
def test_a_drafter_is_trained_saved_and_resumed(
    target: ModelDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "HELD_OUT", 500)
    monkeypatch.setattr("ops.train.head.HELD_OUT", 500)
    monkeypatch.setattr(script, "CHECKPOINT_SECONDS", 0.5)
    tokens = tmp_path / "train.bin"
    out = tmp_path / "drafter"
    np.random.default_rng(0).integers(120, size=4000).astype(np.uint32).tofile(tokens)
    words = ["--target", str(target.path), "--tokens", str(tokens), "--id-bytes", "4"]
    words += ["--out", str(out), "--minutes", "0.05", "--length", "32", "--batch", "4"]
    words += ["--levels", "3", "--known", "4", "--blocks", "6", "--taps", "3", "--layers", "1"]
    script.main([*words, "--mask", "9"])
    folder = open_directory(str(out))
    layout = check_block_drafter(folder, target)
    assert (layout.levels, layout.mask, layout.layers) == (3, 9, (1, 2, 3))
    given = script.arguments().parse_args([*words, "--mask", "9"])
    teacher = Teacher(target.path, "cpu")
    batch = torch.arange(128).view(4, 32) % 120
    blocks = script.place_blocks(np.random.default_rng(1), 20, 4, 3, 32, "cpu")
    torch.manual_seed(0)
    losses = []
    for trainee in (script.fresh(target, given), script.continued(folder, target)):
        with torch.no_grad():
            losses.append(float(script.loss_of(trainee, teacher, batch, blocks, 4.0)))
    assert losses[1] < losses[0]
    script.main([*words, "--resume"])
    assert capsys.readouterr().out.count("held out, T=0, 1 known, top-1 by level: [") == 2
    assert load_block_drafter(open_directory(str(out)), target).levels == 3
    assert not list(out.glob("*.part"))


def test_the_loss_is_least_for_the_targets_distributions(teacher: Teacher) -> None:
    ids = torch.randint(120, (2, 30))
    blocks = script.place_blocks(np.random.default_rng(3), 5, 3, LEVELS, 30, "cpu")
    features = teacher.features(ids)
    right = features[:, blocks.positions[blocks.asked] - 1]

    class Given(torch.nn.Module):
        levels = LEVELS
        mask = MASK
        taps = TAPS

        def __init__(self, rows: torch.Tensor) -> None:
            super().__init__()
            self.rows = rows

        def forward(self, *_unused: object) -> torch.Tensor:
            return self.rows

    least = float(script.loss_of(Given(right), teacher, ids, blocks, 4.0))  # type: ignore[arg-type]
    logits = linear(right, teacher.lm_head).log_softmax(-1)
    entropy = -(logits.exp() * logits).sum(-1)
    weights = torch.exp(-(torch.arange(entropy.shape[1]) % LEVELS) / 4.0)
    assert least == pytest.approx(float((entropy * weights).sum() / (2 * weights.sum())), abs=1e-3)
    worse = Given(right + 0.3 * torch.randn_like(right))
    assert float(script.loss_of(worse, teacher, ids, blocks, 4.0)) > least  # type: ignore[arg-type]


def test_another_targets_drafter_is_not_resumed(target: ModelDirectory, tmp_path: Path) -> None:
    folder = save_block_drafter(tmp_path, num_target_layers=12)
    with pytest.raises(ModelError, match="for a target of 12 layers"):
        script.continued(folder, target)
