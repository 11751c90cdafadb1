"""Ports of 127.0.0.1 for servers that tests start later, each drawn by one process at a time.

That nobody listens on a port now says nothing about the next moment: two processes that draw the
same one have one server between them, and each test finds the other's data in it. So a process
takes a block of ports, by a lock that ends with it, and goes through its block in order. A server
that is killed and started again finds its port unused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST, LAST = 15_000, 32_000
"""Below the ports that clients get from the system."""
BLOCK = 500


def free_port() -> int:
    """A port without a listener at this moment, which no other process draws while this one lives.

    Raises:
        RuntimeError: as many processes as there are blocks draw ports, or all of a block are used.
    """
    ports = _ports(os.getpid())
    for _ in range(BLOCK):
        port = next(ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise RuntimeError(f"each of the {BLOCK} ports up to {port} has a listener")


def free_ports(count: int) -> list[int]:
    """Different ports of the same kind."""
    return [free_port() for _ in range(count)]


@cache
def _ports(process: int) -> Iterator[int]:
    """The ports of a block that this process locks until it ends.

    Args:
        process: its id; a fork that draws ports takes a block of its own.
    """
    directory = Path(tempfile.gettempdir(), f"outbox-test-ports-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    for first in range(FIRST, LAST, BLOCK):
        lock = os.open(directory / str(first), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cycle(range(first, first + BLOCK))
        os.close(lock)
    raise RuntimeError(f"{directory}: each block of ports is locked by a process that still runs")
