"""The proof of absence: each of its parts is necessary."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.core.sequencing.partition_window import WIDTH
from outbox.errors import CursorBroken
from outbox.store import absence_proof
from outbox.store.absence_proof import AbsenceProof
from outbox.store.sql.message import WriteStatement
from tests.support.detaching import ATTACH, DETACH
from tests.support.relay import fetchval, publish
from tests.support.roles import role
from tests.support.sequencers import session
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from outbox.core.sequencing.gaps import Range
    from tests.support.postgres import Database

pytestmark = [pytest.mark.costly, pytest.mark.system]

FIRST = [(1, 1)]
LATER = [(2 * WIDTH, 2 * WIDTH)]

WRITE = WriteStatement(
    "conclude", "INSERT INTO journal (kind, actor, data) VALUES ('concluded', 'test', '{}')"
)
FAILED = absence_proof._FAILED
CONCLUDED = "SELECT count(*) FROM journal WHERE kind = 'concluded'"
NOTHING = WriteStatement("nothing", "SELECT $1::text, $2::text, $3::text")
BARRIER = WriteStatement("barrier", "SELECT pg_advisory_xact_lock_shared($1)")
AT_BARRIER = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"
NO_READ = WriteStatement("no_read", "SELECT $1::text")

SUBSCRIBE = """
CREATE SUBSCRIPTION mine CONNECTION 'dbname=other' PUBLICATION it WITH (connect = false);
SET allow_system_table_mods = on;
INSERT INTO pg_subscription_rel (srsubid, srrelid, srsubstate)
SELECT oid, '{}'::regclass, 'r' FROM pg_subscription
 WHERE subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
IS_SUBSCRIBED = """
SELECT EXISTS (SELECT FROM pg_subscription WHERE subdbid = (
    SELECT oid FROM pg_database WHERE datname = current_database()))
"""
UNSUBSCRIBE = "ALTER SUBSCRIPTION mine SET (slot_name = NONE); DROP SUBSCRIPTION mine"

# What hides or falsifies rows; the words of the reason, the command in it, the condition, and the
# ids that the proof is about.
KEPT: dict[str, tuple[str, str, str, str, list[Range]]] = {
    "a policy": (
        "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY",
        "row level security is active on relay.outbox",
        "ALTER TABLE relay.outbox DISABLE ROW LEVEL SECURITY",
        "row security",
        FIRST,
    ),
    "a policy that is forced": (
        "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
        "row level security is active on relay.outbox",
        "ALTER TABLE relay.outbox DISABLE ROW LEVEL SECURITY",
        "row security",
        FIRST,
    ),
    "a policy that hides nothing": (
        "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY;"
        " CREATE POLICY all_rows ON outbox USING (true)",
        "also if its policies hide nothing",
        "DISABLE ROW LEVEL SECURITY",
        "row security",
        FIRST,
    ),
    "a view in place of the table": (
        "ALTER TABLE outbox RENAME TO kept; CREATE VIEW outbox AS SELECT * FROM kept WHERE id > 1;"
        " GRANT SELECT ON outbox TO PUBLIC",
        "is not the table that it was",
        "RENAME TO outbox",
        "table",
        FIRST,
    ),
    "a partition that is detached": (
        DETACH,
        "relay.outbox_0 is not attached",
        ATTACH.replace("outbox", "relay.outbox"),
        "partitions",
        FIRST,
    ),
    "a partition that is dropped": (
        f"{DETACH}; DROP TABLE outbox_0",
        "relay.outbox_0 does not exist",
        "SELECT relay.add_partition('relay.outbox', 0)",
        "partitions",
        FIRST,
    ),
    "a partition that is detached and renamed": (
        f"{DETACH}; ALTER TABLE outbox_0 RENAME TO elsewhere",
        "relay.outbox_0 does not exist",
        "ATTACH PARTITION",
        "partitions",
        FIRST,
    ),
    "a foreign table as a partition": (
        """
        ALTER TABLE outbox DETACH PARTITION outbox_2; ALTER TABLE outbox_2 RENAME TO was;
        CREATE FOREIGN DATA WRAPPER absent;
        CREATE SERVER elsewhere FOREIGN DATA WRAPPER absent;
        DO $$ BEGIN EXECUTE (
            SELECT format('CREATE FOREIGN TABLE outbox_2 (%s) SERVER elsewhere',
                          string_agg(format('%I %s %s', attname, format_type(atttypid, atttypmod),
                                            CASE WHEN attnotnull THEN 'NOT NULL' END), ', '
                                     ORDER BY attnum))
              FROM pg_attribute
             WHERE attrelid = 'was'::regclass AND attnum > 0 AND NOT attisdropped); END $$
        """,
        "relay.outbox_2 is not an ordinary table",
        "ATTACH PARTITION relay.outbox_2",
        "partitions",
        LATER,
    ),
    "CACHE": (
        "ALTER SEQUENCE outbox_id_seq CACHE 20", "CACHE 1", "ALTER SEQUENCE", "sequence", FIRST
    ),
    "INCREMENT": (
        "ALTER SEQUENCE outbox_id_seq INCREMENT 2", "INCREMENT 1", "ALTER SEQUENCE", "sequence",
        FIRST,
    ),
    "CYCLE": (
        "ALTER SEQUENCE outbox_id_seq CYCLE", "NO CYCLE", "ALTER SEQUENCE", "sequence", FIRST
    ),
    "a subscription into the table": (
        SUBSCRIBE.format("outbox"), "a subscription writes into", "DROP SUBSCRIPTION",
        "subscription", FIRST,
    ),
    "a subscription into a partition": (
        SUBSCRIBE.format("outbox_0"), "a subscription writes into", "DROP SUBSCRIPTION",
        "subscription", FIRST,
    ),
}  # fmt: skip


