"""The source distribution is the tracked tree, and the README's two commands work in it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING

import pytest

from outbox.version import __version__
from tests.support.checkout import export, git, require_checkout

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.system

NAME = f"outbox_relay-{__version__}"
ON_THE_TREE = (
    "tests/deploy",
    "tests/repository/test_pins.py",
    "tests/test_run_py.py",
    "tests/repository/test_no_secrets.py",
)
"""Tests that read files outside of the package."""


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of HEAD, with files in the tree that git ignores."""
    require_checkout()
    tree = tmp_path_factory.mktemp("tree")
    export("HEAD", tree)
    for ignored in ("build/x", ".venv/x", "receivers/typescript/node_modules/x", "outbox.toml"):
        (tree / ignored).parent.mkdir(parents=True, exist_ok=True)
        (tree / ignored).touch()
    target = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", target],
        cwd=tree, check=True, capture_output=True,
    )  # fmt: skip
    return target / f"{NAME}.tar.gz"


@pytest.mark.full
@pytest.mark.slow
def test_the_source_distribution_has_every_tracked_file_and_no_other(archive: Path) -> None:
    with tarfile.open(archive) as opened:
        members = {each.name.removeprefix(f"{NAME}/"): each for each in opened.getmembers()}
        # A link in the tree leads to a file of the archive.
        link = opened.extractfile(f"{NAME}/deploy/helm/outbox-relay/files/alerts.yml")
        assert link is not None
        rules = opened.extractfile(f"{NAME}/outbox/telemetry/alerts.yml")
        assert rules is not None
        assert link.read() == rules.read()
    tracked = set(git("ls-tree", "-r", "--name-only", "HEAD").splitlines())
    assert set(members) == tracked | {"PKG-INFO"}
    assert members["run.py"].mode & 0o100
    assert {each.uid for each in members.values()} == {0}


@pytest.mark.full
def test_the_demo_and_the_tests_run_outside_of_a_checkout(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as opened:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        opened.extractall(tmp_path, **safe)  # noqa: S202 (our own archive)
    tree = tmp_path / NAME
    path = os.pathsep.join(map(str, (tree, *tree.glob("packages/*"))))
    env = {**os.environ, "PYTHONPATH": path, "GIT_CEILING_DIRECTORIES": str(tmp_path)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    run("outbox", "demo", "--events", "100")
    run("pytest", "--collect-only", "-q")
    output = run("pytest", "-q", "-p", "no:cacheprovider", *ON_THE_TREE)
    assert "this is no git checkout" in output, "tests that need git are skipped visibly"
