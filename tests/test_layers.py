"""Import rules: layers import in one direction without cycles, and the core is pure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("flowspec/**/*.py"), *ROOT.glob("workers/*.py")])
PROGRAMS = sorted(ROOT.glob("ops/**/*.py"))

#: Folders of ``flowspec/core`` from the bottom up: each may import those before it.
ROOMS = ("run", "protocol", "tree", "stage", "drafting", "job")
#: layer -> layers it may import. ``model`` and ``broker`` do not import each other, ``core``
#: imports only errors.
ALLOWED = {
    "errors": set[str](),
    "core": {"errors"},
    "strategies": {"core", "errors"},
    "broker": {"core", "errors", "observe"},
    "model": {"core", "errors", "observe"},
    "emulation": {"core", "errors"},
    "planning": {"emulation", "model", "core", "errors"},
    "observe": {"errors"},
    "doctor": {"broker", "model", "core", "errors"},
    "drivers": {"strategies", "broker", "model", "emulation", "core", "errors", "observe"},
    "results": {"broker", "core", "errors"},
    "client": {"results", "broker", "core", "errors", "observe"},
    "async_client": {"client", "results", "broker", "core", "errors"},
    "gateway": {"async_client", "strategies", "results", "broker", "core", "errors", "observe"},
    "flowspec": {"async_client", "client", "results", "errors"},
    "__main__": {"cli"},
}
ALLOWED["workers"] = ALLOWED["drivers"] | {"drivers", "planning", "gateway"}
ALLOWED["forks"] = {"broker", "errors"}
ALLOWED["restarts"] = set()
ALLOWED["cluster"] = ALLOWED["drivers"] | {"drivers", "planning", "forks", "restarts"}
ALLOWED["testbed"] = ALLOWED["cluster"] | {"cluster"}
ALLOWED["cli"] = ALLOWED["testbed"] | {
    *("testbed", "doctor"),
    *("client", "async_client", "results", "gateway"),
}
#: Modules that the pure layers may import: values and arithmetic, no effects.
PURE_IMPORTS = {
    *("__future__", "bisect", "collections", "collections.abc", "dataclasses", "enum", "functools"),
    *("heapq", "itertools", "json", "math", "numpy", "numpy.typing", "operator", "statistics"),
    "typing",
}
PURE = ("core", "strategies")
WITH_TORCH = ("doctor", "model", "testbed", "workers")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            yield from (
                f"{module}.{alias.name}" if is_package(module, alias.name) else module
                for alias in node.names
            )


def is_package(module: str, name: str) -> bool:
    """Whether ``name``, imported from ``module``, is itself one of our modules."""
    place = ROOT.joinpath(*module.split("."), name)
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str | None:
    """The layer of one of our modules; None for other modules."""
    first, *rest = module.split(".")
    if first == "workers":
        return "workers"
    if first != "flowspec":
        return None
    return rest[0] if rest else "flowspec"


def room(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["flowspec", "core"] and len(parts) > 2 else None


def of_layers(*layers: str) -> list[Path]:
    return [path for path in SOURCES if layer(module_name(path)) in layers]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_go_one_way(path: Path) -> None:
    own = layer(module_name(path))
    assert own is not None
    for module in imports(path):
        other = layer(module)
        assert other in (None, own) or other in ALLOWED[own], f"{own} imports {module}"


@pytest.mark.parametrize("path", of_layers("core"), ids=module_name)
def test_rooms_of_the_core_import_those_below_them(path: Path) -> None:
    own = room(module_name(path))
    if own is None:
        assert path.name == "__init__.py", f"{path} is in no folder of the core"
        return
    for module in imports(path):
        other = room(module)
        if other is not None:
            assert ROOMS.index(other) <= ROOMS.index(own), f"core/{own} imports {module}"


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count: a deferred cycle is still a cycle."""
    ours = {module_name(path): path for path in [*SOURCES, *PROGRAMS]}
    links = {
        name: {known for known in imports(path) if known in ours} for name, path in ours.items()
    }
    assert cycle(links) == []


def cycle(links: Mapping[str, set[str]]) -> list[str]:
    """A path from a module back to itself; empty if there is none."""
    finished: set[str] = set()

    def search(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        for other in sorted(links[module]):
            found = search(other, [*path, module])
            if found:
                return found
        finished.add(module)
        return []

    for module in sorted(links):
        found = search(module, [])
        if found:
            return found
    return []


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("path", of_layers(*PURE), ids=module_name)
def test_the_core_is_pure(path: Path) -> None:
    for module in imports(path):
        assert layer(module) is not None or module in PURE_IMPORTS, f"{path} imports {module}"
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("np", "numpy")
        ):
            assert node.attr != "random", f"{path} draws random numbers"
        if isinstance(node, ast.Name):
            assert node.id not in ("open", "print", "input"), f"{path} calls {node.id}"


@pytest.mark.parametrize("path", of_layers(*(set(ALLOWED) - set(WITH_TORCH))), ids=module_name)
def test_only_the_model_imports_torch(path: Path) -> None:
    for module in imports(path):
        assert module.split(".")[0] not in ("torch", "transformers"), f"{path} imports {module}"


@pytest.mark.parametrize("name", ["sim", "replay"])
def test_simulation_and_replay_reach_neither_redis_nor_torch(name: str) -> None:
    """Neither does anything that they import."""
    heavy = ("redis", "torch", "transformers", "flowspec.broker")
    script = (
        f"import sys, flowspec.drivers.{name}\n"
        f"print(*(module for module in {heavy} if module in sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert loaded.stdout.split() == []


def test_the_client_is_imported_on_first_use() -> None:
    import flowspec

    for name in flowspec.__all__:
        assert getattr(flowspec, name) is not None
    assert flowspec.Client.__module__ == "flowspec.client"
    with pytest.raises(AttributeError, match="no attribute 'Server'"):
        _ = flowspec.Server


def test_no_strategy_imports_another() -> None:
    from flowspec.strategies import STRATEGIES

    homes = {kind.__module__ for kind in STRATEGIES.values()}  # type: ignore[attr-defined]
    for path in of_layers("strategies"):
        own = module_name(path)
        if own != "flowspec.strategies":
            assert not (homes - {own}) & set(imports(path)), f"{own} imports another strategy"


def test_no_two_classes_share_a_name() -> None:
    """A search for a class by name finds exactly one."""
    places: dict[str, list[str]] = {}
    for path in [*SOURCES, *PROGRAMS]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module_name(path))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert shared == {}
