"""Migrations are applied once, also concurrently or by psql, and never to another schema."""

from __future__ import annotations

import asyncio
import re
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.errors import CannotRun, SchemaMissing, SchemaTooNew, UsageError
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.connection import migrate as module
from outbox.store.connection.connect import connect
from outbox.store.connection.current_schema import require_current, status
from outbox.store.connection.dsn import parse
from outbox.store.connection.migrate import migrate, sql
from outbox.store.schema import lock_attempts, schema_status
from outbox.store.schema.migration_files import Migration, migrations, read_works_from
from outbox_devtools.embedded import binaries
from tests.support.relay import (
    Network,
    add_endpoint,
    fetchval,
    publish,
    register,
    running,
    shared_out,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from tests.support.postgres import Database

SCHEMAS = ["relay", "Staging", "we\"ird Ünï $$ \\ 'x", "select"]

# Everything that a schema consists of, as text; names of schemas are left out.
CATALOG = """
SELECT 'relation' AS what, c.relname AS name,
       concat_ws('|', c.relkind, c.relpersistence, c.reloptions::text, c.relacl::text,
                 pg_get_partkeydef(c.oid), pg_get_expr(c.relpartbound, c.oid)) AS is
  FROM pg_class c WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT 'column', c.relname || '.' || a.attname,
       concat_ws('|', a.attnum, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
                 pg_get_expr(d.adbin, d.adrelid), a.attacl::text)
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
 WHERE c.relnamespace = $1::regnamespace
UNION ALL
SELECT 'constraint', r.conrelid::regclass::text || '.' || r.conname,
       pg_get_constraintdef(r.oid) || r.convalidated
  FROM pg_constraint r WHERE r.connamespace = $1::regnamespace
UNION ALL
SELECT 'index', c.relname, pg_get_indexdef(c.oid)
  FROM pg_class c WHERE c.relnamespace = $1::regnamespace AND c.relkind IN ('i', 'I')
UNION ALL
SELECT 'function', p.proname || '(' || pg_get_function_arguments(p.oid) || ')',
       concat_ws('|', p.prosrc, p.proconfig::text, p.prosecdef, p.provolatile, p.proacl::text)
  FROM pg_proc p WHERE p.pronamespace = $1::regnamespace
UNION ALL
SELECT 'trigger', t.tgname, concat_ws('|', pg_get_triggerdef(t.oid), t.tgenabled)
  FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
 WHERE c.relnamespace = $1::regnamespace AND NOT t.tgisinternal
ORDER BY 1, 2, 3
"""

LAST = migrations()[-1].version
"""What this program knows."""


async def opened(database: Database, schema: str = "relay", **changes: Any) -> asyncpg.Connection:
    where = replace(parse(database.dsn, source="--dsn", env={}), **changes)
    connection = await connect(where, schema=schema)
    database._connections.append(connection)
    return connection


async def catalog(connection: asyncpg.Connection, schema: str) -> list[tuple[Any, ...]]:
    quoted = module.quote_ident(schema)
    return [tuple(row) for row in await connection.fetch(CATALOG, quoted)]


@pytest.mark.parametrize("schema", sampled(SCHEMAS, lambda schema: schema == SCHEMAS[2]))
async def test_an_empty_database_is_migrated_once(empty_database: Database, schema: str) -> None:
    connection = await opened(empty_database, schema)
    before = await status(connection, schema)
    assert (before.version, before.applied, before.pending) == (0, (), migrations())
    assert await migrate(connection, schema) == list(migrations())
    after = await status(connection, schema)
    assert (after.version, after.pending) == (migrations()[-1].version, ())
    assert await migrate(connection, schema) == []
    await require_current(connection, schema)
    await connection.execute("INSERT INTO outbox (type, payload) VALUES ('a.b', '{}')")
    assert await connection.fetchval("SELECT publish(type => 'a', payload => '1')") is not None


@pytest.mark.parametrize("schema", sampled(SCHEMAS, lambda schema: schema == SCHEMAS[2]))
async def test_functions_use_only_the_schema(empty_database: Database, schema: str) -> None:
    connection = await opened(empty_database, schema)
    await migrate(connection, schema)
    rows = await connection.fetch(
        "SELECT proname, proconfig, prosecdef FROM pg_proc WHERE pronamespace = $1::regnamespace",
        module.quote_ident(schema),
    )
    for row in rows:
        # A constant, which a setting would stop from being inlined; and the constraint of the
        # outbox, in which each name has its schema: see tests/producers/test_constraint.py.
        if row["proname"] in ("payload_bytes_max", "require_valid_event"):
            assert not row["prosecdef"]
            continue
        # pg_temp last: first, as it is when unnamed, callers could slip tables in.
        assert row["proconfig"][0] == f"search_path={await path_of(connection, schema)}"
    # A temporary table of the caller's does not catch what a function writes.
    await connection.execute(
        "CREATE TEMP TABLE idempotency_key (key text); SET search_path = pg_temp"
    )
    publish = (
        f"SELECT {module.quote_ident(schema)}.publish(type => 'a', payload => '1', once => 'k')"
    )
    assert await connection.fetchval(publish) is not None
    assert await connection.fetchval("SELECT count(*) FROM pg_temp.idempotency_key") == 0


async def path_of(connection: asyncpg.Connection, schema: str) -> str:
    return str(await connection.fetchval("SELECT quote_ident($1) || ', pg_temp'", schema))


async def test_concurrent_migrations_apply_once(empty_database: Database) -> None:
    connections = [await opened(empty_database, "Any one") for _ in range(5)]
    done = await asyncio.gather(*(migrate(c, "Any one") for c in connections))
    assert sorted((m for each in done for m in each), key=lambda m: m.version) == list(migrations())
    await require_current(connections[0], "Any one")


@pytest.mark.full
async def test_migrating_works_under_repeatable_read(empty_database: Database) -> None:
    async with empty_database.connection() as connection:
        await connection.execute(
            f"ALTER DATABASE {empty_database.name} "
            "SET default_transaction_isolation = 'repeatable read'"
        )
    connections = [await opened(empty_database) for _ in range(3)]
    done = await asyncio.gather(*(migrate(c, "relay") for c in connections))
    assert sum(map(len, done)) == len(migrations())


@pytest.mark.parametrize("schema", sampled(SCHEMAS, lambda schema: schema == SCHEMAS[2]))
async def test_the_printed_sql_creates_the_same_schema(
    empty_database: Database, schema: str
) -> None:
    server = empty_database.server
    await server.execute("DROP ROLE IF EXISTS app", "CREATE ROLE app")
    connection = await opened(empty_database, schema)
    await migrate(connection, schema, roles=[("producer", "app")], payload_bytes_max=5000)
    migrated = await catalog(connection, schema)
    history = await connection.fetch("SELECT version, name, checksum FROM migration")
    async with server.database(migrated=False) as by_hand:
        script = sql(schema, roles=[("producer", "app")], payload_bytes_max=5000)
        await asyncio.to_thread(psql, by_hand, script)
        other = await opened(by_hand, schema)
        assert await catalog(other, schema) == migrated
        assert await other.fetch("SELECT version, name, checksum FROM migration") == history
        await require_current(other, schema)
        assert await migrate(other, schema) == []
        # Applied again, it stops before it changes anything.
        with pytest.raises(AssertionError, match="requires schema version 0"):
            await asyncio.to_thread(psql, by_hand, script)
    assert len(migrated) > 150


def psql(database: Database, script: str) -> None:
    """Apply a script with psql."""
    program = binaries.find_binaries(database.major).path("psql")
    done = subprocess.run(
        [program, "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", "--output=/dev/null"],
        input=script,
        capture_output=True,
        text=True,
        env={"PGSERVICEFILE": "", "PGHOST": str(database.server.embedded.socket_dir)}
        | {"PGDATABASE": database.name, "PGUSER": "postgres"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.one_major
async def test_the_printed_sql_continues_from_a_version(empty_database: Database) -> None:
    connection = await opened(empty_database)
    first = sql("relay").partition("\n-- 0002_relay.sql")[0]
    await connection.execute(first + "\nCOMMIT;")
    assert (await status(connection, "relay")).version == 1
    with pytest.raises(SchemaMissing, match=f"is at version 1, this program needs {LAST}"):
        await require_current(connection, "relay")
    await connection.execute(sql("relay", after=1))
    await require_current(connection, "relay")
    with pytest.raises(UsageError, match="there is no version 99"):
        sql("relay", after=99)


@pytest.mark.one_major
async def test_a_missing_schema_is_an_error(empty_database: Database) -> None:
    connection = await opened(empty_database)
    with pytest.raises(SchemaMissing) as caught:
        await require_current(connection, "relay")
    assert str(caught.value) == 'schema "relay" is not there; run: outbox migrate'


@pytest.mark.one_major
async def test_a_newer_schema_is_rejected(database: Database) -> None:
    connection = await opened(database)
    await connection.execute("INSERT INTO migration VALUES (99, 'future', 'x', 99)")
    for refused in (
        status(connection, "relay"),
        require_current(connection, "relay"),
        migrate(connection, "relay"),
    ):
        with pytest.raises(SchemaTooNew, match=f"is at version 99, this program knows {LAST}; upg"):
            await refused


ROLLING = f"-- Compatible with programs of version {LAST}.\n"
STOP_FIRST = "-- Relays stop first.\n"
LATER = f"{LAST + 1:04}_later"


def _with_more(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """Add migration files, as a later version would."""
    more = [
        Migration(version, "later", text, "x", read_works_from(text, version))
        for version, text in enumerate(texts, LAST + 1)
    ]
    known = (*migrations(), *more)
    for each in (module, schema_status):
        monkeypatch.setattr(each, "migrations", lambda: known)


def _script_of(text: str) -> str:
    """The SQL of a later version; this program does not know it."""
    with pytest.MonkeyPatch.context() as later:
        _with_more(later, text)
        return sql("relay", after=LAST)


def test_the_first_line_of_a_file_says_whether_relays_stop_first() -> None:
    # Files without such a line are older than the rule; they cannot be edited.
    for migration in migrations()[12:]:
        line = migration.sql.partition("\n")[0]
        last = migration.version - 1
        assert line in (STOP_FIRST.strip(), f"-- Compatible with programs of version {last}.")
    assert [m.version for m in migrations()[:12] if m.relays_stop_first] == [1, 2, 3, 9, 10]


@pytest.mark.one_major
@pytest.mark.parametrize("by_hand", sampled([False, True]))
async def test_a_newer_compatible_schema_is_accepted(database: Database, by_hand: bool) -> None:
    connection = await opened(database)
    text = f"{ROLLING}CREATE TABLE later (id int);"
    await add_endpoint(database)
    async with running(database, Network()):
        await until(lambda: shared_out(database, 1), what="the relay")
        with pytest.MonkeyPatch.context() as later:
            _with_more(later, text)
            if by_hand:
                await connection.execute(sql("relay", after=LAST))
            else:
                assert [m.version for m in await migrate(connection, "relay")] == [LAST + 1]
        assert await fetchval(database, RUN)
    await require_current(connection, "relay")
    assert (await status(connection, "relay")).version == LAST + 1
    assert await migrate(connection, "relay") == []


@pytest.mark.one_major
async def test_one_incompatible_migration_is_sufficient(database: Database) -> None:
    connection = await opened(database)
    for version, works_from in ((LAST + 1, LAST), (LAST + 2, LAST + 1)):
        row = (version, f"v{version}", "x", works_from)
        await connection.execute("INSERT INTO migration VALUES ($1, $2, $3, $4)", *row)
    too_new = f"is at version {LAST + 2}, this program knows {LAST}"
    with pytest.raises(SchemaTooNew, match=too_new):
        await require_current(connection, "relay")
    await connection.execute("UPDATE migration SET works_from = $1", LAST)
    await require_current(connection, "relay")


RUN = "SELECT count(*) FROM replica WHERE expires_at > clock_timestamp()"
REFUSAL = (
    rf"{LATER} was not applied: relays must stop first, and 1 is running: shop-1 \(version \S+\); "
    r"stop them, then run this again \(one that was killed counts as running until its lease "
    r"ends, in at most [1-9]\d* s\)"
)


@pytest.mark.one_major
@pytest.mark.parametrize("by_hand", sampled([False, True]))
async def test_a_migration_is_refused_while_a_relay_that_must_stop_first_runs(
    database: Database, monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    connection = await opened(database)
    script = _script_of(f"{STOP_FIRST}CREATE TABLE later (id int);")
    await add_endpoint(database)
    before = await catalog(connection, "relay")

    async def apply() -> None:
        if by_hand:
            await asyncio.to_thread(psql, database, script)
        else:
            await migrate(connection, "relay")

    async with running(database, Network(), name="shop-1"):
        await until(lambda: shared_out(database, 1), what="the relay")
        # A relay that starts now would refuse the older schema.
        _with_more(monkeypatch, f"{STOP_FIRST}CREATE TABLE later (id int);")
        with pytest.raises(AssertionError if by_hand else CannotRun) as caught:
            await apply()
        assert await catalog(connection, "relay") == before
        assert await fetchval(database, RUN) == 1, "the relay has lost its lease"
    assert re.search(REFUSAL if by_hand else f"^{REFUSAL}$", str(caught.value))
    await apply()
    assert (await status(connection, "relay")).version == LAST + 1


@pytest.mark.one_major
async def test_a_killed_relay_counts_as_running_until_its_lease_ends(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await opened(database)
    replicas = ReplicaStore(connection)
    ids = [await register(replicas, lease_s, name=f"r{lease_s}") for lease_s in range(60, 67)]
    # One whose lease has ended is not counted.
    await connection.execute(
        "UPDATE replica SET expires_at = clock_timestamp() WHERE id = $1", ids[0]
    )
    _with_more(monkeypatch, f"{STOP_FIRST}SELECT 1;")
    first = ", ".join(f"r{n} (version 0)" for n in range(61, 66))
    with pytest.raises(
        CannotRun, match=re.escape(f"and 6 are running: {first} and others; stop them")
    ) as caught:
        await migrate(connection, "relay")
    assert int(re.findall(r"in at most (\d+) s", str(caught.value))[0]) in (65, 66)
    await connection.execute("UPDATE replica SET expires_at = clock_timestamp()")
    assert len(await migrate(connection, "relay")) == 1


@pytest.mark.one_major
@pytest.mark.parametrize("order", [(ROLLING, STOP_FIRST), (STOP_FIRST, ROLLING)])
async def test_a_refused_migration_leaves_the_schema_at_its_version(
    database: Database, monkeypatch: pytest.MonkeyPatch, order: tuple[str, str]
) -> None:
    connection = await opened(database)
    replicas = ReplicaStore(connection)
    me = await register(replicas)
    _with_more(monkeypatch, *[f"{line}SELECT 1;" for line in order])
    refused = LAST + 1 + order.index(STOP_FIRST)
    with pytest.raises(CannotRun, match=f"{refused:04}_later was not applied: relays must stop"):
        await migrate(connection, "relay")
    assert (await status(connection, "relay")).version == LAST
    await replicas.release_all(me, "test")
    assert [m.version for m in await migrate(connection, "relay")] == [LAST + 1, LAST + 2]


@pytest.mark.one_major
async def test_a_frozen_relay_does_not_write_after_a_migration_before_which_relays_stop(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = await add_endpoint(database)
    connection = await opened(database)
    replicas = ReplicaStore(connection)
    me = await register(replicas)
    await connection.execute("UPDATE replica SET expires_at = clock_timestamp()")
    _with_more(monkeypatch, f"{STOP_FIRST}SELECT 1;")
    assert len(await migrate(connection, "relay")) == 1
    assert not await replicas.renew(me)
    assert await replicas.claim(me, [added.id], "test") == {}
    # Also if the server's clock is set back.
    # Finite: before version 17, what reads how long ago it expired would fail.
    assert await connection.fetchval("SELECT expires_at = 'epoch' FROM replica")


@pytest.mark.one_major
async def test_a_migration_waits_for_a_write_that_began_before_the_end_of_the_lease(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_attempts, "RETRY_FOR_S", 0.0)
    connection, writer = await opened(database), await opened(database)
    me = await register(ReplicaStore(connection))
    _with_more(monkeypatch, f"{STOP_FIRST}SELECT 1;")
    async with writer.transaction():
        # The fence of its writes.
        await writer.execute("SELECT FROM replica WHERE id = $1 FOR KEY SHARE", me)
        await connection.execute("UPDATE replica SET expires_at = clock_timestamp()")
        with pytest.raises(CannotRun, match=f"{LATER} was not applied: .* still holds a lock"):
            await migrate(connection, "relay")
        assert (await status(connection, "relay")).version == LAST
    assert len(await migrate(connection, "relay")) == 1


REGISTRATION_WAITS = """
SELECT count(*) > 0 FROM pg_locks WHERE relation = 'relay.replica'::regclass AND NOT granted
"""


@pytest.mark.one_major
async def test_a_relay_registers_before_a_migration_before_which_relays_stop_or_after_its_commit(
    database: Database,
) -> None:
    migrating, connection = await opened(database), await opened(database)
    script, commit, _ = _script_of(f"{STOP_FIRST}SELECT 1;").rpartition("COMMIT;")
    await migrating.execute(script)
    async with asyncio.TaskGroup() as tasks:
        registering = tasks.create_task(register(ReplicaStore(connection)))
        await until(lambda: fetchval(database, REGISTRATION_WAITS), what="the registration to wait")
        await migrating.execute(commit)
    assert registering.result()
    # The check that follows a registration.
    with pytest.raises(SchemaTooNew):
        await require_current(connection, "relay")


@pytest.mark.one_major
async def test_a_relay_that_registers_after_such_a_migration_sends_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch, logs: list[MutableMapping[str, Any]]
) -> None:
    await add_endpoint(database)
    await publish(database, 1)
    registered: Any = ReplicaStore.register
    script = _script_of(f"{STOP_FIRST}SELECT 1;")

    async def register_late(*args: Any) -> int:
        # The version was checked before; the migration found no relay.
        if await fetchval(database, "SELECT max(version) FROM relay.migration") == LAST:
            async with database.connection() as other:
                await other.execute(script)
        return int(await registered(*args))

    monkeypatch.setattr(ReplicaStore, "register", register_late)
    network = Network()

    def refused() -> bool:
        return any("upgrade outbox-relay here" in str(line.get("reason")) for line in logs)

    async with running(database, network):
        await until(refused, what="the refusal")
    assert network.sent == []
    assert await fetchval(database, "SELECT count(*) FROM ownership WHERE epoch > 0") == 0


@pytest.mark.one_major
async def test_a_gap_in_the_history_is_rejected(database: Database) -> None:
    connection = await opened(database)
    await connection.execute("INSERT INTO migration VALUES ($1, 'future', 'x', 1)", LAST + 1)
    await connection.execute("DELETE FROM migration WHERE version = 2")
    with pytest.raises(CannotRun, match="lacks 0002_relay, but has later migrations"):
        await require_current(connection, "relay")


@pytest.mark.one_major
async def test_another_file_with_the_same_number_is_rejected(database: Database) -> None:
    connection = await opened(database)
    await connection.execute("UPDATE migration SET checksum = 'x' WHERE version = 1")
    with pytest.raises(
        CannotRun, match='schema "relay" was created by a different 0001_outbox than'
    ):
        await migrate(connection, "relay")


@pytest.mark.one_major
@pytest.mark.parametrize(
    "theirs",
    [
        "CREATE TABLE relay.outbox (id int)",
        "CREATE TABLE relay.migration (id int)",
        "CREATE FUNCTION relay.payload_bytes_max() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    ],
)
async def test_a_schema_of_another_application_is_not_changed(
    empty_database: Database, theirs: str
) -> None:
    connection = await opened(empty_database)
    await connection.execute(f"CREATE SCHEMA relay; {theirs}")
    before = await catalog(connection, "relay")
    with pytest.raises(CannotRun, match="contains tables of another application; choose another"):
        await migrate(connection, "relay")
    assert await catalog(connection, "relay") == before


@pytest.mark.one_major
async def test_a_failing_migration_is_rolled_back(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = await opened(empty_database)
    first, second, *_ = migrations()
    broken = replace(second, sql=second.sql + "\nSELECT 1/0;")
    monkeypatch.setattr(schema_status, "migrations", lambda: (first, broken))
    with pytest.raises(asyncpg.DivisionByZeroError):
        await migrate(connection, "relay")
    assert (await status(connection, "relay")).version == 1
    assert await connection.fetchval("SELECT to_regclass('endpoint')") is None


@pytest.mark.one_major
@pytest.mark.parametrize("name", ["", "pg_relay", "information_schema", "x" * 51, "a\nb", "é" * 26])
async def test_an_invalid_schema_name_is_rejected(name: str) -> None:
    with pytest.raises(UsageError, match="the schema"):
        sql(name)


async def test_the_longest_name_leaves_room_for_channels(empty_database: Database) -> None:
    name = "é" * 25
    connection = await opened(empty_database, name)
    await migrate(connection, name)
    await connection.execute("SELECT pg_notify(current_schema() || ':owners', '')")


@pytest.mark.one_major
async def test_the_payload_limit_is_a_setting(database: Database) -> None:
    connection = await opened(database)
    insert = "INSERT INTO outbox (type, payload) VALUES ('a', to_jsonb(repeat('x', $1)))"
    for limit in (2000, 2000, 300_000):
        await migrate(connection, "relay", payload_bytes_max=limit)
        await connection.execute(insert, limit - 2)
        with pytest.raises(asyncpg.CheckViolationError) as caught:
            await connection.execute(insert, limit - 1)
        assert caught.value.constraint_name == f"payload_must_be_at_most_{limit}_bytes"
    assert await connection.fetchval("SELECT payload_bytes_max()") == 300_000
    for bad in (0, 1535, 67_108_865):
        with pytest.raises(UsageError, match="payload limit must be between 1536 and 67108864"):
            await migrate(connection, "relay", payload_bytes_max=bad)


PUBLISH = "INSERT INTO outbox (type, payload) VALUES ('a', '1')"
WAITING = """
SELECT count(*) > 0 FROM pg_locks
 WHERE relation = 'relay.outbox'::regclass AND mode = 'AccessExclusiveLock' AND NOT granted
"""


@pytest.mark.one_major
@pytest.mark.parametrize("payload_bytes_max", [None, 2000])
async def test_a_waiting_migration_does_not_block_producers(
    database: Database, monkeypatch: pytest.MonkeyPatch, payload_bytes_max: int | None
) -> None:
    if payload_bytes_max is None:
        _with_more(monkeypatch, "ALTER TABLE outbox ADD COLUMN later int;")
    connection, holder, producer = [await opened(database) for _ in range(3)]
    await holder.execute(f"BEGIN; {PUBLISH}")
    # A generous bound: it waits for a tenth of a second at most, or else until the COMMIT.
    await producer.execute("SET lock_timeout = '10s'")
    migration = migrate(connection, "relay", payload_bytes_max=payload_bytes_max)
    async with asyncio.TaskGroup() as tasks:
        migrating = tasks.create_task(migration)
        for _ in range(3):
            await until(lambda: fetchval(database, WAITING), what="the migration to wait")
            await producer.execute(PUBLISH)
        await holder.execute("COMMIT")
    assert len(migrating.result()) == (payload_bytes_max is None)
    limit = await connection.fetchval("SELECT payload_bytes_max()")
    assert limit == (payload_bytes_max or 262_144)


@pytest.mark.slow
@pytest.mark.one_major
async def test_a_migration_without_its_lock_names_the_holder(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_attempts, "RETRY_FOR_S", 1.0)
    _with_more(monkeypatch, "CREATE TABLE later (); ALTER TABLE outbox ADD COLUMN later int;")
    connection, holder = await opened(database), await opened(database)
    await holder.execute(f"SET application_name = 'billing'; BEGIN; {PUBLISH}")
    pid = holder.get_server_pid()
    before = await catalog(connection, "relay")
    with pytest.raises(CannotRun) as caught:
        await migrate(connection, "relay", open_observer=database.connection)
    assert re.fullmatch(
        rf"{LAST + 1:04}_later was not applied: after 1 s pid {pid} "
        r'\(application "billing", role postgres, in a transaction since [-0-9]+ [:0-9]+ UTC\) '
        r"still holds a lock that it needs; wait for its end, or end it: "
        rf"SELECT pg_terminate_backend\({pid}\)",
        str(caught.value),
    )
    # Without a second connection.
    with pytest.raises(CannotRun, match="another session still holds a lock that it needs; run it"):
        await migrate(connection, "relay", payload_bytes_max=2000)
    assert await catalog(connection, "relay") == before


WAIT_FOR_TURN = """
ALTER TABLE endpoint ADD COLUMN later int;
SET LOCAL lock_timeout = '10s';
SELECT pg_advisory_xact_lock(7);
ALTER TABLE lane ADD COLUMN later int;
"""
WAITERS = "SELECT count(*) FROM pg_locks WHERE NOT granted"


@pytest.mark.one_major
async def test_a_migration_that_deadlocks_is_applied_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_more(monkeypatch, WAIT_FOR_TURN)
    connection, other, starter = [await opened(database) for _ in range(3)]
    # The last to wait finds the deadlock, and before it does a lock_timeout of 0.1 s.
    await connection.execute("SET deadlock_timeout = '5ms'")
    await starter.execute("SELECT pg_advisory_lock(7)")
    await other.execute("BEGIN; LOCK TABLE lane IN ACCESS SHARE MODE")
    async with asyncio.TaskGroup() as tasks:
        migrating = tasks.create_task(migrate(connection, "relay"))
        await until(lambda: _waiters(database, 1), what="the migration to wait")
        tasks.create_task(other.execute("LOCK TABLE endpoint IN ACCESS SHARE MODE; COMMIT"))
        await until(lambda: _waiters(database, 2), what="the other session to wait")
        await starter.execute("SELECT pg_advisory_unlock(7)")
    assert [m.version for m in migrating.result()] == [LAST + 1]


async def _waiters(database: Database, count: int) -> bool:
    return bool(await fetchval(database, WAITERS) == count)


@pytest.mark.one_major
async def test_locks_of_another_application_do_not_block_a_migration(
    empty_database: Database,
) -> None:
    connection, other = await opened(empty_database), await opened(empty_database)
    await other.execute("SELECT pg_advisory_lock(hashtextextended('outbox migrate relay', 0))")
    async with asyncio.timeout(30):
        assert await migrate(connection, "relay") == list(migrations())


@pytest.mark.one_major
async def test_a_missing_producer_role_is_an_error(database: Database) -> None:
    connection = await opened(database)
    with pytest.raises(UsageError, match='role "no one" does not exist; CREATE ROLE it first'):
        await migrate(connection, "relay", roles=[("producer", "no one")])
