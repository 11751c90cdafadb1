"""The tree's Python files, each read and parsed once for all checks."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from typing import TYPE_CHECKING

from tests.support.checkout import ROOT, git

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = (ROOT / "outbox", *sorted(ROOT.glob("packages/*/outbox_*")))
"""The root packages: the product's, and those of its leaves."""
OWN = frozenset(["docs", *(each.name for each in PACKAGES)])
"""Their names."""
PROGRAM = sorted(path for each in (*PACKAGES, ROOT / "docs") for path in each.rglob("*.py"))
_TEST_FOLDERS = (ROOT / "benchmarks", ROOT / "tests", *ROOT.glob("packages/*/tests"))
TESTS = [
    ROOT / "conftest.py",
    *sorted(path for folder in _TEST_FOLDERS for path in folder.rglob("*.py")),
]


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree, the module first."""
    return nodes_of(path.read_text("utf-8"))


def nodes_of(source: str | bytes) -> tuple[ast.AST, ...]:
    """Return all nodes of a source's syntax tree, the module first."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def tracked() -> tuple[Path, ...]:
    """Return the files that git tracks; none outside of a checkout."""
    try:
        listed = git("ls-files", "-z")
    except (OSError, subprocess.CalledProcessError):
        return ()
    paths = (ROOT / name for name in listed.split("\0") if name)
    return tuple(path for path in paths if path.is_file())
