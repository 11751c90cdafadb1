"""Producers that do everything an application can do to an outbox.

Each kind is a method. Their pauses, all inside `_pause` and the server's pg_sleep, are part of the
workload: transactions that stay open while others commit.
"""

from __future__ import annotations

import asyncio
from types import MappingProxyType
from typing import TYPE_CHECKING

import asyncpg

from tests.support.sequencers import LOST
from tests.support.waiting import until

if TYPE_CHECKING:
    import random
    from collections import Counter
    from collections.abc import Mapping

    from asyncpg import Connection

    from tests.support.postgres import Database

KEYS = 6

# The application's own tables and functions.
APPLICATION = f"""
CREATE SCHEMA app;
CREATE TABLE app.account (k integer PRIMARY KEY, v bigint NOT NULL DEFAULT 0);
INSERT INTO app.account (k) SELECT generate_series(0, {KEYS - 1});
CREATE FUNCTION app.stumble(n integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    BEGIN
        INSERT INTO relay.outbox (type, payload)
        SELECT 'app.stumbled', '{{}}' FROM generate_series(1, n);
        RAISE EXCEPTION 'stumbled';
    EXCEPTION WHEN raise_exception THEN
        NULL;
    END;
    INSERT INTO relay.outbox (type, payload) VALUES ('app.stood_up', '{{}}');
END $$;
"""

INSERT = "INSERT INTO relay.outbox (type, payload) VALUES ('app.plain', '{}')"
INSERT_MANY = (
    "INSERT INTO relay.outbox (type, payload) SELECT 'app.many', '{}' FROM generate_series(1, $1)"
)
# Events serialised by a row lock: they must keep this order.
COUNT_UP = "UPDATE app.account SET v = v + 1 WHERE k = $1 RETURNING v"
INSERT_COUNTED = """
INSERT INTO relay.outbox (type, key, payload)
VALUES ('app.counted', 'k' || $1::integer, jsonb_build_object('v', $2::bigint))
"""
# The id is allocated before the payload is computed, and the transaction has no xid until the row
# is written.
INSERT_SLOWLY = """
INSERT INTO relay.outbox (type, payload)
SELECT 'app.slow', to_jsonb(pg_sleep($1)::text)
"""
NEXT_ID = "SELECT nextval('relay.outbox_id_seq')"
INSERT_WITH_ID = """
INSERT INTO relay.outbox (id, type, payload) OVERRIDING SYSTEM VALUE
VALUES ($1, 'app.early', '{}')
"""
# Locked, because a second one could set the sequence back.
SKIP_IDS = """
SELECT pg_advisory_xact_lock(7);
SELECT setval('relay.outbox_id_seq', nextval('relay.outbox_id_seq') + 100000);
"""


# The kinds of producers with their weights.
EVERY_KIND: Mapping[str, int] = MappingProxyType(
    {
        "autocommit": 20,
        "many": 8,
        "spread": 8,
        "copy": 5,
        "savepoint": 8,
        "exception": 8,
        "two_phase": 8,
        "time_out": 6,
        "terminated": 3,
        "counted": 40,
        "counted_slowly": 10,
        "old_snapshot": 10,
        "early_id": 8,
        "slow_payload": 6,
        "long": 3,
        "skip_ids": 1,
        "functions": 6,
    }
)


