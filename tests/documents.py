"""The repository's documents and the prose in its source files."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("flowspec", "workers", "ops", "tests", "lua")
DOCUMENTS = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "lua/README.md")
    ),
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "ops/bench/RESULTS.md",
    *sorted(ROOT.glob("ops/bench/results/*.md")),
]
SOURCES = [
    *(ROOT / name for name in ("Makefile", "pyproject.toml", "docker-compose.yml", ".ci/run")),
    ROOT / "ops/Dockerfile",
    *(
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".lua", ".toml")
    ),
]


def name(path: Path) -> str:
    """A file's path relative to the repository."""
    return path.relative_to(ROOT).as_posix()


@cache
def prose(path: Path) -> str:
    """A document's text; the docstrings and comments of a source file."""
    text = path.read_text(encoding="utf-8")
    if path in DOCUMENTS:
        return text
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
        return "\n".join([*docstrings(text), *comments])
    mark = "--" if path.suffix == ".lua" else "#"
    return "\n".join(line.partition(mark)[2] for line in text.splitlines())


def docstrings(text: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [found for node in nodes if (found := ast.get_docstring(node))]


def without_blocks(text: str) -> str:
    """The text without its fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def code_spans(text: str) -> list[str]:
    """The contents of `...` and ``...``."""
    spans = re.findall(r"(`+)([^`]+)\1", without_blocks(text))
    return [" ".join(content.split()) for _, content in spans]


def anchors(document: Path) -> set[str]:
    """A document's link targets: a slug per heading, and explicit ``<a id="...">``."""
    text = without_blocks(document.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+?)\s*$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
