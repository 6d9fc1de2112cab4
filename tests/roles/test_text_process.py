"""Prompts encoded in another process: the tokenizer's ids, whatever a chat template does."""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from flowspec.core.protocol.work import Encode, Encoded, EncodeDone, EncodeFailed, EncodeTurns
from flowspec.core.run.key import RunKey
from flowspec.core.run.turns import Turn
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import default_pair, open_directory
from flowspec.roles import text_process
from flowspec.roles.text_process import TextProcess

RUN = RunKey("j", 1)
TURNS = EncodeTurns(RUN, (Turn("user", "Why is the sky blue?"),))
PACKAGED = Path(default_pair()[0])


@pytest.fixture
def texts() -> Iterator[TextProcess]:
    with closing(TextProcess(forks=True)) as texts:
        yield texts


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextProcess]:
    """A process in which a chat template may take 0.3 s."""
    monkeypatch.setattr(text_process, "TEMPLATE_SECONDS", 0.3)
    with closing(TextProcess(forks=True)) as texts:
        yield texts


def with_template(folder: Path, template: str) -> Path:
    """A folder with the packaged tokenizer and ``template``."""
    folder.mkdir()
    for file in PACKAGED.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def ended(texts: TextProcess, work: Encode | EncodeTurns) -> Encoded:
    texts.begin(work)
    result = texts.result(60.0)
    assert result is not None
    assert not texts.busy
    return result


def test_ids_and_ends_are_the_tokenizers(texts: TextProcess) -> None:
    tokenizer = Tokenizer(open_directory(str(PACKAGED)))
    assert texts.open(PACKAGED) == tokenizer.eos
    for raw in (True, False):
        found = ended(texts, Encode(RUN, "Two and two", raw))
        assert found == EncodeDone(tokenizer.encode("Two and two", raw=raw))
    assert ended(texts, TURNS) == EncodeDone(tokenizer.encode_turns(TURNS.turns))


def test_the_loop_does_not_wait_for_a_long_text(texts: TextProcess) -> None:
    texts.open(PACKAGED)
    long = "All work and no play. " * 20_000
    texts.begin(Encode(RUN, long, raw=True))
    assert texts.result() is None
    assert texts.busy
    found = texts.result(60.0)
    assert isinstance(found, EncodeDone)
    assert len(found.ids) > 100_000


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 / 0 }}", "fails on the messages: ZeroDivisionError: division by zero"),
        ("{{ messages + 1 }}", "fails on the messages: TypeError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "fails on the messages: OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "fails on the messages: RecursionE"),
        ("{{ raise_exception('needs\n tools') }}", "refuses the messages: needs tools"),
        ("{% if %}", "is broken: "),
    ],
)
def test_a_template_that_fails_is_one_line(
    texts: TextProcess, tmp_path: Path, template: str, said: str
) -> None:
    texts.open(with_template(tmp_path / "model", template))
    found = ended(texts, TURNS)
    assert isinstance(found, EncodeFailed)
    assert found.refused
    assert found.reason.startswith(f"the model's chat template, in its chat_template.jinja, {said}")
    assert "\n" not in found.reason
    assert isinstance(ended(texts, Encode(RUN, "text", raw=True)), EncodeDone)


#: A text of two turns tells what ends an answer: the others may take what they like.
LATER = (
    "{{% if messages | length == 2 %}}{{{{ messages[1].content }}}}</s>{{% else %}}{}{{% endif %}}"
)
ENDLESS = "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}" + (
    "{% endfor %}" * 3
)
LARGE = "{% if messages | length == 1 %}{{ 'x' * 10 ** 10 }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ENDLESS, "the model's chat template took longer than 0.3 s"),
        ("{{ 9 ** (9 ** (8 + (messages | length))) }}", "chat template took longer than 0.3 s"),
        (LARGE, "fails on the messages: MemoryError"),
    ],
    ids=["endless", "endless in one step", "large"],
)
def test_a_template_that_takes_too_much_is_ended(
    hurried: TextProcess, tmp_path: Path, template: str, said: str
) -> None:
    folder = with_template(tmp_path / "model", LATER.format(template))
    assert hurried.open(folder) == open_directory(str(folder)).eos
    found = ended(hurried, TURNS)
    assert isinstance(found, EncodeFailed)
    assert found.refused
    assert said in found.reason


