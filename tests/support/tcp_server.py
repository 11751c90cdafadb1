"""A PostgreSQL server that listens on TCP, for what only a TCP connection does."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg

from tests.support.postgres import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox_devtools.embedded import Setting


@contextmanager
def tcp_server(major: int, **settings: Setting) -> Iterator[tuple[Server, str]]:
    """A server during the block, and its address, a loopback one of its own."""
    # The port is fixed, and several servers run at once.
    numbers = random.Random()
    address = "127." + ".".join(str(numbers.randint(1, 254)) for _ in range(3))
    server = Server(major, {"listen_addresses": address, **settings})
    with server.embedded:
        with (server.embedded.data_dir / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 127.0.0.0/8 trust\n")
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
            connection.execute("SELECT pg_reload_conf()")
        yield server, address
