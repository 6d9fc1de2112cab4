"""Run the gate's live tests again and again, every other time on a busy machine.

    python -m ops.flakes N

Prints a line for each of the N runs, and at the end the failures by test, with how many of them
were beside busy loops. A failure counts although a repetition passed. Status 1 if there was any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ops.parser import Parser

ROOT = Path(__file__).parent.parent
#: What a failure, or one that a repetition passed, looks like in pytest's summary.
_FAILED = re.compile(r"^(?:RERUN|FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
BUSY_LOOPS = 2


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """``count`` processes that only compute."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def failed_in(summary: str) -> set[str]:
    """The tests that failed at least once in a run, by pytest's short summary."""
    return set(_FAILED.findall(summary))


def run_tests() -> str:
    """Run the gate's live tests; what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-rfER"]
    command += ["-p", "no:cacheprovider", "-m", "gate and not heavy"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with status {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout


def table(failures: Sequence[tuple[str, bool]]) -> str:
    """Failures by test, most first; ``failures``: tests, and whether on a busy machine."""
    total = Counter(test for test, _ in failures)
    busy = Counter(test for test, beside in failures if beside)
    return "\n".join(
        f"{count:4} failures, {busy[test]} beside busy loops: {test}"
        for test, count in total.most_common()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    parser = Parser(prog="python -m ops.flakes", description=__doc__)
    parser.add_argument("runs", type=int, metavar="N", help="how often the tests run")
    options = parser.parse_args(arguments)
    failures: list[tuple[str, bool]] = []
    for number in range(options.runs):
        busy = number % 2 == 1
        with busy_loops(BUSY_LOOPS if busy else 0):
            summary = run_tests()
        failed = failed_in(summary)
        failures += [(test, busy) for test in sorted(failed)]
        where = "beside busy loops" if busy else "alone"
        print(f"run {number + 1}, {where}: {len(failed)} failed", flush=True)
        print("\n".join(f"  {test}" for test in sorted(failed)), end="\n" if failed else "")
    print(table(failures) if failures else "no failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
