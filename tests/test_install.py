"""The installed package: a complete wheel, and an editable checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import flowspec
from flowspec.transport.connections.scripts import _folder, load

pytestmark = pytest.mark.live

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(file.name for file in (ROOT / "lua").glob("*.lua"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tracked files, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    for name in ("flowspec", "workers", "lua"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "."],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_has_scripts_models_and_workers(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"flowspec/_lua/{name}" for name in SCRIPTS} <= names
    assert "flowspec/_lua/include/graph.lua" in names
    for model in ("target", "draft"):
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            assert f"flowspec/default_pair/{model}/{file}" in names
    assert {
        "workers/scheduler.py",
        "workers/draft.py",
        "workers/verify.py",
        "workers/gateway.py",
        "flowspec/gateway/page.html",
        "flowspec/py.typed",
    } <= names
    assert not any(name.startswith("tests/") for name in names)


#: Makes an interpreter one without the packages of the extra ``worker``, then runs a module.
WITHOUT_MODELS = """
import runpy, sys
from flowspec.errors import WORKER_PACKAGES
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in WORKER_PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def without_models(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_MODELS, *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.gate
def test_a_client_needs_no_torch(tmp_path: Path) -> None:
    used = "from flowspec import AsyncClient, Client, JobFailed; import flowspec.gateway.app"
    script = WITHOUT_MODELS.replace("runpy.run_module", f"{used}\nrunpy.run_module")
    done = subprocess.run(
        [sys.executable, "-c", script, "flowspec", "strategies"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "autoregressive" in done.stdout


@pytest.mark.parametrize("command", [("flowspec", "simulate", "hi"), ("flowspec", "verify")])
def test_what_runs_models_says_what_to_install(command: tuple[str, ...]) -> None:
    done = without_models(*command)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "is not installed, which a machine that runs models needs" in line
    assert f"{sys.executable} -m pip install 'flowspec[worker]'" in line


def test_an_installed_wheel_finds_its_own_scripts(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import flowspec; from flowspec.transport.connections.scripts import load, _folder\n"
        "from flowspec.model.weights.directory import default_pair, open_directory\n"
        f"assert flowspec.__file__.startswith({str(tmp_path)!r})\n"
        f"assert str(_folder()) == {str(tmp_path / 'flowspec' / '_lua')!r}\n"
        "open_directory(default_pair()[0]).check_weights()\n"
        "print(len(load()))"
    )
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == len(SCRIPTS)


def test_an_editable_checkout_finds_the_scripts_beside_it() -> None:
    if Path(flowspec.__file__).parent.parent == ROOT:
        assert _folder() == ROOT / "lua"
    assert len(load()) == len(SCRIPTS)


def test_the_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == flowspec.__version__


def test_public_names_are_what_all_says() -> None:
    assert set(flowspec.__all__) == {
        "AsyncClient",
        "AsyncJob",
        "Chunk",
        "Client",
        "FlowSpecError",
        "Job",
        "JobError",
        "JobFailed",
        "JobTimeout",
        "Result",
        "Stats",
        "__version__",
    }
    assert all(hasattr(flowspec, name) for name in flowspec.__all__)
