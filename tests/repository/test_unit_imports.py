"""The tier `unit` imports nothing but what its extras install."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from typing import TYPE_CHECKING, cast

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repository.requirements import PROJECTS, brought_by
from tests.repository.sources import PACKAGES, PROGRAM, TESTS, nodes
from tests.support.checkout import ROOT
from tests.support.tiers import has_unit_tests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXTRAS = ("relay", "unit")
"""What `run.py test unit` installs."""
OPTIONAL = ("ImportError", "ModuleNotFoundError")


def imported_at_once(body: list[ast.stmt]) -> Iterator[str]:
    """The names of the modules that a module's first import imports."""
    for statement in body:
        match statement:
            case ast.Import():
                yield from (alias.name for alias in statement.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module
                yield from (f"{module}.{alias.name}" for alias in statement.names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from imported_at_once(statement.orelse)
            case ast.If() | ast.With() | ast.ClassDef():
                yield from imported_at_once(statement.body)
                yield from imported_at_once(getattr(statement, "orelse", []))
            case ast.Try(handlers=handlers) if not any(map(is_for_a_missing_module, handlers)):
                yield from imported_at_once(statement.body)


def is_for_a_missing_module(handler: ast.ExceptHandler) -> bool:
    return isinstance(handler.type, ast.Name) and handler.type.id in OPTIONAL


def own_modules() -> dict[str, Path]:
    """The files of the tree by the names under which they are imported."""
    placed = [(path, ROOT) for path in TESTS]
    placed += [
        (path, next(e.parent for e in (*PACKAGES, ROOT / "docs") if path.is_relative_to(e)))
        for path in PROGRAM
    ]
    modules = {}
    for path, root in placed:
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def installed_for_them() -> set[str]:
    """The distributions that the extras install."""
    project = PROJECTS[0]
    texts = [t for extra in EXTRAS for t in project["optional-dependencies"][extra]]
    return brought_by(map(Requirement, (*project["dependencies"], *texts)))


def test_modules_with_unit_tests_import_only_what_is_installed_for_them() -> None:
    modules = own_modules()
    known = sys.stdlib_module_names | {each.partition(".")[0] for each in modules} | {"run"}
    distributions = importlib.metadata.packages_distributions()
    installed = installed_for_them()
    left = [path for path in TESTS if path.name.startswith("test_") and has_unit_tests(path)]
    left.append(ROOT / "conftest.py")
    assert len(left) > 100
    seen = set(left)
    missing = set()
    while left:
        path = left.pop()
        for name in imported_at_once(cast("ast.Module", nodes(path)[0]).body):
            if name in modules:
                if modules[name] not in seen:
                    seen.add(modules[name])
                    left.append(modules[name])
            elif (top := name.partition(".")[0]) not in known and installed.isdisjoint(
                map(canonicalize_name, distributions.get(top, ()))
            ):
                missing.add(f"{path.relative_to(ROOT)}: {top}")
    assert sorted(missing) == []
