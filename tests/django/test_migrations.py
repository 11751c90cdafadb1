"""Django's migrations and `outbox migrate` agree about the version of the schema."""

from __future__ import annotations

import asyncio
import io
import threading
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.db.migrations.exceptions import IrreversibleError
from django.db.migrations.recorder import MigrationRecorder

from outbox.django.operations import ApplyFile
from outbox.django.settings import APP_LABEL
from outbox.store.connection import current_schema, migrate
from outbox.store.schema.migration_files import migrations
from tests.django.projects import database_settings, project
from tests.support.relay import ADD_REPLICA, END_LEASES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

NAMES = [str(each) for each in migrations()]


async def in_project(
    databases: dict[str, Database], function: Callable[[], Any], **options: Any
) -> Any:
    """Run a function in a project; Django refuses to run where an event loop is running."""

    def run() -> Any:
        aliases = {alias: database_settings(each.dsn) for alias, each in databases.items()}
        with project(aliases, **options):
            return function()

    return await asyncio.to_thread(run)


def run_migrate(*arguments: str, **options: Any) -> str:
    """`manage.py migrate`; returns what it printed."""
    output = io.StringIO()
    call_command("migrate", *arguments, stdout=output, no_color=True, skip_checks=True, **options)
    return output.getvalue()


def recorded(alias: str = "default") -> list[str]:
    """The migrations that Django has recorded."""
    applied = MigrationRecorder(connections[alias]).applied_migrations()
    return sorted(name for app, name in applied if app == APP_LABEL)


async def history(database: Database, schema: str = "relay") -> list[tuple[Any, ...]]:
    """The history as `outbox migrate` has it."""
    async with database.connection() as connection:
        rows = await connection.fetch(
            f'SELECT version, name, checksum, works_from FROM "{schema}".migration ORDER BY version'
        )
        return [tuple(row) for row in rows]


async def catalog(database: Database, schema: str = "relay") -> set[tuple[str, str]]:
    """Tables and functions of the schema."""
    async with database.connection() as connection:
        rows = await connection.fetch(
            "SELECT 'table', relname::text FROM pg_class WHERE relnamespace = $1::regnamespace "
            "UNION SELECT 'function', oid::regprocedure::text FROM pg_proc "
            "WHERE pronamespace = $1::regnamespace",
            schema,
        )
        return {tuple(row) for row in rows}


def test_every_file_of_the_schema_has_a_migration() -> None:
    from django.db.migrations.loader import MigrationLoader

    with project({}):
        loader = MigrationLoader(None)
        found = {
            name: each for (app, name), each in loader.disk_migrations.items() if app == APP_LABEL
        }
    assert sorted(found) == NAMES
    for version, name in enumerate(NAMES, 1):
        first = found[name].operations[0]
        assert isinstance(first, ApplyFile)
        assert first.version == version
        assert found[name].dependencies == (
            [(APP_LABEL, NAMES[version - 2])] if version > 1 else []
        )
        assert not found[name].atomic


async def test_a_schema_made_by_django_is_the_one_that_the_command_makes(
    database: Database, empty_database: Database
) -> None:
    printed = await in_project({"default": empty_database}, lambda: (run_migrate(), recorded()))
    assert f"Applying {APP_LABEL}.0001_outbox... OK" in printed[0]
    assert printed[1] == NAMES
    assert await history(empty_database) == await history(database)
    assert await catalog(empty_database) == await catalog(database)
    async with empty_database.connection() as connection:
        assert await migrate.migrate(connection, "relay") == []


async def test_what_the_command_applied_is_recorded_and_left_as_it_is(database: Database) -> None:
    async with database.connection() as connection:
        await connection.execute("INSERT INTO relay.outbox (type, payload) VALUES ('a.b', '1')")
        before = await connection.fetchval("SELECT array_agg(applied_at) FROM relay.migration")
    assert (
        await in_project({"default": database}, lambda: (run_migrate(APP_LABEL), recorded())[1])
        == NAMES
    )
    async with database.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM relay.outbox") == 1
        after = await connection.fetchval("SELECT array_agg(applied_at) FROM relay.migration")
    assert after == before


@pytest.mark.full
async def test_each_continues_where_the_other_one_stopped(empty_database: Database) -> None:
    await in_project({"default": empty_database}, lambda: run_migrate(APP_LABEL, "0003"))
    async with empty_database.connection() as connection:
        assert (await current_schema.status(connection, "relay")).version == 3
        applied = await migrate.migrate(connection, "relay")
        assert [each.version for each in applied] == list(range(4, len(migrations()) + 1))
    assert (
        await in_project({"default": empty_database}, lambda: (run_migrate(), recorded())[1])
        == NAMES
    )


@pytest.mark.full
async def test_the_schema_and_the_databases_are_those_of_the_settings(
    empty_database: Database, server: Any
) -> None:
    def run() -> None:
        run_migrate(APP_LABEL)
        run_migrate(APP_LABEL, database="events")

    async with server.database(migrated=False) as events:
        await in_project(
            {"default": empty_database, "events": events}, run,
            OUTBOX_DATABASES=["events"], OUTBOX_SCHEMA="my outbox",
        )  # fmt: skip
        assert len(await history(events, "my outbox")) == len(NAMES)
        async with empty_database.connection() as connection:
            schemas = "SELECT count(*) FROM pg_namespace WHERE nspname IN ('relay', 'my outbox')"
            assert await connection.fetchval(schemas) == 0


class RefusingRouter:
    """A router that keeps the outbox away from a database."""

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool | None:
        return False if app_label == APP_LABEL else None


