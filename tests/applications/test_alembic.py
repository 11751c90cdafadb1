"""Alembic revisions and `outbox migrate` apply the same files, and agree about the version."""

from __future__ import annotations

import asyncio
import io
import time
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy.ext.asyncio import create_async_engine

import outbox.alembic
from outbox.errors import CannotRun, NoTransaction, SchemaMissing, SchemaTooNew, UsageError
from outbox.store.connection.current_schema import status
from outbox.store.connection.migrate import migrate
from outbox.store.schema import lock_attempts, migrate_in_transaction
from outbox.store.schema.migration_files import migrations
from tests.store.test_migrate import CATALOG
from tests.support.postgres import API_ROLE
from tests.support.relay import ADD_REPLICA, END_LEASES, fetchval
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.postgres import Database

NEWEST = migrations()[-1].version

ENV = """
from alembic import context
from sqlalchemy import NullPool, create_engine

url = context.config.get_main_option("sqlalchemy.url")
if context.is_offline_mode():
    context.configure(url=url, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        context.configure(connection=connection)
        with context.begin_transaction():
            context.run_migrations()
"""

ASYNC_ENV = """
import asyncio
from alembic import context
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import create_async_engine

def migrate(connection):
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()

async def run():
    url = context.config.get_main_option("sqlalchemy.url")
    async with create_async_engine(url, poolclass=NullPool).connect() as connection:
        await connection.run_sync(migrate)

asyncio.run(run())
"""

REVISION = """
from alembic import op
import outbox.alembic
import sqlalchemy as sa

revision, down_revision = {revision!r}, {down!r}

def upgrade():
{upgrade}

def downgrade():
    outbox.alembic.downgrade(op, to=0)
"""


def environment(
    database: Database, room: Path, *upgrades: str, driver: str = "psycopg", is_async: bool = False
) -> Config:
    """An application's Alembic environment, with one revision per text."""
    (room / "versions").mkdir()
    (room / "env.py").write_text(ASYNC_ENV if is_async else ENV)
    for number, text in enumerate(upgrades, 1):
        body = "\n".join(f"    {line}" for line in text.splitlines())
        down = str(number - 1) if number > 1 else None
        (room / "versions" / f"r{number}.py").write_text(
            REVISION.format(revision=str(number), down=down, upgrade=body)
        )
    config = Config(output_buffer=io.StringIO())
    config.set_main_option("script_location", str(room))
    url = database.dsn.replace("postgresql:", f"postgresql+{driver}:", 1)
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


async def upgrade(config: Config, **options: Any) -> str:
    """Run `alembic upgrade head`; returns the SQL of offline mode."""
    buffer = io.StringIO()
    config.output_buffer = buffer
    await asyncio.to_thread(command.upgrade, config, "head", **options)
    return buffer.getvalue()


async def catalog(database: Database, schema: str = "relay") -> list[tuple[Any, ...]]:
    async with database.connection() as connection:
        return [tuple(row) for row in await connection.fetch(CATALOG, schema)]


async def require_same_catalog(made: Database, migrated: Database) -> None:
    """Compare a schema with that of a test's database, where a role has a purpose."""
    async with made.connection() as connection:
        await connection.execute(f"SELECT relay.grant_api('{API_ROLE}')")
    assert await catalog(made) == await catalog(migrated)


async def version(database: Database, schema: str = "relay") -> int:
    async with database.connection() as connection:
        return (await status(connection, schema)).version


BOTH = (
    "outbox.alembic.upgrade(op, to=3)",
    f"outbox.alembic.upgrade(op, to={NEWEST})\n"
    "op.create_table('orders', sa.Column('id', sa.Integer))\n"
    "assert op.get_bind().scalar(sa.text('SHOW lock_timeout')) == '0'",
)
DRIVERS = [("psycopg", False), ("psycopg2", False), ("asyncpg", True), ("psycopg", True)]


@pytest.mark.parametrize(
    ("driver", "is_async"),
    sampled(DRIVERS, lambda row: row in (("psycopg", False), ("asyncpg", True))),
)
async def test_revisions_do_what_outbox_migrate_does(
    database: Database, empty_database: Database, tmp_path: Path, driver: str, is_async: bool
) -> None:
    config = environment(empty_database, tmp_path, *BOTH, driver=driver, is_async=is_async)
    await upgrade(config)
    await require_same_catalog(empty_database, database)
    async with empty_database.connection() as connection:
        assert await migrate(connection, "relay") == []
        # The revision's own tables are where they would be without the outbox.
        assert await connection.fetchval("SELECT to_regclass('public.orders') IS NOT NULL")
        assert await connection.fetchval("SELECT version_num FROM public.alembic_version") == "2"


