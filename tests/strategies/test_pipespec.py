"""PipeSpec's chain of models as a readable script, and its synchronous variant."""

from __future__ import annotations

import itertools

import pytest

from flowspec.core.drafting import drafting
from flowspec.core.protocol.addresses import Address
from flowspec.core.protocol.machine import Commit, Compute, Input, Output
from flowspec.core.protocol.work import DraftPass, Pass
from flowspec.core.run.sampling import Sampling
from flowspec.errors import ConfigError
from flowspec.rehearse.simulator import Costs
from flowspec.strategies import build
from tests.addresses import D0, M1, S1
from tests.marks import crossed
from tests.strategies.scripted import ScriptedMiddle, pipeline
from tests.toy import PROMPT, TARGET, generate

TEXT = [1, 2, *range(3, 16)]
#: The drafter counts correctly, but proposes 80 after 8 and then 81, 82.
SCRIPT = {token: [(token + 1, -0.1)] for token in range(3, 40)} | {
    8: [(80, -0.1)],
    80: [(81, -0.1)],
    81: [(82, -0.1)],
    82: [(83, -0.1)],
}
#: The middle model chooses 90 after 12.
OWN = [1, 2, *range(3, 13), 90, 91, 92, 93, 94]
NAMES = {D0: "small", M1: "middle", S1: "target"}
SECONDS = {D0: 1.0, M1: 2.0, S1: 4.0}


def script(strategy: str, until: float) -> list[str]:
    """Work and commits by time: a drafter's last token, the other models' input tokens."""
    lines: list[str] = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Compute) and isinstance(output.work, DraftPass):
                (draft,) = output.work.drafts
                lines.append(f"{now:g} small drafts after {draft.part.tokens[-1]}")
            elif isinstance(output, Compute):
                given = " ".join(map(str, output.work.parts[0].tokens))  # type: ignore[union-attr]
                lines.append(f"{now:g} {NAMES[node]} verifies {given}")
            elif isinstance(output, Commit):
                lines.append(f"{now:g} committed {' '.join(map(str, output.tokens))}")

    costs = Costs(lambda node, work: SECONDS[node])
    pipeline(
        strategy,
        TEXT,
        SCRIPT,
        stages=1,
        middles=[lambda: ScriptedMiddle({"j": OWN})],
        costs=costs,
        tap=tap,
    )
    return [line for line in lines if 4 <= float(line.split()[0]) <= until]


def test_a_chain_of_three_models() -> None:
    assert script("pipespec", 24) == [
        "4 committed 3",
        "4 target verifies 3",
        "4 small drafts after 3",
        "4 middle verifies 3",
        "5 small drafts after 4",
        "6 small drafts after 5",
        # The middle model's own choice after 3 was 4, as the small one's: it continues with 4 5.
        "6 middle verifies 4 5",
        "7 small drafts after 6",
        "8 small drafts after 7",
        "8 committed 4",
        "8 target verifies 4",
        "8 middle verifies 6 7",
        "9 small drafts after 8",
        "10 small drafts after 80",
        "10 middle verifies 8 80",
        "11 small drafts after 81",
        "12 small drafts after 82",
        # The target takes the middle model's text so far.
        "12 committed 5",
        "12 target verifies 5 6 7 8",
        # 80 was wrong: the middle model continues with its own 9, the small one adopts it and
        # falls behind.
        "12 middle verifies 9",
        "13 small drafts after 9",
        "14 small drafts after 10",
        "14 middle verifies 10",
        "15 small drafts after 11",
        "16 small drafts after 12",
        "16 committed 6 7 8 9",
        "16 target verifies 9 10",
        "16 middle verifies 11 12",
        "17 small drafts after 13",
        "18 small drafts after 14",
        # The middle model diverges from the target's text, and the small one follows it.
        "18 middle verifies 90",
        "19 small drafts after 90",
        "20 small drafts after 99",
        "20 committed 10 11",
        "20 target verifies 11 12 90",
        "20 middle verifies 91",
        "21 small drafts after 91",
        "22 small drafts after 99",
        "22 middle verifies 92",
        "23 small drafts after 92",
        "24 small drafts after 99",
        # Rolled back by the target: both adopt 13, and the small one's drafts after it are kept.
        "24 committed 12 13",
        "24 target verifies 13",
        "24 middle verifies 13 14 15",
    ]


