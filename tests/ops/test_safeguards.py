"""What the cost of safeguards is measured against lacks them, and gives the same text."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flowspec.client import Client
from flowspec.model.weights.directory import default_pair
from flowspec.transport.connections.connection import connect
from flowspec.transport.connections.scripts import load
from ops.bench.safeguards import LEFT_OUT, pipeline, tables, unfenced

PROGRAM = """
import zlib
from ops.bench.safeguards import TERMS, change
from flowspec.transport.connections.scripts import load
change(["checksums", "leases", "fences"])
print(zlib.crc32(b"rows"), TERMS.renew_seconds, "return true end" in load()["publish"].text)
"""


def test_what_is_left_out_is_not_there() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "0 0.1 True\n", done.stderr


def test_an_unfenced_script_is_another_one() -> None:
    whole = load()["publish"]
    without = unfenced(whole)
    assert len(without.text) < len(whole.text) and without.sha != whole.sha
    assert "'holders')" in whole.text and "'holders')" not in without.text


@pytest.mark.live
def test_a_pipelines_workers_lack_what_is_left_out() -> None:
    whole = load()["publish"]
    with pipeline(default_pair(), "fences") as url, Client(url) as client:
        client.submit("Hi.", max_new_tokens=2, reuse=False).result()
        broker = connect(url)
        assert broker.script_exists(whole.sha, unfenced(whole).sha) == [False, True]
        broker.close()


@pytest.mark.live
def test_a_pipeline_without_them_gives_the_same_text() -> None:
    said = []
    for changed in ("", LEFT_OUT[-1]):
        with pipeline(default_pair(), changed) as url, Client(url) as client:
            job = client.submit("Count to ten.", max_new_tokens=12, strategy="flowspec")
            said.append(job.result().token_ids)
    assert said[0] == said[1]
    assert sum("recorded" in line for line in tables(default_pair(), 1, 4)) == 2
