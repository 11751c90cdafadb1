"""Operational events in the database: their subscribers and contents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.core.model import pattern
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.ids import lane_name
from outbox.core.model.position import parse_position
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.store.connection.migrate import PAYLOAD_BYTES_RANGE, migrate
from outbox.store.operational_events import (
    DEAD_LETTER_CREATED_EVENT,
    HAS_OPERATIONAL_SUBSCRIBER,
    PUBLISH_REPORTED_EVENTS,
)
from tests.support.relay import add_endpoint, fetchval

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

PATH: dict[str, Any] = {"server_settings": {"search_path": "relay"}}
KIND = "outbox.dead_letter.created"
PATTERNS = [
    *("**", "*", "*.dead_letter.created", "*.**", "outbox", "outbox_dead_letter.created"),
    *("outbox.**", "outbox.*", "outbox.*.*", "outbox.dead_letter.*", "outbox.*.created", KIND),
    *(
        "outbox.dead_letter",
        "outbox.dead_letter.created.x",
        "outbox.*.*.*",
        "outbox.dead_letter.**",
    ),
]


async def announced(db: Connection, kind: str = KIND, about: object = None) -> bool:
    return bool(await db.fetchval("SELECT publish_operational_event($1, $2, '{}')", kind, about))


async def test_an_operational_event_is_written_if_a_pattern_matches(
    database: Database, subtests: pytest.Subtests
) -> None:
    async with database.connection(**PATH) as db:
        for n, text in enumerate(PATTERNS):
            with subtests.test(text):
                await add_endpoint(database, f"e{n}", types=["order.paid", text])
                wanted = pattern.parse(text).fullmatch(KIND) is not None
                assert await announced(db) is wanted
                written = "SELECT count(*) FROM outbox WHERE type = $1"
                assert await db.fetchval(written, KIND) == wanted
            # The next pattern has its own subscription and its own event.
            await db.execute(
                "UPDATE subscription SET to_batch = 1; SET LOCAL relay.remove = 'on'; "
                "DELETE FROM outbox"
            )


async def test_an_event_names_the_tenant_and_the_contact(database: Database) -> None:
    await add_endpoint(database, "ops", types=["outbox.**"], all_tenants=True)
    acme = await add_endpoint(database, tenant="acme", contact="ops@acme.example")
    async with database.connection(**PATH) as db:
        assert await announced(db, about=acme.id)
        found = await db.fetchval("SELECT payload ->> 'endpoint' FROM outbox")
    assert orjson.loads(found) == {
        "id": str(acme.id),
        "name": "shop",
        "tenant": "acme",
        "contact": "ops@acme.example",
    }


async def test_an_endpoint_that_is_being_fed_counts_as_a_subscriber(database: Database) -> None:
    async with database.connection(**PATH) as db:
        settings = EndpointSettings(name="ops", url="http://127.0.0.1/", types=("outbox.**",))
        async with db.transaction(isolation="repeatable_read"):
            start = parse_position(await db.fetchval("SELECT snapshot_position()"))
        async with database.at_hand() as at_hand:
            await endpoint_changes.add_endpoint(
                at_hand, "relay", settings, actor="test", start=start
            )
        assert await db.fetchval("SELECT count(*) FROM subscription WHERE to_batch IS NULL") == 0
        assert await db.fetchval(f"SELECT {HAS_OPERATIONAL_SUBSCRIBER}")
        assert await announced(db)


async def test_subscribers_are_found_by_a_small_index(database: Database) -> None:
    for n in range(50):
        await add_endpoint(database, f"e{n}", types=["outbox.**"] if n == 7 else ["**"])
    async with database.connection(**PATH) as db:
        assert await db.fetchval("SELECT count(*) FROM subscription") == 50
        await db.execute("ANALYZE; SET enable_seqscan = off; SET enable_bitmapscan = off")
        size = "SELECT reltuples FROM pg_class WHERE relname = 'subscription_operational'"
        assert await db.fetchval(size) == 1
        plan = await db.fetch(
            "EXPLAIN SELECT EXISTS (SELECT FROM subscription "
            "WHERE to_batch IS NULL AND selects_operational_events(types))"
        )
        assert "subscription_operational" in str(plan)


async def test_lanes_have_the_names_that_receivers_get(database: Database) -> None:
    endpoint = await add_endpoint(database)
    sql = "SELECT lane_name($1, 1000001, 12)"
    assert await fetchval(database, sql, endpoint.id) == lane_name(endpoint.id, 1_000_001, 12)


async def test_rejected_operational_events_are_omitted_from_a_batch(database: Database) -> None:
    await add_endpoint(database, types=[KIND])
    async with database.connection(**PATH) as db:
        await db.execute(f"""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE 'no'; END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON outbox FOR EACH ROW
            WHEN (NEW.payload ->> 'n' = '3') EXECUTE FUNCTION refuse();
            CREATE TEMPORARY TABLE reported AS
            SELECT CASE n WHEN 5 THEN 'outbox.lane.blocked' ELSE '{KIND}' END AS type,
                   NULL::uuid AS endpoint_id, jsonb_build_object('n', n) AS details
              FROM generate_series(1, 6) AS n""")
        assert await db.fetchval(PUBLISH_REPORTED_EVENTS) == 4
        written = await db.fetch("SELECT payload ->> 'n' AS n FROM outbox ORDER BY id")
        assert [each["n"] for each in written] == ["1", "2", "4", "6"]
        await db.execute("DELETE FROM reported")
        assert await db.fetchval(PUBLISH_REPORTED_EVENTS) is None, "no lookup without events"


async def test_a_locked_table_is_waited_for_once(database: Database) -> None:
    await add_endpoint(database, types=[KIND])
    async with database.connection(**PATH) as db, database.connection(**PATH) as other:
        await db.execute(f"""
            CREATE TEMPORARY TABLE reported AS
            SELECT '{KIND}' AS type, NULL::uuid AS endpoint_id, '{{}}'::jsonb AS details
              FROM generate_series(1, 20)""")
        warnings: list[str] = []
        db.add_log_listener(lambda _, message: warnings.append(str(message)))
        async with other.transaction():
            await other.execute("LOCK TABLE outbox IN SHARE MODE")
            assert await db.fetchval(PUBLISH_REPORTED_EVENTS) == 0
        assert await db.fetchval(PUBLISH_REPORTED_EVENTS) == 20
    (warning,) = warnings
    assert "20 operational events were rejected: canceling statement due to lock" in warning


async def test_operational_events_fit_into_the_smallest_payload_limit(database: Database) -> None:
    least, _ = PAYLOAD_BYTES_RANGE
    # The longest name and type that there can be, as JSON twice as long.
    endpoint = await add_endpoint(database, '"' * 200, url="http://receiver.test/")
    await add_endpoint(database, "ops", types=["outbox.**"])
    async with database.connection(**PATH) as db:
        await migrate(db, "relay", payload_bytes_max=least)
        most = 2**63 - 1
        letter = f"""
            SELECT publish_operational_event({DEAD_LETTER_CREATED_EVENT})
              FROM (SELECT $1::uuid AS endpoint_id, {most} AS id, {most} AS seq, {most} AS to_seq,
                           gen_random_uuid() AS event_id, repeat('x', 255) AS type,
                           'exhausted' AS reason, 2147483647 AS attempts,
                           '{{"status": 503, "failure": "connection refused"}}'::jsonb
                               AS last_response) x,
                   (SELECT {most} AS generation, 1023 AS slot) l"""
        assert await db.fetchval(letter, endpoint.id) is True
        payload = await db.fetchval("SELECT payload::text FROM outbox")
    reported = orjson.loads(payload)
    assert set(reported) == {
        *("version", "at", "endpoint", "dead_letter", "lane", "sequence", "to_sequence"),
        *("event", "type", "reason", "attempts", "status", "failure"),
    }
    assert 1024 < len(payload.encode()) <= least