def two_models(strategy: str, until: float) -> list[str]:
    """As ``script``, without the middle model."""
    lines: list[str] = []

    def tap(node: Address, now: float, event: Input, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Compute) and isinstance(output.work, Pass):
                given = " ".join(map(str, output.work.parts[0].tokens))
                lines.append(f"{now:g} target verifies {given}")
            elif isinstance(output, Commit):
                lines.append(f"{now:g} committed {' '.join(map(str, output.tokens))}")

    costs = Costs(lambda node, work: SECONDS[node])
    pipeline(strategy, TEXT, SCRIPT, stages=1, costs=costs, tap=tap)
    return [line for line in lines if 4 <= float(line.split()[0]) <= until]


def test_a_target_that_looks_ahead_waits_for_the_draft() -> None:
    assert two_models("pipespec", 17) == [
        "4 committed 3",
        "4 target verifies 3",
        "8 committed 4",
        "8 target verifies 4 5 6 7",
        "12 committed 5 6 7 8",
        "12 target verifies 8 80 81 82",
        "16 committed 9",
        "16 target verifies 9",
    ]
    assert two_models("pipespec:lookahead=4", 19) == [
        "4 committed 3",
        # The drafts 4, 5 and 6 take three seconds.
        "7 target verifies 3 4 5 6",
        "11 committed 4 5 6 7",
        # 7, 8, 80 and 81 were drafted meanwhile: three are ahead of the new root.
        "11 target verifies 7 8 80 81",
        "15 committed 8 9",
        # A draft of the rejected branch is under way until 16; then three more.
        "19 target verifies 9 10 11 12",
    ]


def test_the_target_waits_for_the_last_middle_model() -> None:
    """Two tokens ahead: each of the models by that of the one before it."""
    lines = [line for line in script("pipespec:lookahead=3", 16) if "small" not in line]
    assert lines == [
        "4 committed 3",
        "6 middle verifies 3 4 5",
        "8 target verifies 3 4 5 6",
        # Its text ends with a 6 of its own; the draft is at 8 only now.
        "9 middle verifies 6 7 8",
        "12 committed 4 5 6 7",
        "12 target verifies 7 8 9",
        # It rejected 80 for 9 at 11.
        "14 middle verifies 9 10 11",
        "16 committed 8 9 10",
        "16 target verifies 10 11 12",
    ]


def test_a_synchronous_window_ends_where_the_drafter_is_unsure() -> None:
    """Each draft has the probability 0.905: two in a row have 0.819, three 0.741."""
    assert two_models("speculative:lookahead=6,confidence=85", 12) == [
        "4 committed 3",
        # The second draft is below, and verified; a third takes another second.
        "6 target verifies 3 4 5",
        "10 committed 4 5 6",
        "12 target verifies 6 7 8",
    ]
    assert two_models("speculative:lookahead=6,confidence=75", 14) == [
        "4 committed 3",
        "7 target verifies 3 4 5 6",
        "11 committed 4 5 6 7",
        "14 target verifies 7 8 80 81",
    ]
    assert two_models("speculative:lookahead=6,confidence=95", 10) == [
        "4 committed 3",
        "5 target verifies 3 4",
        "9 committed 4 5",
        "10 target verifies 5 6",
    ]


@pytest.mark.parametrize("middles", [0, 1, 2])
def test_nobody_waits_for_a_drafter_that_proposes_nothing(middles: int) -> None:
    text = {"j": TEXT}
    pipeline(
        "pipespec:lookahead=4",
        TEXT,
        {token: [] for token in range(100)},
        stages=1,
        middles=[lambda: ScriptedMiddle(text)] * middles,
    )


