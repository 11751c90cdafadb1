"""A group of results is several statements in one message, all of which are fenced alike.

The first one checks the lease, moves the lanes and writes the attempts.  The others write the dead
letters and reports of exactly the lanes that it moved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg
import orjson
import pytest

from outbox.core.delivery.commands import (
    AttemptRow,
    DeadLetter,
    DeadRange,
    Progress,
    Record,
    Successes,
)
from outbox.core.model.delivery import Delivery
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.connection.store_connection import StoreConnection, Worker
from outbox.store.delivery.records import RecordStore
from outbox.store.errors import Fenced
from tests.store.test_message import TRICKY
from tests.support.relay import add_endpoint, fetchval, register

if TYPE_CHECKING:
    from uuid import UUID

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major
SESSION = {"server_settings": {"search_path": "relay"}}

END_THE_LEASE = """
CREATE FUNCTION end_the_lease() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN UPDATE replica SET expires_at = clock_timestamp(); RETURN NULL; END$$;
CREATE TRIGGER ends AFTER INSERT ON {} FOR EACH STATEMENT EXECUTE FUNCTION end_the_lease()
"""
SUPPRESS_DEAD_LETTERS = """
CREATE FUNCTION suppress() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER suppress BEFORE INSERT ON dead_letter FOR EACH ROW EXECUTE FUNCTION suppress()
"""
# Each of its blocks with EXCEPTION is a subtransaction, which has an id of its own once it writes.
# The last one writes the moved row itself.
WRITE_IN_SUBTRANSACTIONS = """
CREATE TABLE seen (lane_id bigint);
CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
    BEGIN INSERT INTO seen VALUES (NEW.lane_id); EXCEPTION WHEN others THEN NULL; END;
    BEGIN INSERT INTO seen VALUES (1 / 0); EXCEPTION WHEN others THEN NULL; END;
    IF TG_WHEN = 'AFTER' AND pg_trigger_depth() = 1 THEN
        BEGIN
            UPDATE lane_progress SET spent = spent WHERE lane_id = NEW.lane_id;
        EXCEPTION WHEN division_by_zero THEN NULL;
        END;
    END IF;
    RETURN NEW;
END$$;
CREATE TRIGGER before BEFORE UPDATE ON lane_progress FOR EACH ROW EXECUTE FUNCTION see();
CREATE TRIGGER after AFTER UPDATE ON lane_progress FOR EACH ROW EXECUTE FUNCTION see()
"""
WRITTEN = """
SELECT (SELECT array_agg(lane_id ORDER BY lane_id) FROM lane_progress WHERE acked_seq > 0),
       (SELECT array_agg(lane_id ORDER BY lane_id) FROM attempt),
       (SELECT array_agg(lane_id ORDER BY lane_id) FROM dead_letter),
       (SELECT array_agg(lane_id ORDER BY lane_id) FROM lane_block),
       (SELECT array_agg((data ->> 'lane')::bigint) FROM journal
         WHERE kind = 'backlog_dead_lettered'),
       (SELECT array_agg(type ORDER BY type) FROM outbox WHERE type LIKE 'outbox.%')
