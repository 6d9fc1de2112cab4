"""The house's rules: imports go one way, the core is pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("flowspec/**/*.py"), *ROOT.glob("workers/*.py")])

#: layer -> layers it may import. ``model`` and ``broker`` never see each other, ``core`` sees
#: errors only.
ALLOWED = {
    "errors": set[str](),
    "core": {"errors"},
    "strategies": {"core", "errors"},
    "broker": {"core", "errors", "observe"},
    "model": {"core", "errors", "observe"},
    "observe": {"errors"},
    "drivers": {"strategies", "broker", "model", "core", "errors", "observe"},
    "cluster": {"broker", "drivers", "model", "core", "strategies", "errors", "observe"},
    "client": {"broker", "core", "errors", "observe"},
    "testbed": {"cluster", "drivers", "broker", "model", "core", "strategies", "errors", "observe"},
    "cli": {
        "testbed",
        "client",
        "cluster",
        "drivers",
        "broker",
        "model",
        "core",
        "strategies",
        "errors",
        "observe",
    },
    "workers": {"drivers", "strategies", "broker", "model", "core", "errors", "observe"},
    "flowspec": {"client", "errors"},
    "__main__": {"cli"},
}
#: What the pure part may import beside itself: values and arithmetic, nothing that acts or looks
#: around.
PURE_IMPORTS = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "numpy",
    "numpy.typing",
    "operator",
    "statistics",
    "typing",
    "collections.abc",
}
PURE = ("core", "strategies")
TORCH_FREE = (
    "core",
    "strategies",
    "broker",
    "client",
    "cli",
    "cluster",
    "observe",
    "errors",
    "flowspec",
    "drivers",
)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module a file imports, and whether it does so at the top of the file."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            package = node.module == "flowspec"
            names = [f"flowspec.{alias.name}" for alias in node.names] if package else [node.module]
            for name in names:
                yield name or "", id(node) in top


def layer(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "workers":
        return "workers"
    return parts[1] if len(parts) > 1 and parts[1] != "__init__" else "flowspec"


def imported_layer(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] == "workers":
        return "workers"
    if parts[0] != "flowspec":
        return None
    return parts[1] if len(parts) > 1 else "flowspec"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    own = layer(path)
    for module, _ in imports(path):
        other = imported_layer(module)
        assert other is None or other == own or other in ALLOWED[own], f"{own} imports {module}"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if layer(p) in PURE], ids=lambda path: path.name
)
def test_the_core_is_pure(path: Path) -> None:
    for module, _ in imports(path):
        assert imported_layer(module) is not None or module in PURE_IMPORTS, (
            f"{path} imports {module}"
        )
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("np", "numpy")
        ):
            assert node.attr != "random", f"{path} draws random numbers"
        if isinstance(node, ast.Name):
            assert node.id not in ("open", "print", "input"), f"{path} calls {node.id}"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if layer(p) in TORCH_FREE], ids=lambda path: path.name
)
def test_only_the_model_imports_torch(path: Path) -> None:
    for module, _ in imports(path):
        assert module.split(".")[0] not in ("torch", "transformers"), f"{path} imports {module}"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if layer(p) == "drivers" and p.stem in ("sim", "replay")], ids=str
)
def test_simulation_and_replay_reach_neither_redis_nor_torch(path: Path) -> None:
    for module, _ in imports(path):
        assert not module.startswith(("redis", "torch", "flowspec.broker"))


def test_no_strategy_imports_another() -> None:
    names = {path.stem for path in ROOT.glob("flowspec/strategies/*.py")} - {"__init__", "base"}
    for name in names:
        for module, _ in imports(ROOT / f"flowspec/strategies/{name}.py"):
            assert module.split(".")[-1] not in names - {name}, f"{name} imports {module}"