def test_nobody_waits_for_a_drafter_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts keep their rows until the target's next verdict."""
    monkeypatch.setattr(drafting, "DRAFT_TREE_ROWS", 40)
    record = generate("pipespec:window=64,lookahead=32", 2, hit_rate=0.0, middles=(0.9,), count=40)
    assert record.finish is not None
    assert record.finish.error == ""
    assert tuple(record.tokens) == TARGET.decode(PROMPT, 40, Sampling())


def test_the_synchronous_chain_runs_one_model_at_a_time() -> None:
    lines = script("speculative:lookahead=4", 30)
    assert lines == [
        "4 committed 3",
        "4 small drafts after 3",
        "5 small drafts after 4",
        "6 small drafts after 5",
        "7 middle verifies 3 4 5 6",
        "9 target verifies 3 4 5 6 7",
        "13 committed 4 5 6 7 8",
        "13 small drafts after 8",
        "14 small drafts after 80",
        "15 small drafts after 81",
        # The middle model rejects 80, chooses 9 and drafts alone until the window is full. It had
        # not run 7 yet.
        "16 middle verifies 7 8 80 81 82",
        "18 middle verifies 9",
        "20 middle verifies 10",
        "22 target verifies 8 9 10 11",
        "26 committed 9 10 11 12",
        "26 small drafts after 12",
        "27 small drafts after 13",
        "28 small drafts after 14",
        "29 middle verifies 11 12 13 14 15",
    ]
    starts = [float(line.split()[0]) for line in lines if "verifies" in line or "drafts" in line]
    assert all(a < b for a, b in itertools.pairwise(starts)), "never two at once"


@pytest.mark.parametrize(
    ("strategy", "middles", "sampling"),
    crossed(
        [
            "pipespec:window=30",
            "pipespec:window=5,lookahead=4",
            "pipespec:window=8,lookahead=8",
            "pipespec:window=2,lookahead=2",
            "speculative",
        ],
        [(), (0.0,), (0.8,), (1.0,), (0.9, 0.5, 0.7)],
        [Sampling(), Sampling(temperature=1.0, seed=4)],
    ),
)
def test_any_chain_gives_the_targets_text(
    strategy: str, middles: tuple[float, ...], sampling: Sampling
) -> None:
    record = generate(strategy, 2, hit_rate=0.6, middles=middles, sampling=sampling, count=32)
    assert record.finish is not None
    assert record.finish.error == ""
    assert tuple(record.tokens) == TARGET.decode(PROMPT, 32, sampling)


def test_a_better_middle_model_needs_fewer_steps() -> None:
    def steps(*middles: float) -> float:
        record = generate("pipespec:window=20", 2, hit_rate=0.5, middles=middles, count=40)
        assert record.finish is not None
        found = record.finish.stats["steps"]
        assert isinstance(found, float)
        return found

    assert steps(1.0) < steps(0.8) < steps(0.0)


def test_other_strategies_leave_the_middle_models_alone() -> None:
    plain, with_middle = (generate("flowspec", 3, middles=middles) for middles in ((), (0.9,)))
    assert plain.committed_at == with_middle.committed_at


def test_a_middle_model_that_is_late_with_the_prompt_is_waited_for() -> None:
    """The target's first token may arrive before a slow middle model has read the prompt."""
    costs = Costs(lambda node, work: {D0: 0.2, M1: 7.0}.get(node, 1.0))
    for strategy in ("pipespec:window=8", "speculative"):
        record = generate(strategy, 2, middles=(0.8,), costs=costs, count=24)
        assert record.finish is not None
        assert record.finish.error == ""
        assert tuple(record.tokens) == TARGET.decode(PROMPT, 24, Sampling())


def test_a_lookahead_beyond_the_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="lookahead is 9; expected at most the window, 8"):
        build("pipespec:window=8,lookahead=9", 2)


def test_a_slow_drafter_is_no_lost_message() -> None:
    """Sixty-three passes of two seconds exceed the stall timeout of a silent pipeline."""
    costs = Costs(lambda node, work: 2.0 if node == D0 else 1.0)
    record = generate("speculative:lookahead=64", 2, costs=costs, count=8)
    assert record.finish is not None
    assert record.finish.error == ""