async def test_a_router_can_refuse_the_migrations(empty_database: Database) -> None:
    await in_project(
        {"default": empty_database},
        lambda: run_migrate(APP_LABEL),
        DATABASE_ROUTERS=[f"{__name__}.RefusingRouter"],
    )
    async with empty_database.connection() as connection:
        assert not await connection.fetchval(migrate.FIND_SCHEMA, "relay")


async def test_it_is_not_reversed_while_the_schema_exists(database: Database) -> None:
    def run() -> list[str]:
        run_migrate(APP_LABEL)
        with pytest.raises(IrreversibleError, match='DROP SCHEMA "relay" CASCADE'):
            run_migrate(APP_LABEL, "zero")
        assert recorded() == NAMES
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM relay.migration")
            cursor.execute("DROP SCHEMA relay CASCADE")
        run_migrate(APP_LABEL, "zero")
        return recorded()

    assert await in_project({"default": database}, run) == []


@pytest.mark.full
async def test_it_does_not_wait_long_for_the_lock_of_a_producer(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await in_project({"default": empty_database}, lambda: run_migrate(APP_LABEL, "0002"))
    monkeypatch.setattr("outbox.store.schema.lock_attempts.RETRY_FOR_S", 0.3)
    async with empty_database.connection() as producer:
        transaction = producer.transaction()
        await transaction.start()
        await producer.execute("LOCK TABLE relay.migration IN SHARE ROW EXCLUSIVE MODE")
        with pytest.raises(
            CommandError, match=r"0003_schedules was not applied.*still holds a lock"
        ):
            await in_project({"default": empty_database}, lambda: run_migrate(APP_LABEL))
        await transaction.rollback()
    assert (
        await in_project({"default": empty_database}, lambda: (run_migrate(), recorded())[1])
        == NAMES
    )


async def test_it_is_refused_while_a_relay_that_must_stop_first_runs(
    empty_database: Database,
) -> None:
    def run() -> list[str]:
        run_migrate(APP_LABEL)
        return recorded()

    await in_project({"default": empty_database}, lambda: run_migrate(APP_LABEL, "0008"))
    async with empty_database.connection() as connection:
        await connection.execute(ADD_REPLICA)
        before = await catalog(empty_database)
        with pytest.raises(
            CommandError,
            match=r"^0009_binary_payloads was not applied: relays must stop first, and 1 is "
            r"running: shop-1 \(.*\); stop them, then run this again \(.*\)$",
        ):
            await in_project({"default": empty_database}, run)
        assert await catalog(empty_database) == before
        assert len(await history(empty_database)) == 8
        await connection.execute(END_LEASES)
    assert await in_project({"default": empty_database}, run) == NAMES


async def test_the_sql_of_a_migration_is_refused_while_a_relay_runs(
    empty_database: Database,
) -> None:
    def script_of(name: str) -> str:
        output = io.StringIO()
        call_command("sqlmigrate", APP_LABEL, name, stdout=output, no_color=True)
        return output.getvalue()

    def run() -> str:
        run_migrate(APP_LABEL, "0008")
        return script_of("0009")

    script = await in_project({"default": empty_database}, run)
    async with empty_database.connection() as connection:
        await connection.execute(ADD_REPLICA)
        with pytest.raises(asyncpg.PostgresError, match="relays must stop first"):
            await connection.execute(script)
        await connection.execute("ROLLBACK")
    assert len(await history(empty_database)) == 8


@pytest.mark.full
async def test_concurrent_migrators_apply_each_file_once(empty_database: Database) -> None:
    barrier = threading.Barrier(2)

    def run() -> list[str]:
        from outbox.django.schema import migrate as migrate_to

        connection = connections.create_connection("default")
        try:
            barrier.wait(10)
            return [str(each) for each in migrate_to(connection, "relay", len(NAMES))]
        finally:
            connection.close()

    def both() -> list[str]:
        applied: list[str] = []
        threads = [threading.Thread(target=lambda: applied.extend(run())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return applied

    assert sorted(await in_project({"default": empty_database}, both)) == NAMES


async def test_it_is_refused_inside_of_a_transaction(empty_database: Database) -> None:
    def run() -> None:
        with transaction.atomic(), pytest.raises(CommandError, match="a transaction is open"):
            run_migrate(APP_LABEL)

    await in_project({"default": empty_database}, run)


async def test_tables_of_another_application_are_reported(empty_database: Database) -> None:
    async with empty_database.connection() as connection:
        await connection.execute("CREATE SCHEMA relay; CREATE TABLE relay.migration (id int)")

    def run() -> None:
        with pytest.raises(CommandError, match="contains tables of another application"):
            run_migrate(APP_LABEL)

    await in_project({"default": empty_database}, run)


@pytest.mark.full
async def test_the_sql_of_a_migration_applies_it(empty_database: Database) -> None:
    def run() -> list[str]:
        scripts = []
        for name in NAMES:
            output = io.StringIO()
            call_command("sqlmigrate", APP_LABEL, name, stdout=output, no_color=True)
            scripts.append(output.getvalue())
        return scripts

    scripts = await in_project({"default": empty_database}, run)
    async with empty_database.connection() as connection:
        for script in scripts:
            await connection.execute(f"{script}; SELECT 1")  # It ends with a comment.
        assert (await current_schema.status(connection, "relay")).pending == ()


async def test_makemigrations_finds_nothing_to_do(database: Database) -> None:
    def run() -> None:
        call_command("makemigrations", APP_LABEL, check=True, dry_run=True, stdout=io.StringIO())

    await in_project({"default": database}, run)
    await in_project({"default": database}, run, DEFAULT_AUTO_FIELD="django.db.models.AutoField")
