"""Positions under fire: snapshots of an application, endpoints that begin there, and what they got.

A snapshot reads the application's counters, the events that it sees, and a position.  The producers
of `tests.support.adversary` write meanwhile.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.core.model.position import parse_position
from outbox.core.sequencing import feeds
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.relay.sequencing import feed_reader, feeder
from tests.support.relay import exceptions
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from uuid import UUID

    import pytest
    from asyncpg import Connection

    from outbox.core.model.position import Position
    from tests.support.postgres import Database

# A standby has no SERIALIZABLE transactions.
STANDBY_LEVELS = ("REPEATABLE READ", "REPEATABLE READ READ ONLY")
LEVELS = (*STANDBY_LEVELS, "SERIALIZABLE READ ONLY DEFERRABLE")
HAVE_ARRIVED = "SELECT NOT EXISTS (SELECT FROM relay.feed WHERE ended_at IS NULL)"
DELIVERED = """
SELECT d.outbox_id, o.key, (o.payload ->> 'v')::bigint AS v
  FROM relay.delivery d
  JOIN relay.lane l ON l.id = d.lane_id
  JOIN relay.outbox o ON o.id = d.outbox_id
 WHERE l.endpoint_id = $1 ORDER BY d.lane_id, d.seq
"""


@dataclass(frozen=True)
class Taken:
    """A snapshot: its position, the events that it sees, and the counters by key."""

    position: Position
    ids: frozenset[int]
    counters: dict[str, int]


def make_small_steps(monkeypatch: pytest.MonkeyPatch, cursor_seconds: float) -> None:
    """Let places be inside batches, and each feed take many reads and batches."""
    # After a long run, the rest is fed in fewer batches.
    monkeypatch.setattr(feeds, "IDLE_MAX", max(40, int(10 * cursor_seconds)))
    monkeypatch.setattr(feeds, "LIVE_PER_S", 1e6)
    monkeypatch.setattr(feed_reader, "READ_EVENTS_MAX", 25)
    monkeypatch.setattr(feed_reader, "COUNT_EVERY_S", 0.02)
    monkeypatch.setattr(feeder, "TAIL_IDS", 30)


async def take_snapshot(
    db: Connection[Any], rng: random.Random, levels: tuple[str, ...] = LEVELS
) -> Taken:
    """Take a snapshot in a transaction of its own."""
    await db.execute(f"BEGIN ISOLATION LEVEL {rng.choice(levels)}")
    if rng.random() < 0.3:
        # The snapshot is older than the position.
        await db.execute("SELECT count(*) FROM app.account")
        await asyncio.sleep(rng.random() * 0.05)
    position = await db.fetchval("SELECT relay.snapshot_position()")
    ids = await db.fetchval("SELECT array_agg(id) FROM relay.outbox")
    rows = await db.fetch("SELECT k, v FROM app.account")
    await db.execute("COMMIT")
    counters = {f"k{k}": v for k, v in rows}
    return Taken(parse_position(position), frozenset(ids or ()), counters)


async def new_position(database: Database) -> Position:
    """The position of a snapshot of now."""
    async with database.connection() as db, db.transaction(isolation="repeatable_read"):
        return parse_position(await db.fetchval("SELECT relay.snapshot_position()"))


async def begin_at(database: Database, taken: Taken, name: str, lanes: int) -> UUID:
    """An endpoint that begins at a position."""
    async with database.at_hand() as db:
        settings = EndpointSettings(name=name, url="http://127.0.0.1/", lanes=lanes)
        new = await endpoint_changes.add_endpoint(
            db, database.schema, settings, actor="test", start=taken.position
        )
    return new.id


async def until_all_arrived(database: Database, cursor_seconds: float) -> None:
    """Wait until every endpoint subscribes."""
    async with database.connection() as db:
        await until(
            lambda: db.fetchval(HAVE_ARRIVED),
            what="every endpoint to subscribe",
            timeout_s=60 + 2 * cursor_seconds,
        )


async def expect_exact(database: Database, begun: list[tuple[UUID, Taken]]) -> None:
    """Require that each endpoint got exactly what its snapshot did not see, in order."""
    async with database.connection() as db:
        wrong = {str(each): await difference(db, each, taken) for each, taken in begun}
        fed = await db.fetchval("SELECT count(*) FROM relay.delivery WHERE feed_id IS NOT NULL")
    assert {each: found for each, found in wrong.items() if found} == {}
    # A run without fed deliveries proves nothing.
    assert fed > 10 * len(begun)
    assert await exceptions(database) == {}


async def difference(db: Connection[Any], endpoint_id: UUID, taken: Taken) -> dict[str, Any]:
    """What an endpoint should have got and has not, or the reverse; and keys out of order.

    gone: events that the snapshot saw, and that do not exist any more.
    """
    rows = await db.fetch(DELIVERED, endpoint_id)
    ids = [row["outbox_id"] for row in rows]
    seen = dict(taken.counters)
    wrong = []
    for row in rows:
        if row["v"] is not None and row["key"] in seen:
            if row["v"] != seen[row["key"]] + 1:
                wrong.append((row["key"], seen[row["key"]], row["v"]))
            seen[row["key"]] = row["v"]
    final = await db.fetch("SELECT k, v FROM app.account")
    every = {row["id"] for row in await db.fetch("SELECT id FROM relay.outbox")}
    wanted = every - taken.ids
    found = {
        "gone": sorted(taken.ids - every)[:5],
        "lost": sorted(wanted - set(ids))[:5],
        "seen before": sorted(set(ids) & taken.ids)[:5],
        "twice": len(ids) - len(set(ids)),
        "versions": wrong[:5],
        "end": {f"k{k}": (v, seen[f"k{k}"]) for k, v in final if seen[f"k{k}"] != v},
    }
    return {name: value for name, value in found.items() if value}


async def lost_by_greatest_id(database: Database, begun: list[tuple[UUID, Taken]]) -> int:
    """How many events are lost if the stream goes on after the greatest id that a snapshot sees."""
    async with database.connection() as db:
        every = [row["id"] for row in await db.fetch("SELECT id FROM relay.outbox")]
    lost = 0
    for _, taken in begun:
        greatest = max(taken.ids, default=0)
        lost += sum(event_id <= greatest and event_id not in taken.ids for event_id in every)
    return lost
