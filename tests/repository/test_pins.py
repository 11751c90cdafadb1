"""The test environment is pinned completely, and installed as pinned."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from outbox.version import __version__
from tests.repository.requirements import PROJECTS, brought_by, holds
from tests.repository.sources import OWN as OWN_PACKAGES
from tests.repository.sources import PROGRAM, ROOT, nodes, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

FILE = ROOT / ".ci" / "constraints.txt"
RENEW = "renew it with: python3 run.py pin"
OWN = {project["name"] for project in PROJECTS}


def script(name: str) -> ModuleType:
    """Load one of the scripts in the directory of the constraints."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pinned() -> dict[str, str]:
    """Return the versions for this Python, by canonical name."""
    read = [Requirement(line) for line in FILE.read_text().splitlines() if not line.startswith("#")]
    here = [each for each in read if each.marker is None or each.marker.evaluate()]
    assert len({each.name for each in here}) == len(here), "a package has two versions"
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in here}


def requirements() -> list[Requirement]:
    """Return the dependencies of the package and its leaves, with all extras."""
    return [each for each in stated() if each.name not in OWN]


def stated() -> list[Requirement]:
    """Return the same with those on each other."""
    return [
        Requirement(text)
        for project in PROJECTS
        for texts in (project["dependencies"], *project.get("optional-dependencies", {}).values())
        for text in texts
    ]


def imported(tree: Sequence[ast.AST]) -> Iterator[str]:
    """The top-level packages that a module imports."""
    for node in tree:
        match node:
            case ast.Import(names=names):
                yield from (each.name.partition(".")[0] for each in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]


@pytest.mark.slow
def test_every_imported_package_is_a_named_dependency() -> None:
    distributions = importlib.metadata.packages_distributions()
    # The type checker brings `_typeshed`.
    known = {*OWN_PACKAGES, "_typeshed", *sys.stdlib_module_names}
    named = {canonicalize_name(each.name) for each in requirements()}
    missing = {
        f"{package} in {path.relative_to(ROOT)}"
        for path in PROGRAM
        for package in imported(nodes(path))
        if package not in known
        and named.isdisjoint(map(canonicalize_name, distributions.get(package, (package,))))
    }
    assert not missing, "a dependency of a dependency may disappear: name it in pyproject.toml"


def test_the_packages_of_a_release_require_the_same_version_of_each_other() -> None:
    between = {str(each.specifier) for each in stated() if each.name in OWN}
    assert between == {f"=={__version__}"}


def test_every_form_of_import_is_found() -> None:
    source = "import a.b as c, d\nif x:\n    from e.f import g\nfrom . import h\nfrom .i import j"
    assert list(imported(nodes_of(source))) == ["a", "d", "e"]


def test_every_pin_is_one_exact_version_without_a_path() -> None:
    text = FILE.read_text()
    for line in text.splitlines():
        assert re.fullmatch(
            r"#.*|[a-z0-9-]+==[0-9][\w.]*(; python_version == '3\.\d+'( or python_version == "
            r"'3\.\d+')*)?",
            line,
        ), f"{line!r}; {RENEW}"
    assert not re.search(r"://|index|sha256|--|/|\\|@", text)


def test_the_requirements_accept_the_pinned_versions() -> None:
    versions = pinned()
    for requirement in requirements():
        if holds(requirement):
            version = versions.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} is not pinned; {RENEW}"
            assert requirement.specifier.contains(version), f"{requirement}: {version}; {RENEW}"


@pytest.mark.slow
def test_every_installed_dependency_is_pinned() -> None:
    stamp = Path(sys.prefix, "run-py-stamp")
    if stamp.exists() and len(stamp.read_text().splitlines()) > 2:
        pytest.skip("run.py could not have all of the pinned versions here, and said so")
    versions = pinned()
    here = {name: importlib.metadata.version(name) for name in brought_by(requirements())}
    assert {name: versions.get(name) for name in here} == here, RENEW


def test_pins_for_other_pythons_have_markers() -> None:
    lines = script("pin").lines
    assert lines(
        {"3.11": {"b": "1", "a": "2"}, "3.12": {"b": "1", "a": "3"}, "3.13": {"b": "1"}}
    ) == [
        "a==2; python_version == '3.11'",
        "a==3; python_version == '3.12'",
        "b==1",
    ]


# ------------------------------------------------------------------ audit


def audit_report(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages})


def skipped(name: str) -> dict[str, Any]:
    return {"name": name, "skip_reason": "Dependency not found on PyPI"}


A = {"name": "a", "version": "1", "vulns": []}
B = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}


def test_a_vulnerable_version_fails_the_audit() -> None:
    code, messages = script("audit").evaluate(1, audit_report(A, B), "", 2)
    assert code == 1
    assert messages == ["b 2: PYSEC-1, fixed in 2.1", "1 of 2 packages are vulnerable"]


def test_a_clean_audit_reports_the_number_of_audited_packages() -> None:
    whole = audit_report(A, skipped("b"))
    code, messages = script("audit").evaluate(0, whole, "", 2)
    assert code == 0
    assert messages == [
        "not audited, because the index has no advisories for them: b",
        "no known vulnerabilities in 1 of 2 packages",
    ]


@pytest.mark.parametrize(
    ("out", "errors"),
    [
        ("", "Traceback …\nrequests.exceptions.ConnectionError: HTTPSConnectionPool(host='x')"),
        ("", "ERROR:pip_audit._cli:pip_audit._service.interface.ServiceError: timed out"),
        (audit_report(skipped("a"), skipped("b")), "No known vulnerabilities found"),
    ],
)
def test_an_audit_without_a_response_is_reported_as_not_audited(out: str, errors: str) -> None:
    code, messages = script("audit").evaluate(0 if out else 1, out, errors, 2)
    assert code == 0
    (line,) = messages
    assert line.startswith("NOT AUDITED: ")


def test_an_audit_with_another_error_fails() -> None:
    code, messages = script("audit").evaluate(
        2, "", "pip-audit: error: unrecognized arguments: --x\n", 2
    )
    assert code == 3
    assert "unrecognized arguments" in messages[0]


def test_only_pins_for_this_python_are_audited() -> None:
    lines = ["# x", "a==1; python_version >= '3'", "a==2; python_version < '3'", "b==3"]
    assert script("audit").pins_for_this_python(lines) == ["a==1", "b==3"]
