"""Import rules: layers import in one direction without cycles, and the core is pure."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("flowspec/**/*.py"), *ROOT.glob("workers/*.py")])
PROGRAMS = sorted(ROOT.glob("ops/**/*.py"))

#: Rooms from the bottom up, folders and modules beside them: each may import those before it.
ROOMS = {
    "core": ("run", "protocol", "tree", "stage", "drafting", "prefixes", "session", "job"),
    "transport": ("base", "ways", "wire", "connections", "control", "link"),
    "model": (
        *("memory", "base", "weights", "kernels", "rows", "layers", "sampling", "drafters"),
        *("empty_stage", "stage", "shards", "text", "reference", "timing"),
    ),
}
#: layer -> layers it may import. ``model`` and ``transport`` do not import each other, ``core``
#: imports only errors.
ALLOWED = {
    "errors": set[str](),
    "core": {"errors"},
    "strategies": {"core", "errors"},
    "transport": {"core", "errors", "observe"},
    "model": {"core", "errors", "observe"},
    "observe": {"errors"},
    "results": {"core", "errors"},
    "async_client": {"results", "transport", "core", "errors", "observe"},
    "client": {"async_client", "results", "transport", "core", "errors"},
    "gateway": {"async_client", "strategies", "results", "transport", "core", "errors", "observe"},
    "flowspec": {"async_client", "client", "results", "errors"},
    "restarts": set[str](),
    "__main__": {"cli"},
}
ALLOWED["roles"] = {
    *("strategies", "transport", "model", "core", "errors", "observe"),
    "flowspec",  # its version, which a lease tells
}
ALLOWED["doctor"] = {"roles", "transport", "model", "core", "errors"}
ALLOWED["rehearse"] = ALLOWED["roles"] | {"roles"}
ALLOWED["plan"] = ALLOWED["proof"] = ALLOWED["rehearse"] | {"rehearse"}
ALLOWED["start"] = ALLOWED["plan"] | {"plan"}
ALLOWED["workers"] = ALLOWED["start"] | {"start", "gateway"}
ALLOWED["cluster"] = ALLOWED["start"] | {"start", "restarts"}
ALLOWED["cli"] = ALLOWED["cluster"] | {
    *("cluster", "proof", "doctor", "client", "async_client", "results", "gateway"),
}
#: Modules that the pure layers may import: values and arithmetic, no effects.
PURE_IMPORTS = {
    *("__future__", "bisect", "collections", "collections.abc", "dataclasses", "enum", "functools"),
    *("heapq", "itertools", "json", "math", "numpy", "numpy.typing", "operator", "statistics"),
    "typing",
}
PURE = ("core", "strategies")
WITH_TORCH = ("doctor", "model", "plan", "proof", "rehearse", "workers")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module that a file imports, at its top or inside a function."""
    found: list[str] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found += [
                f"{module}.{alias.name}" if is_package(module, alias.name) else module
                for alias in node.names
            ]
    return tuple(found)


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
    if first in ("workers", "ops", "tests"):
        return first
    if first != "flowspec":
        return None
    return rest[0] if rest else "flowspec"


def room(layer: str, module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["flowspec", layer] and len(parts) > 2 else None


def of_layers(*layers: str) -> list[Path]:
    return [path for path in SOURCES if layer(module_name(path)) in layers]


def may_import(own: str, module: str) -> bool:
    """Whether a module of layer ``own`` may import ``module``."""
    other = layer(module)
    return other in (None, own) or other in ALLOWED[own]


def test_the_wheel_does_without_the_laboratory() -> None:
    assert layer("ops.compare.tuning") == "ops"
    assert not any(allowed & {"ops", "tests"} for allowed in ALLOWED.values())


def test_imports_go_one_way() -> None:
    assert {layer(module_name(path)) for path in SOURCES} == ALLOWED.keys()
    wrong = [
        f"{module_name(path)} imports {module}"
        for path in SOURCES
        for module in imports(path)
        if not may_import(str(layer(module_name(path))), module)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("layer", ROOMS)
def test_rooms_import_those_below_them(layer: str) -> None:
    rooms = ROOMS[layer]
    wrong = []
    for path in of_layers(layer):
        own = room(layer, module_name(path))
        if own is None:
            assert path.name == "__init__.py"
            continue
        others = [(room(layer, module), module) for module in imports(path)]
        wrong += [
            f"{module_name(path)} imports {module}"
            for other, module in others
            if other is not None and rooms.index(other) > rooms.index(own)
        ]
    assert not wrong, "\n".join(wrong)


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


def effects(path: Path) -> Iterator[str]:
    """What a file of the pure layers does that is not a function of its inputs."""
    for module in imports(path):
        if layer(module) is None and module not in PURE_IMPORTS:
            yield f"imports {module}"
    for node in ast.walk(tree(path)):
        match node:
            case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="random"):
                yield "draws random numbers"
            case ast.Name(id="open" | "print" | "input" as called):
                yield f"calls {called}"


def test_the_core_is_pure() -> None:
    wrong = [f"{path} {effect}" for path in of_layers(*PURE) for effect in effects(path)]
    assert not wrong, "\n".join(wrong)


def test_files_are_utf_8_whatever_the_locale() -> None:
    """Where ruff, which finds most of these calls, does not know that an object is a path."""
    silent = [
        f"{path}:{call.lineno}"
        for path in [*SOURCES, *PROGRAMS]
        for call in ast.walk(tree(path))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("read_text", "write_text")
        and len(call.args) == (call.func.attr == "write_text")
        and not any(one.arg == "encoding" for one in call.keywords)
    ]
    assert silent == []


def test_only_the_model_imports_torch() -> None:
    wrong = [
        f"{path} imports {module}"
        for path in of_layers(*(set(ALLOWED) - set(WITH_TORCH)))
        for module in imports(path)
        if module.split(".")[0] in ("torch", "transformers")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["simulator", "replay"])
def test_simulation_and_replay_reach_neither_redis_nor_torch(name: str) -> None:
    """Neither does anything that they import."""
    heavy = ("redis", "torch", "transformers", "flowspec.transport")
    script = (
        f"import sys, flowspec.rehearse.{name}\n"
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
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module_name(path))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert shared == {}
