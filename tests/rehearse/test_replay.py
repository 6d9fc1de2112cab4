"""Checked-in recordings replay exactly; edited ones are detected; writing is lossless."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.core.drafting import drafter_cache
from flowspec.core.drafting.growth import Growth
from flowspec.core.job.draft_worker import DraftMachine
from flowspec.core.protocol import machine as m
from flowspec.core.protocol.addresses import Address, stage_address
from flowspec.core.protocol.messages import Close, Envelope, Message, Open, Revoke, Submit
from flowspec.core.protocol.work import (
    BlockDone,
    BlockDraft,
    Draft,
    DraftDone,
    DraftPass,
    DraftPassDone,
    LevelProposals,
    Part,
    Pass,
    Pruned,
    WorkFailed,
)
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.run.sampling import Sampling
from flowspec.core.run.spec import JobSpec
from flowspec.core.stage.stage_worker import StageMachine
from flowspec.core.tree.tree import Tree
from flowspec.errors import ReplayMismatch
from flowspec.model.base import RowArray
from flowspec.model.drafters.drafter_choice import ChoiceDrafter
from flowspec.rehearse.replay import header, merge, replay, replay_file
from flowspec.rehearse.simulator import Simulation
from flowspec.roles.record import FORMAT, Recorder, from_json, line_of, to_json
from flowspec.strategies import build
from flowspec.strategies.auto import drafter_bandit
from flowspec.strategies.flowspec import FlowSpec
from tests import make_recordings as recordings
from tests.addresses import D0, S1
from tests.marks import examples
from tests.toy import PROMPT, TARGET, limits, pipeline
from tests.toy_blocks import ToyBlocks
from tests.toy_model import ToyDrafter, ToyStage
from tests.transport.test_codec import MESSAGES

FOLDER = recordings.FOLDER
RECORDINGS = sorted(FOLDER.glob("*.jsonl"))


def test_the_recordings_are_those_that_the_command_makes() -> None:
    assert {file.stem for file in RECORDINGS} == {*recordings.RECORDINGS, recordings.LIVE}
    for name, recipe in recordings.RECORDINGS.items():
        made = "".join(f"{line}\n" for line in recordings.record(recipe))
        assert made == (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8"), name


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: file.stem)
def test_checked_in_recordings_replay(file: Path) -> None:
    """A failure means that the machines' behaviour changed: give the reason in the commit."""
    done = replay_file(file)
    assert done.tokens
    finish = [
        row
        for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())
        if '"Finish"' in json.dumps(row)
    ]
    stats = finish[-1]["out"][0]["stats"]
    assert stats["tokens"] - stats.get("resumed_tokens", 0) == len(done.tokens)


@pytest.mark.parametrize("name", [name for name in recordings.RECORDINGS if "lossy" not in name])
def test_a_recordings_text_is_the_toy_models(name: str) -> None:
    made = recordings.RECORDINGS[name]
    done = replay_file(FOLDER / f"{name}.jsonl")
    known = made.tokens - len(done.tokens)
    assert done.tokens == TARGET.decode(recordings.PROMPT, made.tokens, made.sampling)[known:]
    assert known >= made.lost_after
    assert (known > 0) == (made.lost_after > 0)


def test_recordings_of_shared_passes_have_what_was_granted() -> None:
    for name, made in recordings.RECORDINGS.items():
        granted = (FOLDER / f"{name}.jsonl").read_text().count('"in":{"_":"Granted"')
        assert (granted > 2) == (made.beside > 0), name


def test_flowspec_merges_and_expands_in_its_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: Counter[str] = Counter()
    for name in ("_merge", "_expand"):
        monkeypatch.setattr(FlowSpec, name, counted(getattr(FlowSpec, name), name, sent))
    for name in ("flowspec-2-stages-T0", "flowspec-lockstep-3-stages-T1"):
        sent.clear()
        replay_file(FOLDER / f"{name}.jsonl")
        assert min(sent["_merge"], sent["_expand"]) > 1, name


