"""Recordings that are checked in replay exactly; edited ones are found out; the written form is exact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given

from flowspec.core import machine as m
from flowspec.core.limits import Limits
from flowspec.core.messages import Close, Envelope, Message, Open
from flowspec.core.sampling import Sampling
from flowspec.drivers.record import Recorder, from_json, to_json
from flowspec.drivers.replay import header, merge, replay, replay_file
from flowspec.errors import ReplayMismatch
from tests.broker.test_codec import MESSAGES

RECORDINGS = sorted((Path(__file__).parent.parent / "recordings").glob("*.jsonl"))


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) >= 2


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: file.stem)
def test_checked_in_recordings_replay(file: Path) -> None:
    """A change that makes one of these fail changes what the machines do: say why in its commit."""
    done = replay_file(file)
    assert done.tokens
    finish = [row for row in map(json.loads, file.read_text().splitlines()) if '"Finish"' in json.dumps(row)]
    assert finish[-1]["out"][0]["stats"]["tokens"] == len(done.tokens)


def test_replaying_needs_neither_torch_nor_redis() -> None:
    code = (
        "import sys; from pathlib import Path; from flowspec.drivers.replay import replay_file\n"
        f"replay_file(Path({str(RECORDINGS[0])!r}))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("number", [3, 40, 90])
def test_one_changed_number_is_found(number: int) -> None:
    lines = RECORDINGS[0].read_text().splitlines()
    row = json.loads(lines[number])
    text = json.dumps(row["out"] or row["in"])
    at = next(at for at, character in enumerate(text) if character.isdigit() and text[at - 1] in "[ ")
    changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
    row["out" if row["out"] else "in"] = json.loads(changed)
    with pytest.raises(ReplayMismatch):
        replay([*lines[:number], json.dumps(row), *lines[number + 1 :]])


@given(MESSAGES)
def test_messages_are_written_exactly(message: Message) -> None:
    envelope = Envelope("s1", 3, message)
    assert from_json(json.loads(json.dumps(to_json(envelope)))) == envelope


def test_what_another_version_wrote_is_said() -> None:
    with pytest.raises(ReplayMismatch, match="unknown 'Telepathy'"):
        from_json({"_": "Telepathy"})
    with pytest.raises(ReplayMismatch, match="Close has other fields"):
        from_json({"_": "Close", "job": "j", "colour": "red"})


def test_merging_orders_a_node_by_number_and_takes_each_line_once() -> None:
    head = header(Limits(1, 8, 8, frozenset()))
    lines = [json.dumps({"node": node, "n": n, "now": now}) for node, n, now in
             [("s1", 2, 1.0), ("d0", 1, 5.0), ("s1", 1, 9.0), ("d0", 2, 6.0), ("s1", 1, 9.0)]]  # fmt: skip
    merged = [json.loads(line) for line in merge([*lines, head])]
    assert "format" in merged[0]
    assert [(row["node"], row["n"]) for row in merged[1:]] == [("d0", 1), ("d0", 2), ("s1", 1), ("s1", 2)]


def test_only_jobs_that_asked_are_written_down() -> None:
    lines: list[tuple[str, str]] = []
    recorder = Recorder("s1", lambda job, line: lines.append((job, line)))
    asked = Open("a", 1, 2, 9, Sampling(), record=True)
    silent = Open("b", 1, 2, 9, Sampling())
    both = (Envelope("d0", 1, asked), Envelope("d0", 1, silent))
    recorder.step(0.5, m.Received(both), [m.Allocate("a", 1, 9, Sampling(), asked.returns), m.Release("b")])
    recorder.step(0.6, m.Received((Envelope("d0", 2, Close("b", 1)),)), [])
    recorder.step(0.7, m.Poll(), [])
    ((job, line),) = lines
    row = json.loads(line)
    assert (job, row["n"], row["now"]) == ("a", 1, 0.5)
    assert [envelope["message"]["job"] for envelope in row["in"]["envelopes"]] == ["a"]
    assert [output["job"] for output in row["out"]] == ["a"]
    recorder.forget("a")
    recorder.step(0.8, m.Received((Envelope("d0", 2, Close("a", 1)),)), [])
    assert len(lines) == 1


@pytest.mark.parametrize("kept", [1, 2, 30, -1])
def test_a_recording_that_is_cut_is_not_whole(kept: int) -> None:
    lines = RECORDINGS[0].read_text().splitlines()
    with pytest.raises(ReplayMismatch, match="ends before the job does"):
        replay(lines[:kept])


@pytest.mark.parametrize(
    "line",
    ['{"node": "d0"}', '{"node": ["d0"], "n": 1}', '{"n": 1}', '{"node": "d0", "n": 1, "now": 0, "in": 5, "out": []}'],
)
def test_a_line_that_is_no_step_is_said(line: str) -> None:
    head = RECORDINGS[0].read_text().splitlines()[0]
    with pytest.raises(ReplayMismatch, match=r"no step|cannot be taken"):
        replay([head, line])


def test_a_header_without_limits_is_said() -> None:
    with pytest.raises(ReplayMismatch, match="built from"):
        replay(['{"format": 1, "limits": 5}'])
