"""llama.cpp's HTTP server over RPC stages: several requests at once, one slot each."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowspec.errors import ClusterError
from ops.peer.install import Peer
from ops.peer.llama import RUN_SECONDS, DraftOptions, free_port, running

#: Until the server has sent the model to the RPC servers, over links of any latency measured here.
_LOAD_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The text of one request and its number of tokens."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """A running server at ``url``."""

    url: str

    def complete(self, ids: Sequence[int], tokens: int) -> Completion:
        """Decode greedily after ``ids``, without reuse of an earlier prompt's rows."""
        wanted = {
            "prompt": list(ids),
            "n_predict": tokens,
            "temperature": 0,
            "cache_prompt": False,
        }
        body = json.dumps(wanted).encode()
        json_type = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/completion", body, json_type)
        try:
            with urllib.request.urlopen(request, timeout=RUN_SECONDS) as response:
                answer = json.load(response)
        except (OSError, ValueError) as error:
            raise ClusterError(f"llama-server did not answer: {error}") from error
        return Completion(str(answer["content"]), int(answer["tokens_predicted"]))


@contextlib.contextmanager
def llama_server(
    peer: Peer,
    split: Sequence[str],
    context: int,
    slots: int,
    drafting: DraftOptions | None,
    log: Path,
) -> Iterator[LlamaServer]:
    """A server with ``slots`` slots of ``context`` tokens; ``split`` as of ``split_options``.

    ``drafting``: speculate with the draft model, in this process; None: plain decoding.
    """
    port = free_port()
    command = [
        *(str(peer.tool("llama-server")), "-m", str(peer.model("target"))),
        *("--host", "127.0.0.1", "--port", str(port), "-t", "1", "-tb", "1"),
        *("-np", str(slots), "-c", str(context * slots), "--no-ui"),
        *split,
        *(_draft_options(peer, drafting) if drafting is not None else ()),
    ]
    with running(command, log) as process:
        server = LlamaServer(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + _LOAD_SECONDS
        while not _healthy(server):
            if process.poll() is not None or time.monotonic() > deadline:
                said = (
                    log.read_text(encoding="utf-8", errors="replace").strip()
                    or "it printed nothing"
                )
                raise ClusterError(f"llama-server did not start: {said.splitlines()[-1]}")
            time.sleep(0.1)
        yield server


def _draft_options(peer: Peer, drafting: DraftOptions) -> list[str]:
    return [
        *("-md", str(peer.model("draft")), "-ngld", "0", "-devd", "none", "-td", "1"),
        *("--spec-type", "draft-simple", "--spec-draft-n-max", str(drafting.most)),
        *("--spec-draft-p-min", str(drafting.least)),
    ]


def _healthy(server: LlamaServer) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=5.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
