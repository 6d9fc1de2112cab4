"""The script that trains an EAGLE head, on small inputs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from flowspec.errors import ModelError
from flowspec.model.drafters.eagle import EagleHead, load_head, read_head
from flowspec.model.drafters.eagle3 import Eagle3Head, load_eagle3
from flowspec.model.drafters.eagle3_layout import read_layout
from flowspec.model.drafters.kinds import kind_of
from flowspec.model.weights.directory import ModelDirectory, open_directory
from ops.train import head as script
from ops.train.eagle1 import Eagle1Form
from ops.train.eagle3 import Eagle3Form
from ops.train.teaching import Form, Material, Teacher, agreement, unrolled
from tests.model.families import FAMILIES, save

TEXT = np.arange(2000) % 120
FORMS: dict[str, Form] = {"eagle1": Eagle1Form(), "eagle3": Eagle3Form((1, 3, 5), 50)}


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.heavy)])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModelDirectory:
    return open_directory(
        str(save(FAMILIES[request.param], tmp_path_factory.mktemp(request.param)))
    )


@pytest.fixture
def teacher(target: ModelDirectory) -> Teacher:
    torch.manual_seed(1)
    return Teacher(target.path, "cpu")


def lively(teacher: Teacher, form: str = "eagle1") -> EagleHead | Eagle3Head:
    """A head whose layer has an effect."""
    head: EagleHead | Eagle3Head = FORMS[form].fresh(teacher, TEXT)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return head.eval()


@pytest.mark.parametrize("form", FORMS)
def test_unrolled_steps_are_what_the_head_drafts(teacher: Teacher, form: str) -> None:
    """Row t of step s: true features up to row t-s, then a chain of the head's own predictions."""
    head = lively(teacher, form)
    steps = 3
    rows = 9
    ids = torch.randint(120, (2, rows + 1))
    features = teacher.features(ids)[:, :-1]
    embedded = teacher.embedding[ids[:, 1:]]
    with torch.no_grad():
        found = list(unrolled(head, embedded, features, steps))
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


def test_the_target_writes_its_own_text(teacher: Teacher) -> None:
    prompts = torch.randint(120, (6, 5))
    with torch.no_grad():
        ids = teacher.written(prompts, 24, torch.tensor([0.0, 1.0] * 3))
        best = torch.nn.functional.linear(teacher.features(ids), teacher.lm_head).argmax(-1)
    assert ids.shape == (6, 24)
    assert torch.equal(ids[:, :5], prompts)
    assert torch.equal(ids[::2, 5:], best[::2, 4:-1])
    assert not torch.equal(ids[1::2, 5:], best[1::2, 4:-1])


