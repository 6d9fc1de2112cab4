"""Prompts of benchmarks are those that a training has not seen."""

from __future__ import annotations

import json
from pathlib import Path

from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import default_pair, open_directory
from ops.bench.default_pays import spread
from ops.peer.prompts import chosen
from ops.prompts import HELD_OUT, last_prompts
from ops.train.answers import asked


def test_no_benchmark_takes_a_prompt_of_a_training(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in ("a", "b")]
    for file in files:
        lines = [json.dumps({"turns": [f"{file.stem}{at}"]}) for at in range(2 * HELD_OUT)]
        file.write_text("\n".join(lines), encoding="utf-8")
    target = default_pair()[0]
    tokenizer = Tokenizer(open_directory(target))
    trained = {
        tuple(text.ids) for text in asked(tokenizer, files, slice(0, -HELD_OUT), 512, sampled=0)
    }
    measured = {prompt.text for prompt in last_prompts(tmp_path)}
    assert len(trained) == len(measured) == HELD_OUT * len(files)
    taken = [
        *(prompt.text for prompt in last_prompts(tmp_path, 2)),
        *spread(tmp_path, 9),
        *(prompt.text for prompt in chosen(tmp_path, "measuring", 4, 8, target)),
        *(prompt.text for prompt in chosen(tmp_path, "tuning", 4, 8, target)),
    ]
    assert measured.issuperset(taken)
    assert not trained & {tokenizer.encode(text, raw=False) for text in taken}
