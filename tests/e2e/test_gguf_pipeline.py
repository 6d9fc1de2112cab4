"""GGUF files as target and draft of a pipeline, and the folder that a file is converted to."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flowspec.client import Client
from flowspec.cluster import Cluster, Places, Setup
from tests import gguf_files
from tests.commands import run

PROMPT = [5, 9, 11, 7]
COUNT = 24


@pytest.mark.live
@pytest.mark.gate
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_file_in_parts_beside_its_conversion(role: str, tmp_path: Path) -> None:
    """All drafts are right: values and text of both are the same."""
    file, folder = tmp_path / "model-00001-of-00002.gguf", tmp_path / "folder"
    gguf_files.write(tmp_path / "model.gguf", kind="Q8_0", parts=2)
    words = ("convert", str(file), "--out", str(folder), "--dtype", "float32")
    done = run("flowspec", *words)
    assert done.returncode == 0, done.stderr
    target, draft = (file, folder) if role == "target" else (folder, file)
    places = Places(dtype="float32", draft_dtype="float32")
    setup = Setup(str(target), str(draft), 2, places=places)
    with Cluster(setup) as cluster, Client(cluster.url) as client:
        plain, drafted = (
            client.submit(prompt_ids=PROMPT, max_new_tokens=COUNT, strategy=name).result()
            for name in ("autoregressive", "speculative:lookahead=3")
        )
    assert len(plain.token_ids) == COUNT
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats["rounds"] == math.ceil((COUNT - 1) / 3), "a draft was wrong"
