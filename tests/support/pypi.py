"""Packages of PyPI that only one test uses, fetched once into the ignored directory `build`."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from outbox.errors import CannotRun

ROOT = Path(__file__).parents[2]
_FETCH_S = 120


def pypi_package(name: str, *requirements: str) -> Path:
    """A directory for PYTHONPATH that has these packages and what they need.

    Args:
        name: of the directory; it says which versions it has.

    Raises:
        CannotRun: no index provides the packages.
    """
    target = ROOT / "build" / "pypi" / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as room:
        fetched = Path(room) / "fetched"
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:"]
        options = ["--disable-pip-version-check", "--retries=0", "--target", str(fetched)]
        try:
            done = subprocess.run(
                [*words, *options, *requirements], capture_output=True, text=True, timeout=_FETCH_S
            )
        except subprocess.TimeoutExpired:
            raise CannotRun(f"pip did not end within {_FETCH_S} s") from None
        if done.returncode:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise CannotRun(f"pip could not fetch {name}: {reason}")
        # Renamed when complete; another process may have been faster, with the same result.
        with suppress(OSError):
            fetched.rename(target)
    return target


def library(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> Any:
    """A package of PyPI; what the test environment has as well is the environment's."""
    try:
        package = pypi_package(f"{name}-{version}", f"{name}=={version}")
    except CannotRun as error:
        pytest.skip(str(error))
    monkeypatch.setattr(sys, "path", [*sys.path, str(package)])
    return importlib.import_module(name)
