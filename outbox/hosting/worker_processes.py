"""A warning when several worker processes of one application run a relay each.

They share the endpoints as relays of several machines do, which is correct.  But each holds
database connections, so an application with many workers may use up those of its server.

Workers have one parent, which runs the same interpreter: gunicorn's arbiter, or the supervisor of
uvicorn or hypercorn.  The name of a replica has its host and process id, and Linux has the parent
of a process in /proc.  Elsewhere the variable is read that sets the number of workers.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from outbox.errors import OutboxError
from outbox.relay.relay import default_name
from outbox.store.cluster.replicas import read_names
from outbox.store.cluster.sessions import RELAY_CONNECTIONS_MAX
from outbox.store.connection import dsn
from outbox.store.connection.connect import CONNECTION_ERRORS
from outbox.store.connection.operator import connect_operator

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.config import Settings

log = structlog.get_logger("outbox.relay")

PROCESSES = Path("/proc")
CONCURRENCY_VARIABLE = "WEB_CONCURRENCY"
"""The number of workers, for gunicorn and uvicorn."""
END_S = 1.0
"""How long a process runs after it has drained."""
WARNING = (
    "several workers of this application run a relay each; they share the endpoints, but each "
    f"holds up to {RELAY_CONNECTIONS_MAX} database connections: run one worker, or run "
    "`outbox relay` and take the relay out of the application"
)


async def warn_about_workers(started: asyncio.Event, settings: Settings) -> None:
    """Log a warning if other workers of this application run a relay, too.

    Args:
        started: set when this process's relay is registered.
    """
    await started.wait()
    if not (PROCESSES / "self").exists():
        given = os.environ.get(CONCURRENCY_VARIABLE, "")
        if given.isdecimal() and int(given) > 1:
            log.warning(WARNING, workers=int(given))
        return
    try:
        connection = await connect_operator(dsn.from_settings(settings), settings, "outbox-workers")
        try:
            names = await read_names(connection)
        finally:
            connection.terminate()
    except (OutboxError, *CONNECTION_ERRORS):
        return  # The relay itself reports that the database is away.
    pids = worker_pids(names)
    # Two of them check, since of the first two each may see the other one or not.
    if len(pids) < 2 or os.getpid() not in pids[:2]:
        return
    # A worker that this one replaces drains, and ends.
    await asyncio.sleep(settings.drain_s + END_S)
    workers = sum(_parent_of(pid) == os.getppid() for pid in pids)
    if workers > 1:
        log.warning(WARNING, workers=workers)


def worker_pids(names: Iterable[str]) -> list[int]:
    """Return the process ids of an application's workers that run a relay, in the order of `names`.

    Args:
        names: the names of running replicas.

    Returns:
        This process, and its siblings; none if its parent does not supervise workers.
    """
    parent, (host, _, _) = os.getppid(), default_name().rpartition(":")
    if not _is_same_program(parent):
        return []
    places = (name.rpartition(":") for name in names)
    pids = (int(pid) for where, _, pid in places if where == host and pid.isdecimal())
    # A replica whose session was lost may be there twice.
    return [pid for pid in dict.fromkeys(pids) if _parent_of(pid) == parent]


def _parent_of(pid: int) -> int | None:
    try:
        status = (PROCESSES / str(pid) / "stat").read_text()
    except OSError:
        return None  # Another container's, or it has ended.
    # The second field, the program's name in parentheses, may contain anything.
    return int(status.rpartition(")")[2].split()[1])


def _is_same_program(pid: int) -> bool:
    """Whether a process runs the interpreter of this one."""
    try:
        return (PROCESSES / str(pid) / "exe").readlink() == (PROCESSES / "self" / "exe").readlink()
    except OSError:
        return False  # Another user's, such as init.
