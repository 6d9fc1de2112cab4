"""A digest changes with the code that affects a figure, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

from flowspec.rehearse.compare.digests import profile_digest
from flowspec.rehearse.devices.profile import LinkShape
from flowspec.rehearse.devices.profiles import load
from flowspec.rehearse.devices.way import NO_BROKER, Way


def test_a_profiles_digest_follows_what_it_costs_and_not_its_words() -> None:
    profile = load("jetson-7b")
    assert profile_digest(
        replace(profile, summary="x", source="y", name="z", anchors={})
    ) == profile_digest(profile)
    assert profile_digest(replace(profile, link=LinkShape(0.0, 1e6))) != profile_digest(profile)
    shape = replace(profile.link, exclusive=True)
    exclusive = replace(profile, link=shape, way=NO_BROKER)
    assert profile_digest(exclusive) != profile_digest(profile)
    assert profile_digest(replace(profile, layers=31)) != profile_digest(profile)


def test_entries_with_their_default_leave_a_profiles_digest_as_it_is() -> None:
    """The digest of ``jetson-7b`` in reports of version 0.1."""
    profile = load("jetson-7b")
    assert profile_digest(profile) == "5215a722c1a1"
    for other in (
        replace(profile, speeds=(1.0, 2.0)),
        replace(profile, even_split=True),
        replace(profile, split=(16, 16)),
        replace(profile, hop=0.001),
        replace(profile, way=Way("own")),
        replace(profile, way=Way("draft", "broker")),
        replace(profile, way=NO_BROKER),
    ):
        assert profile_digest(other) != profile_digest(profile)
