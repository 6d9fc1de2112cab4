"""Every profile's arithmetic gives its published figures; the error for a broken file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.core.protocol.addresses import DRAFT, Address, stage_address
from flowspec.core.protocol.messages import Answer, Envelope, Segment
from flowspec.core.run.key import RunKey
from flowspec.errors import ConfigError
from flowspec.rehearse.devices.profile import Profile
from flowspec.rehearse.devices.profiles import load, names
from flowspec.rehearse.devices.way import NO_BROKER, Way
from flowspec.strategies.expected_tbt import expected_tbt
from ops.bench.closed_forms import speculative_tokens

MS = 1e3
PROFILES = [load(name) for name in names()]
ANCHORS = [(profile.name, anchor) for profile in PROFILES for anchor in profile.anchors]


def hop(profile: Profile, to: Address, rows: int) -> float:
    """Seconds of a hop of a segment of ``rows`` rows; to d0, of its answers with hidden rows."""
    ids = tuple(range(rows))
    first = stage_address(1)
    run = RunKey("j", 1)
    if to == DRAFT:
        message = Envelope(first, 1, Answer(run, 1, ids, ids))
    else:
        tokens = ids if to == first else ()
        message = Envelope(first, 1, Segment(run, 1, 1, ids, ids, ids, tokens))
    return profile.transfer_seconds(to, message, hidden=True) + profile.link.latency


def steps(profile: Profile, stages: int, rows: int) -> list[float]:
    """Seconds per stage over ``rows`` rows with the hop to it, and in the last the answer's hop."""
    found = [
        profile.stage_seconds(stage, stages, rows) + hop(profile, stage_address(stage), rows)
        for stage in range(1, stages + 1)
    ]
    found[-1] += hop(profile, DRAFT, rows)
    return found


def autoregressive(profile: Profile, stages: int) -> float:
    return sum(steps(profile, stages, 1)) * MS


