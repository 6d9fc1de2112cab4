"""Python, FlowSpec's version, and the packages it needs: present, in range, and importable."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from flowspec.doctor.finding import Finding, error, ok, warning
from flowspec.errors import installs

SUBJECT = "versions"
#: Extras whose packages only a developer of FlowSpec needs.
_NOT_FOR_RUNS = ("dev", "plots")
#: The extra whose packages run models: what is examined is a machine for these.
_TO_RUN = "worker"
#: Packages that kernels use when they are installed, whether or not an extra names them.
_USED_IF_THERE = ("bitsandbytes", "torch", "transformers")
#: Specifiers that an old version violates; the others are violated by a new one.
_FROM = (">=", ">", "==", "~=")


@dataclass(frozen=True, slots=True)
class Installed:
    """A package: ``version`` None if it is not installed; ``wanted``: a range, empty for any."""

    name: str
    version: str | None
    wanted: str = ""

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """``flowspec`` is None for a checkout that is not installed; its ranges are then unknown."""

    python: str
    flowspec: str | None
    packages: tuple[Installed, ...]


def gather() -> VersionFacts:
    """What is installed; nothing is imported."""
    try:
        own = metadata.version("flowspec")
        lines = metadata.requires("flowspec") or []
    except metadata.PackageNotFoundError:
        own, lines = None, []
    return VersionFacts(platform.python_version(), own, tuple(_installed(lines)))


def _installed(lines: Iterable[str]) -> Iterator[Installed]:
    named = set()
    for requirement in map(Requirement, lines):
        version = _version(requirement.name)
        if _needed(requirement) or (version is not None and _optional(requirement)):
            named.add(requirement.name)
            yield Installed(requirement.name, version, str(requirement.specifier))
    for name in _USED_IF_THERE:
        if name not in named and (version := _version(name)) is not None:
            yield Installed(name, version)


def _needed(requirement: Requirement) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", _TO_RUN))


def _optional(requirement: Requirement) -> bool:
    marker = requirement.marker
    return marker is not None and not any(marker.evaluate({"extra": e}) for e in _NOT_FOR_RUNS)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check(versions: VersionFacts, broken: Mapping[str, str]) -> Iterator[Finding]:
    """``broken``: why a module cannot be imported, by module."""
    if versions.flowspec is None:
        yield warning(
            SUBJECT,
            f"Python {versions.python}; flowspec is not installed, so what it needs is unknown",
            f"run `{installs('.[worker]')}` in its folder",
        )
    else:
        yield ok(SUBJECT, f"Python {versions.python}, flowspec {versions.flowspec}")
    good = []
    for package in versions.packages:
        found = _of(package, broken.get(package.module, ""))
        if found is None:
            good.append(f"{package.name} {package.version}")
        else:
            yield found
    if good:
        yield ok(SUBJECT, ", ".join(good))


def _of(package: Installed, reason: str) -> Finding | None:
    install = installs(f"{package.name}{package.wanted}")
    remedy = f"run `{install}`"
    if package.version is None:
        return error(SUBJECT, f"{package.name} is not installed", remedy)
    if reason:
        return error(
            SUBJECT,
            f"{package.name} {package.version} cannot be imported: {reason}",
            f"run `{install} --force-reinstall`",
        )
    given = SpecifierSet(package.wanted)
    if given.contains(package.version, prereleases=True):
        return None
    found = f"{package.name} is {package.version}; flowspec needs {package.wanted}"
    violated = [part for part in given if not part.contains(package.version, prereleases=True)]
    if any(part.operator in _FROM for part in violated):
        return error(SUBJECT, found, remedy)
    return warning(SUBJECT, f"{found}: newer than what is tested", remedy)
