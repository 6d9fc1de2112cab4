"""Run the commands of results files again and rewrite the files, or check them.

    python -m ops.bench.retake [--check] [--prompts DIR] ops/bench/results/NAME.md...

A results file has a block per command: the command as a code span with ``$`` before it, a line
that says whether the output is simulated or measured, and the output. Commands run in a shell at
the repository root, with this interpreter's folder first on PATH. In a command, ``DIR`` stands
for the folder of prompt sets given by ``--prompts``; it is written back as ``DIR`` in the output.

``--check`` rewrites nothing: it prints the first lines that differ and exits with 1 if any do.
Measured files are refused, as their figures differ from run to run.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from flowspec.errors import ConfigError, FlowSpecError
from ops.bench.report import machine_line
from ops.parser import Parser

ROOT = Path(__file__).parents[2]
SIMULATED = "Simulated: the same on every machine."
#: Lines of a difference that are printed.
SHOWN = 12

_COMMAND = re.compile(r"`\$ (.+)`")
_MEASURED = re.compile(r"Measured on .+: differs from run to run\.")
_PROMPTS = re.compile(r"\bDIR\b")
# The last line of a comparison's report: the command again, the version and the machine.
_FOOTER = re.compile(r"`(?:flowspec|python -m ops\.compare) .+`, version .+, on .+\.")


@dataclass(frozen=True, slots=True)
class CommandBlock:
    """A command, its line ``kind`` (simulated or measured), and the lines of its output."""

    command: str
    kind: str
    output: tuple[str, ...]

    @property
    def simulated(self) -> bool:
        return self.kind == SIMULATED

    def text(self) -> str:
        """The block as it stands in a file."""
        return "\n".join((f"`$ {self.command}`", "", self.kind, "", *self.output)) + "\n"


def trimmed(lines: Iterable[str]) -> tuple[str, ...]:
    """``lines`` without footers, trailing spaces, and blank lines at both ends."""
    text = "\n".join(line.rstrip() for line in lines if not _FOOTER.fullmatch(line))
    return tuple(text.strip("\n").split("\n"))


def parse(text: str) -> list[CommandBlock]:
    """The blocks of a results file; ConfigError if it is not one."""
    lines = text.splitlines()
    starts = [at for at, line in enumerate(lines) if _COMMAND.fullmatch(line)]
    if not starts or starts[0] != 0:
        raise ConfigError("the first line is not a command; expected `$ COMMAND` in a code span")
    return [
        _block(lines[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)
    ]


def _block(lines: list[str]) -> CommandBlock:
    command = lines[0][3:-1]
    kind = lines[2] if len(lines) > 2 else ""
    if kind != SIMULATED and not _MEASURED.fullmatch(kind):
        raise ConfigError(f"the third line of `{command}` is {kind!r}; expected {SIMULATED!r} ...")
    return CommandBlock(command, kind, trimmed(lines[3:]))


def run(command: str, prompts: Path | None) -> tuple[str, ...]:
    """The lines that ``command`` prints; ConfigError if it fails."""
    place = "" if prompts is None else str(prompts.absolute())
    if _PROMPTS.search(command) and not place:
        raise ConfigError(f"`{command}` needs prompt sets; give their folder with --prompts")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(
        _PROMPTS.sub(lambda _: shlex.quote(place), command),
        shell=True,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"`{command}` failed with exit status {done.returncode}")
    return trimmed((done.stdout.replace(place, "DIR") if place else done.stdout).splitlines())


def retaken(block: CommandBlock, prompts: Path | None) -> CommandBlock:
    """``block`` with the output of a new run, on this machine."""
    kind = block.kind
    if not block.simulated:
        kind = f"Measured on {machine_line()}: differs from run to run."
    return replace(block, kind=kind, output=run(block.command, prompts))


def differences(block: CommandBlock, prompts: Path | None) -> Iterator[str]:
    """A unified diff of the block's output and that of a new run; no lines if they are equal."""
    now = run(block.command, prompts)
    return difflib.unified_diff(block.output, now, "file", "now", n=0, lineterm="")


def check(file: Path, blocks: list[CommandBlock], prompts: Path | None) -> bool:
    """Whether ``file`` is what its commands print now; prints the result."""
    for block in blocks:
        lines = list(islice(differences(block, prompts), SHOWN))
        if lines:
            print(f"{file}: `{block.command}` prints something else:", *lines, sep="\n", flush=True)
            return False
    print(f"{file}: equal", flush=True)
    return True


def read(file: Path) -> list[CommandBlock]:
    """The blocks of ``file``; ConfigError names it."""
    try:
        return parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--check", action="store_true", help="compare instead of rewriting")
    parser.add_argument("--prompts", type=Path, metavar="DIR", help="the folder of prompt sets")
    given = parser.parse_args()
    try:
        files = {file: read(file) for file in given.files}
        if given.check:
            _refuse_measured(files)
            equal = [check(file, blocks, given.prompts) for file, blocks in files.items()]
            sys.exit(0 if all(equal) else 1)
        for file, blocks in files.items():
            for at, block in enumerate(blocks):
                # What a long run has found is kept whatever becomes of the next.
                blocks[at] = retaken(block, given.prompts)
                file.write_text("\n".join(one.text() for one in blocks), encoding="utf-8")
    except FlowSpecError as error:
        sys.exit(f"retake: {error}")


def _refuse_measured(files: dict[Path, list[CommandBlock]]) -> None:
    for file, blocks in files.items():
        if not all(block.simulated for block in blocks):
            raise ConfigError(f"{file} is measured, which differs from run to run: cannot check it")


if __name__ == "__main__":
    main()
