"""A real PostgreSQL of one's own, for the demo and the tests.

    with EmbeddedPostgres() as server:
        connection = await asyncpg.connect(server.dsn())

The binaries come from the `demo` extra or from `OUTBOX_PG_BIN`; the life cycle
is ours: a foreground server on a Unix socket only its user can reach, which
ends with the process that started it, whatever ends that one.
"""

from outbox.devtools.embedded.binaries import Binaries, available, find
from outbox.devtools.embedded.server import EmbeddedPostgres, Setting

__all__ = ["Binaries", "EmbeddedPostgres", "Setting", "available", "find"]
