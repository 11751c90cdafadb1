"""`outbox verify --repair`: violations are repaired and journalled while relays run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from outbox.errors import CannotRun
from outbox.operations import dead_letters, endpoint_removal, replays
from outbox.operations.dead_letter_filter import DeadLetterSelection
from outbox.operations.verify import repair
from outbox.operations.verify.guarantees import CHECKS
from outbox.operations.verify.repair_rules import REPAIRS
from outbox.store import change
from tests.support.plans import explain
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

    from tests.support.postgres import Database

# A log of another lane.
LARGE = """
INSERT INTO delivery (lane_id, batch, seq, outbox_id)
SELECT max(lane.id), 1, n, n FROM lane, generate_series(1, 20000) n GROUP BY n;
UPDATE lane_counter SET last_seq = 20000 WHERE lane_id = (SELECT max(id) FROM lane);
"""
PATH = {"server_settings": {"search_path": "relay"}}

# The damage, its repair, and the check that finds it; an endpoint `shop` has
# six deliveries in batches of their own, of which the fifth was given up, and `gone`
# is removed.
DAMAGE = {
    "a counter that is behind": ("UPDATE lane_counter SET last_seq = 3", "counters", "contiguous"),
    "a counter that is ahead": ("UPDATE lane_counter SET last_seq = 9", "counters", "contiguous"),
    "a lane without a counter": ("DELETE FROM lane_counter", "counters", "whole"),
    "a lane without a checkpoint": ("DELETE FROM lane_progress", "progress", "whole"),
    "a checkpoint beyond all numbers": (
        "UPDATE lane_progress SET acked_seq = 40",
        "progress",
        "whole",
    ),
    "a checkpoint from before a letter": (
        "UPDATE lane_progress SET acked_seq = 3, floor_batch = 0",
        "progress",
        "in order",
    ),
    "an endpoint without an owner's row": ("DELETE FROM ownership", "owners", "whole"),
    "an endpoint that changed hands unseen": (
        "UPDATE ownership SET epoch = epoch + 1",
        "owners",
        "owned",
    ),
    "an endpoint without health": ("DELETE FROM endpoint_health", "health", "whole"),
    "a lane that waits for a decision that was made": (
        """WITH decided AS (UPDATE dead_letter SET state = 'discarded')
           INSERT INTO lane_block (lane_id, seq) SELECT lane_id, 5 FROM dead_letter""",
        "blocks",
        "whole",
    ),
    "a lane that waits for a decision about nothing": (
        "INSERT INTO lane_block (lane_id, seq) SELECT lane_id, 2 FROM dead_letter",
        "blocks",
        "whole",
    ),
    "a secret of a removed endpoint": (
        """INSERT INTO endpoint_secret (endpoint_id, id, secret)
           SELECT id, 7, 'whsec_x' FROM endpoint WHERE name = 'gone'""",
        "secrets",
        "whole",
    ),
    "a subscription of a removed endpoint": (
        """UPDATE subscription SET to_batch = NULL
            WHERE endpoint_id = (SELECT id FROM endpoint WHERE name = 'gone')""",
        "subscriptions",
        "whole",
    ),
    "gaps above the cursor": (
        "INSERT INTO gap VALUES (6, 8), (1000, 1001)",
        "gaps",
        "gaps",
    ),
    "gaps that overlap": ("INSERT INTO gap VALUES (6, 7), (7, 8)", "gaps", "gaps"),
    "gaps with events that were sequenced": (
        "INSERT INTO gap VALUES (2, 6), (4, 4)",
        "gaps",
        "gaps",
    ),
    "a once key for nothing": (
        """INSERT INTO idempotency_key (key, claimed_at, expires_at)
           VALUES ('k', now() - interval '2 d', now() + interval '28 d')""",
        "claims",
        "whole",
    ),
}


async def a_life(database: Database) -> None:
    """Deliver six events, the fifth rejected, the sixth with id 9; and remove an endpoint."""
    await add_endpoint(database)
    await add_endpoint(database, "gone", types=["other.**"])
    network = Network(lambda sent: REFUSED if sent.seq == 5 else OK)
    async with running(database, network):
        for n in range(6):
            if n == 5:
                # As of three transactions that were rolled back.
                sql = "SELECT max(nextval('outbox_id_seq')) FROM generate_series(1, 3)"
                await fetchval(database, sql)
            await publish(database, n)
            await all_ended(database)
    async with database.connection(**PATH) as db:
        await endpoint_removal.remove_endpoint(db, "relay", "gone", actor="test")


async def damage(database: Database, sql: str) -> None:
    async with database.connection(**PATH) as db:
        await db.execute(sql)


async def repair_all(database: Database) -> list[repair.AppliedRepair]:
    async with database.connection(**PATH) as db:
        planned = await repair.plan_repairs(db, "relay")
        done = await repair.apply_repairs(db, "relay", actor="ann@host")
        assert await repair.plan_repairs(db, "relay") == []
    assert planned == done
    return done


@pytest.mark.one_major
@pytest.mark.parametrize("what", DAMAGE)
async def test_violations_are_repaired_and_journalled(database: Database, what: str) -> None:
    sql, name, check = DAMAGE[what]
    await a_life(database)
    if name == "counters" or name == "progress":
        sql = f"{sql}{' AND' if 'WHERE' in sql else ' WHERE'} lane_id = 1"
    await damage(database, f"{sql}; UPDATE cursor SET writer = 77")
    assert check in await exceptions(database), "it is found"
    done = await repair_all(database)
    assert {m.repair for m in done} == {name}
    assert await exceptions(database) == {}
    async with database.connection(**PATH) as db:
        rows = await db.fetch("SELECT actor, data::text FROM journal WHERE kind = 'repaired'")
    assert [row["actor"] for row in rows] == ["ann@host"] * len(done)
    reported = [orjson.loads(row["data"]) for row in rows]
    assert [(t["repair"], t["what"], t["before"], t["after"]) for t in reported] == [
        (m.repair, m.what, m.before, m.after) for m in done
    ]
    # Who leads has a copy of all that in memory, and begins anew.
    (repaired,) = [r for r in REPAIRS if r.name == name]
    leader = await fetchval(database, "SELECT writer FROM cursor")
    assert leader == (None if repaired.expires_replicas else 77)
    # What comes after has the right numbers, in order, and all of it arrives.
    network = Network()
    async with running(database, network):
        await publish(database, "after")
        await all_ended(database)
    assert [(s.seq, s.previous_seq) for s in network.sent] == [(7, 6)]
    assert await exceptions(database) == {}


@pytest.mark.one_major
@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE lane_counter SET last_seq = 3 WHERE lane_id = 1",
        "UPDATE lane_counter SET last_seq = 9 WHERE lane_id = 1",
        "DELETE FROM lane_progress WHERE lane_id = 1",
        "UPDATE ownership SET epoch = epoch + 1",
    ],
)
async def test_a_running_relay_reloads_repaired_rows(database: Database, sql: str) -> None:
    await add_endpoint(database)
    network = Network()
    async with running(database, network):
        await publish(database, *range(6))
        await all_ended(database)
        await damage(database, sql)
        async with database.connection(**PATH) as db:
            before = await db.fetchval("SELECT max(id) FROM replica")
            assert len(await repair.apply_repairs(db, "relay", actor="test")) == 1
        await publish(database, *range(6, 9))
        await all_ended(database)
        assert await fetchval(database, "SELECT max(id) FROM replica") > before
    accepted: dict[int, Any] = {s.seq: s.body["data"] for s in network.accepted}
    assert accepted == {n + 1: n for n in range(9)}
    assert await exceptions(database) == {}


@pytest.mark.one_major
async def test_a_replay_for_a_removed_endpoint_is_cancelled(database: Database) -> None:
    await add_endpoint(database)
    async with running(database, Network(lambda _: REFUSED)):
        await publish(database, 1, 2)
        await all_ended(database)
    async with database.connection(**PATH) as db:
        await endpoint_removal.remove_endpoint(db, "relay", "shop", actor="test")
        for letter in await dead_letters.list_dead_letters(db, "relay"):
            with pytest.raises(Exception, match="removed"):
                await replays.start_replay(
                    db, "relay", DeadLetterSelection((letter.id,)), actor="test"
                )
        await db.execute(
            """INSERT INTO replay_job (kind, state, requested_by) VALUES ('dead', 'done', 'test');
               INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
               SELECT j.id, endpoint_id, d.id, seq, batch, to_seq
                 FROM dead_letter d, replay_job j;
               UPDATE dead_letter SET state = 'replaying'"""
        )
    assert list(await exceptions(database)) == ["whole"]
    assert [m.repair for m in await repair_all(database)] == ["replays", "replays"]
    assert await exceptions(database) == {}
    async with database.connection(**PATH) as db:
        assert [letter.state for letter in await dead_letters.list_dead_letters(db, "relay")] == [
            "dead",
            "dead",
        ]


@pytest.mark.one_major
async def test_a_violation_without_a_unique_repair_is_left(database: Database) -> None:
    await a_life(database)
    await damage(database, "DELETE FROM delivery WHERE seq = 6")
    assert await repair_all(database) == [], "number 6 was tried, so the receiver knows it"
    assert {"contiguous", "complete"} <= (await exceptions(database)).keys()
    assert await fetchval(database, "SELECT count(*) FROM journal WHERE kind = 'repaired'") == 0


@pytest.mark.one_major
async def test_consistent_rows_are_not_changed(database: Database) -> None:
    await a_life(database)
    version = await fetchval(database, "SELECT version FROM cursor")
    assert await repair_all(database) == []
    assert await fetchval(database, "SELECT version FROM cursor") == version


@pytest.mark.one_major
async def test_unattached_partitions_are_dropped_if_empty(database: Database) -> None:
    await damage(
        database,
        "CREATE TABLE attempt_77 (LIKE attempt); CREATE TABLE outbox_88 (LIKE outbox);"
        "INSERT INTO outbox_88 (id, event_id, type, payload, created_at) "
        "VALUES (1, gen_random_uuid(), 'a', '1', now());"
        "CREATE TABLE outbox_my_own (a int)",
    )
    assert [(m.repair, m.before) for m in await repair_all(database)] == [
        ("partitions", "attempt_77")
    ]
    assert await fetchval(database, "SELECT to_regclass('attempt_77') IS NULL")
    assert await fetchval(database, "SELECT to_regclass('outbox_88') IS NOT NULL")


@pytest.mark.one_major
async def test_a_replica_that_cannot_be_expired_prevents_the_repair(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change, "LOCK_TIMEOUT_S", 0.1)
    await a_life(database)
    await damage(
        database,
        """UPDATE lane_counter SET last_seq = 3 WHERE lane_id = 1;
           INSERT INTO replica (name, version, label, lease_s, expires_at)
           VALUES ('frozen', '1', 'outbox-relay:frozen', 5, now())""",
    )
    holder: Connection[Any] = await database.connect(**PATH)
    await holder.execute("BEGIN; SELECT FROM replica FOR KEY SHARE")
    async with database.connection(**PATH) as db:
        with pytest.raises(CannotRun, match=r"holds a lock for over 0\.1 s; nothing was changed"):
            await repair.apply_repairs(db, "relay", actor="test")
    assert await fetchval(database, "SELECT last_seq FROM lane_counter WHERE lane_id = 1") == 3


@pytest.mark.one_major
async def test_only_what_was_found_is_read_again_under_the_locks(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair holds the cursor row, and the log may be long."""
    await a_life(database)
    await add_endpoint(database, "large", lanes=1)
    async with database.connection(**PATH) as db:
        await db.execute(LARGE)
        await db.execute("UPDATE lane_counter SET last_seq = 3 WHERE lane_id = 1; ANALYZE")
        messages: list[tuple[Any, ...]] = []
        write_together = db.write_together

        async def record(*calls: Any, **options: Any) -> Any:
            messages.append(calls)
            return await write_together(*calls, **options)

        monkeypatch.setattr(type(db), "write_together", lambda _, *a, **o: record(*a, **o))
        done = await repair.apply_repairs(db, "relay", actor="test")
        assert [each.repair for each in done] == ["counters"]
        (calls,) = messages
        (again,) = [call for call in calls if call[0].name == "require_counters"]
        # It is repaired by now, so this aborts only if it is read to its end.
        sql = again[0].sql.replace("abort_unless(", "NOT (")
        plan = await explain(db, sql, *again[1:], generic=False)
    assert plan.rows < 100, str(plan)


@pytest.mark.one_major
async def test_violations_are_repaired_in_portions(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "AT_ONCE", 2)
    await add_endpoint(database, lanes=5)
    await fetchval(database, "UPDATE lane_counter SET last_seq = 3")
    async with database.connection(**PATH) as db:
        planned = {each.what for each in await repair.plan_repairs(db, "relay")}
        assert len(planned) == 5
        assert {m.what for m in await repair.apply_repairs(db, "relay", actor="test")} == planned
        assert await repair.plan_repairs(db, "relay") == []
    changes = "SELECT count(*) FROM journal WHERE kind = 'repaired' AND request IS NOT NULL"
    assert await fetchval(database, changes) == 3


def test_every_check_has_a_recommended_action() -> None:
    names: Sequence[str] = [check.name for check in CHECKS]
    assert list(repair.ADVICE) == names
