"""The built wheel, and environments that have it and what a test adds."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PINS = (ROOT / ".ci/constraints.txt").as_uri()
INSTALL_MAX_S = 300


def run(*argv: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program without the settings of this process."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OUTBOX_", "OTEL_", "PYTHON", "PIP_CONSTRAINT"))
    }
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, cwd=cwd, env={**inherited, **env},
        timeout=INSTALL_MAX_S,
    )  # fmt: skip


def build_wheel(directory: Path) -> Path:
    """Build the wheels of this tree; return the package's, beside which those of the leaves are."""
    projects = [ROOT, *(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))]
    argv = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", f"-w{directory}")
    built = run(*argv, *projects, PIP_CONSTRAINT=PINS)
    assert built.returncode == 0, built.stderr
    (wheel,) = directory.glob("outbox_relay-*.whl")
    return wheel


def make_environment(directory: Path, *requirements: str, pinned: bool = True) -> Path:
    """Make an environment with these packages; return its directory of programs."""
    venv.create(directory, symlinks=True)
    pip_install(directory / "bin", *requirements, pinned=pinned)
    return directory / "bin"


def pip_install(programs: Path, *requirements: str, pinned: bool = True) -> None:
    """Install packages in an environment: pinned versions, or those that the index has."""
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "-q")
    result = run(*pip, *requirements, PIP_CONSTRAINT=PINS if pinned else "")
    assert result.returncode == 0, result.stderr