class Producer:
    """A client that performs one action after another until it is stopped.

    Args:
        done: counts the actions, by kind.
        kinds: the actions with their weights.
        may_crash: whether the server may crash meanwhile.
    """

    def __init__(
        self,
        database: Database,
        rng: random.Random,
        name: str,
        done: Counter[str],
        *,
        kinds: Mapping[str, int] = EVERY_KIND,
        may_crash: bool = False,
    ) -> None:
        self._database = database
        self._rng = rng
        self._gid = f"{database.name} {name} "
        self._done = done
        self._lost = LOST if may_crash else ()
        self._prepared = 0
        self._db: Connection
        self._kinds = kinds

    async def run(self, stop: asyncio.Event) -> None:
        """Produce until `stop` is set; the action in progress is completed."""
        self._db = await self._database.connect()
        kinds, weights = list(self._kinds), list(self._kinds.values())
        while not stop.is_set():
            (kind,) = self._rng.choices(kinds, weights)
            try:
                await self._act(kind)
            except self._lost:
                self._done["lost connection"] += 1
                await until(self._recover, what="the server to be back")

    async def _act(self, kind: str) -> None:
        try:
            await getattr(self, kind)()
            self._done[kind] += 1
        except (asyncpg.SerializationError, asyncpg.DeadlockDetectedError):
            await self._db.execute("ROLLBACK")
            self._done["serialization failure"] += 1

    async def _recover(self) -> bool:
        """Reconnect, and end the prepared transactions; False: the connection was lost again."""
        self._db.terminate()
        try:
            self._db = await self._database.connect()
            await self._end_prepared()
        except self._lost:
            return False
        return True

    async def _pause(self, longest_s: float) -> None:
        await asyncio.sleep(self._rng.random() * longest_s)

    def _key(self) -> int:
        # Some keys are more frequent than others, so that producers wait for each other.
        return min(self._rng.randrange(KEYS), self._rng.randrange(KEYS))

    async def _end(self, commits: float = 0.75) -> None:
        await self._db.execute("COMMIT" if self._rng.random() < commits else "ROLLBACK")

    async def _end_prepared(self) -> None:
        # Includes transactions that a crash of the server left behind.
        for row in await self._db.fetch(
            "SELECT gid FROM pg_prepared_xacts WHERE starts_with(gid, $1)", self._gid
        ):
            how = "COMMIT" if self._rng.random() < 0.75 else "ROLLBACK"
            await self._db.execute(f"{how} PREPARED '{row['gid']}'")

    # ---------------------------------------------------------------- kinds

    async def autocommit(self) -> None:
        await self._db.execute(INSERT)

    async def many(self) -> None:
        await self._db.execute("BEGIN")
        await self._db.execute(INSERT_MANY, self._rng.choice([2, 10, 60]))
        await self._pause(0.15)
        await self._end()

    async def spread(self) -> None:
        # One commit closes several gaps.
        await self._db.execute("BEGIN")
        for _ in range(3):
            await self._db.execute(INSERT)
            await self._pause(0.06)
        await self._end()

    async def copy(self) -> None:
        await self._db.copy_records_to_table(
            "outbox",
            schema_name="relay",
            columns=["type", "payload"],
            records=[("app.copied", "{}")] * self._rng.choice([1, 20]),
        )

    async def savepoint(self) -> None:
        await self._db.execute(f"BEGIN; {INSERT}; SAVEPOINT a; {INSERT}")
        await self._pause(0.05)
        await self._db.execute("ROLLBACK TO a")
        await self._pause(0.1)
        # The ids of a released savepoint belong to the top transaction.
        await self._db.execute(f"SAVEPOINT b; {INSERT}; RELEASE b")
        await self._pause(0.05)
        await self._end()

    async def exception(self) -> None:
        await self._db.execute("BEGIN")
        await self._db.execute("SELECT app.stumble($1)", self._rng.randint(1, 20))
        await self._pause(0.1)
        await self._end()

    async def two_phase(self) -> None:
        self._prepared += 1
        name = f"{self._gid} {self._prepared}"
        await self._db.execute("SET relay.notify = off; BEGIN")
        await self._db.execute(INSERT_MANY, self._rng.choice([1, 20]))
        await self._pause(0.1)
        await self._db.execute(f"PREPARE TRANSACTION '{name}'; RESET relay.notify")
        await self._pause(0.3)
        await self._end_prepared()

    async def time_out(self) -> None:
        await self._db.execute("BEGIN; SET LOCAL statement_timeout = '20ms'")
        try:
            await self._db.execute(INSERT)
            await self._db.execute("SELECT pg_sleep($1)", self._rng.random() * 0.04)
        except asyncpg.QueryCanceledError:
            await self._db.execute("ROLLBACK")
        else:
            await self._db.execute("COMMIT")

    async def terminated(self) -> None:
        victim = await self._database.connect()
        await victim.execute(f"BEGIN; {INSERT}")
        await self._pause(0.05)
        match self._rng.randrange(3):
            case 0:
                await self._db.execute("SELECT pg_terminate_backend($1)", victim.get_server_pid())
                victim.terminate()
            case 1:
                victim.terminate()  # The client is gone; its transaction may still be open.
            case _:
                await victim.execute("COMMIT")
                await victim.close()

    async def counted(self) -> None:
        k = self._key()
        isolation = self._rng.choices(
            ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"], [8, 1, 1]
        )[0]
        await self._db.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        if self._rng.random() < 0.4:
            # Its xid is older than those of the transactions that it will wait for.
            await self._db.execute("SELECT pg_current_xact_id()")
            await self._pause(0.02)
        v = await self._db.fetchval(COUNT_UP, k)
        await self._db.execute(INSERT_COUNTED, k, v)
        if self._rng.random() < 0.3:
            await self._pause(0.02)
        await self._end(0.9)

    async def counted_slowly(self) -> None:
        k = self._key()
        await self._db.execute("BEGIN")
        v = await self._db.fetchval(COUNT_UP, k)
        await self._db.execute(INSERT_COUNTED, k, v)
        # Its gap becomes old, and the next transaction of its key waits for it.
        await self._pause(0.3)
        await self._end(0.9)

    async def old_snapshot(self) -> None:
        isolation = self._rng.choice(["REPEATABLE READ", "SERIALIZABLE"])
        await self._db.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        await self._db.execute("SELECT count(*) FROM app.account")
        await self._pause(0.1)
        await self._db.execute(INSERT)
        await self._pause(0.1)
        await self._end()

    async def early_id(self) -> None:
        await self._db.execute("BEGIN")
        own_id = await self._db.fetchval(NEXT_ID)
        await self._pause(0.25)
        if self._rng.random() < 0.8:
            await self._db.execute(INSERT_WITH_ID, own_id)
            await self._pause(0.05)
        await self._end()

    async def slow_payload(self) -> None:
        await self._db.execute(INSERT_SLOWLY, self._rng.random() * 0.2)

    async def long(self) -> None:
        await self._db.execute("BEGIN")
        await self._db.execute(INSERT_MANY, self._rng.choice([1, 60]))
        # Longer than a gap stays young.
        await self._db.execute("SELECT pg_sleep($1)", 1.1 + self._rng.random() * 0.4)
        await self._end()

    async def skip_ids(self) -> None:
        await self._db.execute(SKIP_IDS)

    async def functions(self) -> None:
        await self._db.execute("BEGIN")
        await self._db.execute("SELECT relay.publish('app.called', '{}')")
        await self._pause(0.05)
        await self._db.execute(
            "SELECT relay.publish_many('{app.called,app.called}', '{\"{}\",\"{}\"}')"
        )
        await self._end()
