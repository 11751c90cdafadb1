"""Runs initdb, and extracts the error line of a log."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from outbox.errors import CannotRun
from outbox_devtools.embedded.launch import command, environment

if TYPE_CHECKING:
    from pathlib import Path

    from outbox_devtools.embedded.binaries import Binaries
    from outbox_devtools.embedded.run_as_user import Account

_TIMEOUT_S = 120.0


def initdb(
    binaries: Binaries, data_dir: Path, account: Account | None, cwd: Path, *, sync: bool
) -> None:
    """Create a cluster with the superuser `postgres` and trust authentication.

    Access control is the private directory of the socket.

    Args:
        binaries: programs that `account` can run.
        data_dir: an empty directory owned by `account`.
        account: the user to run as; None: the current one.
        cwd: a directory that `account` can enter, which initdb requires.
        sync: flush everything to disk before returning.

    Raises:
        CannotRun: with initdb's error.
    """
    argv = [binaries.path("initdb"), f"--pgdata={data_dir}", "--username=postgres"]
    argv += ["--auth=trust", "--encoding=UTF8", "--no-locale"]
    if not sync:
        argv.append("--no-sync")
    try:
        completed = subprocess.run(
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
    if completed.returncode:
        reason = error_line(completed.stderr) or f"exit code {completed.returncode}"
        raise CannotRun(f"initdb of PostgreSQL {binaries.version} failed: {reason}")


def error_line(log: str) -> str:
    """Return the line of a log that states why a program ended, without its time stamp."""
    lines = log.strip().splitlines()
    for mark in ("FATAL:", "PANIC:", "error:", "could not", "ERROR:"):
        for line in lines:
            if mark in line:
                return line[line.index(mark) :].removeprefix(mark).strip()
    return lines[-1].strip() if lines else ""
