"""A program that runs a server and reports it; the tests end it in several ways.

    python -m packages.devtools.tests.embedded.holder MAJOR [DIRECTORY]

Prints one JSON line when the server runs, then waits for a line on stdin (or its end), prints
another line with the state of the server, and stops it. Needs no other package, so that any
Python can run it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING

from outbox_devtools.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from pathlib import Path

PROTOCOL = 3 << 16  # PostgreSQL: Message Formats, StartupMessage


def responses(socket_dir: Path) -> bool:
    """Return whether the server accepts a connection."""
    words = b"user\0postgres\0database\0postgres\0\0"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(socket_dir / ".s.PGSQL.5432"))
        client.sendall(struct.pack("!ii", len(words) + 8, PROTOCOL) + words)
        return client.recv(9) == struct.pack("!cii", b"R", 8, 0)  # AuthenticationOk


def main() -> None:
    major, *where = sys.argv[1:]
    interrupts = 0

    def count(*_: object) -> None:
        nonlocal interrupts
        interrupts += 1

    signal.signal(signal.SIGINT, count)
    with EmbeddedPostgres(
        int(major), temporary_in=where[0] if where else None, settings={"fsync": False}
    ) as server:
        server_state = {
            "pid": os.getpid(),
            "server_pid": server.pid,
            "data_dir": str(server.data_dir),
            "uid": os.geteuid(),
        }
        print(json.dumps(server_state), flush=True)
        sys.stdin.readline()
        final_state = {"responses": responses(server.socket_dir), "interrupts": interrupts}
        print(json.dumps(final_state), flush=True)


if __name__ == "__main__":
    main()
