"""Files, anchors and Python names cited in documents, docstrings and comments exist."""

from __future__ import annotations

import ast
import pkgutil
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from tests.documents import DOCUMENTS, FOLDERS, ROOT, SOURCES, anchors, code_spans, name, prose

PATH = re.compile(rf"(?<![\w./-])(?:docs|{'|'.join(FOLDERS)})/[\w./*-]*[\w*]")
#: Capitals in a cited path that stand for any name, as in ``flowspec/strategies/NAME.py``.
PLACEHOLDER = re.compile(r"NAME|OPERATION|KEYS")
ANCHOR = re.compile(r"(docs/\w+\.md)#([\w-]+)")
LINK = re.compile(r"\]\((?!\w+:)([^)#]*)#?([^)]*)\)")
#: Docstrings may leave out ``flowspec.``, except of ``model``, which is also a variable's name.
PACKAGES = {path.parent.name for path in ROOT.glob("flowspec/*/__init__.py")} - {"model"}
DOTTED = re.compile(rf"(?:flowspec|workers|ops|{'|'.join(sorted(PACKAGES))})(?:\.[A-Za-z_]\w*)+")
MEMBER = re.compile(r"([A-Z]\w+)\.(\w+)(?:\(.*\))?")


def is_path(cited: str) -> bool:
    pattern = PLACEHOLDER.sub("*", cited)
    return any(ROOT.glob(pattern)) if "*" in pattern else (ROOT / pattern).exists()


def resolves(dotted: str) -> bool:
    full = f"flowspec.{dotted}" if dotted.partition(".")[0] in PACKAGES else dotted
    try:
        pkgutil.resolve_name(full)
    except (ImportError, AttributeError):
        return False
    return True


def dotted_names(path: Path) -> set[str]:
    """Python names in code spans: a span's own, or the module in ``python -m module``."""
    words = {word.rstrip("();,") for span in code_spans(prose(path)) for word in span.split()}
    return {word for word in words if DOTTED.fullmatch(word)}


def test_every_cited_path_exists() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    installed = set(wheel["targets"]["wheel"]["force-include"].values())
    missing = [
        f"{name(path)}: {cited}"
        for path in [*DOCUMENTS, *SOURCES]
        for cited in sorted(set(PATH.findall(prose(path))))
        if not is_path(cited) and cited not in installed
    ]
    assert not missing, "\n".join(missing)


def test_every_cited_anchor_exists() -> None:
    """In strings too: an error message may cite a document."""
    known = {name(document): anchors(document) for document in DOCUMENTS}
    missing = [
        f"{name(path)}: {document}#{anchor}"
        for path in [*DOCUMENTS, *SOURCES]
        for document, anchor in sorted(set(ANCHOR.findall(path.read_text())))
        if anchor not in known.get(document, ())
    ]
    assert not missing, "\n".join(missing)


def leads_nowhere(document: Path, target: str, anchor: str) -> bool:
    file = document.parent / target if target else document
    return not file.exists() or (bool(anchor) and anchor not in anchors(file))


def test_every_relative_link_leads_somewhere() -> None:
    missing = [
        f"{name(document)}: {target}#{anchor}"
        for document in DOCUMENTS
        for target, anchor in LINK.findall(document.read_text())
        if leads_nowhere(document, target, anchor)
    ]
    assert not missing, "\n".join(missing)


def test_every_cited_python_name_resolves() -> None:
    missing = [
        f"{name(path)}: {dotted}"
        for path in [*DOCUMENTS, *SOURCES]
        for dotted in sorted(dotted_names(path))
        if not resolves(dotted)
    ]
    assert not missing, "\n".join(missing)


def test_every_cited_member_of_a_class_exists() -> None:
    """As in ``StageMachine.step``, for classes of flowspec, workers and ops."""
    classes = {
        node.name: node
        for folder in ("flowspec", "workers", "ops")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    missing = [
        f"{name(path)}: {span}"
        for path in [*DOCUMENTS, *SOURCES]
        for span in sorted(set(code_spans(prose(path))))
        if (cited := MEMBER.fullmatch(span)) and cited[1] in classes
        if cited[2] not in members(cited[1], classes)
    ]
    assert not missing, "\n".join(missing)


def members(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Names of a class's methods and fields, inherited ones included."""
    found = set()
    for node in ast.walk(classes[name]):
        match node:
            case ast.FunctionDef(name=member) | ast.AsyncFunctionDef(name=member):
                found.add(member)
            case ast.AnnAssign(target=ast.Name(id=member)):
                found.add(member)
            case ast.Name(id=member, ctx=ast.Store()):
                found.add(member)
            case ast.Attribute(value=ast.Name(id="self"), attr=member, ctx=ast.Store()):
                found.add(member)
    bases = {base.id for base in classes[name].bases if isinstance(base, ast.Name)}
    return found.union(*(members(base, classes) for base in bases & classes.keys()))
