"""Digests that identify the models, prompts, profile and machine of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

from flowspec.model.weights.directory import open_directory
from flowspec.rehearse.devices.profile import Profile
from flowspec.rehearse.devices.way import Way

#: Fields of a profile that describe it and change no figure; models have digests of their own.
_PROFILE_TEXT = ("name", "summary", "source", "models", "anchors")
#: Entries a profile may lack. They are left out where they have their default, so that a report
#: can be compared with one of a version that has more of them.
_OPTIONAL = ("speeds", "even_split", "split", "blocks", "hop")


def digest(value: object) -> str:
    """A digest of any JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def profile_digest(profile: Profile) -> str:
    """A digest of everything in a profile that changes a figure."""
    fields = dataclasses.asdict(profile)
    for name in _OPTIONAL:
        if not fields[name]:
            del fields[name]
    if not profile.link.exclusive:
        del fields["link"]["exclusive"]
    if profile.way == Way() or profile.link.exclusive:
        del fields["way"]
    return digest({name: value for name, value in fields.items() if name not in _PROFILE_TEXT})


def model_digest(name: str) -> str:
    """A digest of a model's configuration and weights."""
    return open_directory(name).fingerprint[:12]


def machine() -> str:
    """This machine in one line: cores, processor, system and the versions that affect rounding."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy"))
    processor = names[0] if names else platform.machine()
    return f"{os.cpu_count()} cores of {processor}, {platform.system()}, {libraries}"