@pytest.mark.parametrize(("driver", "is_async"), DRIVERS[1:3])
async def test_a_database_that_outbox_migrate_has_migrated_is_not_changed(
    database: Database, tmp_path: Path, driver: str, is_async: bool
) -> None:
    before = await catalog(database)
    await upgrade(environment(database, tmp_path, *BOTH, driver=driver, is_async=is_async))
    assert await catalog(database) == before


@pytest.mark.full
async def test_outbox_migrate_goes_on_where_a_revision_ended(
    database: Database, empty_database: Database, tmp_path: Path
) -> None:
    await upgrade(environment(empty_database, tmp_path, "outbox.alembic.upgrade(op, to=4)"))
    assert await version(empty_database) == 4
    async with empty_database.connection() as connection:
        done = await migrate(connection, "relay")
    assert [each.version for each in done] == list(range(5, NEWEST + 1))
    await require_same_catalog(empty_database, database)


@pytest.mark.parametrize("start", sampled([0, 2, NEWEST]))
async def test_the_printed_sql_works_from_any_version(
    database: Database, empty_database: Database, tmp_path: Path, start: int
) -> None:
    config = environment(
        empty_database, tmp_path, *BOTH[:1], f"outbox.alembic.upgrade(op, to={NEWEST})"
    )
    script = await upgrade(config, sql=True)
    assert await asyncio.to_thread(outbox_version, empty_database.dsn) == 0
    if start:
        (tmp_path / "earlier").mkdir()
        earlier = environment(
            empty_database, tmp_path / "earlier", f"outbox.alembic.upgrade(op, to={start})"
        )
        await upgrade(earlier)
        async with empty_database.connection() as connection:
            await connection.execute("DROP TABLE public.alembic_version")
    async with empty_database.connection() as connection:
        await connection.execute(script)
    await require_same_catalog(empty_database, database)


