"""Django's tests empty the tables of managed models; the outbox tables are not among them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from django.core.management import call_command
from django.db import DatabaseError, connection

from tests.django.projects import database_settings, project
from tests.support.relay import fetchval, publish

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


def flush() -> None:
    """What `TransactionTestCase` and pytest-django's `transaction=True` do after each test."""
    call_command("flush", interactive=False, verbosity=0, reset_sequences=False, allow_cascade=True)


def truncate() -> None:
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE relay.outbox")


async def run(database: Database, function: Callable[[], None], **options: Any) -> None:
    def in_project() -> None:
        settings = database_settings(database.dsn) | {"OPTIONS": options}
        with project({"default": settings}):
            call_command("migrate", verbosity=0, skip_checks=True)
            function()

    await asyncio.to_thread(in_project)


async def test_flush_leaves_the_events(database: Database) -> None:
    await publish(database, 1)
    await run(database, flush)
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 1


async def test_a_truncate_needs_an_option_of_the_database(database: Database) -> None:
    await publish(database, 1)
    with pytest.raises(DatabaseError, match=r"events of relay\.outbox may not be truncated"):
        await run(database, truncate)
    await run(database, truncate, options="-c relay.remove=on")
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 0