def counted(make: Callable[..., Growth], name: str, sent: Counter[str]) -> Callable[..., Growth]:
    """``make``, counting the segments of its growths in ``sent``."""

    def making(strategy: FlowSpec, *given: Any) -> Growth:
        growth = make(strategy, *given)
        segments = growth.segments

        def counting(tree: Tree) -> list[list[int]]:
            found = segments(tree)
            sent[name] += len(found)
            return found

        growth.segments = counting  # type: ignore[method-assign]
        return growth

    return making


def test_the_recording_of_auto_has_segments_of_several_sizes() -> None:
    assert len(segment_sizes("auto-2-stages-T0")) > 2


def test_the_recording_of_a_draft_head_gives_it_hidden_rows() -> None:
    text = (FOLDER / "flowspec-head-2-stages-T0.jsonl").read_text()
    learnt = [
        output
        for line in text.splitlines()[1:]
        for output in json.loads(line)["out"]
        if output["_"] == "Learn"
    ]
    assert len(learnt) > 3


def segment_sizes(name: str) -> set[int]:
    """Numbers of rows of the segments that the draft worker sends after the prompt."""
    rows = map(json.loads, (FOLDER / f"{name}.jsonl").read_text().splitlines()[1:])
    messages = (
        output["envelope"]["message"]
        for row in rows
        if row["node"] == "d0"
        for output in row["out"]
        if output["_"] == "Send"
    )
    return {
        len(message["ids"])
        for message in messages
        if message["_"] == "Segment" and message["round"]
    }


