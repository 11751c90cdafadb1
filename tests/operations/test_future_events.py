"""Scheduled events: what is guaranteed, and what is rejected."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import outbox
from outbox import Event, InvalidEvent
from outbox.errors import NotFound
from outbox.operations.events import queries as events
from outbox.store.connection.migrate import migrate
from outbox.store.schedules.future_events import FutureEventStore

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

DAY = timedelta(days=1)
LATER = datetime(2100, 1, 1, 9, tzinfo=UTC)
LIMIT = 262_144


@pytest.fixture
async def owner(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


@pytest.fixture
async def app(database: Database, owner: Connection[Any]) -> Connection[Any]:
    """A connection of a role that has the privileges of a producer only."""
    await owner.execute("DROP ROLE IF EXISTS later; CREATE ROLE later LOGIN")
    await migrate(owner, "relay", roles=[("producer", "later")])
    return await database.connect(user="later")


async def waiting(owner: Connection[Any]) -> list[Any]:
    return await owner.fetch("SELECT * FROM future_event ORDER BY id")


async def entered(owner: Connection[Any]) -> list[Any]:
    return await owner.fetch("SELECT * FROM outbox ORDER BY id")


async def let_it_come(owner: Connection[Any]) -> None:
    """Make all future events due."""
    await owner.execute("UPDATE future_event SET deliver_at = clock_timestamp()")
    while await FutureEventStore(owner, 1).move_due():
        pass


async def test_a_scheduled_event_enters_the_outbox_unchanged(
    app: Connection[Any], owner: Connection[Any]
) -> None:
    event_id = await outbox.publish(
        app,
        "trial.ended",
        {"user": 7},
        key="user-7",
        tenant="acme",
        headers={"X-A": "b"},
        expires_in=DAY,
        deliver_at=LATER,
        autocommit=True,
    )
    (row,) = await waiting(owner)
    assert (row["event_id"], row["deliver_at"]) == (event_id, LATER)
    # From its time on: it would never have been worth sending otherwise.
    assert row["expires_at"] == LATER + DAY
    assert await entered(owner) == []
    await let_it_come(owner)
    (event,) = await entered(owner)
    assert await waiting(owner) == []
    kept = ("event_id", "tenant", "type", "key", "payload", "headers", "expires_at")
    assert [event[name] for name in kept] == [row[name] for name in kept]
    # It is published when it enters.
    assert event["created_at"] > row["created_at"]


async def test_an_event_that_is_due_enters_the_outbox_at_once(
    app: Connection[Any], owner: Connection[Any]
) -> None:
    await outbox.publish(app, "a", 1, deliver_at=datetime.now(UTC) - DAY, autocommit=True)
    await outbox.publish(app, "a", 2, deliver_at=datetime.min.replace(tzinfo=UTC), autocommit=True)
    await app.execute("SELECT relay.publish('a', '3', deliver_at => '-infinity')")
    assert await waiting(owner) == []
    assert [row["payload"] for row in await entered(owner)] == ["1", "2", "3"]


async def test_a_batch_has_a_time_for_each_event(
    app: Connection[Any], owner: Connection[Any]
) -> None:
    ids = await outbox.publish_many(
        app,
        [
            Event("a", 0),
            Event("a", 1, key="k", deliver_at=LATER + DAY),
            Event("a", 2, deliver_at=datetime.now(UTC) - DAY, once="o"),
            Event("a", 3, key="k", deliver_at=LATER, expires_in=60),
            Event("a", 4, deliver_at=LATER, once="o"),
            Event("a", 5, key="k", deliver_at=LATER),
        ],
        autocommit=True,
    )
    assert ids[4] is None
    assert [row["event_id"] for row in await entered(owner)] == [ids[0], ids[2]]
    kept = await waiting(owner)
    assert [row["event_id"] for row in kept] == [ids[1], ids[3], ids[5]]
    assert kept[1]["expires_at"] == LATER + timedelta(seconds=60)
    await owner.execute("UPDATE future_event SET deliver_at = deliver_at - interval '100 years'")
    await FutureEventStore(owner, 1).move_due()
    assert [row["payload"] for row in await entered(owner)] == ["0", "2", "3", "5", "1"]


async def test_a_rolled_back_event_is_not_published(
    app: Connection[Any], owner: Connection[Any]
) -> None:
    transaction = app.transaction()
    await transaction.start()
    assert await outbox.publish(app, "a", 1, once="k", deliver_at=LATER, autocommit=True)
    await transaction.rollback()
    assert await waiting(owner) == []
    assert await outbox.publish(app, "a", 2, once="k", deliver_at=LATER, autocommit=True)
    assert await outbox.publish(app, "a", 3, once="k", deliver_at=LATER, autocommit=True) is None


async def test_a_trace_shows_a_scheduled_event_as_waiting(
    app: Connection[Any], owner: Connection[Any]
) -> None:
    event_id = await outbox.publish(app, "a", 1, once="k", deliver_at=LATER, autocommit=True)
    for text in (str(event_id), "k"):
        with pytest.raises(NotFound) as caught:
            await events.find_events(owner, "relay", text)
        assert str(caught.value) == (
            f"event {event_id} is scheduled for 2100-01-01 09:00:00+00:00; it has no deliveries yet"
        )
    await let_it_come(owner)
    assert (await events.find_events(owner, "relay", str(event_id))).by == "event id"


async def test_an_idempotency_key_applies_to_scheduled_events(
    app: Connection[Any], owner: Connection[Any]
) -> None:
    assert await outbox.publish(
        app, "a", lambda: {"n": 1}, once="k", deliver_at=LATER, autocommit=True
    )
    assert (
        await outbox.publish(app, "a", lambda: 1 / 0, once="k", deliver_at=LATER, autocommit=True)
        is None
    )
    (row,) = await waiting(owner)
    assert row["payload"] == '{"n": 1}'


async def test_an_invalid_scheduled_event_is_rejected_at_once(
    app: Connection[Any], owner: Connection[Any]
) -> None:
    for value, says in (
        (datetime(2100, 1, 1), "deliver_at: has no time zone"),
        ("2100-01-01", "deliver_at: str is not a datetime"),
        (60, "deliver_at: int is not a datetime"),
    ):
        with pytest.raises(InvalidEvent) as caught:
            await outbox.publish(app, "a", 1, deliver_at=value, autocommit=True)  # type: ignore[arg-type]
        assert says in str(caught.value)
    with pytest.raises(InvalidEvent, match="payload"):
        await outbox.publish(app, "a", "x" * LIMIT, deliver_at=LATER, autocommit=True)
    assert await waiting(owner) == []


async def test_a_producer_role_cannot_read_scheduled_events(app: Connection[Any]) -> None:
    for statement in (
        "SELECT * FROM relay.future_event",
        "INSERT INTO relay.future_event (event_id, type, payload, deliver_at) "
        "VALUES (gen_random_uuid(), 'a', '1', now())",
        "DELETE FROM relay.future_event",
        "SELECT * FROM relay.schedule",
        "UPDATE relay.schedule SET state = 'paused'",
    ):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await app.execute(statement)


async def test_session_settings_do_not_change_the_time(
    app: Connection[Any], owner: Connection[Any]
) -> None:
    await app.execute("SET timezone = 'Asia/Kolkata'; SET datestyle = 'SQL, DMY'")
    await outbox.publish(app, "a", 1, deliver_at=LATER, autocommit=True)
    await outbox.publish_many(app, [Event("a", 2, deliver_at=LATER)], autocommit=True)
    assert [row["deliver_at"] for row in await waiting(owner)] == [LATER, LATER]
