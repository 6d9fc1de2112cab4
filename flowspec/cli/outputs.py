"""Outputs: files are checked before the work, and errors of stdout are told from all others."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flowspec.errors import ConfigError

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link that leads back to itself",
}


def check_writable(flag: str, file: Path) -> None:
    """ConfigError unless ``file``, given by ``flag``, can be written; it is not touched."""
    if not file.name or file.is_dir():
        raise ConfigError(f"{flag} is {file}, which is a folder; name a file")
    _check_kind(flag, file)
    target = linked(file)
    folder = target.parent
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
    if target.exists() and not os.access(target, os.W_OK):
        raise ConfigError(f"{flag} is {file}, which may not be written; choose another name")


def _check_kind(flag: str, file: Path) -> None:
    """ConfigError if ``file`` exists and is neither a regular file nor a link to one."""
    try:
        mode = file.stat().st_mode
    except OSError as error:
        if error.errno != errno.ELOOP:
            return
        mode = stat.S_IFLNK
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise ConfigError(f"{flag} is {file}, which is {kind}; expected a regular file or none")


def linked(file: Path) -> Path:
    """The file that a symbolic link leads to; any other file itself."""
    return Path(os.path.realpath(file)) if file.is_symlink() else file


def check_distinct(files: Mapping[str, Path | None]) -> None:
    """ConfigError if two flags name one file; ``files`` is by flag."""
    given = [(flag, file) for flag, file in files.items() if file is not None]
    for (flag, file), (other, same) in itertools.combinations(given, 2):
        if os.path.realpath(file) == os.path.realpath(same) or _is_one(file, same):
            raise ConfigError(f"{flag} and {other} name the same file, {same}; name two files")


def _is_one(file: Path, other: Path) -> bool:
    """Whether two existing names, hard links for example, are of one file."""
    with contextlib.suppress(OSError):
        return file.samefile(other)
    return False


def write(flag: str, file: Path, text: str) -> None:
    """Write ``text``; if that fails it goes to stdout, and ConfigError says why."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        sys.stdout.write(text)
        raise ConfigError(
            f"{flag}: {file} cannot be written: {_why(error)}; its text is on stdout instead"
        ) from None


class StdoutError(OSError):
    """Standard output cannot be written."""


class _Stdout(io.FileIO):
    """File descriptor 1. Its errors are StdoutError, since any OSError might be another file's."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise StdoutError(error.errno, error.strerror) from None


@contextlib.contextmanager
def checked_stdout() -> Iterator[None]:
    """End the process with one line and status 1 if stdout is closed or cannot be written.

    A reader that has closed its end of a pipe gets no line: it wants no more output.
    """
    if sys.stdout is None:
        sys.stderr.write("flowspec: standard output is closed; redirect it to a file instead\n")
        sys.exit(1)
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _named(sys.stdout)
    out = sys.stdout
    try:
        try:
            yield
        finally:
            out.flush()
    except StdoutError as error:
        _discard(out.fileno())
        if error.errno != errno.EPIPE:
            sys.stderr.write(f"flowspec: standard output cannot be written: {_why(error)}\n")
        sys.exit(1)


def _named(out: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream like ``out``, the errors of which are StdoutError.

    Files and pipes get UTF-8, whatever the locale; a terminal gets what it can show.
    """
    raw = _Stdout(out.fileno(), "wb", closefd=False)
    local = out.isatty() or "PYTHONIOENCODING" in os.environ
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=out.encoding if local else "utf-8",
        errors="backslashreplace",
        line_buffering=out.line_buffering,
        write_through=out.write_through,
    )


def _discard(descriptor: int) -> None:
    """Let the interpreter, which flushes what is left when it ends, write it to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__
