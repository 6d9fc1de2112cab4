"""The examinations together: a broken part does not keep the others from being examined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from flowspec.doctor import examine as module
from flowspec.doctor.examine import Plans, chosen_device, examine
from flowspec.doctor.finding import Finding, Severity
from flowspec.doctor.imports import Accelerator, Imported
from flowspec.errors import BrokerError
from flowspec.transport.connections.server import PrivateBroker
from tests.doctor.test_kernels import LACKING, PLAIN, Kernel
from tests.pair import DRAFT, TARGET

PLANS = Plans(TARGET, DRAFT, "auto", "auto", None)


@pytest.fixture(autouse=True)
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports in other processes take seconds, and have tests of their own."""
    monkeypatch.setattr(module, "try_imports", lambda modules: Imported({}, "cpu", 1))
    monkeypatch.setattr(module, "text_ends", lambda folder: frozenset({1}))


def found(plans: Plans, subject: str = "") -> list[Finding]:
    every = examine(plans, None, lambda line: None)
    return [finding for finding in every if subject in ("", finding.subject)]


def errors(plans: Plans) -> list[Finding]:
    return [finding for finding in found(plans) if finding.level is Severity.ERROR]


def test_without_a_url_a_private_broker_is_started_and_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped = []
    stop = PrivateBroker.stop

    def noted(broker: PrivateBroker) -> None:
        stopped.append(broker)
        stop(broker)

    monkeypatch.setattr(PrivateBroker, "stop", noted)
    (port,) = found(PLANS, "ports")
    assert port.level is Severity.OK
    assert "private broker" in port.found
    (broker,) = stopped
    assert broker.directory is None


def test_a_broker_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise BrokerError("no server found; install one")

    monkeypatch.setattr(module, "find_server", none)
    (error,) = errors(PLANS)
    assert (error.subject, error.remedy) == ("ports", "install one")


def test_the_broker_of_a_url(server: PrivateBroker) -> None:
    plans = replace(PLANS, url=server.url)
    assert errors(plans) == []
    shown = [finding.found for finding in found(plans)]
    assert not any("private broker" in line for line in shown)
    assert any("saves nothing" in line for line in shown)


@pytest.mark.parametrize(
    ("url", "subject", "said"),
    [
        ("http://:hush@h", "ports", "not understood"),
        ("redis://:hush@localhost:port", "ports", "not understood"),
        ("redis://:hush@[::1", "ports", "not understood"),
        ("redis://:hush@localhost:1/0", "ports", "refuses connections"),
        ("unix://:hush@{socket}", "broker", "refused the password"),
    ],
)
def test_no_way_to_fail_shows_the_password(
    server: PrivateBroker, url: str, subject: str, said: str
) -> None:
    plans = replace(PLANS, url=url.format(socket=server.url.rpartition("@")[2]))
    (error,) = errors(plans)
    assert error.subject == subject
    assert said in error.found
    assert "hush" not in repr(found(plans))
    assert found(plans, "target"), "the models are examined all the same"


def test_kernels_are_those_of_the_device_chosen() -> None:
    asked = []

    def survey(device: str) -> Sequence[Kernel]:
        asked.append(device)
        return [PLAIN, LACKING]

    every = list(examine(replace(PLANS, dtype="nf4"), survey, lambda line: None))
    assert asked == ["cpu"]
    assert [finding.level for finding in every if finding.subject == "kernels"] == [
        Severity.OK,
        Severity.NOTE,
        Severity.ERROR,
    ]


def test_nothing_is_asked_of_a_torch_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        module, "try_imports", lambda modules: Imported({"torch": "ImportError: x"})
    )
    every = list(
        examine(PLANS, lambda device: pytest.fail("it would import torch"), lambda line: None)
    )
    (kernels,) = [finding for finding in every if finding.subject == "kernels"]
    assert kernels.level is Severity.NOTE
    (broken,) = [finding for finding in every if finding.level is Severity.ERROR]
    assert broken.subject == "versions"


def test_every_wait_is_announced_with_its_limit() -> None:
    lines: list[str] = []
    list(examine(PLANS, None, lines.append))
    waits = [line for line in lines if "importing" in line or "starting" in line]
    assert len(waits) == 2
    assert all("at most" in line for line in waits)


def test_a_finding_that_is_not_ok_has_a_remedy(server: PrivateBroker) -> None:
    for finding in found(replace(PLANS, url=server.url, target="nowhere", dtype="int8")):
        assert bool(finding.remedy) is (finding.level is not Severity.OK), finding
        assert "\n" not in finding.found + finding.remedy


def test_the_device_is_a_gpu_if_there_is_one() -> None:
    gpu = Imported({}, "cuda 12", 1, (Accelerator("H100", 80, 70, (9, 0)),))
    assert chosen_device("auto", gpu) == "cuda:0"
    assert chosen_device("cpu", gpu) == "cpu"
    assert chosen_device("auto", Imported({}, "cpu", 1)) == "cpu"
