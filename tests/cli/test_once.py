"""`outbox once`: idempotency keys with their event and expiry."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import TYPE_CHECKING, Any

import pytest

import outbox as producer
from outbox.operations.events import idempotency_keys
from tests.support.relay import remove_events

if TYPE_CHECKING:
    from uuid import UUID

    from tests.support.commands import Command
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


def query(database: Database, sql: str, *arguments: Any) -> list[Any]:
    async def query_database() -> list[Any]:
        async with database.connection(server_settings={"search_path": "relay"}) as connection:
            rows: list[Any] = await connection.fetch(sql, *arguments)
            return rows

    return asyncio.run(query_database())


@pytest.fixture
def claimed(database: Database) -> dict[str, UUID | None]:
    """Claim keys a to c with events and d without; e has expired."""

    async def query_database() -> dict[str, UUID | None]:
        async with database.connection() as db:
            ids = {}
            for key in ("plan:a", "plan:b", "plan:c", "e"):
                ids[key] = await producer.publish(db, "order.paid", {}, once=key, autocommit=True)
            await db.execute("SELECT relay.claim_once('d')")
            await db.execute("UPDATE relay.idempotency_key SET expires_at = now() WHERE key = 'e'")
            await db.execute(
                "UPDATE relay.idempotency_key SET claimed_at = now() - interval '3 days' "
                "WHERE key = 'plan:a'"
            )
            return ids

    return asyncio.run(query_database())


def keys(result: Any) -> list[str]:
    return [row["key"] for row in result.json]


def test_keys_are_listed(here: Command, claimed: dict[str, UUID | None]) -> None:
    rows = here("once", "list", "--json").json
    assert list(rows[0]) == ["key", "state", "event_id", "claimed_at", "expires_at", "resets"]
    assert [(r["key"], r["state"]) for r in rows] == [
        ("d", "claimed-without-event"),
        ("e", "expired"),
        ("plan:a", "held"),
        ("plan:b", "held"),
        ("plan:c", "held"),
    ]
    assert rows[2]["event_id"] == str(claimed["plan:a"])
    shown = here("once", "list").out.splitlines()
    assert shown[0].split() == ["KEY", "STATE", "EVENT", "CLAIMED", "EXPIRES", "RESETS"]
    assert len(shown) == 6
    assert here("once", "list", "--prefix", "none").out == "no idempotency keys\n"


@pytest.mark.usefixtures("claimed")
def test_listings_are_filtered_and_paged(here: Command) -> None:
    def listed(*arguments: object) -> list[str]:
        return keys(here("once", "list", "--json", *arguments))

    assert listed("--prefix", "plan:") == ["plan:a", "plan:b", "plan:c"]
    assert listed("--prefix", "plan:", "--since", "1d") == ["plan:b", "plan:c"]
    assert listed("--until", "1d") == ["plan:a"]
    tomorrow = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    assert listed("--since", tomorrow.isoformat()) == []
    assert listed("--state", "claimed-without-event") == ["d"]
    assert listed("--state", "expired") == ["e"]
    first = here("once", "list", "--json", "--limit", 2)
    assert (keys(first), first.err) == (["d", "e"], "more rows exist; next page: --after e\n")
    assert listed("--after", "e", "--limit", 3) == ["plan:a", "plan:b", "plan:c"]


PREFIXES = (
    "é",
    "\ud7ff",
    "a\U0010ffff",
    "\U0010ffff",
)


def test_keys_are_found_by_any_prefix(
    here: Command, database: Database, subtests: pytest.Subtests
) -> None:
    for prefix in PREFIXES:
        with subtests.test(prefix=prefix):
            names = [f"{prefix}{end}" for end in ("", "b", "\U0010ffff")]
            for name in ("a", "\ue000", *names):
                query(database, "SELECT claim_once($1)", name)
            assert keys(here("once", "list", "--json", "--prefix", prefix)) == names


@pytest.mark.usefixtures("claimed")
def test_an_invalid_time_is_rejected(here: Command) -> None:
    bad = here("once", "list", "--since", "yesterday")
    assert bad.code == 2
    assert '"yesterday" is neither a time such as 2026-01-31T12:00Z nor an age such as' in bad.error


def test_a_key_is_shown_with_its_event(
    here: Command, database: Database, claimed: dict[str, UUID | None]
) -> None:
    found = here("once", "show", "plan:a").out
    assert "order.paid" in found
    assert f"outbox trace {claimed['plan:a']}" in found
    assert here("once", "show", "plan:a", "--json").json["type"] == "order.paid"
    assert "not published" in here("once", "show", "d").out
    asyncio.run(remove_events(database))
    assert "the event is no longer retained" in here("once", "show", "plan:a").out
    for key in ("nothing", "a\0"):
        unknown = here("once", "show", key)
        assert unknown.code == 2
        assert "was never claimed; see: outbox once list" in unknown.error


def test_a_reset_is_journalled(
    here: Command, database: Database, claimed: dict[str, UUID | None]
) -> None:
    assert (
        here("once", "reset", "plan:a").out == 'reset "plan:a": its next event will be published\n'
    )
    assert here("once", "reset", "plan:a").out == '"plan:a" was not taken\n'
    assert here("once", "reset", "plan:a", "--json").json == {"key": "plan:a", "reset": False}
    assert here("once", "reset", "nothing").code == 2
    (row,) = query(database, "SELECT actor, data::text FROM journal WHERE kind = 'once_reset'")
    assert "@" in row["actor"]
    assert str(claimed["plan:a"]) in row["data"]
    published = here("publish", "a.b", "--once", "plan:a", "--once-for", "2h", "--json").json
    assert not published["already"]
    shown = here("once", "show", "plan:a", "--json").json
    assert (shown["event_id"], shown["resets"], shown["state"]) == (published["id"], 1, "held")
    kept = (
        "SELECT expires_at - claimed_at < interval '3 h' AS kept FROM idempotency_key "
        "WHERE key = 'plan:a'"
    )
    assert query(database, kept)[0]["kept"]


def test_a_listing_of_many_keys_reads_few(database: Database) -> None:
    query(
        database,
        "INSERT INTO idempotency_key (key, event_id, expires_at) "
        "SELECT 'k' || i, gen_random_uuid(), "
        "now() + interval '1 d' FROM generate_series(1, 20000) i",
    )

    async def query_database() -> list[Any]:
        async with database.connection(server_settings={"search_path": "relay"}) as db:
            await db.execute("ANALYZE idempotency_key")
            begin = "BEGIN; SET LOCAL plan_cache_mode = force_custom_plan"
            await db.execute(begin)
            plans = []
            for prefix, behind in (("", None), ("k777", "k778")):
                arguments = ("", prefix, behind, None, None, None, 100)
                rows = await db.fetch(f"EXPLAIN {idempotency_keys.LIST_KEYS}", *arguments)
                plans.append("\n".join(row[0] for row in rows))
            return plans

    for plan in asyncio.run(query_database()):
        assert "Index Scan using idempotency_key_pkey" in plan, plan