def test_replaying_needs_neither_torch_nor_redis() -> None:
    code = (
        "import sys; from pathlib import Path; from flowspec.rehearse.replay import replay_file\n"
        f"replay_file(Path({str(RECORDINGS[0])!r}))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("number", [3, 40, 90])
def test_one_changed_number_is_found(number: int) -> None:
    """The first number in the step's outputs, or in those of the next step that has one."""
    lines = RECORDINGS[0].read_text().splitlines()
    for at in range(number, len(lines)):
        row = json.loads(lines[at])
        text = json.dumps(row["out"])
        found = re.search(r"(?<=[\[ ])\d", text)
        if found is not None:
            break
    assert found is not None
    digit = str((int(found[0]) + 1) % 10)
    row["out"] = json.loads(text[: found.start()] + digit + text[found.end() :])
    with pytest.raises(ReplayMismatch, match=r"step \d+ of (d0|s\d)"):
        replay([*lines[:at], line_of(row), *lines[at + 1 :]])


@given(st.data())
def test_any_other_character_is_found(data: st.DataObject) -> None:
    lines = data.draw(st.sampled_from(RECORDINGS)).read_text().splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    line = lines[at]
    place = data.draw(st.integers(0, len(line) - 1))
    other = data.draw(st.characters(exclude_characters=line[place]))
    edited = line[:place] + other + line[place + 1 :]
    with pytest.raises(ReplayMismatch):
        replay([*lines[:at], edited, *lines[at + 1 :]])
    with pytest.raises(ReplayMismatch):
        merge([*lines[:at], edited, *lines[at + 1 :]])


@given(MESSAGES)
def test_messages_are_written_exactly(message: Message) -> None:
    envelope = Envelope(S1, 3, message)
    assert from_json(json.loads(json.dumps(to_json(envelope)))) == envelope


def test_what_another_version_wrote_is_said() -> None:
    with pytest.raises(ReplayMismatch, match="unknown 'Telepathy'"):
        from_json({"_": "Telepathy"})
    with pytest.raises(ReplayMismatch, match="Close has other fields"):
        from_json({"_": "Close", "run": to_json(RunKey("j", 1)), "colour": "red"})


def test_merging_orders_a_node_by_number_and_takes_each_line_once() -> None:
    head = header(Limits(1, 8, 8, frozenset()))
    steps = [("s1", 2, 1.0), ("d0", 1, 5.0), ("s1", 1, 9.0), ("d0", 2, 6.0), ("s1", 1, 9.0)]
    lines = [line_of({"node": node, "n": n, "now": now}) for node, n, now in steps]
    merged = [json.loads(line) for line in merge([*lines, head])]
    assert "format" in merged[0]
    order = [(row["node"], row["n"]) for row in merged[1:]]
    assert order == [("d0", 1), ("d0", 2), ("s1", 1), ("s1", 2)]


def test_only_runs_that_ask_for_it_are_written_down() -> None:
    lines: list[tuple[RunKey, str]] = []
    recorder = Recorder(S1, lambda run, line: lines.append((run, line)))
    a = RunKey("a", 2)
    others = (RunKey("b", 1), RunKey("a", 1))
    asked = Open(a, 2, 9, Sampling(), record=True)
    silent = tuple(Envelope(D0, 1, Open(run, 2, 9, Sampling())) for run in others)
    released = [m.Release(run) for run in others]
    allocated = m.Allocate(a, 9, Sampling(), asked.returns)
    recorder.step(0.5, m.Received((Envelope(D0, 1, asked), *silent)), [allocated, *released])
    recorder.step(0.6, m.Received((Envelope(D0, 2, Close(others[0])),)), [])
    recorder.step(0.7, m.Poll(), [])
    ((run, line),) = lines
    row = json.loads(line)
    assert (run, row["node"], row["n"], row["now"]) == (a, "s1", 1, 0.5)
    assert [envelope["message"]["run"] for envelope in row["in"]["envelopes"]] == [to_json(a)]
    assert [output["run"] for output in row["out"]] == [to_json(a)]
    recorder.forget(a)
    recorder.step(0.8, m.Received((Envelope(D0, 2, Close(a)),)), [])
    assert len(lines) == 1


@pytest.mark.parametrize(
    "ending",
    [
        Revoke(RunKey("a", 2)),
        Open(RunKey("a", 2), 2, 9, Sampling()),
        Submit(RunKey("a", 2), (("prompt", "secret"),)),
    ],
)
def test_a_message_that_ends_a_run_is_written_down_as_its_end(ending: Message) -> None:
    """Whatever else it says is about the newer run."""
    lines: list[str] = []
    recorder = Recorder(S1, lambda run, line: lines.append(line))
    a = RunKey("a", 1)
    opening = Open(a, 2, 9, Sampling(), record=True)
    recorder.step(0.5, m.Received((Envelope(D0, 1, opening),)), [])
    others = (Envelope(D0, 1, Close(RunKey("b", 1))), Envelope(D0, 2, Close(RunKey("a", 2))))
    recorder.step(0.6, m.Received((*others, Envelope(D0, 1, ending))), [m.Release(a)])
    row = json.loads(lines[-1])
    assert from_json(row["in"]) == m.Received((Envelope(D0, 1, Revoke(RunKey("a", 2))),))
    assert from_json(row["out"]) == (m.Release(a),)


class Learning(ToyDrafter):
    """A drafter that accepts any target rows."""

    wants_hidden = True

    def learn(self, run: RunKey, ids: Sequence[int], rows: RowArray) -> None:
        assert len(rows) == len(ids)


def test_jobs_whose_drafters_take_turns_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of several concurrent jobs, which has all drafters to itself in the replay."""
    monkeypatch.setattr(drafter_bandit, "DECISION_INTERVAL", 6)
    monkeypatch.setattr(drafter_cache, "CATCH_UP_ROWS", 16)
    drafters = ToyDrafter(TARGET, 0.5), Learning(TARGET, 0.6), ToyDrafter(TARGET, 0.7)
    allowed = replace(limits(2, eos=frozenset()), others=(True, False))
    nodes: dict[Address, Any] = {D0: (DraftMachine(allowed, build), ChoiceDrafter(drafters))}
    for stage in (1, 2):
        nodes[stage_address(stage)] = (StageMachine(stage, 2), ToyStage(TARGET, stage, 2))
    lines = defaultdict[str, list[str]](list)

    def emit(run: RunKey, line: str) -> None:
        lines[run.job].append(line)

    def head(address: Address) -> str:
        return header(allowed) if address == D0 else ""

    recorders = {address: Recorder(address, emit, head(address)) for address in nodes}

    def tap(address: Address, now: float, event: m.Input, outputs: list[m.Output]) -> None:
        recorders[address].step(now, event, outputs)

    simulation = Simulation(nodes, tap=tap)
    for at, job in enumerate(("a", "b", "silent")):
        spec = JobSpec(
            prompt_ids=(*PROMPT, 2 + at),
            max_new_tokens=60,
            strategy="auto",
            record=job != "silent",
        )
        simulation.submit(job, spec)
    simulation.run()
    assert lines.keys() == {"a", "b"}
    for job, written in lines.items():
        works = [
            output["work"]
            for line in map(json.loads, written)
            for output in line.get("out", ())
            if "work" in output
        ]
        drafts = [one for work in works for one in work.get("drafts", ())]
        assert {draft["drafter"] for draft in drafts} == {0, 1, 2}
        assert {len(work["drafts"]) for work in works if "drafts" in work} == {1}
        done = replay(merge(written))
        assert done.tokens == tuple(simulation.jobs[job].tokens)
        assert len(done.tokens) == 60


@pytest.mark.parametrize("strategy", ["auto", "flowspec", "specpipe", "autoregressive"])
def test_jobs_that_share_a_pipeline_are_replayed(strategy: str) -> None:
    """What each was granted, and when one behind a barrier began, is among its inputs."""
    allowed = limits(3, eos=frozenset())
    nodes: dict[Address, Any] = {D0: (DraftMachine(allowed, build), ToyDrafter(TARGET, 0.7))}
    for stage in (1, 2, 3):
        nodes[stage_address(stage)] = (StageMachine(stage, 3), ToyStage(TARGET, stage, 3))
    lines = defaultdict[str, list[str]](list)

    def emit(run: RunKey, line: str) -> None:
        lines[run.job].append(line)

    recorders = {
        address: Recorder(address, emit, header(allowed) if address == D0 else "")
        for address in nodes
    }

    def tap(address: Address, now: float, event: m.Input, outputs: list[m.Output]) -> None:
        recorders[address].step(now, event, outputs)

    simulation = Simulation(nodes, tap=tap)
    for at, job in enumerate(("a", "b", "c", "alone")):
        spec = JobSpec(
            prompt_ids=(*PROMPT, 2 + at),
            max_new_tokens=20 + 10 * at,
            strategy="pipedec" if job == "alone" else strategy,
            record=job != "a",
        )
        simulation.submit(job, spec, at=2.0 * at)
    simulation.run()
    assert lines.keys() == {"b", "c", "alone"}
    for job, written in lines.items():
        granted = sum('"in":{"_":"Granted"' in line for line in written)
        assert (granted > 1) == (job != "alone")
        assert replay(merge(written)).tokens == tuple(simulation.jobs[job].tokens)


def test_a_job_of_a_block_drafter_is_replayed() -> None:
    drafter = ToyBlocks(3, 0.7)
    allowed = replace(limits(2, eos=frozenset()), levels=(3,))
    nodes: dict[Address, Any] = {D0: (DraftMachine(allowed, build), drafter)}
    for stage in (1, 2):
        nodes[stage_address(stage)] = (StageMachine(stage, 2), ToyStage(TARGET, stage, 2))
    lines: list[str] = []
    recorders = {
        address: Recorder(
            address, lambda run, line: lines.append(line), header(allowed) if address == D0 else ""
        )
        for address in nodes
    }

    def tap(address: Address, now: float, event: m.Input, outputs: list[m.Output]) -> None:
        recorders[address].step(now, event, outputs)

    simulation = Simulation(nodes, tap=tap)
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=20, strategy="specpipe", record=True)
    simulation.submit("a", spec)
    simulation.run()
    assert sum('"_":"BlockDraft"' in line for line in lines) >= drafter.passes > 0
    assert replay(merge(lines)).tokens == tuple(simulation.jobs["a"].tokens)


def test_work_and_limits_are_written_exactly() -> None:
    run = RunKey("j", 1)
    pruned = Pruned((1, 2), (4, 5))
    part = Part(run, -1, (6, 7), (5, 6), (9, 10), (5, 8), (0, 1), 1, pruned, (1,))
    one = Limits(2, 8, 8, frozenset({1, 3}), hidden=True)
    whole = (
        Draft(replace(part, pruned=None), 4),
        Draft(part, 4, 2, True, 2),
        BlockDraft(part, 4, 2, True, 2, levels=7),
        DraftPassDone(
            (BlockDone(((1,),), ((-0.5,),), below=((LevelProposals((2, 3), (-1.0, -2.0)),),)),)
        ),
        DraftPass((Draft(part, 4), BlockDraft(part, 4, levels=2))),
        m.Done(DraftPassDone((DraftDone(((1,),), ((-0.5,),)), WorkFailed("it is lost")))),
        Pass((part, replace(part, run=RunKey("j", 2)))),
        one,
        replace(one, others=(False, True), levels=(0, 0, 7)),
    )
    for value in whole:
        assert from_json(json.loads(json.dumps(to_json(value)))) == value


@pytest.mark.parametrize("kept", [1, 2, 30, None])
def test_a_recording_that_is_cut_is_not_whole(kept: int | None) -> None:
    """None: before the last step that releases the rows of a worker."""
    lines = RECORDINGS[0].read_text().splitlines()
    if kept is None:
        kept = max(at for at, line in enumerate(lines) if '"Release"' in line)
    with pytest.raises(ReplayMismatch, match="ends before the job does"):
        replay(lines[:kept])


@pytest.mark.parametrize(
    "line",
    [
        {"node": "d0"},
        {"node": ["d0"], "n": 1},
        {"n": 1},
        {"node": "d0", "n": 1, "now": 0, "in": 5, "out": []},
    ],
)
def test_a_line_that_is_no_step_is_said(line: dict[str, object]) -> None:
    with pytest.raises(ReplayMismatch, match=r"no step|cannot be taken"):
        replay([header(limits(2)), line_of(line)])


def test_a_header_without_limits_is_said() -> None:
    with pytest.raises(ReplayMismatch, match="built from"):
        replay([line_of({"format": FORMAT, "limits": 5})])


def test_a_recording_of_another_format_is_said(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    file.write_text(json.dumps({"format": FORMAT - 1, "limits": to_json(limits(2))}))
    with pytest.raises(ReplayMismatch) as raised:
        replay_file(file)
    assert str(raised.value) == (
        f"{file} is a recording of format {FORMAT - 1}; this version replays format {FORMAT}: "
        "record it again"
    )


@pytest.mark.parametrize("lines", [[], ["{}"], ['{"node":"d0"}'], ['{"format":[2]}']])
def test_a_file_that_is_no_recording_is_said(lines: list[str], tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(ReplayMismatch, match=r"other\.jsonl is not a recording of format"):
        replay_file(file)


def refusal(lines: Sequence[str]) -> str:
    """The one line with which a replay of ``lines`` is refused, at once."""
    began = time.thread_time()
    with pytest.raises(ReplayMismatch) as raised:
        replay(lines)
    assert time.thread_time() - began < 2
    said = str(raised.value)
    assert "\n" not in said
    assert len(said) < 400
    return said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("stages", value) for value in ("4", None, 4.5, -1, 0, True, 10**9, 10**30, [4])),
        *(("middles", value) for value in ({}, "1", None, -1, 10**6, 10**30)),
        *(("context", value) for value in (0, "8", None)),
        *(("vocabulary", value) for value in (-1, 1.5)),
        *(("tree_rows", value) for value in (0, 10**30)),
        *(("stall_seconds", value) for value in (0, float("nan"), float("inf"), 10**400, "1")),
        *(("eos", value) for value in ([1], {"_": "frozenset"}, {"_": "frozenset", "of": [[1]]})),
        *(("others", value) for value in ([1], True)),
        ("hidden", 1),
    ],
)
def test_a_damaged_header_is_said(field: str, value: object) -> None:
    head = json.loads(header(limits(2)))
    head["limits"][field] = value
    said = refusal([line_of(head)])
    assert field in said or "frozenset" in said


CUT = ["[" * 100_000, '{"a":' * 100_000, "[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500]


@pytest.mark.parametrize("line", CUT, ids=["lists", "objects", "closed lists", "closed objects"])
def test_a_line_nested_deeply_is_said(line: str) -> None:
    assert "line 2 of the recording" in refusal([header(limits(2)), line])
    assert "line 1 of the recording" in refusal([line])


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"_": "frozenset"}, "damaged frozenset"),
        ({"_": "frozenset", "of": ["a"]}, "damaged frozenset"),
        ({"_": "Address", "of": ["d0"]}, "damaged Address"),
        ({"_": {"a": 1}}, "unknown {'a': 1}"),
        ({"_": None}, "unknown None"),
        ({"_": "Sampling", "temperature": -1}, "Sampling is damaged: temperature is -1"),
        ({"_": "Close", "run": {"_": "RunKey", "job": "a"}}, "RunKey has other fields"),
        ({"_": "Close", "run": 5}, "Close.run is 5; expected RunKey"),
        ({"_": "Poll"}, "Envelope.message is Poll()"),
        (
            {"_": "Revoke", "run": {"_": "RunKey", "job": "a", "epoch": 10**30}},
            "RunKey.epoch is 1000",
        ),
    ],
)
def test_a_damaged_message_is_said(message: dict[str, object], says: str) -> None:
    envelope = {"_": "Envelope", "sender": to_json(D0), "seq": 1, "message": message}
    received = {"_": "Received", "envelopes": [envelope]}
    line = line_of({"node": "s1", "n": 1, "now": 0, "in": received, "out": []})
    said = refusal([header(limits(2)), line])
    assert said.startswith("step 1 of s1 cannot be taken: ")
    assert says in said


@pytest.mark.parametrize("value", [10**30, -(10**30), 1.5, True, None, "7"])
def test_a_damaged_token_is_said(value: object) -> None:
    lines = RECORDINGS[0].read_text().splitlines()
    at = next(at for at, line in enumerate(lines) if '"EncodeDone"' in line)
    row = json.loads(lines[at])
    row["in"]["result"]["ids"][0] = value
    said = refusal([*lines[:at], line_of(row), *lines[at + 1 :]])
    assert "EncodeDone.ids" in said


def test_an_error_inside_a_machine_names_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(machine: StageMachine, event: m.Input, now: float) -> list[m.Output]:
        raise OverflowError("too large\nfor an index")

    monkeypatch.setattr(StageMachine, "step", fail)
    line = {"node": "s1", "n": 1, "now": 0, "in": to_json(m.Poll()), "out": []}
    said = refusal([header(limits(2)), line_of(line)])
    assert said == (
        "step 1 of s1 cannot be taken: its input is damaged (OverflowError: too large for an index)"
    )


@pytest.mark.parametrize(
    "place", [{"n": True}, {"n": 1.0}, {"now": float("nan")}, {"now": 10**400}, {"now": True}]
)
def test_a_step_without_a_number_or_a_time_is_said(place: dict[str, object]) -> None:
    line = {"node": "s1", "n": 1, "now": 0, "in": to_json(m.Poll()), "out": [], **place}
    assert "no step" in refusal([header(limits(2)), line_of(line)])


JUNK = st.one_of(
    st.sampled_from([None, True, "", "4", -1, 0, 4.5, 10**9, 10**30, [], {}, {"_": "frozenset"}]),
    st.floats(),
    st.integers(-10, 10),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["_", "of", "run", "a"]), inner, max_size=3)
        ),
        max_leaves=5,
    ),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in ``value`` with each of its keys."""
    for key in value.keys() if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def damaged(line: str, data: st.DataObject) -> str:
    """``line`` with one value replaced, deleted or inserted."""
    row = json.loads(line)
    found = list(places(row))
    holder, key = found[data.draw(st.integers(0, len(found) - 1), "place")]
    match data.draw(st.sampled_from(["replace", "delete", "insert"]), "how"):
        case "replace":
            holder[key] = data.draw(JUNK, "value")
        case "delete":
            del holder[key]
        case _ if isinstance(holder, list):
            holder.insert(key, data.draw(JUNK, "value"))
        case _:
            holder[data.draw(st.sampled_from(["_", "of", "more"]), "key")] = data.draw(JUNK)
    return json.dumps(row)


@pytest.fixture(scope="module")
def small() -> list[str]:
    """A recording of a few tokens on two stages."""
    allowed = limits(2, eos=frozenset())
    nodes: dict[Address, Any] = {D0: (DraftMachine(allowed, build), ToyDrafter(TARGET, 0.7))}
    for stage in (1, 2):
        nodes[stage_address(stage)] = (StageMachine(stage, 2), ToyStage(TARGET, stage, 2))
    lines: list[str] = []
    recorders = {
        address: Recorder(
            address, lambda _, line: lines.append(line), header(allowed) if address == D0 else ""
        )
        for address in nodes
    }
    simulation = Simulation(nodes, tap=lambda address, *step: recorders[address].step(*step))
    spec = JobSpec(prompt_ids=PROMPT, max_new_tokens=6, record=True)
    simulation.submit("a", spec)
    simulation.run()
    merged = merge(lines)
    assert len(replay(merged).tokens) == 6
    return merged


@settings(max_examples=examples(100))
@given(data=st.data())
def test_a_damaged_recording_is_replayed_or_refused(small: list[str], data: st.DataObject) -> None:
    """One line of it is damaged, deleted or repeated elsewhere. No other error is raised."""
    at = data.draw(st.just(0) | st.integers(0, len(small) - 1), "line")
    lines = list(small)
    match data.draw(st.sampled_from(["damage", "damage", "delete", "insert", "cut"]), "what"):
        case "damage":
            lines[at] = damaged(lines[at], data)
        case "delete":
            del lines[at]
        case "insert":
            lines.insert(data.draw(st.integers(0, len(small)), "to"), lines[at])
        case _:
            lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at])), "length")]
    try:
        replay(lines)
    except ReplayMismatch as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 500