def naive_pp(profile: Profile) -> float:
    """Tokens per second, prefill included (docs/algorithms.md#closed-forms).

    EAGLE-2 rounds of 7 draft passes and N + 1 segments of 16 rows; prompts in chunks of at most 60.
    """
    stages = profile.stages[0]
    anchors = profile.anchors
    slowest = max(profile.stage_seconds(stage, stages, 16) for stage in range(1, stages + 1))
    round_seconds = (
        7 * profile.draft_seconds("head", 10) + sum(steps(profile, stages, 16)) + stages * slowest
    )
    prompt = anchors["naive_pp_prompt_tokens"]
    output = anchors["naive_pp_output_tokens"]
    chunks = -(-int(prompt) // 60)
    prefill = steps(profile, stages, int(prompt) // chunks)
    whole = (
        sum(prefill)
        + (chunks - 1) * max(prefill)
        + output / anchors["naive_pp_tokens_per_round"] * round_seconds
    )
    return output / whole


def level(profile: Profile, stages: int) -> float:
    """SpecPipe's expected ms per token at ``level_rows`` rows (docs/algorithms.md#width)."""
    rows = int(profile.anchors["level_rows"])
    times = [max(step, profile.draft_seconds("slm", rows)) for step in steps(profile, stages, rows)]
    return expected_tbt(times, profile.anchors["hit_rate"]) * MS


def verify(profile: Profile, rows: int) -> float:
    return sum(steps(profile, profile.stages[0], rows)) * MS


def synchronous(profile: Profile, draft: float, acceptance: float) -> float:
    """PipeSpec's ms per token, drafting and verifying in turn (docs/algorithms.md#speculative)."""
    drafts = int(profile.anchors["sync_drafts"])
    return (drafts * draft + verify(profile, drafts + 1)) / speculative_tokens(acceptance, drafts)


FORMULAS: dict[str, Callable[[Profile], float]] = {
    "autoregressive_ms_1_stage": lambda profile: autoregressive(profile, 1),
    "autoregressive_ms_4_stages": lambda profile: autoregressive(profile, 4),
    "autoregressive_ms_8_stages": lambda profile: autoregressive(profile, 8),
    "naive_pp_tokens_per_second": naive_pp,
    "draft_ms": lambda profile: profile.draft_seconds("slm", 1) * MS,
    "middle_ms": lambda profile: profile.middles[0].at(1) * MS,
    "specpipe_ms_8_stages": lambda profile: level(profile, 8),
    "pipedec_14_over_7_stages": lambda profile: level(profile, 7) / level(profile, 14),
    "verify_ms_10_rows": lambda profile: verify(profile, 10),
    "async_middle_ms": lambda profile: (
        verify(profile, 10) / profile.anchors["async_middle_tokens_per_step"]
    ),
    "sync_middle_ms": lambda profile: synchronous(
        profile, profile.middles[0].at(1) * MS, profile.anchors["sync_middle_acceptance"]
    ),
    "sync_draft_ms": lambda profile: synchronous(
        profile, profile.draft_seconds("slm", 1) * MS, profile.anchors["sync_draft_acceptance"]
    ),
    "last_stage_ms": lambda profile: (
        (profile.anchors["last_stage_layers"] * profile.layer.at(1) + profile.head.at(1)) * MS
    ),
}
#: The formulas' inputs beside a profile's times: shares and counts.
GIVEN = {
    "naive_pp_tokens_per_round",
    "naive_pp_prompt_tokens",
    "naive_pp_output_tokens",
    "level_rows",
    "hit_rate",
    "async_middle_tokens_per_step",
    "sync_middle_acceptance",
    "sync_draft_acceptance",
    "sync_drafts",
    "last_stage_layers",
}
#: A measured profile's parts and whole are medians of different passes.
NOISE = {"last_stage_ms": 0.1}


@pytest.mark.parametrize(("name", "anchor"), [pair for pair in ANCHORS if pair[1] not in GIVEN])
def test_a_profile_gives_its_published_figures(name: str, anchor: str) -> None:
    profile = load(name)
    assert FORMULAS[anchor](profile) == pytest.approx(
        profile.anchors[anchor], rel=NOISE.get(anchor, 0.03)
    )


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_a_profile_is_anchored_or_says_that_it_is_assumed(profile: Profile) -> None:
    assert set(profile.anchors) - GIVEN or "assumed" in profile.source
    assert {"slm", "head", "ngram"} <= set(profile.drafters)
    assert profile.summary and profile.stages


def test_the_machines_of_the_papers_are_all_there() -> None:
    assert set(names()) >= {
        "jetson-7b",
        "jetson-13b-w4",
        "rtx3090-70b",
        "a100-70b",
        "a100-7b",
        "a100-13b",
        "wan-25ms",
        "wan-50ms",
        "wan-100ms",
        "laptop-cpu",
    }
    assert set(load("rtx3090-70b").stages) == {7, 8, 14, 21}
    assert load("jetson-13b-w4").stages == (4,)


def test_layers_are_split_as_the_papers_split_them() -> None:
    # PipeDec's 14 GPUs: at most 6 layers, 4 beside the head; its pairs of GPUs: 12
    # (docs/algorithms.md#closed-forms).
    profile = load("rtx3090-70b")
    assert profile.stage_layers(14, 14) == 4
    assert max(profile.stage_layers(stage, 14) for stage in range(1, 15)) == 6
    assert max(profile.stage_layers(stage, 7) for stage in range(1, 8)) == 12
    # FlowSpec's Jetsons.
    assert [load("jetson-7b").stage_layers(stage, 4) for stage in range(1, 5)] == [8, 8, 8, 8]
    assert [load("jetson-13b-w4").stage_layers(stage, 4) for stage in range(1, 5)] == [
        10,
        10,
        10,
        10,
    ]


@pytest.mark.parametrize("milliseconds", [25, 50, 100])
def test_a_wan_profile_is_its_base_on_other_links(milliseconds: int) -> None:
    base = load("jetson-7b")
    far = load(f"wan-{milliseconds}ms")
    assert far.link.latency == milliseconds / 1e3
    assert far.link.bandwidth < base.link.bandwidth
    assert (far.layer, far.head, far.drafters, far.hidden) == (
        base.layer,
        base.head,
        base.drafters,
        base.hidden,
    )
    assert not far.anchors


def test_a_flat_kernel_takes_little_longer_for_16_rows_than_for_one() -> None:
    flat = load("jetson-13b-flat4")
    assert flat.layer.at(16) < 1.1 * flat.layer.at(1)
    assert flat.layer.at(1) < load("jetson-13b-w4").layer.at(1)
    assert flat.link == load("jetson-13b-w4").link


def test_behind_launches_a_flat_kernel_takes_as_long_for_64_rows_as_for_one() -> None:
    base = load("a100-70b")
    flat = load("a100-70b-flat4")
    assert flat.layer.at(64) == flat.layer.at(1) == base.layer.at(1)
    weights, row = 441.2e6 / (0.8 * 1555e9), 2 * 855.6e6 / 200e12
    for rows in (1, 16, 64, 128, 136, 192, 512, 1024):
        computed = max(base.layer.at(1), weights + rows * row)
        assert flat.layer.at(rows) == pytest.approx(computed, rel=0.01)
        assert flat.layer.at(rows) <= base.layer.at(rows)
    assert (flat.link, flat.head, flat.drafters, flat.middles) == (
        base.link,
        base.head,
        base.drafters,
        base.middles,
    )


def test_mixed_boxes_have_as_many_layers_and_different_times() -> None:
    mixed = load("mixed-7b")
    assert [mixed.stage_layers(stage, 4) for stage in range(1, 5)] == [8] * 4
    times = [mixed.stage_seconds(stage, 4, 1) * MS for stage in range(1, 5)]
    assert times == pytest.approx([64.8, 43.2, 64.8, 23.35], abs=0.1)
    balanced = replace(mixed, even_split=False)
    slowest = max(balanced.stage_seconds(stage, 4, 1) for stage in range(1, 5)) * MS
    assert slowest < 0.7 * max(times)


def test_a_file_of_ones_own_can_build_on_a_profile(tmp_path: Path) -> None:
    own = tmp_path / "mine.toml"
    own.write_text(
        'base = "jetson-7b"\nsummary = "mine"\nsource = "assumed"\n'
        "[link]\nlatency_ms = 1\nmbit = 8\n"
    )
    profile = load(str(own))
    assert (profile.name, profile.link.latency, profile.link.bandwidth) == ("mine", 1e-3, 1e6)
    assert profile.layer == load("jetson-7b").layer


VALID = (
    'summary = "s"\nsource = "s"\nstages = [2]\n'
    "[target]\nlayers = 4\nhidden = 8\nvalue_bytes = 2\nlayer_ms = {1 = 1.0}\nhead_ms = {1 = 1.0}\n"
    "[drafters]\nslm = {1 = 1.0}\n[link]\nlatency_ms = 1\nmbit = 8\n"
)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("layers = 4", "layer = 4", "unknown entry 'layer'"),
        ("hidden = 8\n", "", "lacks the entry 'hidden'"),
        ("hidden = 8", 'hidden = "wide"', "target.hidden is 'wide'; expected a whole number"),
        ("hidden = 8", "hidden = 1.5", "target.hidden is 1.5; expected a whole number"),
        ("hidden = 8", "hidden = true", "target.hidden is true; expected a whole number"),
        ("value_bytes = 2", "value_bytes = 0.5", "target.value_bytes is 0.5; expected a whole"),
        ("stages = [2]", 'stages = ["2"]', "stages is '2'; expected a whole number"),
        ('summary = "s"', "summary = 1", "summary is 1; expected text"),
        ("layer_ms = {1 = 1.0}", "layer_ms = {1 = true}", "expected milliseconds by rows"),
        ("latency_ms = 1", "latency_ms = -1", "link.latency_ms is -1; expected 0 to below"),
        ("latency_ms = 1", "latency_ms = true", "link.latency_ms is true; expected a number"),
        ("mbit = 8", "mbit = nan", "link.mbit is nan; expected a number above 0"),
        ("layer_ms = {1 = 1.0}", "layer_ms = {2 = 1.0, 4 = 0.5}", "never fall"),
        ("layer_ms = {1 = 1.0}", "layer_ms = 1.0", "items"),
        ("layers = 4", "layers = 0", "layers"),
        ("stages = [2]", "stages = []", "stages"),
        ("stages = [2]", "stages = [2]\nspeeds = [1, 0]", "expected numbers above 0"),
        ("stages = [2]", "stages = [2]\neven_split = 1", "expected true or false"),
        (
            "stages = [2]",
            f"stages = [2]\neven_split = '{'a' * 99}'",
            "a...; expected true or false",
        ),
        ("mbit = 8", "mbit = 0", "link.mbit is 0; expected a number above 0"),
        ("mbit = 8", "mbit = 8\nexclusive = 1", "link.exclusive is 1; expected true or false"),
        (
            "mbit = 8",
            'mbit = 8\n[broker]\nat = "moon"',
            "broker.at is 'moon'; expected draft, stage-N",
        ),
        ("mbit = 8", "mbit = 8\n[broker]\nrows = 3", "broker.rows is 3; expected straight"),
        ("mbit = 8", "mbit = 8\n[broker]\nat = 3", "a value of the wrong kind"),
        ("mbit = 8", 'mbit = 8\n[broker]\non = "s1"', "unknown entry 'on'; expected: at, rows"),
        (
            "mbit = 8",
            "mbit = 8\n[software]\nhop_ms = -1",
            "software.hop_ms is -1; expected 0 to",
        ),
        ("mbit = 8", "mbit = 8\n[software]\nhops = 1", "unknown entry 'hops'; expected: hop_ms"),
        (
            "mbit = 8",
            "mbit = 8\nexclusive = true\n[software]\nhop_ms = 1",
            "hop is 0.001 s; expected 0 to below 1000 s, and 0 on exclusive links",
        ),
        (
            "mbit = 8",
            'mbit = 8\nexclusive = true\n[broker]\nat = "own"',
            "links are exclusive and the broker is on a box of its own, rows go straight",
        ),
        (
            "mbit = 8",
            'mbit = 8\n[models]\nhead = "h"',
            "models names head, beside times of",
        ),
        (
            "mbit = 8",
            'mbit = 8\n[models]\ntarget = "t"\nhaed = "h"',
            "models names target, haed, beside times of target, slm",
        ),
        ("mbit = 8", "mbit = 8\n[models]\ntarget = 1", "models.target is 1; expected text"),
        ("[link]", "[link", "no TOML"),
        ('source = "s"', 'source = "s"\nbase = "nowhere"', "nowhere"),
    ],
)
def test_a_broken_file_says_what_is_wrong(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(VALID)
    load(str(path))
    assert old in VALID
    path.write_text(VALID.replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load(str(path))
    assert "broken.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_links_are_exclusive_where_a_profile_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(VALID)
    assert not load(str(path)).link.exclusive
    path.write_text(f"{VALID}exclusive = true\n")
    assert load(str(path)).link.exclusive


@pytest.mark.parametrize(
    ("entries", "way"),
    [
        ("", Way("draft", "straight")),
        ("[broker]\n", Way("draft", "straight")),
        ('[broker]\nat = "stage-2"\n', Way("stage-2", "straight")),
        ('[broker]\nrows = "broker"\n', Way("draft", "broker")),
        ('[broker]\nat = "none"\n', NO_BROKER),
        ("exclusive = true\n", NO_BROKER),
        ('exclusive = true\n[broker]\nat = "none"\n', NO_BROKER),
    ],
)
def test_a_profile_says_where_its_broker_is_and_which_way_rows_go(
    tmp_path: Path, entries: str, way: Way
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(VALID + entries)
    assert load(str(path)).way == way


def test_a_profile_says_what_the_software_of_a_hop_takes(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(VALID)
    assert load(str(path)).hop == 0.0
    path.write_text(f"{VALID}[software]\nhop_ms = 0.5\n")
    assert load(str(path)).hop == 0.0005


def test_packaged_profiles_have_the_broker_beside_the_draft_and_straight_rows() -> None:
    assert {profile.way for profile in PROFILES} == {Way("draft", "straight")}


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"jetson-7b, .*rtx3090-70b"):
        load("jetson")
