"""`outbox erase`: confirmed, counted and journalled."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from tests.support.relay import fetchval, publish

if TYPE_CHECKING:
    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


@pytest.fixture
def filled(database: Database) -> Database:
    async def query_database() -> None:
        for tenant, key in (("acme", "k1"), ("acme", "k2"), ("other", "k1")):
            await publish(database, {"of": tenant}, tenant=tenant, key=key)

    asyncio.run(query_database())
    return database


def left(database: Database) -> int:
    sql = "SELECT count(*) FROM outbox WHERE payload IS NOT NULL"
    return int(asyncio.run(fetchval(database, sql)))


def test_events_of_a_tenant_are_erased(outbox: Command, filled: Database) -> None:
    dsn = filled.dsn
    result = outbox("erase", "--tenant", "acme", "--dry-run", OUTBOX_DSN=dsn)
    assert result.out == "would be erased: 2 events, 0 dead letters\n"
    assert left(filled) == 3
    result = outbox("erase", "--tenant", "acme", "--yes", OUTBOX_DSN=dsn)
    assert result.out == "erased: 2 events, 0 dead letters, 0 responses\n"
    assert left(filled) == 1
    reported = asyncio.run(fetchval(filled, "SELECT data FROM journal WHERE kind = 'erased'"))
    assert json.loads(reported)["tenant"] == "acme"


def test_events_of_a_key_are_erased_with_json_output(outbox: Command, filled: Database) -> None:
    later = ("--at", "2099-01-01T00:00:00Z")
    outbox("publish", "a.b", "--key", "k1", *later, OUTBOX_DSN=filled.dsn)
    nightly = ("nightly", "0 3 * * *", "--type", "a.b", "--key", "k1")
    outbox("schedule", "add", *nightly, OUTBOX_DSN=filled.dsn)
    result = outbox("erase", "--key", "k1", "--yes", "--json", OUTBOX_DSN=filled.dsn)
    assert json.loads(result.out) == {
        "dry_run": False,
        "events": 2,
        "future_events": 1,
        "dead_letters": 0,
        "responses": 0,
        "schedules": ["nightly"],
    }
    assert left(filled) == 1
    assert 'the schedule "nightly" still publishes' in result.err
    assert asyncio.run(fetchval(filled, "SELECT count(*) FROM future_event")) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "specify either tenant or key"),
        (["--tenant", "a", "--key", "b"], "specify either tenant or key"),
        (
            ["--tenant", "acme"],
            "erasing is irreversible; confirm with --yes, or count with --dry-run",
        ),
    ],
)
def test_an_erasure_requires_a_selection_and_confirmation(
    outbox: Command, filled: Database, arguments: list[str], says: str
) -> None:
    result = outbox("erase", *arguments, OUTBOX_DSN=filled.dsn)
    assert (result.code, result.out) == (2, "")
    assert says in result.err
    assert left(filled) == 3