def outbox_version(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'relay'")
        return int((row.fetchone() or (0,))[0])


@pytest.mark.full
async def test_another_schema_with_a_difficult_name(
    empty_database: Database, tmp_path: Path
) -> None:
    name = "we\"ird $$ %s :x 'y"
    config = environment(
        empty_database, tmp_path, f"outbox.alembic.upgrade(op, to={NEWEST}, schema={name!r})"
    )
    await upgrade(config)
    assert await version(empty_database, name) == NEWEST
    url = empty_database.dsn.replace("postgresql:", "postgresql+psycopg:")
    with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        outbox.alembic.check(connection, name)


async def test_a_failed_revision_changes_nothing(empty_database: Database, tmp_path: Path) -> None:
    config = environment(
        empty_database, tmp_path, f"outbox.alembic.upgrade(op, to={NEWEST})\nraise RuntimeError"
    )
    with pytest.raises(RuntimeError):
        await upgrade(config)
    assert await version(empty_database) == 0


# --------------------------------------------------------------- relays that run


@pytest.fixture
async def lease(empty_database: Database, tmp_path: Path) -> AsyncIterator[Any]:
    """The schema at version 4, before 0009 and 0010, and a relay that runs on it."""
    (tmp_path / "earlier").mkdir()
    earlier = environment(
        empty_database, tmp_path / "earlier", "outbox.alembic.upgrade(op, to=4)", "pass"
    )
    await upgrade(earlier)
    async with empty_database.connection() as connection:
        await connection.execute("DELETE FROM public.alembic_version")
        await connection.execute(ADD_REPLICA)
        yield connection


REFUSAL = r"0009_binary_payloads was not applied: relays must stop first, and 1 is running: shop-1 "


@pytest.mark.parametrize(("driver", "is_async"), sampled(DRIVERS))
async def test_a_revision_is_refused_while_a_relay_that_must_stop_first_runs(
    empty_database: Database, lease: Any, tmp_path: Path, driver: str, is_async: bool
) -> None:
    before = await catalog(empty_database)
    config = environment(empty_database, tmp_path, *BOTH, driver=driver, is_async=is_async)
    with pytest.raises(CannotRun, match=f"^{REFUSAL}.*s\\)$"):
        await upgrade(config)
    assert await catalog(empty_database) == before
    assert await version(empty_database) == 4
    await lease.execute(END_LEASES)
    await upgrade(config)
    assert await version(empty_database) == NEWEST


@pytest.mark.full
async def test_the_printed_sql_is_refused_while_a_relay_that_must_stop_first_runs(
    empty_database: Database, lease: Any, tmp_path: Path
) -> None:
    config = environment(empty_database, tmp_path, f"outbox.alembic.upgrade(op, to={NEWEST})")
    script = await upgrade(config, sql=True)
    async with empty_database.connection() as connection:
        await connection.execute("DROP TABLE public.alembic_version")
        with pytest.raises(asyncpg.PostgresError, match=REFUSAL):
            await connection.execute(script)
        await connection.execute("ROLLBACK")
        assert await version(empty_database) == 4
        await connection.execute(END_LEASES)
        await connection.execute(script)
    assert await version(empty_database) == NEWEST


# -------------------------------------------------------------------------- locks


@pytest.fixture
async def locked(empty_database: Database, tmp_path: Path) -> AsyncIterator[tuple[Config, Any]]:
    """A revision that waits for a lock, and the transaction that holds it."""
    await upgrade(environment(empty_database, tmp_path, "outbox.alembic.upgrade(op, to=4)"))
    (tmp_path / "next").mkdir()
    config = environment(
        empty_database, tmp_path / "next", "pass", f"outbox.alembic.upgrade(op, to={NEWEST})"
    )
    async with empty_database.connection() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("LOCK TABLE relay.migration IN SHARE ROW EXCLUSIVE MODE")
        yield config, transaction


@pytest.mark.full
async def test_a_lock_is_awaited_in_short_attempts(
    empty_database: Database, locked: tuple[Config, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, transaction = locked
    loop = asyncio.get_running_loop()
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            asyncio.run_coroutine_threadsafe(transaction.rollback(), loop).result()

    clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    monkeypatch.setattr(lock_attempts, "time", clock)
    await upgrade(config)
    assert len(pauses) == 2
    assert await version(empty_database) == NEWEST


async def test_a_lock_that_is_not_released_is_reported(
    empty_database: Database, locked: tuple[Config, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_attempts, "RETRY_FOR_S", 0.0)
    with pytest.raises(CannotRun, match=r"was not migrated: .* another session still holds a lock"):
        await upgrade(locked[0])
    assert await version(empty_database) == 4


@pytest.mark.full
async def test_a_schema_that_another_session_creates_meanwhile_is_used(
    empty_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate_in_transaction, "MESSAGE_LOCK_TIMEOUT_S", 10.0)
    config = environment(empty_database, tmp_path, f"outbox.alembic.upgrade(op, to={NEWEST})")
    waiting = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"
    async with empty_database.connection() as other, asyncio.TaskGroup() as tasks:
        transaction = other.transaction()
        await transaction.start()
        await other.execute("CREATE SCHEMA relay")
        upgrading = tasks.create_task(upgrade(config))
        await until(lambda: fetchval(empty_database, waiting))
        await transaction.commit()
        await upgrading
    assert await version(empty_database) == NEWEST


async def test_an_isolation_level_with_one_snapshot_is_refused(empty_database: Database) -> None:
    url = empty_database.dsn.replace("postgresql:", "postgresql+psycopg:")
    engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="REPEATABLE READ")
    with engine.connect() as connection:
        operations = Operations(MigrationContext.configure(connection))
        with pytest.raises(CannotRun, match=r"is repeatable read, .*in env\.py"):
            outbox.alembic.upgrade(operations, to=NEWEST)
    assert await version(empty_database) == 0


# ----------------------------------------------------------------------- refusals


async def test_wrong_revisions_are_refused(empty_database: Database, tmp_path: Path) -> None:
    cases: list[tuple[str, type[Exception], str]] = [
        (f"outbox.alembic.upgrade(op, to={NEWEST + 1})", UsageError, "there is no version"),
        ("outbox.alembic.upgrade(op, to=0)", UsageError, "knows 1 to"),
        ("outbox.alembic.upgrade(op, to=1, schema='pg_x')", UsageError, "reserves that name"),
        (
            "with op.get_context().autocommit_block():\n    outbox.alembic.upgrade(op, to=1)",
            NoTransaction,
            "outside of autocommit_block",
        ),
    ]
    for number, (text, kind, message) in enumerate(cases):
        room = tmp_path / str(number)
        room.mkdir()
        with pytest.raises(kind, match=message):
            await upgrade(environment(empty_database, room, text))
    context = MigrationContext.configure(dialect_name="sqlite", opts={"as_sql": True})
    with pytest.raises(UsageError, match="this revision is for sqlite"):
        outbox.alembic.upgrade(Operations(context), to=1)
    assert await version(empty_database) == 0


@pytest.mark.full
async def test_a_downgrade_is_refused(empty_database: Database, tmp_path: Path) -> None:
    config = environment(empty_database, tmp_path, f"outbox.alembic.upgrade(op, to={NEWEST})")
    await upgrade(config)
    with pytest.raises(UsageError, match="has no downgrade to version 0: it would lose events"):
        await asyncio.to_thread(command.downgrade, config, "base")
    assert await version(empty_database) == NEWEST


async def test_a_schema_of_another_application_is_refused(
    empty_database: Database, tmp_path: Path
) -> None:
    async with empty_database.connection() as connection:
        await connection.execute("CREATE SCHEMA relay; CREATE TABLE relay.outbox (id int)")
    config = environment(empty_database, tmp_path, "outbox.alembic.upgrade(op, to=1)")
    with pytest.raises(CannotRun, match="contains tables of another application"):
        await upgrade(config)


# -------------------------------------------------------------------------- check


@pytest.mark.parametrize("driver", sampled(["psycopg", "psycopg2", "asyncpg"]))
async def test_check_reports_what_is_missing(
    empty_database: Database, tmp_path: Path, driver: str
) -> None:
    async def check() -> None:
        url = empty_database.dsn.replace("postgresql:", f"postgresql+{driver}:")
        if driver == "asyncpg":
            async with create_async_engine(url, poolclass=sa.NullPool).connect() as connection:
                await connection.run_sync(outbox.alembic.check)
        else:
            with sa.create_engine(url, poolclass=sa.NullPool).connect() as blocking:
                outbox.alembic.check(blocking)

    with pytest.raises(SchemaMissing, match=rf"not there; .*upgrade\(op, to={NEWEST}\)"):
        await check()
    await upgrade(environment(empty_database, tmp_path, "outbox.alembic.upgrade(op, to=4)"))
    with pytest.raises(SchemaMissing, match=f"is at version 4, this program needs {NEWEST}"):
        await check()
    async with empty_database.connection() as connection:
        await migrate(connection, "relay")
        await check()
        await connection.execute(
            "INSERT INTO relay.migration (version, name, checksum, works_from) "
            "VALUES (1000, 'later', '', 1000)"
        )
    with pytest.raises(SchemaTooNew, match="upgrade outbox-relay here"):
        await check()


async def test_check_names_what_to_call_on_asyncio(database: Database) -> None:
    async with database.connection() as connection:
        with pytest.raises(UsageError, match="run_sync"):
            outbox.alembic.check(connection)  # type: ignore[arg-type]


# ----------------------------------------------------------------------- autogenerate


def differences(dsn: str, metadata: sa.MetaData, **filters: Any) -> set[str]:
    """What autogenerate would change, by table."""
    url = dsn.replace("postgresql:", "postgresql+psycopg:")
    with sa.create_engine(url, poolclass=sa.NullPool).connect() as connection:
        context = MigrationContext.configure(connection, opts={"include_schemas": True, **filters})
        with warnings.catch_warnings():
            # SQLAlchemy 2.0 warns of each CHECK that it reads and that is NOT VALID.
            warnings.filterwarnings("ignore", "Can't validate argument 'dialect_options'")
            found = compare_metadata(context, metadata)
    # Changes within a table are lists.
    return {str(each[1]) for each in found if each[0] in ("add_table", "remove_table")}


def not_legacy_name(name: str | None, type_: str, parent_names: Any) -> bool:
    return not (type_ == "table" and name == "legacy")


def not_legacy(item: Any, name: str | None, type_: str, reflected: bool, other: Any) -> bool:
    return not (type_ == "table" and name == "legacy")


async def test_autogenerate_keeps_away_from_the_schema(database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute("CREATE TABLE public.legacy (id int)")
    metadata = sa.MetaData()
    sa.Table("orders", metadata, sa.Column("id", sa.Integer))

    def compare(**filters: Any) -> set[str]:
        return differences(database.dsn, metadata, **filters)

    assert {"orders", "legacy", "relay.outbox"} <= compare()
    filters: dict[str, Any] = {
        "include_name": outbox.alembic.include_name(),
        "include_object": outbox.alembic.include_object(),
    }
    assert compare(**filters) == {"orders", "legacy"}
    # Reading models of an application.
    sa.Table("dead_letter", metadata, sa.Column("id", sa.Integer), schema="relay")
    assert compare(include_name=filters["include_name"]) == {
        "orders", "legacy", "relay.dead_letter",
    }  # fmt: skip
    assert compare(**filters) == {"orders", "legacy"}
    assert compare(include_object=filters["include_object"]) == {"orders", "legacy"}
    # With the application's own filters.
    assert compare(
        include_name=outbox.alembic.include_name(not_legacy_name),
        include_object=outbox.alembic.include_object(),
    ) == {"orders"}
    assert compare(include_object=outbox.alembic.include_object(not_legacy)) == {"orders"}
    other = outbox.alembic.include_name(schema="elsewhere")
    assert "relay.outbox" in compare(include_name=other)


def test_no_file_contains_what_ends_its_command() -> None:
    for migration in migrations():
        assert "$migration$" not in migration.sql
        assert "$outbox$" not in migration.sql
