"""Mutation testing: break one rule at a time and check that a test fails.

    python -m ops.mutations [--only TEXT] [--jobs 2] [--list]

``ops/mutations.toml`` lists the mutations. Each is applied alone to a copy of the project, and the
tests run in stages until one fails: the test module that mirrors the mutated file, then the pure
tests, then, unless the file belongs to the core, all other tests. Every mutation must be caught;
those of the core by pure tests, and one that names a test file by that file. Prints one line per
mutation and exits with 1 if any survives. The unchanged copy must pass the same tests first.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ops.parser import Parser

ROOT = Path(__file__).parent.parent
#: Tests that need no Redis, model or further process.
PURE = ("tests/core", "tests/strategies", "tests/seam", "tests/rehearse/devices")
#: Mutations of these files must be caught by pure tests.
CORE = ("flowspec/core/", "flowspec/strategies/")
#: What `make test` runs.
GATE = "not heavy and (gate or not live)"
#: Time limit of one run of tests; a mutation that makes them hang counts as caught.
TIMEOUT_SECONDS = 900.0
#: Exit statuses of pytest: all tests passed; nothing was collected.
_PASSED = (0, 5)

Judge = Callable[[Path, Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replace ``old``, which occurs once in ``file``, by ``new``; ``breaks`` names the rule.

    ``test``: the test file that must catch it; empty: any.
    """

    breaks: str
    file: str
    old: str
    new: str
    test: str = ""

    @property
    def is_core(self) -> bool:
        """Whether pure tests must catch it."""
        return self.file.startswith(CORE)

    def apply(self, text: str) -> str:
        """The mutated text of the file; ValueError unless ``old`` occurs once in ``text``."""
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.file} contains the text of {self.breaks!r} {text.count(self.old)} times; "
                "expected once: update ops/mutations.toml"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Outcome:
    """``caught_by``: the first test that failed; empty: the mutation survived."""

    mutation: Mutation
    caught_by: str
    seconds: float


def load(path: Path = ROOT / "ops" / "mutations.toml") -> list[Mutation]:
    """The mutations in the file's order."""
    with path.open("rb") as file:
        return [Mutation(**entry) for entry in tomllib.load(file)["mutation"]]


def mirror(file: str, root: Path = ROOT) -> tuple[str, ...]:
    """The test module that mirrors ``file``, or else the closest folder; empty: neither exists."""
    path = Path(file.removeprefix("flowspec/"))
    name = path.stem.partition("-")[0]  # a script's name ends in the number of its keys
    module = "tests" / path.with_name(f"test_{name}.py")
    for place in (module, *module.parents):
        if place == Path("tests"):
            break
        if (root / place).exists():
            return (str(place),)
    return ()


def stages(mutation: Mutation) -> list[tuple[str, ...]]:
    """Arguments of the test runs to try, narrow ones first."""
    if mutation.test:
        return [(mutation.test,)]
    near = mirror(mutation.file)
    rest = ("tests", *(f"--ignore={folder}" for folder in PURE))
    return [*([near] if near else []), PURE, *([] if mutation.is_core else [rest])]


def run_tests(copy: Path, arguments: Sequence[str]) -> str:
    """Run pytest in ``copy`` until a test fails; return that test, or "" if all passed.

    RuntimeError if pytest fails without naming a test.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", GATE]
    command += ["-p", "no:cacheprovider", "--no-header", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"a test of {arguments[0]} that did not end in {TIMEOUT_SECONDS:.0f} s"
    if done.returncode in _PASSED:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise RuntimeError(f"pytest {' '.join(arguments)} names no test: {done.stdout[-400:]}")
    return failed[1]


def attempt(mutation: Mutation, copy: Path, judge: Judge = run_tests) -> Outcome:
    """Apply ``mutation`` in ``copy``, run the tests, and restore the file."""
    began = time.monotonic()
    path = copy / mutation.file
    text = path.read_text(encoding="utf-8")
    path.write_text(mutation.apply(text), encoding="utf-8")
    try:
        found = (judge(copy, arguments) for arguments in stages(mutation))
        caught_by = next(filter(None, found), "")
    finally:
        path.write_text(text, encoding="utf-8")
    return Outcome(mutation, caught_by, time.monotonic() - began)


def unchanged(copy: Path, mutations: Sequence[Mutation]) -> str:
    """The first test that fails without a mutation, among the stages of ``mutations``; or ""."""
    needed = dict.fromkeys(
        run for mutation in mutations for run in stages(mutation)[0 if mutation.test else 1 :]
    )
    return next(filter(None, (run_tests(copy, run) for run in needed)), "")


def copy_project(to: Path) -> Path:
    """Copy all files that git does not ignore into ``to``; return it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name)
    return to


def run_all(mutations: Sequence[Mutation], copies: Sequence[Path]) -> list[Outcome]:
    """Try every mutation, one per copy at a time; print each outcome."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(mutation: Mutation) -> Outcome:
        copy = free.get()
        try:
            outcome = attempt(mutation, copy)
        finally:
            free.put(copy)
        print(_line(outcome), flush=True)
        return outcome

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(one, mutations))


def _line(outcome: Outcome) -> str:
    fate = f"caught by {outcome.caught_by}" if outcome.caught_by else "SURVIVED"
    mutation = outcome.mutation
    return f"{outcome.seconds:4.0f} s  {mutation.file}: {mutation.breaks}: {fate}"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Numbers of mutations caught, by kind of test."""
    caught = [outcome for outcome in outcomes if outcome.caught_by]
    pure = [outcome for outcome in caught if outcome.caught_by.startswith(PURE)]
    return (
        f"{len(caught)} of {len(outcomes)} mutations caught, {len(pure)} by pure tests, "
        f"{len(caught) - len(pure)} by others"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    parser = Parser(prog="python -m ops.mutations", description=__doc__)
    parser.add_argument("--only", default="", help="mutations whose file or rule contains TEXT")
    parser.add_argument("--jobs", type=int, default=2, help="mutations tried at a time")
    parser.add_argument("--list", action="store_true", help="show the mutations, run nothing")
    options = parser.parse_args(arguments)
    chosen = [one for one in load() if options.only in f"{one.file} {one.breaks}"]
    if not chosen:
        print(f"no mutation contains {options.only!r}; see --list", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{one.file}: {one.breaks}" for one in chosen))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        jobs = max(1, min(options.jobs, len(chosen)))
        copies = [copy_project(Path(folder) / str(number)) for number in range(jobs)]
        broken = unchanged(copies[0], chosen)
        if broken:
            print(f"the unchanged project fails {broken}; fix that first", file=sys.stderr)
            return 2
        outcomes = run_all(chosen, copies)
    print(summary(outcomes))
    return 0 if all(outcome.caught_by for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
