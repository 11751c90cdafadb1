"""The tier `unit` imports nothing but what its extras install."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from tests.repository.sources import PACKAGES, PROGRAM, TESTS
from tests.support.checkout import ROOT
from tests.support.tiers import has_unit_tests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DISTRIBUTION = "outbox-relay"
EXTRAS = frozenset(["relay", "unit"])
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


@cache
def installed_by_the_extras() -> frozenset[str]:
    """The distributions that the extras install, in the form of the package index."""
    found: set[str] = set()
    left = [(DISTRIBUTION, EXTRAS)]
    while left:
        name, extras = left.pop()
        try:
            texts = requires(name) or []
        except PackageNotFoundError:  # For another platform.
            continue
        for requirement in map(Requirement, texts):
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": e}) for e in extras or {""}):
                continue
            name = normal(requirement.name)
            if name not in found or requirement.extras:
                found.add(name)
                left.append((name, frozenset(requirement.extras)))
    return frozenset(found)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_modules_with_unit_tests_import_only_what_is_installed_for_them() -> None:
    modules = own_modules()
    known = sys.stdlib_module_names | {each.partition(".")[0] for each in modules} | {"run"}
    distributions = packages_distributions()
    left = [path for path in TESTS if path.name.startswith("test_") and has_unit_tests(path)]
    left.append(ROOT / "conftest.py")
    assert len(left) > 100
    seen = set(left)
    missing = set()
    while left:
        path = left.pop()
        for name in imported_at_once(ast.parse(path.read_text("utf-8")).body):
            if name in modules:
                if modules[name] not in seen:
                    seen.add(modules[name])
                    left.append(modules[name])
            elif (top := name.partition(".")[0]) not in known:
                names = {normal(each) for each in distributions.get(top, [])}
                if not names & installed_by_the_extras():
                    missing.add(f"{path.relative_to(ROOT)}: {top}")
    assert sorted(missing) == []
