"""Output files: checked before the work, and printed to stdout if they cannot be written."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from flowspec.errors import ConfigError


def check_writable(flag: str, file: Path) -> None:
    """ConfigError unless ``file``, given by ``flag``, can be written; it is not touched."""
    if not file.name or file.is_dir():
        raise ConfigError(f"{flag} is {file}, which is a folder; name a file")
    folder = file.parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} is {file}, but there is no folder {folder}; make it first")
    try:
        # Permissions do not suffice: the file system may be full or read-only.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} is {file}, but {folder} cannot be written: {_why(error)}"
        ) from None
    if file.exists() and not os.access(file, os.W_OK):
        raise ConfigError(f"{flag} is {file}, which may not be written; choose another name")


def write(flag: str, file: Path, text: str) -> None:
    """Write ``text``; if that fails it goes to stdout, and ConfigError says why."""
    try:
        file.write_text(text)
    except OSError as error:
        sys.stdout.write(text)
        raise ConfigError(
            f"{flag}: {file} cannot be written: {_why(error)}; its text is on stdout instead"
        ) from None


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__