class Proof:
    """A proof in a session of the relay's role that reads less under a policy."""

    def __init__(self, database: Database, connection: Any, owner: Any) -> None:
        self.database = database
        self.proof = AbsenceProof(connection)
        self._connection = connection
        self.owner = owner

    async def conclude(self, missing: list[Range]) -> int:
        """Conclude that some ids do not exist; returns the written rows, 0 if it was aborted."""
        return await self.proof.write(missing, *await self.proof.prove(missing), (WRITE,))

    async def conclude_slowly(self, *actions: Callable[[], Awaitable[object]]) -> int:
        """The same of id 1, with an action before the second read, and one after it."""
        ranges = absence_proof.multirange(FIRST)
        barriers = [(BARRIER, number) for number in range(len(actions))]
        before, after = barriers[0], barriers[1:]
        proof = await self.proof.prove(FIRST, before, (self.proof.second_read, ranges), *after)
        for number in range(len(actions)):
            await self.owner.execute("SELECT pg_advisory_lock($1)", number)
        task = asyncio.create_task(self.proof.write(FIRST, *proof, (WRITE,)))
        for number, action in enumerate(actions):
            await until(lambda: self._is_at_barrier(task), what="the message to wait")
            if task.done():
                break
            await action()
            await self.owner.execute("SELECT pg_advisory_unlock($1)", number)
        return await task

    async def _is_at_barrier(self, task: asyncio.Task[int]) -> bool:
        return task.done() or await self.owner.fetchval(AT_BARRIER)


@asynccontextmanager
async def proof_of(database: Database) -> AsyncIterator[Proof]:
    async with role(database, "relay") as name:
        connection = await session(database, user=name)
        async with database.connection(server_settings={"search_path": "relay"}) as owner:
            try:
                yield Proof(database, connection, owner)
            finally:
                if await owner.fetchval(IS_SUBSCRIBED):
                    await owner.execute(UNSUBSCRIBE)


async def test_ids_without_events_are_proven_to_be_absent(database: Database) -> None:
    async with proof_of(database) as it:
        await it.proof.check()
        # In partitions, in a period without one, and beyond everything.
        assert await it.conclude([(1, WIDTH), (5 * WIDTH, 7 * WIDTH), (10**18, 10**18 + 1)]) == 1
        assert it.proof.contradictions == 0


