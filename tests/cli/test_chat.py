"""``flowspec chat``: what is sent, kept and shown of a conversation; the pipeline is a fake."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from flowspec.cli import chat
from flowspec.cli.chat import ChatFlags, Conversation, figures
from flowspec.cluster import Setup
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.run.turns import Turn
from flowspec.errors import ClusterError, JobFailed
from flowspec.results import Chunk, Result, Stats
from tests.cli.conftest import Command

DONE = Stats(tokens=3, tokens_per_second=20.0, hit_rate=0.5)


class Answer:
    """A job that says ``pieces``; then ``fault`` is raised, once."""

    def __init__(self, *pieces: str, fault: BaseException | None = None) -> None:
        self.pieces = pieces
        self.fault = fault
        self.cancelled = False

    def stream(self) -> Iterator[Chunk]:
        yield from (Chunk(piece, (at,), (len(piece),)) for at, piece in enumerate(self.pieces))
        if self.fault is not None:
            raise self.fault

    def cancel(self) -> None:
        self.cancelled = True

    def result(self) -> Result:
        return self.so_far()

    def so_far(self) -> Result:
        reason = "cancelled" if self.cancelled else "eos"
        stats = Stats(tokens=len(self.pieces)) if self.cancelled else DONE
        ids = tuple(range(len(self.pieces)))
        return Result("1-0", (1,), ids, "".join(self.pieces), "flowspec", reason, stats)


class Client:
    """A client whose jobs are ``answers``."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.specs: list[JobSpec] = []

    def submit_spec(self, spec: JobSpec) -> Answer:
        self.specs.append(spec)
        return self.answers.pop(0)


def converse(client: Client, *messages: str, system: str = "") -> Conversation:
    flags = ChatFlags(Setup("t", "d", 2), Sampling(), "flowspec", 9, system, None)
    conversation = Conversation(client, flags, lambda: None)  # type: ignore[arg-type]
    conversation.run(iter(messages))
    return conversation


def said(client: Client) -> list[list[tuple[str, str]]]:
    return [[(turn.role, turn.content) for turn in spec.messages or ()] for spec in client.specs]


def test_every_answer_has_the_turns_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    client = Client(Answer(" One", "."), Answer(" Two."))
    converse(client, "first", "  ", "second ", system="be brief")
    begun = [("system", "be brief"), ("user", "first")]
    assert said(client) == [begun, [*begun, ("assistant", "One."), ("user", "second")]]
    shown = capsys.readouterr()
    assert shown.out == " One.\n Two.\n"
    assert (
        shown.err
        == "[2 tokens, 20.0 tokens/s, 50% guessed]\n[1 tokens, 20.0 tokens/s, 50% guessed]\n"
    )


def test_figures_begin_a_line_where_both_streams_are_one_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, "utf-8"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(file, "utf-8", write_through=True))
    converse(Client(Answer("One")), "first")
    assert file.getvalue() == b"One\n[1 tokens, 20.0 tokens/s, 50% guessed]\n"


def test_new_forgets_and_quit_ends() -> None:
    client = Client(Answer("a"), Answer("b"))
    converse(client, "first", "/new", "second", "/quit", "never", system="s")
    assert said(client)[1] == [("system", "s"), ("user", "second")]


def test_ctrl_c_stops_one_answer_and_keeps_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    stopped = Answer("half an", fault=KeyboardInterrupt())
    client = Client(stopped, Answer("whole"))
    conversation = converse(client, "first", "second")
    assert stopped.cancelled
    assert conversation.turns[:2] == [Turn("user", "first"), Turn("assistant", "half an")]
    assert len(conversation.turns) == 4
    assert "[1 tokens, stopped]" in capsys.readouterr().err


def test_a_message_that_fails_was_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    fault = JobFailed("the prompt has 2000 tokens; the model's context is 1024: shorten it")
    client = Client(Answer(fault=fault), Answer("fine"))
    conversation = converse(client, "too long", "short")
    assert conversation.turns[0] == Turn("user", "short")
    assert f"flowspec: {fault}\n" in capsys.readouterr().err


def test_a_lost_pipeline_ends_the_conversation() -> None:
    with pytest.raises(ClusterError, match="no scheduler"):
        converse(Client(Answer(fault=ClusterError("no scheduler"))), "hello")


def test_figures_of_an_answer_that_was_stopped_are_those_of_the_clock() -> None:
    result = Result("1-0", (), tuple(range(11)), "", "", "cancelled", Stats(tokens=11))
    assert figures(result, 0.5) == "[11 tokens, 20.0 tokens/s, stopped]"
    assert figures(result, 0.0) == "[11 tokens, stopped]"


def test_lines_of_a_file_are_messages_without_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "two"])

    def read(prompt: str) -> str:
        assert prompt == ""
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert list(chat._messages()) == ["one", "two"]


def test_flags_of_a_private_pipeline_and_a_running_one_exclude_each_other(
    command: Command,
) -> None:
    status, out, err = command("chat", "--stages", "2", "--redis-url", "redis://localhost:1/0")
    assert (status, out) == (1, "")
    assert "leave out the one or the other" in err
