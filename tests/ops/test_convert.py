"""The default pair in llama.cpp's format, and the installation of its readers."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from flowspec.errors import ConfigError, ModelError
from flowspec.model.weights.directory import ModelDirectory, default_pair, open_directory
from ops.peer import install
from ops.peer.convert import convert, interleaved, settings, tensors, vocabulary
from ops.peer.install import CONSTRAINTS, Peer, Step, check_compiler, unpack, version

PAIR = [pytest.param(open_directory(folder), id=Path(folder).name) for folder in default_pair()]


def rotated_halves(head: np.ndarray, position: int) -> np.ndarray:
    """A head's values rotated as by Hugging Face: value i with value i + size / 2."""
    half = len(head) // 2
    angles = position * 10000.0 ** (-np.arange(half) / half)
    low = head[:half]
    high = head[half:]
    turned = (
        low * np.cos(angles) - high * np.sin(angles),
        high * np.cos(angles) + low * np.sin(angles),
    )
    return np.concatenate(turned)


def rotated_neighbours(head: np.ndarray, position: int) -> np.ndarray:
    """The same as by llama.cpp: value 2i with value 2i + 1."""
    half = len(head) // 2
    angles = position * 10000.0 ** (-np.arange(half) / half)
    even = head[::2]
    odd = head[1::2]
    turned = np.stack(
        (even * np.cos(angles) - odd * np.sin(angles), odd * np.cos(angles) + even * np.sin(angles))
    )
    return turned.T.reshape(-1)


@given(
    seed=st.integers(0, 1000),
    heads=st.integers(1, 4),
    half=st.integers(1, 16),
    at=st.tuples(st.integers(0, 500), st.integers(0, 500)),
)
def test_attention_is_the_same_with_interleaved_heads(
    seed: int, heads: int, half: int, at: tuple[int, int]
) -> None:
    draw = np.random.default_rng(seed)
    size = 2 * half
    hidden = 8
    query, key = (draw.standard_normal((heads * size, hidden)).astype(np.float32) for _ in range(2))
    row = draw.standard_normal(hidden)
    ours = [(weight @ row).reshape(heads, size) for weight in (query, key)]
    theirs = [(interleaved(weight, heads) @ row).reshape(heads, size) for weight in (query, key)]
    for head in range(heads):
        expected = rotated_halves(ours[0][head], at[0]) @ rotated_halves(ours[1][head], at[1])
        found = rotated_neighbours(theirs[0][head], at[0]) @ rotated_neighbours(
            theirs[1][head], at[1]
        )
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("directory", PAIR)
def test_every_tensor_is_there_with_its_values(directory: ModelDirectory) -> None:
    written = dict(tensors(directory))
    source = load_file(directory.path / "model.safetensors")
    assert len(written) == len(source) == 2 + 9 * directory.layers
    assert all(values.dtype == np.float32 for values in written.values())
    last = directory.layers - 1
    for name, origin in (
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        (f"blk.{last}.ffn_down", f"model.layers.{last}.mlp.down_proj"),
        (f"blk.{last}.attn_v", f"model.layers.{last}.self_attn.v_proj"),
    ):
        assert np.array_equal(written[f"{name}.weight"], source[f"{origin}.weight"].float().numpy())
    query = source[f"model.layers.{last}.self_attn.q_proj.weight"].float().numpy()
    assert np.array_equal(
        written[f"blk.{last}.attn_q.weight"],
        interleaved(query, directory.config["num_attention_heads"]),
    )
    assert not np.array_equal(written[f"blk.{last}.attn_q.weight"], query)


@pytest.mark.parametrize("directory", PAIR)
def test_the_vocabulary_is_the_tokenizers(directory: ModelDirectory) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory.path)
    written = vocabulary(directory)
    assert written["add_token_list"] == tokenizer.convert_ids_to_tokens(
        list(range(directory.vocabulary))
    )
    special = [number for number, kind in enumerate(written["add_token_types"]) if kind != 1]
    assert special == sorted(tokenizer.all_special_ids)
    assert (written["add_bos_token_id"], written["add_eos_token_id"]) == (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )
    assert written["add_add_bos_token"]
    assert all(merge.count(" ") == 1 for merge in written["add_token_merges"])


