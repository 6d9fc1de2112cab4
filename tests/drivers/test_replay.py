"""Recordings that are checked in replay exactly; edited ones are found out; the written form is
exact.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from flowspec.core.drafting import drafter_cache
from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol import machine as m
from flowspec.core.protocol.messages import (
    SCHEDULER,
    Close,
    Envelope,
    Message,
    Open,
    Submit,
    stage_node,
)
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.drivers.record import Recorder, from_json, to_json
from flowspec.drivers.replay import header, merge, replay, replay_file
from flowspec.drivers.sim import Simulation
from flowspec.errors import ReplayMismatch
from flowspec.model.base import RowArray
from flowspec.model.choice import ChoiceDrafter
from flowspec.model.toy import ToyDrafter, ToyStage
from flowspec.strategies import build
from flowspec.strategies.auto import drafter_bandit
from tests.broker.test_codec import MESSAGES
from tests.toy import PROMPT, TARGET, limits

RECORDINGS = sorted((Path(__file__).parent.parent / "recordings").glob("*.jsonl"))


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) >= 2


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: file.stem)
def test_checked_in_recordings_replay(file: Path) -> None:
    """A change that makes one of these fail changes what the machines do: say why in its commit."""
    done = replay_file(file)
    assert done.tokens
    finish = [
        row
        for row in map(json.loads, file.read_text().splitlines())
        if '"Finish"' in json.dumps(row)
    ]
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
    at = next(
        at for at, character in enumerate(text) if character.isdigit() and text[at - 1] in "[ "
    )
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
    lines = [
        json.dumps({"node": node, "n": n, "now": now})
        for node, n, now in [
            ("s1", 2, 1.0),
            ("d0", 1, 5.0),
            ("s1", 1, 9.0),
            ("d0", 2, 6.0),
            ("s1", 1, 9.0),
        ]
    ]
    merged = [json.loads(line) for line in merge([*lines, head])]
    assert "format" in merged[0]
    assert [(row["node"], row["n"]) for row in merged[1:]] == [
        ("d0", 1),
        ("d0", 2),
        ("s1", 1),
        ("s1", 2),
    ]


def test_only_jobs_that_asked_are_written_down() -> None:
    lines: list[tuple[str, str]] = []
    recorder = Recorder("s1", lambda job, line: lines.append((job, line)))
    asked = Open("a", 1, 2, 9, Sampling(), record=True)
    silent = Open("b", 1, 2, 9, Sampling())
    both = (Envelope("d0", 1, asked), Envelope("d0", 1, silent))
    recorder.step(
        0.5, m.Received(both), [m.Allocate("a", 1, 9, Sampling(), asked.returns), m.Release("b")]
    )
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


class Learning(ToyDrafter):
    """A drafter that takes the target's rows, whatever they say."""

    wants_hidden = True

    def learn(self, job: str, ids: Sequence[int], rows: RowArray) -> None:
        assert len(rows) == len(ids)


def test_jobs_whose_drafters_take_turns_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of several at once, which has every drafter to itself in the replay."""
    monkeypatch.setattr(drafter_bandit, "DECISION_INTERVAL", 6)
    monkeypatch.setattr(drafter_cache, "CATCH_UP_ROWS", 16)
    drafters = ToyDrafter(TARGET, 0.5), Learning(TARGET, 0.6), ToyDrafter(TARGET, 0.7)
    allowed = replace(limits(2, eos=frozenset()), others=(True, False))
    nodes: dict[str, Any] = {"d0": (DraftMachine(allowed, build), ChoiceDrafter(drafters))}
    nodes |= {
        stage_node(stage): (StageMachine(stage, 2), ToyStage(TARGET, stage, 2)) for stage in (1, 2)
    }
    lines = defaultdict[str, list[str]](list)
    recorders = {
        node: Recorder(
            node, lambda job, line: lines[job].append(line), header(allowed) if node == "d0" else ""
        )
        for node in nodes
    }
    simulation = Simulation(
        nodes, tap=lambda node, now, event, outputs: recorders[node].step(now, event, outputs)
    )
    for at, job in enumerate(("a", "b", "silent")):
        prompt = (*PROMPT, 2 + at)
        fields = JobSpec(
            prompt_ids=prompt, max_new_tokens=60, strategy="auto", record=job != "silent"
        ).fields()
        simulation.post("d0", Envelope(SCHEDULER, at + 1, Submit(job, 1, tuple(fields.items()))))
    simulation.run()
    assert lines.keys() == {"a", "b"}
    for job, written in lines.items():
        works = [
            output["work"]
            for line in map(json.loads, written)
            for output in line.get("out", ())
            if "work" in output
        ]
        assert {work.get("drafter", 0) for work in works if work["_"] == "Draft"} == {0, 1, 2}
        done = replay(merge(written))
        assert done.tokens == tuple(simulation.jobs[job].tokens)
        assert len(done.tokens) == 60


def test_what_says_nothing_is_left_out_as_it_was_before_it_could_be_said() -> None:
    part = m.Part("j", 1, -1, (0,), (0,), (5,), (), 0, 0, None, (-1,), (0,))
    one = Limits(2, 8, 8, frozenset(), hidden=True)
    for plain, told, field in (
        (m.Draft(part, 4), m.Draft(part, 4, drafter=2), "drafter"),
        (one, replace(one, others=(False, True)), "others"),
    ):
        assert field not in to_json(plain)
        assert from_json(json.loads(json.dumps(to_json(plain)))) == plain
        assert from_json(json.loads(json.dumps(to_json(told)))) == told


@pytest.mark.parametrize("kept", [1, 2, 30, -1])
def test_a_recording_that_is_cut_is_not_whole(kept: int) -> None:
    lines = RECORDINGS[0].read_text().splitlines()
    with pytest.raises(ReplayMismatch, match="ends before the job does"):
        replay(lines[:kept])


@pytest.mark.parametrize(
    "line",
    [
        '{"node": "d0"}',
        '{"node": ["d0"], "n": 1}',
        '{"n": 1}',
        '{"node": "d0", "n": 1, "now": 0, "in": 5, "out": []}',
    ],
)
def test_a_line_that_is_no_step_is_said(line: str) -> None:
    head = RECORDINGS[0].read_text().splitlines()[0]
    with pytest.raises(ReplayMismatch, match=r"no step|cannot be taken"):
        replay([head, line])


def test_a_header_without_limits_is_said() -> None:
    with pytest.raises(ReplayMismatch, match="built from"):
        replay(['{"format": 1, "limits": 5}'])
