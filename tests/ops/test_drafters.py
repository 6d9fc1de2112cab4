"""The comparison of drafters, on a random block drafter for the packaged target."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowspec.errors import ConfigError
from flowspec.model.weights.directory import open_directory
from ops.bench.drafters import Contestant, contestants
from tests.model.block_drafters import save_block_drafter
from tests.ops.test_bench import printed


@pytest.mark.heavy
def test_every_drafter_has_a_row_for_every_strategy(tmp_path: Path) -> None:
    target = open_directory("target")
    folder = save_block_drafter(
        tmp_path / "random",
        vocabulary=target.vocabulary,
        hidden=target.hidden_size,
        num_target_layers=target.layers,
    )
    words = ["--strategies", "static_tree,speculative", "--tokens", "6", "--per-kind", "1"]
    rows = printed("ops.bench.drafters", "--drafters", f"slm=draft,block={folder.path}", *words)
    table = [row for row in rows if row[0] in ("static_tree", "speculative")]
    assert [row[1] for row in table] == ["draft", "random"] * 4
    for small, block in zip(table[::2], table[1::2], strict=True):
        # A random drafter is hardly ever right: a round is a token, and takes two passes at most,
        # as its block has four levels and a tree up to eight.
        assert float(block[3]) < float(small[3])
        assert float(block[4]) <= 2.1
        assert float(small[4]) > float(block[4])


def test_drafters_are_pairs() -> None:
    assert contestants("slm=draft,block=a/b") == [
        Contestant("slm", "draft", "draft"),
        Contestant("block", "a/b", "a/b"),
    ]
    with pytest.raises(ConfigError, match="expected pairs"):
        contestants("draft")
