"""llama.cpp's tools as a system to compare with: RPC servers as stages, plain or speculative.

The target is split by layers like our stages, the LM head with the last block; the client has
the embedding, sampling and the draft model. All links are the client's: it moves the rows from
each server to the next.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from flowspec.errors import ClusterError
from flowspec.model.weights.directory import layer_ranges
from flowspec.transport.connections.server import die_with_parent
from ops.peer.install import Peer

HOST = "127.0.0.1"
#: Time limits of a server or relay to listen, and of a run.
START_SECONDS = 30.0
RUN_SECONDS = 300.0
_ATTEMPTS = 4
#: Until a relay has read a new latency.
_RESHAPED_SECONDS = 0.2
_TOTAL = re.compile(r"total time = +([\d.]+) ms")
_PROMPT = re.compile(r"prompt eval time = +([\d.]+) ms")
_RUNS = re.compile(r" eval time = +[\d.]+ ms / +(\d+) runs")
_PERPLEXITY = re.compile(r"Final estimate: PPL = ([\d.]+)")
_DECODED = re.compile(r"decoded +(\d+) tokens in +([\d.]+) seconds")


@dataclass(frozen=True, slots=True)
class LlamaRun:
    """One prompt's output text, and seconds per token without loading and prefill."""

    text: str
    tbt: float


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """A draft has at most ``most`` tokens and ends at a token less probable than ``least``.

    ``lookup``: it is what followed the last so many tokens when they came before; 0: it is the
    draft model's or head's.
    """

    most: int
    least: float = 0.0
    lookup: int = 0

    def __str__(self) -> str:
        behind = f" behind {self.lookup}-grams" if self.lookup else ""
        cut = f" while p >= {self.least:g}" if self.least else ""
        return f"drafts of {self.most}{behind}{cut}"


