"""Embedded PostgreSQL: a private server for the demo and tests.

    with EmbeddedPostgres() as server:
        connection = await asyncpg.connect(server.dsn())

The binaries come from the `demo` extra or from `OUTBOX_PG_BIN`.  The server runs in the
foreground on a Unix socket that only its user can reach, and ends with the process that
started it, however that process ends.
"""

from outbox_devtools.embedded.binaries import Binaries, find_binaries, installed_binaries
from outbox_devtools.embedded.server import EmbeddedPostgres, Setting

__all__ = ["Binaries", "EmbeddedPostgres", "Setting", "find_binaries", "installed_binaries"]
