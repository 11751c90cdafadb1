"""`run.py release` builds what can be released, and refuses everything else with one line."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version as installed_version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

from outbox.version import __version__
from tests.support.checkout import ROOT, export, git, require_checkout
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHANGES = """# Changelog

## [Unreleased]

## [{version}] - 2026-11-27

### Added

- Everything.
"""
AUTHOR = {
    f"GIT_{role}_{name}": value
    for role in ("AUTHOR", "COMMITTER")
    for name, value in (("NAME", "A"), ("EMAIL", "a@example.com"), ("DATE", "1795770000 +0000"))
}
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE", ".ci/release.py", ".ci/sbom.py")


def _release(tree: Path, *arguments: str, umask: int = 0o022) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, tree / ".ci/release.py", *arguments],
        cwd=tree.parent, umask=umask, capture_output=True, text=True,
    )  # fmt: skip


def _commit(tree: Path, message: str = "A commit") -> None:
    git("add", "--all", cwd=tree)
    git("commit", "--quiet", "--message", message, cwd=tree, env=AUTHOR)


def _begin(tree: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git("init", "--quiet", "--initial-branch=main", cwd=tree)
    git("config", "commit.gpgsign", "false", cwd=tree)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A committed project that can be released, without most of its modules."""
    tree = tmp_path / "small"
    for name in PROJECT_FILES:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    for name in ("outbox", "schema"):
        (tree / name).mkdir()
    (tree / "outbox/__init__.py").touch()
    (tree / "outbox/version.py").write_text('__version__ = "3.4.5"\n')
    (tree / "schema/0001_outbox.sql").touch()
    (tree / ".gitignore").write_text("dist/\n__pycache__/\n")
    (tree / "CHANGELOG.md").write_text(CHANGES.format(version="3.4.5"))
    _begin(tree)
    _commit(tree)
    return tree


def _change_nothing(tree: Path) -> None:
    """Leave the tree as it is."""


def _tag(tree: Path, name: str) -> None:
    git("tag", "--annotate", "--message", name, name, cwd=tree, env=AUTHOR)


def _change(name: str, text: str) -> Callable[[Path], None]:
    """Commit another text of a file."""

    def apply(tree: Path) -> None:
        (tree / name).write_text(text)
        _commit(tree)

    return apply


def _tag_an_earlier_commit(tree: Path) -> None:
    _tag(tree, "v3.4.5")
    _change("later", "1")(tree)


