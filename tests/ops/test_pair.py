"""The script that retrains the packaged pair, on small inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flowspec.model.weights.directory import check_pair, open_directory
from ops.train import pair


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_muon_is_torchs_in_float32(shape: tuple[int, int]) -> None:
    """torch rounds to bfloat16 on the way."""
    torch.manual_seed(0)
    start = torch.randn(shape)
    gradients = torch.randn(3, *shape)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    ours = pair.Muon([weights[0]], 0.1)
    theirs = torch.optim.Muon([weights[1]], lr=0.1, momentum=0.95, weight_decay=0.01)
    for gradient in gradients:
        for weight, optimizer in zip(weights, (ours, theirs), strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    moved = [weight.detach() - start for weight in weights]
    assert torch.dist(*moved) < 0.03 * moved[1].norm()


@pytest.mark.heavy
def test_a_pair_can_be_made_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pair, "HELD_OUT", 2048)
    problems = tmp_path / "problems.jsonl"
    rows = [
        {"question": f"Tom has {n} and buys 2?", "answer": f"<<{n}+2={n + 2}>>{n + 2}"}
        for n in range(40)
    ]
    problems.write_text("\n".join(json.dumps(row) for row in rows))
    code = str(Path(pair.__file__).parents[2] / "flowspec")
    out = str(tmp_path / "work")
    quick = ["--out", out, "--minutes", "0.02", "--length", "32", "--batch", "2", "--threads", "1"]
    pair.main(["prepare", code, code, str(problems), "--out", out])
    pair.main(["target", *quick])
    pair.main(["draft", *quick])
    pair.main(["draft", *quick, "--from", f"{out}/draft"])
    assert capsys.readouterr().out.count("held-out loss") == 3
    target = open_directory(f"{out}/target")
    draft = open_directory(f"{out}/draft")
    check_pair(target, draft)
    assert (target.layers, draft.layers) == (12, 2)
    target.check_weights()