"""
"""What was written: lanes with progress, attempts, dead letters, blocks, and journal entries about
ranges; types of operational events."""
PENDING = """
WITH event AS (INSERT INTO outbox (type, payload) VALUES ('a.b', '1') RETURNING id)
INSERT INTO delivery_run (lane_id, batch, seq, outbox_id)
SELECT l.id, 1, n, event.id FROM event, lane l, generate_series(1, 6) n
"""
SUPPRESS_NOTHING = """
CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
CREATE TRIGGER keep BEFORE INSERT ON attempt_run FOR EACH ROW EXECUTE FUNCTION keep()
"""
RESPONSES: list[dict[str, Any] | None] = [
    None, {"body": "same"}, *({"body": text} for text in TRICKY), {"body": "same"}, None,
]  # fmt: skip
CREATED, BLOCKED = "outbox.dead_letter.created", "outbox.lane.blocked"
REPORTED = [CREATED, CREATED, BLOCKED]
"""The events for a dead letter that blocks its lane, and for a range."""


def dead(lane_id: int, endpoint_id: UUID) -> Record:
    """The first delivery of a lane, which is refused, and blocks its lane."""
    delivery = Delivery(
        endpoint_id, "lane", lane_id, 1, 1, uuid4(), "a.b", None, None, 1.0, None, b"{}", None
    )
    row = AttemptRow(1, 1, 1, "refused", 400, None, 1.0, 0.1)
    letter = DeadLetter(delivery, "refused", 1, {"status": 400})
    return Record(lane_id, 1, row, Progress(1, 0, 1), letter, blocks=True)


def cut(lane_id: int, seq: int, to_seq: int) -> Record:
    """A range of a backlog."""
    return Record(
        lane_id,
        to_seq,
        None,
        Progress(to_seq, 0, 1),
        DeadRange(1, seq, to_seq, "backlog", 0, None),
    )


def succeeded(lane_id: int, seq: int, response: dict[str, Any] | None) -> Record:
    """A success that waits for a group."""
    return Record(lane_id, seq, AttemptRow(1, seq, 1, "delivered", 200, None, 1.0, 0.1, response))


def run(first_seq: int, responses: list[dict[str, Any] | None]) -> Successes:
    """The successes of a run."""
    results = Successes()
    for seq, response in enumerate(responses, first_seq):
        results.rows.append(AttemptRow(1, seq, 1, "delivered", 200, None, 1.0, 0.1, response))
    return results


class Owner:
    """A replica that owns the endpoints `a`, `b` and `c`, each with one lane."""

    def __init__(self, database: Database, connection: asyncpg.Connection) -> None:
        self.database = database
        self.connection = connection
        self.replicas = ReplicaStore(connection)

    async def start(self) -> Owner:
        self.endpoints = [(await add_endpoint(self.database, name, lanes=1)).id for name in "abc"]
        await add_endpoint(self.database, "watcher", types=["outbox.**"])
        self.id = await register(self.replicas, 60)
        self.epochs = await self.replicas.claim(self.id, self.endpoints, "test")
        self.records = RecordStore(self.connection, self.id)
        lane = "SELECT id FROM lane WHERE endpoint_id = $1"
        self.lanes = [await fetchval(self.database, lane, each) for each in self.endpoints]
        await self.connection.execute(PENDING)
        return self

    async def write(self, *records: Record) -> None:
        """Write a record of each of the endpoints, by the epochs of the start."""
        owners = dict(zip(self.lanes, self.endpoints, strict=True))
        await self.records.write(records, [self.epochs[owners[r.lane_id]] for r in records])

    async def damage(self, sql: str) -> None:
        await self.connection.execute(sql)

    async def written(self) -> tuple[list[int | str] | None, ...]:
        async with self.database.at_hand() as db:
            return tuple(await db.fetchrow(WRITTEN))


@pytest.fixture(params=[Worker, StoreConnection], ids=["prepared", "inline"])
async def owner(request: pytest.FixtureRequest, database: Database) -> Owner:
    """Also with the statements that are sent through a connection pooler."""
    return await Owner(
        database, await database.connect(**SESSION, connection_class=request.param)
    ).start()


@pytest.mark.parametrize("table", ["attempt_run", "dead_letter"])
async def test_a_lease_that_ends_between_two_statements_loses_nothing(
    owner: Owner, table: str
) -> None:
    a, b, c = owner.lanes
    await owner.damage(END_THE_LEASE.format(table))
    await owner.write(dead(a, owner.endpoints[0]), cut(b, 1, 3))
    both = [a, b]
    assert await owner.written() == (both, [a], both, [a], [b], REPORTED)
    # The next message finds that it has ended.
    with pytest.raises(Fenced):
        await owner.write(dead(c, owner.endpoints[2]))
    assert await owner.written() == (both, [a], both, [a], [b], REPORTED)


async def test_nothing_is_written_for_a_lane_that_has_moved(owner: Owner) -> None:
    a, b, c = owner.lanes
    await owner.replicas.release(owner.id, owner.endpoints[:2], "test", "moved")
    other = ReplicaStore(await owner.database.connect(**SESSION))
    await other.claim(await register(other, 60), owner.endpoints[:2], "test")
    with pytest.raises(Fenced):
        await owner.write(dead(a, owner.endpoints[0]), cut(b, 1, 3), dead(c, owner.endpoints[2]))
    assert await owner.written() == ([c], [c], [c], [c], None, [CREATED, BLOCKED])


async def test_nothing_is_written_for_a_lane_that_is_further(owner: Owner) -> None:
    """A repeated message, whose first result was lost, moves no lane backwards."""
    a, b, _ = owner.lanes
    await owner.write(cut(b, 1, 3))
    with pytest.raises(Fenced):
        await owner.write(dead(a, owner.endpoints[0]), dead(b, owner.endpoints[1]))
    both = [a, b]
    assert await owner.written() == (both, [a], both, [a], [b], REPORTED)


async def test_nothing_is_written_after_the_lease(owner: Owner) -> None:
    a, b, _ = owner.lanes
    await owner.damage("UPDATE replica SET expires_at = clock_timestamp()")
    with pytest.raises(Fenced):
        await owner.write(dead(a, owner.endpoints[0]), cut(b, 1, 3))
    assert await owner.written() == (None,) * 6


async def test_a_suppressed_dead_letter_undoes_the_progress(owner: Owner) -> None:
    a, b, c = owner.lanes
    await owner.write(cut(b, 1, 3))
    before = await owner.written()
    await owner.damage(SUPPRESS_DEAD_LETTERS)
    with pytest.raises(asyncpg.PostgresError) as raised:
        await owner.write(dead(a, owner.endpoints[0]), cut(b, 4, 6), cut(c, 1, 3))
    assert raised.value.sqlstate == "OB003"
    assert await owner.written() == before
    acked = "SELECT acked_seq FROM lane_progress WHERE lane_id = $1"
    assert await fetchval(owner.database, acked, b) == 3


async def test_a_lane_is_moved_although_a_trigger_writes_in_subtransactions(owner: Owner) -> None:
    a, b, _ = owner.lanes
    await owner.damage(WRITE_IN_SUBTRANSACTIONS)
    await owner.write(dead(a, owner.endpoints[0]), cut(b, 1, 3))
    assert await fetchval(owner.database, "SELECT count(*) FROM seen") == 8
    assert await owner.written() == ([a, b], [a], [a, b], [a], [b], REPORTED)


async def test_an_extended_range_is_journalled_by_its_part(owner: Owner) -> None:
    _, b, _ = owner.lanes
    await owner.write(cut(b, 1, 3))
    await owner.write(cut(b, 4, 6))
    ranges = "SELECT string_agg(seq || '-' || to_seq, ' ') FROM dead_letter"
    assert await fetchval(owner.database, ranges) == "1-6"
    parts = (
        "SELECT string_agg(concat_ws('-', data ->> 'from', data ->> 'to'), ' ' ORDER BY id) "
        "FROM journal WHERE kind = 'backlog_dead_lettered'"
    )
    assert await fetchval(owner.database, parts) == "1-3 4-6"


@pytest.mark.parametrize("message", ["acknowledgements", "counted", "progress"])
async def test_each_attempt_has_its_own_response(owner: Owner, message: str) -> None:
    a, b, c = owner.lanes
    if message == "counted":
        await owner.damage(SUPPRESS_NOTHING)
    records = [succeeded(b, seq, each) for seq, each in enumerate(RESPONSES, 1)]
    if message == "progress":
        records.append(cut(c, 1, 3))
    epochs = [owner.epochs[owner.endpoints[owner.lanes.index(r.lane_id)]] for r in records]
    runs = [(a, run(1, RESPONSES)), (a, run(1 + len(RESPONSES), RESPONSES[::-1]))]
    await owner.records.write(records, epochs, runs)
    async with owner.database.at_hand() as db:
        found = await db.fetch("SELECT lane_id, response FROM attempt ORDER BY lane_id, seq")
    of_lane: dict[int, list[dict[str, Any] | None]] = {a: [], b: []}
    for lane_id, response in found:
        of_lane[lane_id].append(None if response is None else orjson.loads(response))
    assert of_lane == {a: [*RESPONSES, *RESPONSES[::-1]], b: RESPONSES}


async def test_a_response_that_repeats_is_sent_once(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = owner.lanes
    messages: list[str] = []
    execute = asyncpg.Connection.execute

    async def logged(self: asyncpg.Connection, query: str, *args: Any, **kwargs: Any) -> Any:
        messages.append(query)
        return await execute(self, query, *args, **kwargs)

    monkeypatch.setattr(asyncpg.Connection, "execute", logged)
    repeated = [{"body": "repeated"} for _ in range(4)]
    runs = [(a, run(1, repeated[2:])), (a, run(9, [{"body": "other"}]))]
    records = [succeeded(b, 1, repeated[0]), succeeded(c, 1, repeated[1])]
    await owner.records.write(records, [0, 0], runs)
    text = "".join(messages)
    assert text.count("repeated") == text.count("other") == 1
    written = "SELECT count(*) FROM attempt WHERE response ->> 'body' = 'repeated'"
    assert await fetchval(owner.database, written) == 4
