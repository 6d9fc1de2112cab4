"""The machine's findings and remedies by made-up facts, and facts of this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowspec.doctor.finding import Severity
from flowspec.doctor.machine import MachineFacts, check, gather, hub_cache

GIB = 1 << 30
GOOD = MachineFacts(
    memory=32 * GIB,
    available=24 * GIB,
    limit=None,
    swap_used=0,
    cores=8,
    allowed_cores=8,
    quota=None,
    load=0.5,
    threads="1",
    cache=Path("/cache/hub"),
    cache_free=100 * GIB,
    clock_step=1e-9,
    clock_set=True,
)


def test_a_good_machine_needs_nothing() -> None:
    assert {finding.level for finding in check(GOOD)} == {Severity.OK}


@pytest.mark.parametrize(
    ("changes", "level", "found", "remedy"),
    [
        ({"available": GIB // 2}, Severity.WARNING, "512 MiB free", "end other programs"),
        (
            {"available": GIB // 2, "limit": GIB},
            Severity.WARNING,
            "1.0 GiB allowed by the container",
            "raise the container's memory limit",
        ),
        ({"memory": None}, Severity.NOTE, "cannot be told", "compare the sizes"),
        ({"swap_used": 2 * GIB}, Severity.WARNING, "2.0 GiB are swapped out", "--dtype"),
        ({"allowed_cores": 2}, Severity.NOTE, "2 of 8 cores", "affinity"),
        ({"quota": 1.5}, Severity.NOTE, "1 of 8 cores", "processor limit"),
        ({"load": 20.0}, Severity.WARNING, "20.0 programs compete for 8", "end other programs"),
        ({"threads": None}, Severity.NOTE, "on 1 of 8 cores", "OMP_NUM_THREADS=8"),
        ({"threads": "many"}, Severity.WARNING, "no number of threads", "set it to 1, or to 8"),
        ({"threads": "0"}, Severity.WARNING, "no number of threads", "set it to 1"),
        ({"threads": "16"}, Severity.WARNING, "8 cores may be used", "set it to 8 or less"),
        ({"cache_free": GIB}, Severity.WARNING, "1.0 GiB free for models", "HF_HOME"),
        ({"clock_step": 0.016}, Severity.WARNING, "steps of 16 ms", "clock source"),
        ({"clock_set": False}, Severity.NOTE, "no time server", "timedatectl set-ntp true"),
    ],
)
def test_each_trouble_has_its_remedy(
    changes: dict[str, Any], level: Severity, found: str, remedy: str
) -> None:
    troubles = [
        finding for finding in check(replace(GOOD, **changes)) if finding.level is not Severity.OK
    ]
    (trouble,) = [finding for finding in troubles if found in finding.found]
    assert trouble.level is level
    assert remedy in trouble.remedy


def test_what_cannot_be_told_is_no_trouble() -> None:
    facts = replace(GOOD, cache_free=None, clock_set=None)
    assert {finding.level for finding in check(facts)} == {Severity.OK}


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    facts = gather()
    assert facts.threads == "3"
    assert facts.memory is not None
    assert facts.available is not None
    assert 0 < facts.available <= facts.memory
    assert 1 <= facts.usable_cores <= facts.cores
    assert 0 < facts.clock_step < 1


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
)
def test_the_hubs_folder(environment: dict[str, str], folder: str) -> None:
    assert hub_cache(environment) == Path(folder)


def test_a_cache_that_may_not_be_looked_at_has_no_known_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    assert gather().cache_free is None