@pytest.mark.parametrize("strategy", ["flowspec", "auto", "autoregressive"])
def test_a_run_that_shared_its_passes_is_replayed_alone(strategy: str) -> None:
    """A recording holds a run's own part of every pass, as the machines see it alone."""
    lines: dict[RunKey, list[str]] = defaultdict(list)
    recorders = {
        address: Recorder(
            address, lambda run, line: lines[run].append(line), header(limits(2)) if head else ""
        )
        for address, head in ((D0, True), (stage_address(1), False), (stage_address(2), False))
    }
    shared = Counter[int]()
    drafted = Counter[int]()

    def tap(node: Address, now: float, event: m.Input, outputs: list[m.Output]) -> None:
        recorders[node].step(now, event, outputs)
        works = [output.work for output in outputs if isinstance(output, m.Compute)]
        shared.update(len(work.parts) for work in works if isinstance(work, Pass))
        drafted.update(len(work.drafts) for work in works if isinstance(work, DraftPass))

    simulation = pipeline(2, tap=tap)
    prompts = {f"j{at}": tuple(PROMPT[at:]) for at in range(3)}
    for job, prompt in prompts.items():
        spec = JobSpec(prompt_ids=prompt, max_new_tokens=30, strategy=strategy, record=True)
        simulation.submit(job, spec)
    simulation.run()
    assert shared[2] + shared[3] > 3
    assert strategy == "autoregressive" or drafted[3] > 3
    for job, prompt in prompts.items():
        done = replay(merge(lines[RunKey(job, 1)]))
        assert done.tokens == TARGET.decode(prompt, 30, Sampling())
