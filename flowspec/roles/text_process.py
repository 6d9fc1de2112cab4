"""Prompts become ids in a process of their own, beside the draft worker's loop.

Encoding a megabyte takes more than a second, in which no job would get a token. And a chat template
is a program of whoever made the model: it may not end, or take all memory. The process sets itself
bounds, by signals that end it; another one is started in its place.

It is forked where that is safe, while the worker has no threads yet: that takes no time for imports
and hardly any memory. One that takes its place is started from nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import signal
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowspec.core.protocol.work import Encoded, EncodeFailed, Encoding
from flowspec.errors import JobError
from flowspec.model.base import reason_of
from flowspec.model.weights.directory import open_directory
from flowspec.roles.performers import encoded

if TYPE_CHECKING:
    from flowspec.model.text.tokenizer import Tokenizer

#: How long a chat template may take, seconds.
TEMPLATE_SECONDS = 2.0
#: How long encoding a text may take, and a process to start.
TEXT_SECONDS = 60.0
#: Memory that a chat template may take, bytes.
TEMPLATE_BYTES = 1 << 30
#: Asks for the ids that end a text.
_ENDS = "ends"
#: In the place of a number: whether the chat template runs; that the tokenizer is loaded.
_TEMPLATE = 0
_LOADED = -1


class TextProcess:
    """A process with the tokenizer of a model; it encodes one prompt at a time.

    ``start.forks``: whether this process may fork, now.
    """

    def __init__(self, *, forks: bool) -> None:
        self._folder: Path | None = None
        # Of the work in hand, of what was sent last, and of what was answered last.
        self._number = self._sent = self._answered = 0
        self._work: Encoding | str = _ENDS
        self._start("fork" if forks else "spawn")

    def open(self, folder: Path) -> frozenset[int] | None:
        """Use the tokenizer of the model in ``folder``; return the ids of tokens that end a text.

        None: its chat template, which names one of them, fails.
        """
        self._folder = folder
        self._loaded = False
        self._send(folder)
        # A machine that loads models is slow, and the template runs by the clock.
        for _ in range(2):
            self.begin(_ENDS)
            found = self._answer(TEXT_SECONDS)
            if isinstance(found, frozenset):
                return found
        return None

    @property
    def busy(self) -> bool:
        """Whether a prompt is being encoded."""
        return self._asked

    def begin(self, work: Encoding | str) -> None:
        """Begin to encode; ``result`` returns what comes of it."""
        if self._ended:
            self._restart()
        self._number += 1
        self._asked = True
        self._due = time.monotonic() + TEMPLATE_SECONDS + 2 * TEXT_SECONDS
        self._work = work
        # One that starts, or is at work that was dropped, does not read: the sender would wait.
        if self._loaded and self._answered == self._sent:
            self._send_work()

    def drop(self) -> None:
        """Forget the work in hand."""
        self._asked = False

    def result(self, wait: float = 0.0) -> Encoded | None:
        """What has come of the work, after at most ``wait`` seconds; None: nothing yet, or no work.

        A process that has ended, or does not answer, is replaced.
        """
        found: Encoded | None = self._answer(wait)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._ended = True

    def _answer(self, wait: float) -> Any:
        until = time.monotonic() + wait
        while self._asked:
            try:
                if self._connection.poll(max(0.0, until - time.monotonic())):
                    number, found = self._connection.recv()
                    if number == self._number:
                        self._asked = False
                        self._answered = number
                        return found
                    self._note(number, found)
                    continue
                if time.monotonic() < self._due:
                    break
            except (EOFError, OSError):
                pass  # as of one that does not answer
            if (failed := self._end()) is not None:
                return failed
        return None

    def _note(self, number: int, found: Any) -> None:
        """Note what is no answer to the work in hand: it may be to work that was dropped."""
        if number == _TEMPLATE:
            self._templates = found
        elif number == _LOADED:
            self._loaded = True
            self._send_work()
        else:
            self._answered = number
            self._send_work()

    def _end(self) -> EncodeFailed | None:
        """End a process that answers no more; what has become of its work.

        None: it was at work that was dropped, and what was asked after that begins anew.
        """
        self._process.join(1.0)  # one that has closed its connection is ending
        status = self._process.exitcode
        self.close()
        self._asked = False
        if self._loaded and self._sent < self._number:
            self.begin(self._work)
            return None
        was_template = self._templates
        self._restart()  # the next prompt does not wait for its start
        seconds = TEMPLATE_SECONDS if was_template else TEXT_SECONDS
        why = (
            f"took longer than {seconds:g} s"
            if status in (None, -signal.SIGALRM)
            else "ended its process; it may have taken too much memory"
        )
        what = "the model's chat template" if was_template else "encoding the prompt"
        return EncodeFailed(f"{what} {why}", refused=was_template)

    def _restart(self) -> None:
        self._start("spawn")
        self._send(self._folder)

    def _start(self, method: str) -> None:
        context: Any = multiprocessing.get_context(method)
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._connection), daemon=True)
        self._process.start()
        other.close()
        self._ended = self._asked = self._templates = self._loaded = False
        self._answered = self._sent = self._number

    def _send_work(self) -> None:
        self._sent = self._number
        self._send(self._work)

    def _send(self, what: object) -> None:
        with contextlib.suppress(OSError):  # of a process that has ended: the next answer tells
            self._connection.send((self._number, what))


def text_ends(folder: Path) -> frozenset[int] | None:
    """``TextProcess.open`` in a process for that alone."""
    process = TextProcess(forks=False)
    try:
        return process.open(folder)
    finally:
        process.close()


def _serve(connection: Connection, parents: Connection) -> None:
    """The process: answer what is asked until the other end is closed."""
    from flowspec.model.text.tokenizer import Tokenizer

    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    tokenizer: Tokenizer | None = None
    with contextlib.suppress(EOFError):
        while True:
            number, work = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, TEXT_SECONDS)
            if isinstance(work, Path):
                tokenizer = Tokenizer(open_directory(str(work)), partial(_bounds, connection))
                connection.send((_LOADED, True))
            else:
                assert tokenizer is not None
                connection.send((number, _found(tokenizer, work)))
            signal.setitimer(signal.ITIMER_REAL, 0)


def _found(tokenizer: Tokenizer, work: Encoding | str) -> Encoded | frozenset[int]:
    try:
        return tokenizer.eos if isinstance(work, str) else encoded(tokenizer, work)
    except Exception as error:  # noqa: BLE001 - what fails ends its job, never the process
        return EncodeFailed(reason_of(error), refused=isinstance(error, JobError))


@contextlib.contextmanager
def _bounds(connection: Connection) -> Iterator[None]:
    """Say that a chat template runs, and bound its time and memory; then those of a text again."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        most = size + TEMPLATE_BYTES
        if before[1] != resource.RLIM_INFINITY:
            most = min(most, before[1])
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    connection.send((_TEMPLATE, True))
    signal.setitimer(signal.ITIMER_REAL, TEMPLATE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, TEXT_SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, before)
        connection.send((_TEMPLATE, False))
