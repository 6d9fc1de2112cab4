"""The script that trains an EAGLE head, on small inputs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from flowspec.errors import ModelError
from flowspec.model.directory import ModelDirectory, open_directory
from flowspec.model.eagle import EagleHead, load_head, read_head
from flowspec.model.head_layout import is_head
from ops.train import head as script
from tests.model.families import FAMILIES, save


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModelDirectory:
    return open_directory(
        str(save(FAMILIES[request.param], tmp_path_factory.mktemp(request.param)))
    )


@pytest.fixture
def teacher(target: ModelDirectory) -> script.Teacher:
    torch.manual_seed(1)
    return script.Teacher(target.path, "cpu")


def lively(teacher: script.Teacher) -> EagleHead:
    """A head whose layer has an effect."""
    head = script.fresh(teacher)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return head.eval()


def test_unrolled_steps_are_what_the_head_drafts(teacher: script.Teacher) -> None:
    """Row t of step s: true features up to row t-s, then a chain of the head's own predictions."""
    head = lively(teacher)
    steps = 3
    rows = 9
    ids = torch.randint(120, (2, rows + 1))
    features = teacher.features(ids)[:, :-1]
    embedded = teacher.embedding[ids[:, 1:]]
    with torch.no_grad():
        found = list(script.unrolled(head, embedded, features, steps))
        for step in range(steps):
            for row in range(step, rows):
                above = features[:, : row + 1].clone()
                for at in range(row - step, row + 1):
                    mask = torch.ones(at + 1, at + 1, dtype=torch.bool).tril()[None, None]
                    positions = torch.arange(1, at + 2)[None]
                    last = head(embedded[:, : at + 1], above[:, : at + 1], mask, positions, None)[
                        :, -1
                    ]
                    if at < row:
                        above[:, at + 1] = last
                assert torch.allclose(found[step][:, row], last, atol=1e-4), (step, row)


def test_the_target_writes_its_own_text(teacher: script.Teacher) -> None:
    prompts = torch.randint(120, (6, 5))
    with torch.no_grad():
        ids = teacher.written(prompts, 24, torch.tensor([0.0, 1.0] * 3))
        best = torch.nn.functional.linear(teacher.features(ids), teacher.lm_head).argmax(-1)
    assert ids.shape == (6, 24)
    assert torch.equal(ids[:, :5], prompts)
    assert torch.equal(ids[::2, 5:], best[::2, 4:-1])
    assert not torch.equal(ids[1::2, 5:], best[1::2, 4:-1])


def test_a_head_that_copies_the_target_agrees_with_it(
    teacher: script.Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report counts the target's most likely token at the requested positions."""
    ids = teacher.written(torch.randint(120, (3, 6)), 20, torch.ones(3))

    def oracle(
        head: object, embedded: torch.Tensor, features: torch.Tensor, steps: int
    ) -> list[torch.Tensor]:
        following = torch.cat(
            (features[:, 1:], features[:, -1:]), dim=1
        )  # the last row has no known target
        following[:, :5] = 0.0  # positions in the prompt do not count
        return [following, features]

    monkeypatch.setattr(script, "unrolled", oracle)
    (first, four), (late, _) = script.agreement(lively(teacher), teacher, ids, 6, 2)
    assert 13 / 14 - 1e-6 <= first <= four
    assert late < first


def test_a_head_is_trained_saved_and_resumed(
    target: ModelDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "HELD_OUT", 500)
    monkeypatch.setattr(script, "CHECKPOINT_SECONDS", 0.5)
    tokens = tmp_path / "train.bin"
    out = tmp_path / "head"
    np.random.default_rng(0).integers(120, size=4000).astype(np.uint32).tofile(tokens)
    words = [
        "--target",
        str(target.path),
        "--tokens",
        str(tokens),
        "--id-bytes",
        "4",
        "--out",
        str(out),
    ]
    words += ["--minutes", "0.05", "--length", "32", "--batch", "4"]
    script.main(words)
    teacher = script.Teacher(target.path, "cpu")
    batch = script.Material(np.arange(2000) % 120, teacher, 32).batch(8)
    trained = read_head(open_directory(str(out)), target)
    with torch.no_grad():
        before, after = (
            float(script.loss_of(head, teacher, batch, 3))
            for head in (script.fresh(teacher), trained)
        )
    assert after < before
    script.main([*words, "--resume"])
    assert capsys.readouterr().out.count("agreement top-1 / top-4: step 1: ") == 4
    directory = open_directory(str(out))
    assert is_head(directory)
    assert load_head(directory, target).wants_hidden
    assert directory.config["architectures"] == ["LlamaForCausalLMEagle"]
    assert sorted(directory.weight_files) == sorted(
        {
            "fc.weight",
            "layers.0.post_attention_layernorm.weight",
            *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
            *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        }
    )
    assert not list(out.glob("*.part"))


def test_text_that_cannot_be_used_is_refused(target: ModelDirectory, tmp_path: Path) -> None:
    tokens = tmp_path / "train.bin"
    words = [
        "--target",
        str(target.path),
        "--tokens",
        str(tokens),
        "--out",
        str(tmp_path / "o"),
        "--minutes",
        "1",
    ]
    np.zeros(300, dtype=np.uint16).tofile(tokens)
    with pytest.raises(ModelError, match=re.escape("has 300 tokens; give more than 100256")):
        script.main(words)
    np.full(101_000, 120, dtype=np.uint16).tofile(tokens)
    with pytest.raises(ModelError, match="has token 120; the target's vocabulary has 120"):
        script.main(words)