@pytest.mark.live
def test_the_next_prompt_has_a_new_process(hurried: TextProcess, tmp_path: Path) -> None:
    assert hurried.open(with_template(tmp_path / "model", ENDLESS)) is None
    assert hurried._process.is_alive(), "it starts before there is work"
    tokenizer = Tokenizer(open_directory(str(PACKAGED)))
    found = ended(hurried, Encode(RUN, "Two and two", raw=True))
    assert found == EncodeDone(tokenizer.encode("Two and two", raw=True))


def test_the_result_of_dropped_work_is_nobodys(texts: TextProcess) -> None:
    texts.open(PACKAGED)
    texts.begin(Encode(RUN, "One", raw=True))
    texts.drop()
    assert texts.result(0.1) is None
    tokenizer = Tokenizer(open_directory(str(PACKAGED)))
    assert ended(texts, Encode(RUN, "Two", raw=True)) == EncodeDone(
        tokenizer.encode("Two", raw=True)
    )


@pytest.mark.live
def test_a_process_that_dropped_work_has_ended_is_no_fault_of_the_next(
    hurried: TextProcess, tmp_path: Path
) -> None:
    hurried.open(with_template(tmp_path / "model", LATER.format(ENDLESS)))
    hurried.begin(Encode(RUN, "One", raw=True))
    assert hurried.result(60.0)
    hurried.begin(TURNS)
    hurried.drop()
    tokenizer = Tokenizer(open_directory(str(PACKAGED)))
    long = "All work and no play. " * 5_000  # more than a pipe holds
    ids = tokenizer.encode(long, raw=True)
    for _ in range(2):  # the second finds a process that has started long ago
        assert ended(hurried, Encode(RUN, long, raw=True)) == EncodeDone(ids)


def test_a_process_at_work_that_was_dropped_is_sent_nothing(
    texts: TextProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not read, and a large text would hold the sender up."""
    texts.open(PACKAGED)
    texts.begin(Encode(RUN, "All work and no play. " * 20_000, raw=True))
    texts.drop()
    sent: list[object] = []
    monkeypatch.setattr(texts, "_send", sent.append)
    for text in ("Two", "Three"):
        texts.begin(Encode(RUN, text, raw=True))
        assert sent == []
        texts.drop()
    monkeypatch.undo()
    tokenizer = Tokenizer(open_directory(str(PACKAGED)))
    assert ended(texts, Encode(RUN, "Four", raw=True)) == EncodeDone(
        tokenizer.encode("Four", raw=True)
    )


def test_a_hard_bound_of_memory_below_the_own_one_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `ulimit -v`: every chat was refused."""
    hard = 3 << 30
    set_limits: list[tuple[int, int]] = []
    monkeypatch.setattr(text_process, "TEMPLATE_BYTES", 1 << 40)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (hard, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: set_limits.append(pair))
    monkeypatch.setattr(signal, "setitimer", lambda which, seconds: None)
    ours, _ = multiprocessing.Pipe()
    with text_process._bounds(ours):
        pass
    assert set_limits == [(hard, hard), (hard, hard)]


@pytest.mark.live
def test_a_process_that_starts_is_not_waited_for(texts: TextProcess) -> None:
    texts.open(PACKAGED)
    texts.close()
    texts.begin(Encode(RUN, "All work and no play. " * 5_000, raw=True))  # more than a pipe holds
    assert texts.result() is None
    texts.drop()
    tokenizer = Tokenizer(open_directory(str(PACKAGED)))
    for _ in range(2):
        assert ended(texts, Encode(RUN, "Two", raw=True)) == EncodeDone(
            tokenizer.encode("Two", raw=True)
        )
