"""Session settings of connections, and the messages of connection errors."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import asyncpg
import pytest

from outbox.errors import CannotRun, DatabaseUnavailable, SchemaMissing, UsageError
from outbox.store.connection import connect as module
from outbox.store.connection.connect import connect, map_errors
from outbox.store.connection.dsn import Dsn, parse
from tests.support.tcp import forward_to, listening, refuse_with, silent
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import Database, Server

pytestmark = pytest.mark.one_major


def address(text: str) -> Dsn:
    return parse(text, source="OUTBOX_DSN", env={})


def dead_port() -> int:
    """A port without a listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def failure(text: str, **changes: object) -> str:
    with pytest.raises(DatabaseUnavailable) as caught:
        await connect(replace(address(text), **changes), schema="relay")  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.endswith("(from OUTBOX_DSN)")
    assert "\n" not in message
    return message


async def test_the_session_is_set_up(database: Database) -> None:
    connection = await connect(
        address(database.dsn + "&options=-c%20search_path=public&geqo=off"),
        schema="relay",
        application_name="outbox test",
        server_settings={"idle_in_transaction_session_timeout": "4s"},
    )
    for name, value in {
        # The DSN's own options come first, so ours win.
        "search_path": '"relay", pg_temp',
        "jit": "off",
        "application_name": "outbox test",
        "idle_in_transaction_session_timeout": "4s",
        "tcp_keepalives_idle": "0",  # A unix socket has none.
    }.items():
        assert await connection.fetchval("SELECT current_setting($1)", name) == value
    assert await connection.fetchval("SELECT current_schema()") == "relay"
    await connection.close()


async def test_any_schema_name_is_quoted(database: Database) -> None:
    name = 'my "Schema", x'
    async with database.connection() as other:
        await other.execute('CREATE SCHEMA "my ""Schema"", x"')
    connection = await connect(address(database.dsn), schema=name)
    assert await connection.fetchval("SELECT current_schema()") == name
    await connection.close()


async def test_the_dsn_can_set_the_application_name(database: Database) -> None:
    connection = await connect(
        address(database.dsn + "&application_name=mine"), schema="relay", application_name="ours"
    )
    assert await connection.fetchval("SELECT current_setting('application_name')") == "mine"
    await connection.close()


async def test_tcp_sessions_notice_a_dead_peer_on_both_sides(database: Database) -> None:
    path = str(database.server.embedded.socket_dir / ".s.PGSQL.5432")
    async with listening(forward_to(path)) as port:
        text = f"postgresql://postgres@127.0.0.1:{port}/{database.name}?keepalives_count=7"
        connection = await connect(address(text), schema="relay")
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 7
        await connection.close()


async def test_hosts_are_tried_in_order(database: Database) -> None:
    path = str(database.server.embedded.socket_dir / ".s.PGSQL.5432")
    async with listening(forward_to(path)) as port, listening(silent) as frozen:
        hosts = f"127.0.0.1:{dead_port()},127.0.0.1:{frozen},127.0.0.1:{port}"
        found = replace(
            address(f"postgresql://postgres@{hosts}/{database.name}"), connect_timeout_s=0.3
        )
        connection = await connect(found, schema="relay")
        assert await connection.fetchval("SELECT 1") == 1
        await connection.close()


async def test_an_unreachable_server_is_reported() -> None:
    port = dead_port()
    text = f"postgresql://u:hunter2@127.0.0.1:{port}/d"
    assert f"no server listens at 127.0.0.1:{port}; start it" in await failure(text)
    several = await failure(f"postgresql://127.0.0.1:{port},127.0.0.1:{port}/d")
    assert several.count("no server listens") == 1
    assert "no server listens at /nowhere/.s.PGSQL.5432" in await failure("host=/nowhere user=u")
    assert 'host name "nowhere.invalid" is unknown' in await failure("host=nowhere.invalid user=u")


async def test_an_unresponsive_server_is_reported() -> None:
    async with listening(silent) as port:
        text = f"postgresql://u@127.0.0.1:{port}/d"
        message = await failure(text, connect_timeout_s=0.2)
    assert f"no response from 127.0.0.1:{port} within 0.2 s" in message


async def test_a_server_that_closes_the_connection_is_reported() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with listening(hang_up) as port:
        for query in ("", "?sslmode=disable"):
            message = await failure(f"postgresql://u@127.0.0.1:{port}/d{query}")
            assert f"127.0.0.1:{port} closed the connection at once" in message


async def test_another_protocol_is_reported() -> None:
    async def web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    async with listening(web_server) as port:
        for query in ("", "?sslmode=prefer"):
            message = await failure(f"postgresql://u@127.0.0.1:{port}/d{query}")
            assert f"the server at 127.0.0.1:{port} is not PostgreSQL; check the port" in message


async def test_missing_tls_is_reported(database: Database) -> None:
    path = str(database.server.embedded.socket_dir / ".s.PGSQL.5432")
    async with listening(forward_to(path)) as port:
        text = f"postgresql://postgres@127.0.0.1:{port}/{database.name}"
        assert "does not offer TLS" in await failure(text + "?sslmode=require")
        message = await failure(text + "?sslmode=verify-full&sslrootcert=/nowhere.pem")
        assert "a file named by sslrootcert" in message


async def test_a_missing_database_or_role_is_reported(database: Database) -> None:
    message = await failure(database.server.embedded.dsn("nix"))
    assert 'database "nix" does not exist' in message
    message = await failure(database.server.embedded.dsn(database.name, user="nobody"))
    assert 'refused the login: role "nobody" does not exist' in message


