"""``ops.bench.peer_jobs``: the closed loop, llama.cpp's server, and a report of stub sides."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowspec.errors import ClusterError
from ops.bench import peer_jobs as program
from ops.peer.closed_loop import Serve, closed_loop
from ops.peer.install import Peer
from ops.peer.llama import DraftOptions
from ops.peer.prompts import PeerPrompt
from ops.peer.server import Completion, llama_server
from tests.marks import examples

PROMPTS = [PeerPrompt(f"p{at}", (at, at), f"<p{at}>", expected="right") for at in range(12)]


class Counting:
    """Serves a prompt in ``seconds``, and knows how many it served at once."""

    def __init__(self, seconds: float = 0.0, text: str = "right and more") -> None:
        self.seconds = seconds
        self.text = text
        self.served: list[str] = []
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def __call__(self, prompt: PeerPrompt) -> Completion:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(self.seconds)
        with self._lock:
            self._now -= 1
            self.served.append(prompt.text)
        return Completion(self.text, 10)


@settings(max_examples=examples(20))
@given(st.integers(1, 12), st.integers(1, 8))
def test_every_prompt_is_served_once_and_no_more_than_so_many_at_once(
    prompts: int, at_once: int
) -> None:
    serve = Counting(0.001)
    found = closed_loop(serve, PROMPTS[:prompts], at_once)
    assert sorted(serve.served) == sorted(prompt.text for prompt in PROMPTS[:prompts])
    assert serve.most <= at_once
    assert (found.same, found.prompts) == (prompts, prompts)


def test_the_rate_is_of_all_requests_together() -> None:
    serve = Counting(0.1)
    found = closed_loop(serve, PROMPTS[:8], 4)
    assert serve.most == 4
    assert 0.2 <= 80 / found.rate < 0.8


def test_a_text_that_is_not_the_targets_is_counted() -> None:
    assert closed_loop(Counting(text="wrong"), PROMPTS[:3], 2).same == 0


# ---- llama.cpp's server --------------------------------------------------------------------------


def tool(folder: Path, body: str) -> Peer:
    """llama.cpp with a server that is a Python program."""
    peer = Peer(folder)
    file = peer.tool("llama-server")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!{sys.executable}\n{textwrap.dedent(body)}")
    file.chmod(0o755)
    return peer


ECHO = """
    import http.server, json, sys
    words = sys.argv[1:]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"status": "ok"})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = json.dumps([words, asked])
            self.answer({"content": said, "tokens_predicted": asked["n_predict"]})

        def answer(self, body):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    port = int(words[words.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_slots_split_and_drafts_reach_the_server_and_ids_the_request(tmp_path: Path) -> None:
    peer = tool(tmp_path, ECHO)
    split = ["--rpc", "a:1,b:2"]
    log = tmp_path / "log"
    with llama_server(peer, split, 1024, 4, DraftOptions(6, 0.5), log) as server:
        found = server.complete((5, 6), 48)
    assert found.tokens == 48
    for words in ('"-np", "4"', '"-c", "4096"', '"--rpc", "a:1,b:2"', '"--spec-draft-n-max", "6"'):
        assert words in found.text
    assert (
        '"prompt": [5, 6], "n_predict": 48, "temperature": 0, "cache_prompt": false' in found.text
    )


def test_plain_decoding_has_no_draft_model(tmp_path: Path) -> None:
    with llama_server(tool(tmp_path, ECHO), [], 64, 1, None, tmp_path / "log") as server:
        assert '"-md"' not in server.complete((1,), 1).text


def test_a_server_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    peer = tool(tmp_path, "import sys; sys.exit('no such model')")
    with (
        pytest.raises(ClusterError, match="llama-server did not start: no such model"),
        llama_server(peer, [], 64, 1, None, tmp_path / "log"),
    ):
        pass


# ---- the report ----------------------------------------------------------------------------------


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stubs for both sides, theirs half as fast; the folder of an installed peer."""
    peer = Peer(tmp_path)
    for file in peer.missing():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    @contextlib.contextmanager
    def clients(*_: object) -> Iterator[list[None]]:
        yield [None] * 8

    @contextlib.contextmanager
    def theirs(*_: object) -> Iterator[Serve]:
        yield Counting(0.04, "other")

    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(program, "_prompts", lambda *_: PROMPTS[:4])
    monkeypatch.setattr(program, "our_clients", clients)
    monkeypatch.setattr(program, "our_serve", lambda *_: Counting(0.02))
    monkeypatch.setattr(program, "_their_serve", theirs)
    return tmp_path


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str | Path
) -> str:
    monkeypatch.setattr(sys, "argv", ["peer_jobs", *map(str, words)])
    program.main()
    return capsys.readouterr().out


@pytest.mark.heavy
def test_the_table_has_a_row_for_each_latency_and_number_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stubs: Path
) -> None:
    page = said(monkeypatch, capsys, "--peer", stubs, "--jobs", "1,4", "--latencies", "0,5")
    rows = [line.split(" | ") for line in page.splitlines() if " ms | " in line]
    assert [row[:2] for row in rows] == [
        ["| 0 ms", "1"],
        ["| 0 ms", "4"],
        ["| 5 ms", "1"],
        ["| 5 ms", "4"],
    ]
    assert all(1.2 < float(row[-2]) < 3.5 for row in rows)
    assert all(row[-1] == "12/12 12/12 0/12 0/12 |" for row in rows)


def test_a_side_with_more_settings_is_refused(monkeypatch: pytest.MonkeyPatch, stubs: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["peer_jobs", "--peer", str(stubs), "--drafts", "3,4"])
    with pytest.raises(SystemExit, match=r"^peer_jobs: ours has 2 settings, llama\.cpp 3 "):
        program.main()
