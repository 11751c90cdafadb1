"""The wheel runs in an environment that has nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
_INSTALL_MAX_S = 300


def _run(*argv: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OUTBOX_", "PYTHON"))}
    env["PIP_CONSTRAINT"] = (ROOT / ".ci/constraints.txt").as_uri()
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, cwd=cwd, env=env, timeout=_INSTALL_MAX_S
    )


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the programs of an environment with the wheel and no extra."""
    tmp_path = tmp_path_factory.mktemp("wheel")
    built = _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", f"-w{tmp_path}", ROOT)
    assert built.returncode == 0, built.stderr
    venv.create(tmp_path / "env", symlinks=True)
    _install(tmp_path / "env/bin", "")
    return tmp_path / "env/bin"


def _install(programs: Path, extra: str) -> None:
    (wheel,) = programs.parents[1].glob("*.whl")
    result = _run(
        *(sys.executable, "-m", "pip", "--python", programs / "python", "install", "-q"),
        f"{wheel}{extra}",
    )
    assert result.returncode == 0, result.stderr


def test_the_demo_names_the_extra_that_it_needs_and_runs_with_it(
    installed: Path, tmp_path: Path
) -> None:
    version = _run(installed / "outbox", "--version", cwd=tmp_path)
    assert (version.returncode, version.stderr) == (0, "")
    without = _run(installed / "outbox", "demo", cwd=tmp_path)
    assert without.returncode == 3
    assert "outbox-relay[demo]" in without.stderr.splitlines()[-1]
    _install(installed, "[demo]")
    demo = _run(installed / "outbox", "demo", cwd=tmp_path)
    assert demo.returncode == 0, demo.stderr
    assert f"  {installed}/outbox migrate" in demo.stdout, "the command as this user can run it"


def test_the_wheel_has_the_schema_and_the_types(installed: Path, tmp_path: Path) -> None:
    sql = _run(installed / "outbox", "migrate", "--sql", cwd=tmp_path)
    assert sql.returncode == 0, sql.stderr
    for file in (ROOT / "schema").glob("*.sql"):
        assert file.read_text().splitlines()[-1] in sql.stdout
    (package,) = installed.parent.glob("lib/python*/site-packages/outbox")
    assert (package / "py.typed").exists()