@pytest.fixture
async def locked(private_server: Server) -> AsyncIterator[str]:
    """A role with the password `right`."""
    hba = private_server.embedded.data_dir / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text("local all locked scram-sha-256\nlocal all all trust\n")
    await private_server.execute(
        "CREATE ROLE locked LOGIN PASSWORD 'right'", "SELECT pg_reload_conf()"
    )
    yield "locked"
    hba.write_text(before)
    await private_server.execute("DROP ROLE locked", "SELECT pg_reload_conf()")


async def test_a_wrong_password_is_reported(private_database: Database, locked: str) -> None:
    text = private_database.server.embedded.dsn(private_database.name, user=locked)

    async def asks_for_a_password() -> bool:
        try:
            await (await asyncpg.connect(text)).close()
        except (asyncpg.PostgresError, asyncpg.InterfaceError):
            return True
        return False

    await until(asks_for_a_password)
    message = await failure(text + "&password=hunter2")
    assert 'the password of role "locked" was not accepted' in message
    assert "hunter2" not in message
    assert 'the password of role "locked" was not accepted' in await failure(text)
    connection = await connect(address(text + "&password=right"), schema="relay")
    await connection.close()


async def test_an_unsupported_setting_is_reported(database: Database) -> None:
    with pytest.raises(UsageError, match=r'OUTBOX_DSN: .* does not take a setting: .*"nix"'):
        await connect(address(database.dsn + "&options=-c%20nix=1"), schema="relay")


async def test_a_proxy_that_rejects_startup_settings_is_reported() -> None:
    refusal = refuse_with("08P01", "unsupported startup parameter: search_path")
    async with listening(refusal) as port:
        assert "set OUTBOX_POOLED=true" in await failure(f"postgresql://u@127.0.0.1:{port}/d")


async def test_behind_a_proxy_the_role_finds_the_schema(database: Database) -> None:
    name = database.name
    async with database.connection() as admin:
        await admin.execute("DROP ROLE IF EXISTS pooled; CREATE ROLE pooled LOGIN")
        await admin.execute("GRANT USAGE ON SCHEMA relay TO pooled")
    where = address(database.server.embedded.dsn(name, user="pooled"))
    with pytest.raises(CannotRun) as caught:
        await connect(where, schema="relay", pooled=True)
    advice = f'ALTER ROLE "pooled" IN DATABASE "{name}" SET search_path = "relay", pg_temp'
    assert advice in str(caught.value)
    async with database.connection() as admin:
        await admin.execute(advice)
    connection = await connect(where, schema="relay", pooled=True)
    assert await connection.fetchval("SELECT current_setting('application_name')") == "outbox"
    await connection.close()


async def test_too_many_connections_are_reported() -> None:
    async with listening(refuse_with("53300", "sorry, too many clients already")) as port:
        message = await failure(f"postgresql://u@127.0.0.1:{port}/d")
    assert "has no connection left: sorry, too many clients already" in message


async def test_an_unsupported_server_version_is_rejected(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SERVER_VERSION_MIN", 99)
    with pytest.raises(CannotRun, match=r"runs PostgreSQL \d+; 99 or later is needed"):
        await connect(address(database.dsn), schema="relay")


async def test_a_database_with_another_encoding(server: Server) -> None:
    name = "latin1"
    await server.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
    with pytest.raises(CannotRun, match="has the encoding LATIN1; UTF8 is needed"):
        await connect(address(server.dsn(name)), schema="relay")
    await server.execute(f"DROP DATABASE {name}")


FAILING_STATEMENTS = (
    ("SELECT * FROM nix.outbox", SchemaMissing, "run: outbox migrate"),
    ("SELECT * FROM nix", SchemaMissing, "run: outbox migrate"),
    ("SELECT nix()", SchemaMissing, "run: outbox migrate"),
    ("SET ROLE app; SELECT * FROM relay.outbox", CannotRun, "permission denied for"),
    ("SELECT pg_terminate_backend(pg_backend_pid())", DatabaseUnavailable, "was lost"),
    ("BEGIN READ ONLY; DELETE FROM relay.gap", CannotRun, "accepts no writes"),
)


async def test_database_errors_are_translated(
    database: Database, subtests: pytest.Subtests
) -> None:
    for statement, error, says in FAILING_STATEMENTS:
        with subtests.test(statement=statement, error=error, says=says):
            connection = await database.connect()
            await connection.execute("DROP ROLE IF EXISTS app; CREATE ROLE app")
            with pytest.raises(error, match=says), map_errors("relay"):
                await connection.execute(statement)
            if error is DatabaseUnavailable:
                with pytest.raises(DatabaseUnavailable), map_errors("relay"):
                    await connection.execute("SELECT 1")


async def test_other_errors_are_not_translated(database: Database) -> None:
    connection = await database.connect()
    with pytest.raises(asyncpg.DivisionByZeroError), map_errors("relay"):
        await connection.execute("SELECT 1/0")


async def test_a_server_shutdown_is_reported(private_server: Server) -> None:
    async with private_server.database() as database:
        connection = await connect(address(database.dsn), schema="relay")
        await asyncio.to_thread(private_server.embedded.kill)
        with pytest.raises(DatabaseUnavailable), map_errors("relay"):
            await connection.execute("SELECT 1")
