"""The git checkout of the tests: commits, and their files."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def git(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """The output of git.

    Raises:
        CalledProcessError: git failed.
    """
    done = subprocess.run(
        ["git", *arguments],  # noqa: S607 (any git will do)
        cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, check=True, text=True,
    )  # fmt: skip
    return done.stdout.strip()


def require_checkout() -> None:
    """Skip the test in a source distribution, and where git is not installed."""
    try:
        top = git("rev-parse", "--show-toplevel")
    except (OSError, subprocess.CalledProcessError):
        top = ""
    if not top or Path(top).resolve() != ROOT:
        pytest.skip("this is no git checkout")


def export(commit: str, target: Path, *paths: str) -> None:
    """Write the files of a commit, or those below some paths, into a directory."""
    with tempfile.TemporaryDirectory() as directory:
        index = {"GIT_INDEX_FILE": f"{directory}/index"}
        git("read-tree", commit, env=index)
        names = git("ls-files", "-z", "--", *paths, env=index)
        subprocess.run(
            ["git", "checkout-index", "-z", "--stdin", f"--prefix={target}/"],  # noqa: S607
            cwd=ROOT, env={**os.environ, **index}, input=names.encode(), check=True,
        )  # fmt: skip


def commit_before(path: str) -> str | None:
    """The commit before the one that added a file; None if the history does not go that far."""
    added = git("log", "-1", "--diff-filter=A", "--format=%H", "--", path)
    return _commit(f"{added}^") if added else None


def last_release() -> str | None:
    """The newest release tag before HEAD, or None."""
    try:
        return git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^")
    except subprocess.CalledProcessError:
        return None


def _commit(name: str) -> str | None:
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except subprocess.CalledProcessError:
        return None
