"""A PostgreSQL server given to the benchmark is used, left unchanged, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from benchmarks import __main__ as bench
from benchmarks.given import given
from benchmarks.stage import POSTGRES_SETTINGS, search, stage
from outbox.errors import CannotRun
from tests.support.postgres import Server
from tests.support.roles import dsn_of, role

if TYPE_CHECKING:
    from tests.support.postgres import Database

DATABASES = "SELECT datname FROM pg_database ORDER BY 1"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.system
async def test_a_given_server_is_used_and_left_unchanged() -> None:
    server = Server(None, POSTGRES_SETTINGS)
    async with (
        server.embedded,
        server.database(migrated=False) as empty,
        empty.connection() as connection,
    ):
        before = await connection.fetch(DATABASES)
        output: list[str] = []
        async with stage(output.append, dsn=empty.dsn) as set_up:
            async with (
                set_up.durable() as durable,
                durable.database() as database,
                search(database) as made,
            ):
                assert durable is set_up.server
                await made.execute("INSERT INTO outbox (type, payload) VALUES ('a.b', '1')")
            assert set_up.server_description == f"{server.version}, not embedded"
        assert await connection.fetch(DATABASES) == before


async def test_a_database_with_a_relay_is_refused(database: Database) -> None:
    with pytest.raises(CannotRun, match=r'--dsn: .*is not empty \(it has "relay"\."outbox", which'):
        await given(database.dsn)


async def test_a_database_with_anything_else_is_refused(empty_database: Database) -> None:
    async with empty_database.connection() as connection:
        await connection.execute("CREATE TABLE public.invoice (n int)")
    with pytest.raises(CannotRun, match=r'it has "public"\."invoice"\): make one'):
        await given(empty_database.dsn)


async def test_settings_that_invalidate_results_are_reported(empty_database: Database) -> None:
    with pytest.raises(
        CannotRun, match=r"meaningless: .*fsync = off: no commit waits for the disk"
    ):
        await given(empty_database.dsn)
    async with empty_database.connection() as connection:
        name = empty_database.name
        await connection.execute(f"ALTER DATABASE {name} SET log_statement = 'all'")
    with pytest.raises(CannotRun, match="log_statement = all: it is its log"):
        await given(empty_database.dsn)


async def test_a_role_without_createdb_is_refused(empty_database: Database) -> None:
    async with role(empty_database) as name:
        with pytest.raises(CannotRun, match="does not let its role make others: ALTER ROLE"):
            await given(dsn_of(empty_database, name))


def test_quick_and_full_are_mutually_exclusive() -> None:
    ended = CliRunner().invoke(bench.main, ["--quick", "--full"])
    assert ended.exit_code == 2
    assert "choose one" in ended.stderr


@pytest.mark.system
def test_an_unreachable_server_is_a_one_line_error() -> None:
    words = ["--only", "commits", "--dsn", "postgresql://nobody@127.0.0.1:1/none"]
    ended = CliRunner().invoke(bench.main, words)
    assert ended.exit_code == 3
    assert ended.stderr.startswith("bench: ")
    assert len(ended.stderr.splitlines()) == 1