@dataclass(frozen=True, slots=True)
class Llama:
    """The tools of ``peer``, with stages at ``addresses`` (``host:port``) in layer order.

    ``target``: its file in GGUF. ``head``: that of an EAGLE-3 head of it, which drafts in place of
    the packaged draft model.
    """

    peer: Peer
    addresses: Sequence[str]
    layers: int
    context: int
    target: Path
    head: Path | None = None

    def token_ids(self, prompt: str) -> tuple[int, ...]:
        """llama.cpp's token ids of ``prompt``."""
        done = self._tool("llama-tokenize", "--ids", "--log-disable", prompt=prompt)
        return tuple(json.loads(done.stdout))

    def plain(self, prompt: str, tokens: int) -> LlamaRun:
        """Decode token by token, greedily."""
        options = ["-n", str(tokens), "-no-cnv", "--no-display-prompt", *self._split()]
        text, said = self._reported("llama-completion", options, prompt, (_PROMPT, _RUNS, _TOTAL))
        before, runs, total = (float(match[1]) for match in said)
        return LlamaRun(text, (total - before) / 1e3 / max(runs, 1))

    def speculative(self, prompt: str, tokens: int, drafting: DraftOptions) -> LlamaRun:
        """Decode greedily with drafts made at the client; may exceed ``tokens`` slightly."""
        options = ["-n", str(tokens - 1), *self._drafting(drafting), *self._split()]
        text, (decoded,) = self._reported("llama-speculative-simple", options, prompt, (_DECODED,))
        return LlamaRun(text.partition(prompt)[2], float(decoded[2]) / int(decoded[1]))

    def perplexity(self, text: Path, pieces: int) -> float:
        """Of the second halves of the first ``pieces`` of ``context`` tokens of ``text``."""
        options = ["-f", str(text), "--chunks", str(pieces), "-t", "1", "-c", str(self.context)]
        done = self._run("llama-perplexity", *options)
        found = _PERPLEXITY.search(done.stderr.decode(errors="replace"))
        if found is None:
            raise ClusterError("llama-perplexity gave no estimate")
        return float(found[1])

    def _drafting(self, drafting: DraftOptions) -> list[str]:
        if drafting.lookup:
            sizes = {"size-n": drafting.lookup, "size-m": drafting.most}
            named = [(f"--spec-ngram-simple-{name}", str(size)) for name, size in sizes.items()]
            return ["--spec-type", "ngram-simple", *chain(*named)]
        limits = {"n-max": drafting.most, "p-min": drafting.least}
        named = [(f"--spec-draft-{name}", str(limit)) for name, limit in limits.items()]
        kind = "draft-simple" if self.head is None else "draft-eagle3"
        model = ["-md", str(self.head or self.peer.model("draft"))]
        on = ["-ngld", "0", "-devd", "none", "-td", "1"]
        return ["--spec-type", kind, *chain(*named), *model, *on]

    def _reported(
        self, name: str, options: Sequence[str], prompt: str, report: Sequence[re.Pattern[str]]
    ) -> tuple[str, list[re.Match[str]]]:
        """A tool's output and the lines of its report.

        The tool's exit may cut off the thread that writes its log; a run without a report is
        repeated.
        """
        for _ in range(_ATTEMPTS):
            done = self._tool(name, *options, prompt=prompt)
            said = done.stderr.decode(errors="replace")
            found = [match for pattern in report if (match := pattern.search(said))]
            if len(found) == len(report):
                return done.stdout.decode(errors="replace"), found
        raise ClusterError(
            f"{name} gave no report in {_ATTEMPTS} runs; expected that of `make peer`'s version"
        )

    def _split(self) -> list[str]:
        split = split_options(self.addresses, self.layers)
        return [*split, "-t", "1", "-c", str(self.context), "--temp", "0"]

    def _tool(self, name: str, *arguments: str, prompt: str) -> subprocess.CompletedProcess[bytes]:
        return self._run(name, *arguments, "-p", prompt)

    def _run(self, name: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [
            str(self.peer.tool(name)),
            *("-m", str(self.target), "--no-escape"),
            *arguments,
        ]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=RUN_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{name} did not end within {RUN_SECONDS:g} s") from None
        if done.returncode:
            last = (
                done.stderr.decode(errors="replace").strip() or "it printed nothing"
            ).splitlines()[-1]
            raise ClusterError(f"{name} ended with status {done.returncode}: {last}")
        return done


def split_options(addresses: Sequence[str], layers: int) -> list[str]:
    """Options that split a model of ``layers`` layers over ``addresses`` like our stages."""
    blocks = [len(block) for block in layer_ranges(layers, len(addresses))]
    blocks[-1] += 1  # the LM head counts as a layer here
    shares = ",".join(map(str, blocks))
    return ["--rpc", ",".join(addresses), "-ngl", str(layers + 1), "-ts", shares]


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """A free port that no connection takes until a server listens there: it is bound meanwhile."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((HOST, 0))
        yield int(bound.getsockname()[1])


@contextlib.contextmanager
def servers(peer: Peer, count: int, logs: Path) -> Iterator[list[str]]:
    """Run ``count`` RPC servers with one thread each; yield their addresses."""
    with contextlib.ExitStack() as stack:
        addresses = []
        for stage in range(1, count + 1):
            port = stack.enter_context(kept_port())
            command = [str(peer.tool("ggml-rpc-server")), "-t", "1", "-p", str(port)]
            process = stack.enter_context(running(command, logs / f"rpc-{stage}.log"))
            _wait_for_port(port, process)
            addresses.append(f"{HOST}:{port}")
        yield addresses


@dataclass(frozen=True, slots=True)
class Relays:
    """Running relays: their ``ports``, in the order of their targets."""

    ports: list[int]
    process: subprocess.Popen[bytes]

    def set_latency(self, seconds: float) -> None:
        """Add ``seconds`` each way to everything that is sent from now on."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds * 1e3:g}\n".encode())
        self.process.stdin.flush()
        time.sleep(_RESHAPED_SECONDS)


@contextlib.contextmanager
def relays(targets: Sequence[str], latency: float, log: Path) -> Iterator[Relays]:
    """Run relays to ``targets`` that add ``latency`` seconds each way."""
    command = [
        sys.executable,
        "-m",
        "ops.peer.relay",
        "--latency-ms",
        f"{latency * 1e3:g}",
        *targets,
    ]
    with running(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ClusterError(
                f"the relay did not start: {log.read_text(encoding='utf-8').strip()}"
            )
        yield Relays(json.loads(line), process)


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, *, stdin: int = subprocess.DEVNULL, stdout: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` while the context is open."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout or said, stderr=said, preexec_fn=die_with_parent()
        )
    with process:
        try:
            yield process
        finally:
            process.terminate()


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection((HOST, port), 1.0).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise ClusterError(
                    f"llama.cpp's RPC server does not listen on port {port}"
                ) from None
        time.sleep(0.02)