def test_the_settings_are_the_models() -> None:
    directory = open_directory(default_pair()[0])
    found = settings(directory)
    assert found["add_block_count"] == directory.layers
    assert found["add_key_length"] * found["add_head_count"] == directory.hidden_size
    assert found["add_rope_dimension_count"] == found["add_value_length"] == found["add_key_length"]
    assert found["add_rope_freq_base"] == directory.config["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "qwen3"}, "its model_type is 'qwen3'"),
        ({"attention_bias": True}, "its layers have biases"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "its rope_type is 'llama3'"),
        ({"rope_scaling": {"factor": 2}}, "it scales its rotary positions"),
        ({"hidden_act": "gelu"}, "its activation is 'gelu'"),
    ],
)
def test_what_cannot_be_written_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    directory = open_directory(default_pair()[1])
    other = dataclasses.replace(directory, config={**directory.config, **change})
    with pytest.raises(ModelError, match=says):
        convert(other, tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def gguf_folder() -> Path | None:
    """The folder of ``gguf``; None: this environment. Skips if it is not installed."""
    if importlib.util.find_spec("gguf") is not None:
        return None
    if not (Peer().packages / "gguf").is_dir():
        pytest.skip("no gguf package; `make peer` installs one")
    return Peer().packages


def test_the_file_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = gguf_folder()
    monkeypatch.setattr(sys, "path", [*sys.path])
    directory = open_directory(default_pair()[1])
    file = tmp_path / "draft.gguf"
    convert(directory, file, folder)
    from gguf import GGUFReader

    reader = GGUFReader(file)
    expected = dict(tensors(directory))
    assert {tensor.name for tensor in reader.tensors} == set(expected)
    for tensor in reader.tensors:
        assert np.array_equal(tensor.data, expected[tensor.name])
    assert [path.name for path in tmp_path.iterdir()] == ["draft.gguf"]


# ---- the installation ----------------------------------------------------------------------------


def test_a_peer_that_is_not_installed_says_how_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ggml-rpc-server does not exist.*make peer"):
        Peer(tmp_path).check()


def test_without_a_compiler_the_error_names_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match=r"no C compiler found.*apt install build-essential"):
        check_compiler()
    monkeypatch.setenv("CC", "/no/such/gcc -O2")
    with pytest.raises(ConfigError, match=r"looked for /no/such/gcc\)"):
        check_compiler()


def test_versions_are_exact_and_agree_with_the_projects() -> None:
    pins = [
        line for line in CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")
    ]
    assert all(pin.count("==") == 1 for pin in pins)
    assert f"llama_cpp_python=={version()}" in pins


def test_a_step_that_fails_tells_its_last_line(tmp_path: Path) -> None:
    step = Step("failing", 10, tmp_path / "log")
    with pytest.raises(ConfigError, match=r"failing failed with status 3: the reason; see .*log"):
        step.run(
            [sys.executable, "-c", "print('begun'); print('the reason'); raise SystemExit(3)"], {}
        )


def test_a_step_that_takes_too_long_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "_REPORT_SECONDS", 0.1)
    step = Step("waiting", 0.2, tmp_path / "log")
    with pytest.raises(ConfigError, match=r"waiting took more than 0\.2 s"):
        step.run([sys.executable, "-c", "import time; time.sleep(60)"], {})


def test_only_the_wanted_folder_is_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("p/vendor/x/CMakeLists.txt", "p/vendor/x/src/a.c", "p/setup.py"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    folder = unpack(archive, "p/vendor/x/", tmp_path / "source")
    assert sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    ) == [
        "CMakeLists.txt",
        "src/a.c",
    ]
    with pytest.raises(ConfigError, match="has nothing below"):
        unpack(archive, "q/", tmp_path / "other")


def test_a_download_that_is_not_the_pinned_one_is_removed(tmp_path: Path) -> None:
    archive = tmp_path / f"llama_cpp_python-{version()}.tar.gz"
    archive.write_bytes(b"something else")
    with pytest.raises(ConfigError, match="is not the file that was pinned"):
        install._source(Peer(tmp_path), {})
    assert not archive.exists()


def test_nothing_is_done_when_everything_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = Peer(tmp_path)
    peer.tool("x").parent.mkdir(parents=True)
    for tool in install.TOOLS:
        peer.tool(tool).touch()
    for name in ("target", "draft"):
        peer.model(name).touch()
    before = sorted(tmp_path.rglob("*"))
    install.install(peer, 1)
    assert sorted(tmp_path.rglob("*")) == before
    assert "are in" in capsys.readouterr().out