async def test_ids_of_a_dropped_period_are_proven_to_be_absent(database: Database) -> None:
    async with proof_of(database) as it:
        await it.owner.execute(
            "UPDATE period SET ended_at = now(), dropped_at = now() WHERE kind = 'events';"
            " INSERT INTO period (kind, number) VALUES ('events', 1);"
            f" {DETACH}; DROP TABLE outbox_0"
        )
        assert await it.conclude([(1, WIDTH + 5)]) == 1


async def _is_refused(database: Database, kind: str) -> None:
    """Nothing is concluded while rows may be hidden; the reason names cause and command."""
    damage, says, command, _, ids = KEPT[kind]
    async with proof_of(database) as it:
        await publish(database, 1)
        await it.proof.check()
        await it.owner.execute(damage)
        with pytest.raises(CursorBroken) as refused:
            await it.conclude(ids)
        reason = str(refused.value).replace('"', "")
        assert says in reason
        assert command in reason
        assert await fetchval(database, CONCLUDED) == 0


@pytest.mark.parametrize("kind", KEPT)
async def test_nothing_is_concluded_while(kind: str, database: Database) -> None:
    await _is_refused(database, kind)


@pytest.mark.parametrize("kind", KEPT)
async def test_a_proof_without_the_condition_is_detected_by(
    kind: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    condition = KEPT[kind][3]
    others = {name: sql for name, sql in absence_proof.CONDITIONS.items() if name != condition}
    failed = " UNION ALL ".join(
        f"SELECT '{name}' AS condition WHERE ({sql}) IS NOT TRUE" for name, sql in others.items()
    )
    weaker = absence_proof.require("weaker", others.values())
    monkeypatch.setattr(absence_proof, "CONDITIONS", others)
    monkeypatch.setattr(
        absence_proof, "READ_FAILED", absence_proof.READ_FAILED.replace(FAILED, failed)
    )
    monkeypatch.setattr(AbsenceProof, "conditions_before", weaker)
    monkeypatch.setattr(AbsenceProof, "conditions_after", weaker)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await _is_refused(database, kind)


# ------------------------------------------------------------- the second read


async def _is_contradicted(database: Database) -> None:
    async with proof_of(database) as it:
        await publish(database, 1)
        assert await it.conclude([(1, 1), (5, 9)]) == 0
        assert it.proof.contradictions == 1
        assert await fetchval(database, CONCLUDED) == 0


async def test_an_event_that_exists_aborts_the_message(
    database: Database, logs: list[dict[str, Any]]
) -> None:
    await _is_contradicted(database)
    assert logs[0]["first_ids"] == [1]


async def test_a_proof_without_the_second_read_is_detected(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AbsenceProof, "second_read", NO_READ)
    with pytest.raises(AssertionError):
        await _is_contradicted(database)


# -------------------------------------------------- between two of its statements


async def _withstands_detaching(database: Database) -> None:
    """A partition is detached before the second read, and attached again after it."""
    async with proof_of(database) as it, database.connection() as other:
        await publish(database, 1)
        await it.proof.check()
        await other.execute("SET search_path = relay; SET lock_timeout = 200")

        async def detach() -> None:
            with suppress(asyncpg.LockNotAvailableError):
                await other.execute(DETACH)

        async def attach() -> None:
            with suppress(asyncpg.PostgresError):
                await other.execute(ATTACH)

        assert await it.conclude_slowly(detach, attach) == 0
        assert await fetchval(database, CONCLUDED) == 0


async def test_no_partition_is_detached_during_a_proof(database: Database) -> None:
    await _withstands_detaching(database)


async def test_a_proof_without_the_lock_is_detected(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absence_proof, "LOCK_TABLE", WriteStatement("no_lock", "SELECT 1"))
    with pytest.raises(AssertionError):
        await _withstands_detaching(database)


async def _withstands_concurrent_detaching(database: Database) -> None:
    """DETACH CONCURRENTLY hides the rows at once, and does not wait for the lock until then."""
    async with proof_of(database) as it, database.connection() as other:
        await publish(database, 1)
        await it.proof.check()
        await other.execute("SET search_path = relay")
        tasks = []

        async def detach() -> None:
            tasks.append(asyncio.create_task(other.execute(f"{DETACH} CONCURRENTLY")))
            pending = "SELECT bool_or(inhdetachpending) FROM pg_inherits"
            await until(lambda: it.owner.fetchval(pending), what="the partition to be detached")

        try:
            with pytest.raises(CursorBroken, match=r"outbox_0 is (not attached|being detached)"):
                await it.conclude_slowly(detach)
        finally:
            await asyncio.gather(*tasks)


async def test_a_partition_that_is_detached_concurrently_is_noticed(database: Database) -> None:
    await _withstands_concurrent_detaching(database)


async def test_a_proof_without_the_conditions_after_its_read_is_detected(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AbsenceProof, "conditions_after", NOTHING)
    with pytest.raises(pytest.fail.Exception):
        await _withstands_concurrent_detaching(database)


async def _withstands_attaching(database: Database) -> None:
    """A partition is attached after the second read: ATTACH does not wait for the lock."""
    async with proof_of(database) as it, database.connection() as other:
        await publish(database, 1)
        await it.proof.check()
        await other.execute(f"SET search_path = relay; {DETACH}")

        async def nothing() -> None:
            """The rows are still hidden."""

        with pytest.raises(CursorBroken, match="not attached"):
            await it.conclude_slowly(nothing, lambda: other.execute(ATTACH))


async def test_a_partition_that_is_attached_during_a_proof_is_noticed(database: Database) -> None:
    await _withstands_attaching(database)


async def test_a_proof_without_the_conditions_before_its_read_is_detected(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AbsenceProof, "conditions_before", NOTHING)
    with pytest.raises(pytest.fail.Exception):
        await _withstands_attaching(database)


@pytest.mark.parametrize(
    "damage",
    [
        "CREATE TABLE rest (LIKE outbox INCLUDING DEFAULTS INCLUDING CONSTRAINTS);"
        f"ALTER TABLE outbox ATTACH PARTITION rest DEFAULT; {DETACH}",
        "CREATE TABLE below (LIKE outbox INCLUDING DEFAULTS INCLUDING CONSTRAINTS);"
        f"ALTER TABLE outbox ATTACH PARTITION below FOR VALUES FROM (MINVALUE) TO (0); {DETACH}",
    ],
    ids=["DEFAULT", "MINVALUE"],
)
async def test_a_partition_with_other_bounds_does_not_stand_for_one(
    damage: str, database: Database
) -> None:
    async with proof_of(database) as it:
        await publish(database, 1, 2)
        await it.proof.check()
        await it.owner.execute(damage)
        with pytest.raises(CursorBroken, match="outbox_0 is not attached"):
            await it.proof.write([(1, 2)], *await it.proof.prove([(1, 2)]))


async def test_a_partition_with_partitions_proves_nothing(database: Database) -> None:
    """Its own partitions may be detached."""
    async with proof_of(database) as it:
        await publish(database, 1, 2)
        await it.proof.check()
        await it.owner.execute(f"""
            {DETACH};
            ALTER TABLE outbox_0 RENAME TO leaf;
            CREATE TABLE outbox_0 (LIKE outbox INCLUDING CONSTRAINTS) PARTITION BY RANGE (id);
            {ATTACH}
        """)
        with pytest.raises(CursorBroken, match="outbox_0 is not an ordinary table"):
            await it.proof.write([(1, 2)], *await it.proof.prove([(1, 2)]))


async def test_a_sequenced_event_may_be_missing_whatever_the_sequence_does(
    database: Database,
) -> None:
    """Otherwise one missing event would end every session, while only sequencing has to stop."""
    async with proof_of(database) as it:
        of_events = AbsenceProof(it.proof._db, of_events=True)
        await of_events.check()
        await it.owner.execute("ALTER SEQUENCE outbox_id_seq CACHE 20")
        assert await of_events.write([(1, 2)], *await of_events.prove([(1, 2)])) == 1
        with pytest.raises(CursorBroken, match="CACHE 1"):
            await it.proof.check()