GOOD = CHANGES.format(version="3.4.5")
REFUSALS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no tag": (_change_nothing, "", "HEAD has no tag: run  git tag -a v3.4.5"),
    "another tag": (
        lambda tree: _tag(tree, "v3.4.6"),
        "",
        "the tag v3.4.6 does not match '3.4.5' of outbox/version.py",
    ),
    "another version": (_change_nothing, "3.5.0", "--version 3.5.0 does not match '3.4.5'"),
    "a tag elsewhere": (_tag_an_earlier_commit, "3.4.5", "the tag v3.4.5 is at another commit"),
    "a changed file": (
        lambda tree: (tree / "README.md").write_text("x"),
        "3.4.5",
        "the tree is dirty (M README.md)",
    ),
    "an untracked file": (
        lambda tree: (tree / "new.py").touch(),
        "3.4.5",
        "the tree is dirty (?? new.py)",
    ),
    "no section": (
        _change("CHANGELOG.md", CHANGES.format(version="3.4.4")),
        "3.4.5",
        "CHANGELOG.md has no section for the version",
    ),
    "an undated section": (
        _change("CHANGELOG.md", GOOD.replace(" - 2026-11-27", "")),
        "3.4.5",
        "CHANGELOG.md has no section for the version",
    ),
    "unreleased changes": (
        _change("CHANGELOG.md", GOOD.replace("[Unreleased]\n", "[Unreleased]\n\n- X.\n")),
        "3.4.5",
        "CHANGELOG.md has entries under Unreleased",
    ),
    "no version": (
        _change("outbox/version.py", '__version__ = "soon"\n'),
        "soon",
        "'soon' of outbox/version.py is no version",
    ),
    "no checkout": (
        lambda tree: shutil.rmtree(tree / ".git"),
        "3.4.5",
        "this is no git checkout",
    ),
}
"""By name: what happens to a good tree, the version that is asked for, and the reason."""


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("name", sampled(REFUSALS, 3))
def test_a_tree_that_cannot_be_released_is_refused_with_one_line(small: Path, name: str) -> None:
    prepare, version, reason = REFUSALS[name]
    prepare(small)
    ended = _release(small, *(["--version", version] if version else []))
    assert (ended.returncode, ended.stdout) == (3, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("release: ")
    assert reason in line
    assert not (small / "dist").exists()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.system
def test_a_failing_build_leaves_the_last_release_in_place(small: Path) -> None:
    done = small / "dist/outbox-relay-3.4.5"
    done.mkdir(parents=True)
    (done / "kept").touch()
    _change("pyproject.toml", "[project]\nname = 1\n")(small)
    ended = _release(small, "--version", "3.4.5")
    assert ended.returncode == 3
    assert ended.stderr.splitlines()[-1].startswith("release: build failed with exit code ")
    assert [each.name for each in done.iterdir()] == ["kept"]


@pytest.mark.full
def test_a_release_has_the_same_bytes_wherever_it_is_built(small: Path, tmp_path: Path) -> None:
    _tag(small, "v3.4.5")
    # Files that git ignores are no part of it.
    (small / "outbox/__pycache__").mkdir()
    (small / "outbox/__pycache__/x.pyc").touch()
    first = _release(small)
    assert first.returncode == 0, first.stderr
    other = tmp_path / "elsewhere/a clone"
    shallow = ("clone", "--quiet", "--depth=1", "--no-tags", "--no-local")
    git(*shallow, small.as_uri(), str(other), cwd=tmp_path)
    second = _release(other, "--version", "3.4.5", umask=0o077)
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    packages = other / "dist/outbox-relay-3.4.5"
    sums = dict(reversed(line.split("  ")) for line in first.stdout.splitlines())
    assert set(sums) == {
        "outbox_relay-3.4.5.tar.gz",
        "outbox_relay-3.4.5-py3-none-any.whl",
        "outbox_relay-3.4.5.cdx.json",
    }
    for name, digest in sums.items():
        assert hashlib.sha256((packages / name).read_bytes()).hexdigest() == digest
    assert (packages / "SHA256SUMS").read_text() == first.stdout
    bill = json.loads((packages / "outbox_relay-3.4.5.cdx.json").read_text())
    _check_bill(bill, sums["outbox_relay-3.4.5-py3-none-any.whl"])


def _check_bill(bill: dict[str, Any], wheel_sha256: str) -> None:
    """Check a bill against CycloneDX's schema and the environment."""
    schemas = files("cyclonedx.schema") / "_res"

    def load(name: str) -> Any:
        return json.loads((schemas / f"{name}.SNAPSHOT.schema.json").read_text())

    base = "http://cyclonedx.org/schema/{}.SNAPSHOT.schema.json"
    names = ("spdx", "jsf-0.82", "cryptography-defs")
    registry = jsonschema_rs.Registry([(base.format(name), load(name)) for name in names])
    jsonschema_rs.validator_for(load("bom-1.6"), registry=registry).validate(bill)
    root = bill["metadata"]["component"]
    assert root["hashes"] == [{"alg": "SHA-256", "content": wheel_sha256}]
    assert root["licenses"] == [{"license": {"id": "MIT"}}]
    components = {each["name"]: each for each in bill["components"]}
    assert {"asyncpg", "pydantic-core", "nats-py", "protobuf"} <= set(components)
    assert {"outbox-adopt", "outbox-api", "outbox-devtools", "outbox-doctor"} <= set(components)
    assert not {"pytest", "mypy", "hatchling", "twine", "atheris"} & set(components)
    assert components["orjson"]["scope"] == "required"
    assert components["yarl"]["scope"] == "optional"
    assert components["nats-py"]["scope"] == "optional"
    for name, each in components.items():
        assert each["version"] == installed_version(name)
        named = [text for it in each["licenses"] for text in (it.get("license") or it).values()]
        assert named, f"{name} declares no licence"
        assert all(named), f"a licence of {name} has no name"
    references = {each["bom-ref"] for each in (root, *bill["components"])}
    graph = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    assert references <= set(graph)
    needed = {root["bom-ref"]}
    while further := {each for ref in needed for each in graph[ref]} - needed:
        needed |= further
    assert needed == references, "a component that nothing depends on"


@pytest.mark.full
def test_the_project_can_be_released(tmp_path: Path) -> None:
    require_checkout()
    tree = tmp_path / "tree"
    export("HEAD", tree)
    (tree / "CHANGELOG.md").write_text(CHANGES.format(version=__version__))
    _begin(tree)
    _commit(tree)
    ended = _release(tree, "--version", __version__)
    assert ended.returncode == 0, ended.stderr
    dist = tree / f"dist/outbox-relay-{__version__}"
    (wheel,) = dist.glob("outbox_relay-*.whl")
    texts: dict[str, str] = {}
    for package in tree.glob("packages/*/outbox_*"):
        (leaf,) = dist.glob(f"{package.name}-{__version__}-*.whl")
        with zipfile.ZipFile(leaf) as opened:
            names = {name for name in opened.namelist() if ".dist-info/" not in name}
            (licence,) = (name for name in opened.namelist() if name.endswith("/LICENSE"))
            assert opened.read(licence) == (ROOT / "LICENSE").read_bytes()
            texts |= _texts(opened)
        assert names == {
            path.removeprefix(f"packages/{package.parent.name}/")
            for path in git("ls-files", str(package.relative_to(tree)), cwd=tree).splitlines()
        }
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        texts |= _texts(opened)
    tracked = set(git("ls-files", "outbox", cwd=tree).splitlines())
    schema = {f"outbox/{each}" for each in git("ls-files", "schema", cwd=tree).splitlines()}
    assert {name for name in names if ".dist-info/" not in name} == tracked | schema
    # The bill says that no library is bundled.
    foreign = re.compile(r"copyright|@license|licensed under|sourceMappingURL", re.IGNORECASE)
    assert {each.rpartition(".")[2] for each in texts} == {"js", "css", "html"}
    assert [name for name, text in texts.items() if foreign.search(text)] == []


def _texts(wheel: zipfile.ZipFile) -> dict[str, str]:
    """What browsers load from a wheel."""
    names = (each for each in wheel.namelist() if each.endswith((".js", ".css", ".html")))
    return {each: wheel.read(each).decode() for each in names}


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", each) for each in headings[1:])
    assert headings[1].startswith(f"[{__version__}]")
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
