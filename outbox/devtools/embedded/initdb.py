"""Making a cluster, and finding the line of a log that matters."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from outbox.devtools.embedded.launch import command, environment
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from pathlib import Path

    from outbox.devtools.embedded.binaries import Binaries
    from outbox.devtools.embedded.run_as_user import Account

_TIMEOUT_S = 120.0


def initdb(
    binaries: Binaries, data_dir: Path, account: Account | None, cwd: Path, *, sync: bool
) -> None:
    """Make a cluster whose superuser is `postgres` and needs no password.

    Whoever reaches the socket gets in, and its directory is private.

    Args:
        binaries: programs that `account` can run.
        data_dir: an empty directory that belongs to `account`.
        account: who runs it; None for ourselves.
        cwd: a directory that `account` reaches; initdb insists on one.
        sync: write everything to the disk before returning.

    Raises:
        CannotRun: with initdb's reason.
    """
    argv = [binaries.path("initdb"), f"--pgdata={data_dir}", "--username=postgres"]
    argv += ["--auth=trust", "--encoding=UTF8", "--no-locale"]
    if not sync:
        argv.append("--no-sync")
    try:
        made = subprocess.run(
            command(argv, account),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=environment(),
            cwd=cwd,
            process_group=0,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotRun(
            f"initdb of PostgreSQL {binaries.version} did not end within {_TIMEOUT_S:.0f} s"
        ) from error
    if made.returncode:
        why = reason(made.stderr) or f"exit code {made.returncode}"
        raise CannotRun(f"initdb of PostgreSQL {binaries.version} failed: {why}")


def reason(log: str) -> str:
    """The line of a log that says why a program ended, without its time stamp."""
    lines = log.strip().splitlines()
    for mark in ("FATAL:", "PANIC:", "error:", "could not", "ERROR:"):
        for line in lines:
            if mark in line:
                return line[line.index(mark) :].removeprefix(mark).strip()
    return lines[-1].strip() if lines else ""
