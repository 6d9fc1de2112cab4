from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowspec.model.weights.directory import ModelDirectory, open_directory
from tests.model.families import FAMILIES, save

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelDirectory]:
    """A family's model by name and seed, written once."""
    root = tmp_path_factory.mktemp("families")

    def get(name: str, seed: int = 0) -> ModelDirectory:
        folder = root / f"{name}-{seed}"
        if not folder.exists():
            save(FAMILIES[name], folder, seed=seed)
        return open_directory(str(folder))

    return get


@pytest.fixture
def llama_copy(family: Callable[..., ModelDirectory], tmp_path: Path) -> Path:
    """A Llama to damage."""
    source = family("llama").path
    folder = tmp_path / "model"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
