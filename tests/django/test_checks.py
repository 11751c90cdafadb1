"""System checks of settings and databases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.django.checks import check_databases, check_settings
from outbox.store.connection import migrate
from outbox.store.schema.migration_files import migrations
from tests.django.projects import database_settings, project
from tests.django.test_migrations import in_project, run_migrate

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

NEWEST = len(migrations())


def found(messages: list[Any]) -> list[tuple[str, str, str]]:
    return [(each.id.removeprefix("outbox_relay."), each.msg, each.hint) for each in messages]


async def check(database: Database, **options: Any) -> list[tuple[str, str, str]]:
    """What `manage.py check --database default` finds."""
    return await in_project(
        {"default": database}, lambda: found(check_databases(["default"])), **options
    )


async def execute(database: Database, sql: str) -> None:
    async with database.connection() as connection:
        await connection.execute(sql)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"OUTBOX_SCHEMA": "pg_outbox"}, 'OUTBOX_SCHEMA: the schema cannot be "pg_outbox"'),
        ({"OUTBOX_SCHEMA": None}, "OUTBOX_SCHEMA: must be a name, not None"),
        ({"OUTBOX_SCHEMA": "100%"}, "OUTBOX_SCHEMA: Django does not support"),
        ({"OUTBOX_DATABASES": "default"}, "OUTBOX_DATABASES: must be a list of aliases"),
        ({"OUTBOX_DATABASES": []}, "OUTBOX_DATABASES: must be a list of aliases"),
        ({"OUTBOX_DATABASES": ["events"]}, 'OUTBOX_DATABASES: DATABASES has no "events"'),
        ({"OUTBOX_PAGE_URL": "outbox.example.com"}, "OUTBOX_PAGE_URL: must be the URL"),
    ],
)
def test_a_wrong_setting_is_an_error(options: dict[str, Any], message: str) -> None:
    with project({}):
        from django.test.utils import override_settings

        with override_settings(**options):
            ((number, text, hint),) = found(check_settings())
            assert found(check_databases(["default"])) == []
    assert number == "E001"
    assert text.startswith(message)
    assert hint == f"Correct {message.partition(':')[0]} in the settings."


def test_a_database_of_another_kind_is_an_error() -> None:
    with project({"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}):
        ((number, message, _),) = found(check_settings())
    assert number == "E002"
    assert message == 'OUTBOX_DATABASES: database "default" is sqlite, not PostgreSQL.'


async def test_a_migrated_database_is_in_order(database: Database) -> None:
    assert await check(database) == []


async def test_an_absent_schema_is_a_warning(empty_database: Database) -> None:
    assert await check(empty_database) == [
        (
            "W001",
            'Database "default" has no schema "relay" of the outbox.',
            "Run: manage.py migrate outbox_relay --database default",
        )
    ]


async def test_an_older_schema_is_a_warning(empty_database: Database) -> None:
    await in_project({"default": empty_database}, lambda: run_migrate("outbox_relay", "0003"))
    assert await check(empty_database) == [
        (
            "W002",
            'Database "default": schema "relay" is at version 3, '
            f"this version of outbox-relay requires {NEWEST}.",
            "Run: manage.py migrate outbox_relay --database default",
        )
    ]


async def test_recorded_migrations_that_are_not_there_have_another_remedy(
    database: Database,
) -> None:
    await in_project({"default": database}, lambda: run_migrate("outbox_relay"))
    await execute(database, "DROP SCHEMA relay CASCADE")
    ((number, _, hint),) = await check(database)
    assert number == "W001"
    assert hint.endswith("Run: manage.py outbox --database default migrate")


async def test_a_newer_schema_is_an_error(database: Database) -> None:
    later = NEWEST + 1
    await execute(database, f"INSERT INTO relay.migration VALUES ({later}, 'new', '', {later})")
    ((number, message, _),) = await check(database)
    assert number == "E003"
    assert message.startswith(f'Database "default": schema "relay" is at version {later}')


async def test_a_role_that_may_not_publish_is_a_warning(database: Database) -> None:
    name = f"app_{database.name}"
    await execute(database, f"CREATE ROLE {name} LOGIN")
    try:
        settings = {**database_settings(database.dsn), "USER": name}

        def run() -> list[tuple[str, str, str]]:
            with project({"default": settings}):
                return found(check_databases(["default"]))

        import asyncio

        assert await asyncio.to_thread(run) == [
            (
                "W003",
                f'Database "default": role "{name}" may not publish in schema "relay".',
                f"As the owner of the schema, run: outbox migrate --producer {name}",
            )
        ]
        # A producer may not read the history, and is in order.
        async with database.connection() as connection:
            await migrate.migrate(connection, "relay", roles=[("producer", name)])
        assert await asyncio.to_thread(run) == []
    finally:
        await execute(database, f"DROP OWNED BY {name}; DROP ROLE {name}")


async def test_only_the_databases_that_are_asked_for_are_checked(empty_database: Database) -> None:
    assert await in_project({"default": empty_database}, lambda: check_databases([])) == []
    assert await in_project({"default": empty_database}, check_databases) == []