def test_a_head_that_copies_the_target_agrees_with_it(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr("ops.train.eagle1.unrolled", oracle)
    seen = teacher.seen(ids, ())
    seen.counted[:, :6] = False
    (first, four), (late, _) = agreement(Eagle1Form(), lively(teacher), teacher, [seen], 2)
    assert 13 / 14 - 1e-6 <= first <= four
    assert late < first


def test_guesses_of_an_eagle3_head_are_the_targets_tokens(teacher: Teacher) -> None:
    """Of the tokens that it has: the most frequent ones of the text."""
    form = Eagle3Form((1, 3, 5), 3)
    text = np.array([7, 7, 7, 90, 90, 4, 4, 4, 4, 11])
    head = form.fresh(teacher, text)
    with torch.no_grad():
        logits = head.logits(torch.randn(5, 64))
    assert logits.shape == (5, 3)
    assert form._ids.tolist() == [4, 7, 90]
    tensors, config = form.stored(head)
    assert (tensors["d2t"] + torch.arange(3)).tolist() == [4, 7, 90]
    assert tensors["t2d"].nonzero().flatten().tolist() == [4, 7, 90]
    assert config["draft_vocab_size"] == 3


def test_a_resumed_head_gets_the_tokens_of_its_new_text(
    target: ModelDirectory, teacher: Teacher, tmp_path: Path
) -> None:
    """It keeps what it has learned of those that it had."""
    form = Eagle3Form((1, 3, 5), 3)
    head = form.fresh(teacher, np.array([4, 7, 90]))
    with torch.no_grad():
        head.lm_head.weight.fill_(0.5)
    script.save(form, head, tmp_path)
    saved = open_directory(str(tmp_path))
    again = form.read(saved, target, teacher, np.array([7, 90, 11]))
    assert form._ids.tolist() == [7, 11, 90]
    assert torch.equal(again.lm_head.weight[[0, 2]], torch.full((2, 64), 0.5))
    assert torch.equal(again.lm_head.weight[1], teacher.lm_head[11])
    same = Eagle3Form((1, 3, 5))
    same.read(saved, target, teacher, np.array([7, 90, 11]))
    assert same._ids.tolist() == [4, 7, 90]


def test_positions_of_tokens_that_the_head_lacks_do_not_count(teacher: Teacher) -> None:
    ids = torch.randint(120, (2, 12))
    best = torch.nn.functional.linear(teacher.features(ids), teacher.lm_head).argmax(-1)[:, 1:]
    absent = sorted(set(range(120)) - set(best.flatten().tolist()))
    form = Eagle3Form((1, 3, 5), 2)
    head = form.fresh(teacher, np.array(absent[:2]))
    with torch.no_grad():
        assert float(form.loss(head, teacher, teacher.seen(ids, form.taps), 2)) == 0.0


@pytest.mark.heavy
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
    words += ["--minutes", "0.15", "--length", "32", "--batch", "4"]
    script.main(words)
    teacher = Teacher(target.path, "cpu")
    batch = Material(TEXT, teacher, 32).seen(8, ())
    trained = read_head(open_directory(str(out)), target)
    with torch.no_grad():
        form = Eagle1Form()
        before, after = (
            float(form.loss(head, teacher, batch, 3))
            for head in (form.fresh(teacher, TEXT), trained)
        )
    assert after < before
    script.main([*words, "--resume"])
    assert capsys.readouterr().out.count("agreement top-1 / top-4: step 1: ") == 4
    directory = open_directory(str(out))
    assert kind_of(directory).reads_target
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


@pytest.mark.heavy
def test_an_eagle3_head_is_trained_saved_and_resumed(
    target: ModelDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "HELD_OUT", 500)
    tokens = tmp_path / "train.bin"
    out = tmp_path / "head"
    np.random.default_rng(0).integers(120, size=4000).astype(np.uint16).tofile(tokens)
    words = ["--target", str(target.path), "--tokens", str(tokens), "--out", str(out)]
    words += ["--minutes", "0.15", "--length", "32", "--form", "eagle3", "--taps", "1,3,5"]
    words += ["--vocabulary", "50"]
    script.main(words)
    teacher = Teacher(target.path, "cpu")
    batch = Material(TEXT, teacher, 32).seen(8, (1, 3, 5))
    form = Eagle3Form((1, 3, 5), 50)
    with torch.no_grad():
        text = np.fromfile(tokens, np.uint16)[:-500]
        before = float(form.loss(form.fresh(teacher, text), teacher, batch, 3))
        trained = form.read(open_directory(str(out)), target, teacher, text)
        after = float(form.loss(trained, teacher, batch, 3))
    assert after < before
    script.main([*words, "--resume"])
    assert capsys.readouterr().out.count("agreement top-1 / top-4: step 1: ") == 4
    directory = open_directory(str(out))
    layout = read_layout(directory, target)
    assert (layout.taps.layers, layout.vocabulary, layout.mapped) == ((1, 3, 5), 50, True)
    assert load_eagle3(directory, target).wants_hidden


def test_taps_that_do_not_ascend_are_refused() -> None:
    given = script.arguments().parse_args(
        ["--target", "t", "--tokens", "x", "--out", "o", "--minutes", "1", "--form", "eagle3"]
    )
    with pytest.raises(ModelError, match=re.escape("the taps are [2, 3, 3]; give ascending")):
        script.form_of(given, 6)
    given.taps = "1,3,6"
    with pytest.raises(ModelError, match="give ascending layers below 6"):
        script.form_of(given, 6)


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
