"""The script that writes a target's own answers, and a head that is trained on them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from flowspec.errors import ModelError
from flowspec.model.drafters.eagle3_layout import read_layout
from flowspec.model.layers import placing
from flowspec.model.weights.directory import default_pair, open_directory
from ops.train import answers as script
from ops.train import head
from ops.train.answers import Answers, Writer, WrittenText
from ops.train.teaching import Teacher, drawn
from tests.model.families import FAMILIES, save

TAPS = (1, 3, 5)
LIMIT = 24


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Teacher:
    return Teacher(save(FAMILIES["llama"], tmp_path_factory.mktemp("llama")), "cpu")


def writer(teacher: Teacher, ends: frozenset[int] = frozenset()) -> Writer:
    return Writer(teacher, TAPS, ends, slots=3, limit=LIMIT, capacity=80)


def prompts(count: int) -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        yield torch.randint(120, (2 + 5 * (number % 4),), generator=generator).tolist()


def test_a_text_is_the_same_beside_others_and_alone(teacher: Teacher) -> None:
    """Its tokens, the rows of all layers, and the target's choice at each of its answer's."""
    given = [*prompts(7)]
    found = [*writer(teacher).write(WrittenText(list(prompt), 0.0) for prompt in given)]
    assert len(found) == 7
    for tokens, rows in found:
        ids, best, kind = tokens.long().unbind(1)
        count = int((kind == 0).sum())
        prompt = ids[None, :count]
        assert prompt[0].tolist() in given
        assert torch.equal(ids, teacher.written(prompt, count + LIMIT, torch.zeros(1))[0])
        features, tapped = teacher.rows(ids[None], TAPS)
        alone = torch.cat((tapped, features), dim=-1)[0]
        assert torch.allclose(rows.float(), alone, rtol=0.01, atol=1e-4)
        choice = linear(features[0], teacher.lm_head).argmax(-1)
        assert torch.equal(best[count - 1 :], choice[count - 1 :])


def test_a_target_in_bfloat16_writes_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "cpu_flags", lambda: {"avx512_bf16"})
    folder = save(FAMILIES["llama"], tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "dtype": "bfloat16"})
    (folder / "config.json").write_text(text, encoding="utf-8")
    teacher = Teacher(folder, "cpu")
    assert teacher.model.dtype == torch.bfloat16
    found = [*writer(teacher).write(WrittenText(list(prompt), 1.0) for prompt in prompts(4))]
    assert len(found) == 4
    for tokens, rows in found:
        features, tapped = teacher.rows(tokens[None, :, 0].long(), TAPS)
        alone = torch.cat((tapped, features), dim=-1)[0]
        assert torch.allclose(rows.float(), alone, rtol=0.1, atol=0.1)


def test_tokens_are_drawn_by_their_shares() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([-torch.inf, 0.0, 1.0, 2.0, -torch.inf]).repeat(40_000, 1)
    shares = torch.bincount(drawn(logits, torch.ones(len(logits))), minlength=5) / len(logits)
    assert torch.allclose(shares, logits[0].softmax(-1), atol=0.01)
    assert shares[0] == shares[4] == 0.0
    assert drawn(logits[:2], torch.zeros(2)).tolist() == [3, 3]


def test_an_answer_ends_with_its_end_token(teacher: Teacher) -> None:
    torch.manual_seed(0)
    ends = frozenset(range(10))
    found = writer(teacher, ends).write(WrittenText(prompt, 1.0) for prompt in prompts(20))
    lengths = []
    for tokens, _ in found:
        answer = tokens[tokens[:, 2] == 2, 0].tolist()
        assert not ends & set(answer[:-1])
        assert answer[-1] in ends or len(answer) == LIMIT
        lengths.append(len(answer))
    assert len(lengths) == 20
    assert min(lengths) < LIMIT


def test_the_target_writes_a_users_turn_before_its_answer(teacher: Teacher) -> None:
    """One that does not end is given up."""
    torch.manual_seed(0)
    closing = (7, 50, 51)
    texts = (WrittenText([1, 2], 0.0, closing) for _ in range(40))
    found = [*writer(teacher, frozenset({7})).write(texts)]
    assert 0 < len(found) < 40
    for tokens, _ in found:
        ids, best, kind = (column.tolist() for column in tokens.unbind(1))
        begun = kind.index(1)
        assert tuple(ids[begun - 3 : begun]) == closing
        assert ids.index(7) == begun - 3
        assert ids[begun:] == best[begun - 1 : -1]


@pytest.fixture
def folder(teacher: Teacher, tmp_path: Path) -> Path:
    """Nine texts, three of them sampled."""
    texts = (WrittenText(prompt, float(at % 3 == 2)) for at, prompt in enumerate(prompts(9)))
    script.keep(tmp_path, TAPS, 64, writer(teacher).write(texts))
    return tmp_path


def test_answers_are_read_with_their_rows(teacher: Teacher, folder: Path) -> None:
    answers = Answers(folder, 32)
    assert answers.taps == TAPS
    assert len(answers.text) == 9 * LIMIT
    greedy, sampled = ([*answers.whole(sampled=which)] for which in (False, True))
    assert (len(greedy), len(sampled)) == (6, 3)
    for seen in greedy:
        features, tapped = teacher.rows(seen.ids, TAPS)
        assert torch.allclose(seen.features, features, rtol=0.01, atol=1e-4)
        assert torch.allclose(seen.tapped, tapped, rtol=0.01, atol=1e-4)
        assert int(seen.counted.sum()) == LIMIT
        assert torch.equal(seen.best[seen.counted], seen.ids.roll(-1)[seen.counted])


def test_a_batch_has_every_text_once_a_round(folder: Path) -> None:
    """Each from its beginning, or from the middle of a prompt that is longer than half a row."""
    answers = Answers(folder, 20)
    whole = [seen for which in (False, True) for seen in answers.whole(sampled=which)]
    rows = torch.cat([answers.seen(3).ids for _ in range(3)]).tolist()
    assert len(rows) == 9
    for seen in whole:
        begun = seen.ids.shape[1] - LIMIT
        first = max(0, begun - 10)
        assert rows.count(seen.ids[0, first : first + 20].tolist()) == 1


def test_files_of_another_size_are_refused(folder: Path) -> None:
    with (folder / script.TOKENS).open("ab") as file:
        file.write(bytes(12))
    with pytest.raises(ModelError, match=r"rows\.bin is not the rows of .*tokens\.bin"):
        Answers(folder, 20)


def test_a_head_is_trained_on_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the packaged target, to prompts of a file and to its own."""
    target = default_pair()[0]
    prompts_file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"turns": [f"Add {number} and 2."]}) for number in range(6)]
    prompts_file.write_text("\n".join(lines), encoding="utf-8")
    words = ["--target", str(target), "--prompts", str(prompts_file), "--hold-out", "2"]
    words += ["--limit", "12", "--slots", "4", "--sampled", "1"]
    script.main([*words, "--out", str(tmp_path / "answers"), "--minutes", "0.1"])
    script.main([*words, "--out", str(tmp_path / "test"), "--minutes", "9", "--test"])
    held = Answers(tmp_path / "test", 16)
    assert [len([*held.whole(sampled=which)]) for which in (False, True)] == [2, 2]
    assert len([*Answers(tmp_path / "answers", 16).whole(sampled=True)]) >= 4
    words = ["--target", str(target), "--answers", str(tmp_path / "answers"), "--length", "32"]
    words += ["--test", str(tmp_path / "test"), "--out", str(tmp_path / "head"), "--minutes"]
    words += ["0.05", "--form", "eagle3", "--vocabulary", "50"]
    head.main(words)
    shown = capsys.readouterr().out
    assert "held out, greedy, agreement top-1 / top-4: step 1: " in shown
    assert "held out, sampled, agreement top-1 / top-4: step 1: " in shown
    layout = read_layout(open_directory(str(tmp_path / "head")), open_directory(str(target)))
    assert (layout.taps.layers, layout.vocabulary) == ((2, 6, 9), 50)
    assert np.fromfile(tmp_path / "test" / script.TOKENS, np.int32).reshape(-1, 3)[:, 2].max() == 2
