"""Each database role has the privileges of its purposes, and no others."""

from __future__ import annotations

import itertools
import shlex
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.core.model.sql_names import quote_ident
from outbox.core.sequencing.partition_window import WIDTH
from outbox.operations import journal
from outbox.store.connection.migrate import migrate
from outbox.store.errors import ABORTED
from outbox.store.privileges import PURPOSES
from outbox.store.retention.partitions import PartitionStore
from outbox.store.schema import schema_status
from outbox.store.schema.migration_files import Migration, migrations
from tests.support import ranges
from tests.support.doctor import PATH, findings_of
from tests.support.relay import (
    REFUSED as REJECTED,
)
from tests.support.relay import (
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)
from tests.support.roles import role
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox_doctor.check import DoctorFinding
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

OWNERS_RIGHTS = {
    "account",
    "account_batches",
    "add_ownership",
    "add_partition",
    "advance_sequences",
    "analyze_parent",
    "blocks_to_examine",
    "claim_once",
    "drop_period",
    "empty_partition",
    "end_period",
    "erase_responses",
    "count_idempotency_keys",
    "examine_block",
    "remove_lanes",
    "expected_events",
    "forget_shares",
    "guard_events",
    "header_names",
    "lock_ownership",
    "publish",
    "publish_event",
    "publish_events",
    "publish_many",
    "publish_shared",
    "publish_text",
    "publish_checked",
    "resequence",
    "reset_once",
    "sequences_behind",
    "notify_relay",
    "count_secrets_by_key",
    "server_identity",
    "settle_period",
    "snapshot_position",
    "summarize",
    "unsequenced_events",
}
"""Functions that run with the rights of their owner."""

FUNCTIONS = """
SELECT p.proname AS name, p.prosecdef AS definer, p.proconfig AS config,
       EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
                WHERE a.grantee = 0) AS public,
       ARRAY(SELECT format_type(a.type, NULL) FROM unnest(p.proargtypes) AS a(type)
               JOIN pg_type t ON t.oid = a.type
              WHERE t.typtype = 'p' OR t.typnamespace NOT IN (
                    p.pronamespace, 'pg_catalog'::regnamespace)) AS foreign_types
  FROM pg_proc p WHERE p.pronamespace = $1::regnamespace
"""

ADD_RELAY = """
INSERT INTO replica (name, version, label, lease_s, expires_at)
VALUES ('r1', '1', 'outbox-relay:r1', 3600, clock_timestamp() + interval '1 h')
"""
"""A running relay, whose sessions have this label."""
DENIED = (asyncpg.InsufficientPrivilegeError, asyncpg.GeneratedAlwaysError)
FORGED = "INSERT INTO outbox (id, type, payload) OVERRIDING SYSTEM VALUE VALUES (5, 'a', '{}')"

NO_ROLE_MAY = (
    FORGED,
    "INSERT INTO outbox_0 (type, payload) VALUES ('a', '{}')",
    "UPDATE outbox SET type = 'b'",
    "DELETE FROM outbox",
    "TRUNCATE outbox",
    "TRUNCATE outbox_0",
    "ALTER TABLE outbox DISABLE TRIGGER ALL",
    "ALTER TABLE outbox DETACH PARTITION outbox_0",
    "DROP TABLE outbox_0",
    "UPDATE journal SET actor = 'nobody'",
    "DELETE FROM journal",
    "INSERT INTO journal (kind, actor, at) VALUES ('a', 'b', '2000-01-01')",
    "INSERT INTO journal (kind, actor, session_role) VALUES ('a', 'b', 'c')",
    "INSERT INTO journal (id, kind, actor) OVERRIDING SYSTEM VALUE VALUES (1, 'a', 'b')",
    "INSERT INTO period (kind, number) VALUES ('events', 9000000)",
    "UPDATE period SET dropped_at = '2000-01-01' WHERE number = 0",
    "UPDATE period SET ended_at = '2000-01-01'",
    "UPDATE period SET last_batch = 0",
    "SELECT setval('outbox_id_seq', 99999999999999)",
    "UPDATE migration SET version = 99",
    "UPDATE attempt_run SET outcome = 'd'",
    "DELETE FROM attempt_run",
    "DELETE FROM delivery_run",
    "UPDATE batch SET high = 0",
    "CREATE TABLE mine ()",
    "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE OR REPLACE FUNCTION rfc3339(at timestamptz) RETURNS text LANGUAGE sql AS 'SELECT 1'",
    "CREATE TRIGGER mine AFTER INSERT ON outbox FOR EACH STATEMENT EXECUTE FUNCTION notify_relay()",
    "ALTER FUNCTION publish OWNER TO CURRENT_USER",
    "SELECT set_payload_bytes_max(5000)",
    "SELECT make_partition('outbox', 7)",
    "SELECT sync_grants()",
    "SELECT grant_purpose('relay', current_user::regrole)",
    "SELECT grant_producer(current_user::regrole)",
    "SELECT grant_relay(current_user::regrole)",
    "SELECT set_purposes(current_user::regrole, '{relay}')",
    "SELECT * FROM public.theirs",
    "INSERT INTO public.theirs VALUES (1)",
)

OF_RELAYS = (
    "UPDATE ownership SET epoch = epoch + 1",
    "UPDATE ownership SET replica_id = 1",
    "SELECT FROM ownership FOR NO KEY UPDATE",
    "INSERT INTO ownership (endpoint_id, epoch) VALUES (gen_random_uuid(), 7)",
    "UPDATE attempt_run SET response = NULL",
    "UPDATE lane_progress SET acked_seq = 7",
    "UPDATE lane_progress SET last_response = NULL",
    "UPDATE endpoint_health SET last_response = NULL",
    "INSERT INTO lane_progress (lane_id, endpoint_id, acked_seq) VALUES (1, gen_random_uuid(), 7)",
    "INSERT INTO lane_counter (lane_id, last_seq) VALUES (1, 7)",
    "UPDATE cursor SET writer = 7",
    "SELECT FROM replica FOR UPDATE",
    "DELETE FROM replica",
    "UPDATE lock SET expires_at = NULL",
    "UPDATE odometer SET seconds = 0",
    "INSERT INTO gap (lo, hi) VALUES (1, 1)",
    "INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome, started_at,"
    " elapsed_ms) VALUES (1, 1, 1, 1, 1, 'd', now(), 1)",
    "INSERT INTO delivery_run (lane_id, batch, seq, outbox_id) VALUES (1, 1, 1, 1)",
    "INSERT INTO batch (batch, high) VALUES (7, 7)",
    "INSERT INTO replica (name, version, label, lease_s, expires_at)"
    " VALUES ('a', 'b', 'outbox-relay:a', 1, now())",
    "SELECT end_period('events', 0)",
    "SELECT settle_period(0)",
    "SELECT drop_period('events', 0)",
    "SELECT add_partition('outbox', 3)",
    "SELECT empty_partition('outbox', 0)",
)

MAY_NOT = {
    "producer": (
        *NO_ROLE_MAY,
        "SELECT * FROM outbox",
        "SELECT payload FROM outbox_0",
        "SELECT * FROM endpoint",
        "SELECT secret FROM endpoint_secret",
        "SELECT hash FROM token",
        "SELECT * FROM idempotency_key",
        "SELECT * FROM migration",
        "SELECT nextval('outbox_id_seq')",
        "SELECT setval('wakeup', 1)",
        "SELECT add_partition('outbox', 3)",
        "SELECT header_names(NULL)",
        "SELECT publish_operational_event('outbox.endpoint.failing', NULL, '{}')",
        "INSERT INTO outbox (event_id, type, payload) VALUES (gen_random_uuid(), 'a', '{}')",
    ),
    "reader": (
        *NO_ROLE_MAY,
        "SELECT headers FROM endpoint",
        "SELECT * FROM endpoint",
        "SELECT secret FROM endpoint_secret",
        "SELECT s FROM endpoint_secret s",
        "SELECT * FROM token",
        "SELECT hash FROM token",
        "SELECT FROM token WHERE hash = ''",
        "SELECT hash FROM fetch_token",
        "SELECT publish('a', '{}')",
        "SELECT claim_once('k')",
        "INSERT INTO outbox (type, payload) VALUES ('a', '{}')",
        "INSERT INTO journal (kind, actor) VALUES ('a', 'b')",
        "SELECT FROM cursor FOR UPDATE",
        "UPDATE endpoint SET url = 'http://elsewhere.test'",
        "UPDATE dead_letter SET state = 'discarded'",
        "SELECT setval('wakeup', 1)",
        "SELECT add_partition('outbox', 3)",
        "SELECT empty_partition('outbox', 0)",
    ),
    "operator": (
        *NO_ROLE_MAY,
        *OF_RELAYS,
        "SELECT hash FROM token",
        "SELECT hash FROM fetch_token",
        "UPDATE token SET hash = sha256('')",
        "UPDATE token SET scopes = '{operate}'",
        "DELETE FROM token",
        "SELECT publish('a', '{}')",
        "SELECT claim_once('k')",
        "UPDATE outbox SET id = 7",
        "UPDATE outbox SET created_at = now()",
        "SELECT nextval('outbox_id_seq')",
    ),
    "api": (
        *NO_ROLE_MAY,
        *OF_RELAYS,
        "UPDATE token SET hash = sha256('')",
        "UPDATE token SET scopes = '{operate}'",
        "DELETE FROM token",
        "INSERT INTO fetch_token (endpoint_id, hash, created_by)"
        " VALUES (gen_random_uuid(), sha256(''), 'a')",
        "UPDATE fetch_token SET expires_at = NULL",
        "DELETE FROM fetch_token",
        "UPDATE endpoint_secret SET secret = 'whsec_'",
        "SELECT publish('a', '{}')",
        "UPDATE outbox SET id = 7",
        "UPDATE outbox SET created_at = now()",
        "SELECT nextval('outbox_id_seq')",
    ),
    "relay": (
        *NO_ROLE_MAY,
        "UPDATE endpoint SET url = 'http://elsewhere.test'",
        "UPDATE endpoint SET headers = '{}'",
        "INSERT INTO endpoint (name, url) VALUES ('a', 'b')",
        "INSERT INTO endpoint_secret (endpoint_id, id, secret) VALUES (gen_random_uuid(), 1, 'a')",
        "UPDATE endpoint_secret SET secret = 'whsec_'",
        "INSERT INTO token (name, hash, scopes, created_by)"
        " VALUES ('a', sha256(''), '{operate}', 'a')",
        "SELECT hash FROM token",
        "SELECT hash FROM fetch_token",
        "UPDATE token SET last_used_at = now()",
        "UPDATE fetch_token SET last_used_at = now()",
        "UPDATE token SET scopes = '{operate}'",
        "UPDATE attempt_run SET response = NULL",
        "DELETE FROM token",
        "INSERT INTO fetch_token (endpoint_id, hash, created_by)"
        " VALUES (gen_random_uuid(), sha256(''), 'a')",
        "DELETE FROM fetch_token",
        "UPDATE outbox SET payload = NULL",
        "SELECT publish('a', '{}')",
        "INSERT INTO schedule (name, cron) VALUES ('a', '@daily')",
    ),
}

NOT_ACCEPTED = (
    ("SELECT add_partition('public.theirs', 3)", "partition 3 of"),
    ("SELECT add_partition('period', 3)", "partition 3 of"),
    ("SELECT add_partition('outbox', 4000)", "partition 4000 of outbox may not be created"),
    ("SELECT add_partition('outbox', -1)", "partition -1 of"),
    ("SELECT add_partition('outbox', NULL)", "may not be created"),
    ("SELECT empty_partition('outbox', 0)", "does not belong to a period that was dropped"),
    ("SELECT empty_partition('public.theirs', 0)", "does not belong to a period that was dropped"),
    ("SELECT empty_partition('outbox', 77)", "does not belong to a period that was dropped"),
    ("SELECT empty_partition('outbox', NULL)", "does not belong to a period that was dropped"),
    ("SELECT analyze_parent('public.theirs')", "is not a partitioned table of this schema"),
    ("SELECT summarize('public.theirs_key')", "is not an index of an outbox partition"),
)
"""What functions with the owner's rights do not do for a relay."""


@pytest.fixture
async def owner(database: Database) -> Connection[Any]:
    connection = await database.connect(**PATH)
    await connection.execute(
        "CREATE TABLE public.theirs (n int); CREATE INDEX theirs_key ON public.theirs (n)"
    )
    return connection


async def _as(database: Database, name: str) -> Connection[Any]:
    return await database.connect(user=name, **PATH)


# ------------------------------------------------------------------- functions


@pytest.mark.parametrize("schema", ["relay", 'Pro"d \u00fcber'])
async def test_functions_are_not_public_and_have_a_fixed_search_path(
    empty_database: Database, schema: str
) -> None:
    connection = await empty_database.connect()
    await migrate(connection, schema)
    found = await connection.fetch(FUNCTIONS, quote_ident(schema))
    # The constraint of the outbox calls it as any role that inserts.
    assert [f["name"] for f in found if f["public"]] == ["require_valid_event"]
    assert {f["name"] for f in found if f["definer"]} == OWNERS_RIGHTS
    # Without an explicit position pg_temp is searched first, and any role can create tables there.
    pinned = f"search_path={await connection.fetchval('SELECT quote_ident($1)', schema)}, pg_temp"
    assert all(pinned in f["config"] for f in found if f["definer"])
    # A value of a caller's own type could bring casts and operators, which run with these rights.
    assert {
        f["name"]: f["foreign_types"] for f in found if f["definer"] and f["foreign_types"]
    } == {}


@pytest.mark.one_major
async def test_tables_of_the_caller_do_not_shadow_those_of_the_schema(
    database: Database, owner: Connection[Any]
) -> None:
    endpoint = await add_endpoint(database, headers={"X-Ours": "1"})
    async with role(database, "relay", "producer") as name:
        relay = await _as(database, name)
        await relay.execute("""
            CREATE TEMP TABLE endpoint (id uuid, headers jsonb);
            CREATE TEMP TABLE period (kind text, number bigint, dropped_at timestamptz);
            INSERT INTO pg_temp.period VALUES ('events', 0, '2000-01-01'), ('events', 90, NULL);
            CREATE TEMP TABLE idempotency_key (LIKE relay.idempotency_key);
            CREATE TEMP TABLE outbox (LIKE relay.outbox);
            SET search_path = pg_temp, relay
        """)
        assert await relay.fetchval("SELECT relay.header_names($1)", endpoint.id) == ["X-Ours"]
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await relay.execute("SELECT relay.add_partition('relay.outbox', 80)")
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await relay.execute("SELECT relay.add_partition('pg_temp.outbox', 3)")
        with pytest.raises(asyncpg.InvalidParameterValueError):
            await relay.execute("SELECT relay.empty_partition('relay.outbox', 0)")
        await relay.execute("SELECT relay.publish('a.b', '{}', once => 'k')")
        assert await relay.fetchval("SELECT count(*) FROM pg_temp.outbox") == 0
        assert (
            await owner.fetchval(
                "SELECT count(*) FROM outbox JOIN idempotency_key USING (event_id)"
            )
            == 1
        )


async def test_security_definer_functions_are_limited_to_their_tables(
    database: Database, owner: Connection[Any]
) -> None:
    async with role(database, "relay") as name:
        relay = await _as(database, name)
        for statement, says in NOT_ACCEPTED:
            with pytest.raises(asyncpg.InvalidParameterValueError, match=says):
                await relay.execute(statement)
        await relay.execute("SELECT add_partition('outbox', 3)")
        made = "SELECT tableowner FROM pg_tables WHERE tablename = 'outbox_3'"
        assert await owner.fetchval(made) != name


@pytest.mark.one_major
async def test_responses_are_erased_only_of_erased_events(
    database: Database, owner: Connection[Any]
) -> None:
    await add_endpoint(database)
    async with running(database, Network(lambda _: REJECTED)):
        await publish(database, 1, 2)
        await all_ended(database)
    await owner.execute("""UPDATE attempt_run SET response = '{"body": "x"}'""")
    await owner.execute("UPDATE outbox SET payload = NULL, erased_at = now() WHERE id = 2")
    kept = """SELECT array_agg(outbox_id ORDER BY outbox_id) FROM delivery d
                WHERE EXISTS (SELECT FROM attempt a WHERE a.lane_id = d.lane_id
                                 AND a.seq = d.seq AND a.response ? 'body')"""
    for purpose in ("api", "operator", "relay"):
        async with role(database, purpose) as name:
            connection = await _as(database, name)
            await connection.execute("SELECT erase_responses('{1,2}', 100)")
            assert await owner.fetchval(kept) == [1]
    # Its row is gone, and its dead letter is erased.
    await owner.execute("SET relay.remove = 'on'; DELETE FROM outbox WHERE id = 1")
    async with role(database, "api") as name:
        connection = await _as(database, name)
        await connection.execute("SELECT erase_responses('{1,2}', 100)")
        assert await owner.fetchval(kept) == [1]
        await connection.execute("UPDATE dead_letter SET payload = NULL, erased_at = now()")
        await connection.execute("SELECT erase_responses('{1,2}', 100)")
        assert await owner.fetchval(kept) is None


@pytest.mark.one_major
async def test_epochs_and_registrations_change_only_if_events_were_skipped(
    database: Database, owner: Connection[Any]
) -> None:
    endpoint = await add_endpoint(database)
    await owner.execute(ADD_RELAY)
    await owner.execute("UPDATE ownership SET replica_id = (SELECT id FROM replica), epoch = 3")
    state = "SELECT (SELECT count(*) FROM replica), (SELECT max(epoch) FROM ownership)"
    async with role(database, "api") as name:
        connection = await _as(database, name)
        assert await connection.fetchval("SELECT epoch FROM lock_ownership($1)", [endpoint.id]) == 3
        with pytest.raises(asyncpg.ForeignKeyViolationError):
            await connection.execute("SELECT add_ownership(ARRAY[gen_random_uuid()])")
        for planned in ("'{}'", "NULL", """'{"{[5,6)}"}'"""):
            with pytest.raises(asyncpg.PostgresError) as refused:
                await connection.execute(f"SELECT resequence('{{0}}', {planned}, 'me')")
            assert refused.value.sqlstate == ABORTED
        assert tuple(await owner.fetchrow(state)) == (1, 3)


# ------------------------------------------------------------------- rights


async def test_a_role_has_only_the_privileges_of_its_purpose(
    database: Database, owner: Connection[Any], subtests: pytest.Subtests
) -> None:
    await add_endpoint(database)
    for purpose in PURPOSES:
        with subtests.test(purpose=purpose):
            async with role(database, purpose) as name:
                connection = await _as(database, name)
                for statement in MAY_NOT[purpose]:
                    try:
                        async with connection.transaction():
                            await connection.execute(statement)
                            raise AssertionError(f"a {purpose} may {statement}")
                    except DENIED:
                        pass


@pytest.mark.one_major
async def test_every_table_is_readable_or_listed_as_private(
    owner: Connection[Any],
) -> None:
    tables = await owner.fetchval("""
        SELECT array_agg(relname::text) FROM pg_class
         WHERE relnamespace = 'relay'::regnamespace AND relkind IN ('r', 'p', 'v')
           AND NOT relispartition
    """)
    shown = await owner.fetchval(
        "SELECT array_agg(DISTINCT name) FROM required_privileges('reader') WHERE kind = 'table'"
    )
    assert sorted(tables) == sorted(shown)
    for purpose in PURPOSES:
        sql = f"SELECT array_agg(DISTINCT name) FROM {purpose}_privileges() WHERE kind = 'table'"
        assert set(await owner.fetchval(sql)) <= set(tables)


@pytest.mark.one_major
async def test_a_role_without_a_purpose_sees_nothing(
    database: Database, owner: Connection[Any]
) -> None:
    async with role(database) as name:
        connection = await _as(database, name)
        with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedTableError)):
            await connection.fetch("SELECT FROM relay.outbox")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.fetch("SELECT relay.rfc3339(now())")


# ----------------------------------------------------------------- granting


async def _privileges_of(
    connection: Connection[Any], schema: str, name: str
) -> set[tuple[str, ...]]:
    rows = await connection.fetch(
        """
        SELECT c.relname, a.privilege_type, '' FROM pg_class c, aclexplode(c.relacl) a
         WHERE c.relnamespace = $1::regnamespace AND a.grantee = $2::regrole
        UNION ALL
        SELECT c.relname, a.privilege_type, t.attname
          FROM pg_class c JOIN pg_attribute t ON t.attrelid = c.oid, aclexplode(t.attacl) a
         WHERE c.relnamespace = $1::regnamespace AND a.grantee = $2::regrole
        UNION ALL
        SELECT p.proname, a.privilege_type, '' FROM pg_proc p, aclexplode(p.proacl) a
         WHERE p.pronamespace = $1::regnamespace AND a.grantee = $2::regrole
        """,
        quote_ident(schema),
        quote_ident(name),
    )
    return {tuple(row) for row in rows}


@pytest.mark.one_major
@pytest.mark.parametrize("purpose", sampled(PURPOSES))
async def test_granting_again_changes_nothing_with_any_names(
    empty_database: Database, purpose: str
) -> None:
    schema, name = 'Stag"ing x', f'Ro"le {empty_database.name} \u00fc'
    connection = await empty_database.connect()
    await connection.execute(f"CREATE ROLE {quote_ident(name)} LOGIN")
    try:
        await migrate(connection, schema, roles=[(purpose, name)])
        once = await _privileges_of(connection, schema, name)
        await migrate(connection, schema, roles=[(purpose, name)])
        assert await _privileges_of(connection, schema, name) == once
        assert len(once) > 10
        assert not any(each[0].startswith("outbox_0") for each in once)
    finally:
        await connection.execute(
            f"DROP OWNED BY {quote_ident(name)}; DROP ROLE {quote_ident(name)}"
        )


@pytest.mark.one_major
async def test_objects_of_a_later_migration_are_granted(
    database: Database, owner: Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = migrations()[-1]
    text = """
        CREATE TABLE later (id int);
        ALTER TABLE endpoint ADD COLUMN colour text;
        CREATE FUNCTION later() RETURNS int LANGUAGE sql AS 'SELECT 1';
        ALTER FUNCTION read_only_privileges RENAME TO old_read_only_privileges;
        CREATE FUNCTION read_only_privileges() RETURNS SETOF required_privilege
        LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
            SELECT * FROM old_read_only_privileges()
            UNION ALL VALUES ('table', 'later', 'SELECT', NULL::text[], NULL::text[]),
                             ('function', 'later', 'EXECUTE', NULL, NULL)
        $$;
    """
    later = Migration(last.version + 1, "later", text, "x", last.version + 1)
    monkeypatch.setattr(schema_status, "migrations", lambda: (*migrations_before, later))
    migrations_before = migrations()
    async with (
        role(database, "reader") as reader,
        role(database, "relay") as relay,
        role(database, "producer") as producer,
    ):
        await migrate(owner, "relay")
        for name in (reader, relay):
            connection = await _as(database, name)
            await connection.execute("SELECT colour FROM endpoint; SELECT later() FROM later")
        connection = await _as(database, producer)
        for statement in ("SELECT FROM relay.later", "SELECT relay.later()"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)


@pytest.mark.one_major
async def test_revoked_grants_are_not_restored(database: Database, owner: Connection[Any]) -> None:
    async with role(database, "reader", "operator") as name:
        await owner.execute(f'DROP OWNED BY "{name}"; SELECT grant_producer(\'"{name}"\')')
        await owner.execute("SELECT sync_grants()")
        connection = await _as(database, name)
        await connection.execute("SELECT publish('a.b', '{}')")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute("SELECT FROM outbox")


@pytest.mark.one_major
async def test_unneeded_privileges_are_revoked(database: Database, owner: Connection[Any]) -> None:
    async with role(database, "relay", "reader") as name:
        had = await _privileges_of(owner, "relay", name)
        # As if an earlier version had needed these.
        await owner.execute(f"""
            GRANT UPDATE ON period TO "{name}";
            GRANT UPDATE (hash), INSERT (hash) ON token TO "{name}";
            GRANT UPDATE ON SEQUENCE outbox_id_seq TO "{name}";
            GRANT EXECUTE ON FUNCTION set_payload_bytes_max TO "{name}";
            GRANT CREATE ON SCHEMA relay TO "{name}"
        """)
        assert await _privileges_of(owner, "relay", name) > had
        await owner.execute("SELECT sync_grants()")
        assert await _privileges_of(owner, "relay", name) == had
        creates = "SELECT has_schema_privilege($1::text, 'relay', 'CREATE')"
        assert await owner.fetchval(creates, name) is False


@pytest.mark.one_major
async def test_a_migration_does_not_renew_privileges_that_are_current(
    database: Database, owner: Connection[Any]
) -> None:
    async with role(database, *PURPOSES), role(database, "producer") as producer:
        async with owner.transaction():
            await owner.execute("SELECT sync_grants()")
            # It wrote nothing: producers wait for it, if the migration has locked the outbox.
            assert await owner.fetchval("SELECT pg_current_xact_id_if_assigned()") is None
        # A difference is found in one object only.
        proacl = "SELECT xmin::text FROM pg_proc WHERE proname = $1"
        before = [await owner.fetchval(proacl, f) for f in ("publish", "publish_many")]
        await owner.execute(f'REVOKE ALL ON FUNCTION publish FROM "{producer}"')
        await owner.execute("SELECT sync_grants()")
        after = [await owner.fetchval(proacl, f) for f in ("publish", "publish_many")]
        assert [a == b for a, b in zip(before, after, strict=True)] == [False, True]
        connection = await _as(database, producer)
        await connection.execute("SELECT publish('a.b', '{}')")


@pytest.mark.one_major
async def test_privileges_are_replaced_in_one_transaction(
    database: Database, owner: Connection[Any]
) -> None:
    async with role(database, "producer", "operator") as name, role(database, "reader") as other:
        others = await _privileges_of(owner, "relay", other)
        works = await _as(database, name)
        async with owner.transaction():
            await owner.execute("SELECT sync_grants()")
            await works.execute("SELECT publish('a.b', '{}'); SELECT FROM endpoint")
        await works.execute("SELECT publish('a.b', '{}'); SELECT FROM endpoint")
        await migrate(owner, "relay", revoked=[name], roles=[("reader", name)])
        assert await _privileges_of(owner, "relay", name) == others
        await migrate(owner, "relay", revoked=[name])
        assert await _privileges_of(owner, "relay", name) == set()
        with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedTableError)):
            await works.execute("SELECT FROM relay.outbox")
        assert await _privileges_of(owner, "relay", other) == others


@pytest.mark.one_major
async def test_the_owner_loses_no_privilege(database: Database, owner: Connection[Any]) -> None:
    me = await owner.fetchval("SELECT quote_ident(current_user)")
    before = await _privileges_of(owner, "relay", await owner.fetchval("SELECT current_user"))
    await owner.execute(f"SELECT grant_reader('{me}'), revoke_purposes('{me}')")
    after = await _privileges_of(owner, "relay", await owner.fetchval("SELECT current_user"))
    assert after >= before


# ---------------------------------------------------------------- what is believed


@pytest.mark.one_major
async def test_without_a_privilege_on_event_ids_operational_events_cannot_be_forged(
    database: Database, owner: Connection[Any]
) -> None:
    forged = "INSERT INTO relay.outbox (type, payload) VALUES ('outbox.endpoint.disabled', '{}')"
    async with role(database, "producer") as name, role(database, "operator") as operator:
        for connection in (await _as(database, name), owner):
            with pytest.raises(asyncpg.CheckViolationError, match="type_outbox_is_reserved"):
                await connection.execute(forged)
        scheduled = """
            INSERT INTO schedule (name, cron, timezone, misfire, grace_s, overlap, next_at,
                                  due_at, type, payload)
            VALUES ('s', '@daily', 'UTC', 'all', 1, 'allow', now(), now(), 'outbox.x', '{}')"""
        with pytest.raises(asyncpg.CheckViolationError, match="type_outbox_is_reserved"):
            await (await _as(database, operator)).execute(scheduled)
        await add_endpoint(database, "told", types=["outbox.**"])
        assert await owner.fetchval(
            "SELECT publish_operational_event('outbox.endpoint.disabled', NULL, '{}')"
        )
    assert await fetchval(database, "SELECT array_agg(type) FROM outbox") == [
        "outbox.endpoint.disabled"
    ]


@pytest.mark.one_major
async def test_a_journal_entry_names_the_role_that_wrote_it(
    database: Database, owner: Connection[Any]
) -> None:
    async with role(database, "operator") as name:
        operator = await _as(database, name)
        # Another role of its own changes nothing.
        await operator.execute("""
            SET ROLE NONE;
            INSERT INTO journal (kind, actor, data) VALUES ('endpoint_paused', 'ann@desk', '{}')
        """)
        (row, *_) = await journal.list_journal(owner, "relay")
        assert (row.actor, row.session_role) == ("ann@desk", name)


@pytest.mark.one_major
async def test_endpoint_headers_must_be_a_json_object(
    database: Database, owner: Connection[Any], subtests: pytest.Subtests
) -> None:
    await add_endpoint(database, headers={"X-Ours": "1"})
    for headers in ("[]", '"a"', "null"):
        with (
            subtests.test(headers=headers),
            pytest.raises(asyncpg.CheckViolationError, match="endpoint_headers"),
        ):
            await owner.execute("UPDATE endpoint SET headers = $1::text::jsonb", headers)


# ------------------------------------------------------------------- the doctor


async def _says(connection: Connection[Any], check: str = "roles") -> list[DoctorFinding]:
    return await findings_of(connection, check)


@pytest.mark.one_major
async def test_the_doctor_reports_relays_that_are_superusers(owner: Connection[Any]) -> None:
    await owner.execute("SET application_name = 'outbox-relay:r1'")
    await owner.execute(ADD_RELAY)
    (found,) = await _says(owner)
    assert found.severity == "warning"
    assert 'a relay connects as "' in found.message
    assert "superuser: a compromised relay would control the whole server" in found.message
    assert found.action == "create a role for relays, and run: outbox migrate --relay ROLE"


@pytest.mark.one_major
async def test_the_doctor_reports_relays_that_own_the_schema(
    database: Database, owner: Connection[Any]
) -> None:
    async with role(database, "relay") as name:
        relay = await _as(database, name)
        await relay.execute("SET application_name = 'outbox-relay:r1'")
        await owner.execute(ADD_RELAY)
        assert [f for f in await _says(owner) if "a relay connects" in f.message] == []
        await owner.execute(f'ALTER TABLE outbox OWNER TO "{name}"')
        (found,) = [f for f in await _says(owner) if "a relay connects" in f.message]
        await owner.execute("ALTER TABLE outbox OWNER TO CURRENT_USER")
    assert found.severity == "warning"
    assert found.message == (
        f'a relay connects as "{name}", which owns the schema: a compromised relay would control '
        "all of the schema"
    )


@pytest.mark.full
@pytest.mark.one_major
async def test_the_doctor_reports_missing_privileges(
    database: Database, owner: Connection[Any], subtests: pytest.Subtests
) -> None:
    for purpose in ("relay", "operator", "api", "reader"):
        with subtests.test(purpose=purpose):
            async with role(database, purpose) as name:
                connection = await _as(database, name)
                (found,) = await _says(connection)
                assert (found.severity, found.message) == (
                    "ok",
                    f'"{name}" has the privileges of the purpose {purpose}, and does not own the '
                    "tables",
                )
                await owner.execute(f'REVOKE SELECT ON lane_block FROM "{name}"')
                await owner.execute(f'REVOKE EXECUTE ON FUNCTION matches_filter FROM "{name}"')
                await owner.execute(f'REVOKE SELECT (name) ON token FROM "{name}"')
                await owner.execute(f'REVOKE SELECT ON token FROM "{name}"')
                (found,) = await _says(connection)
                assert found.severity == "problem"
                assert '"SELECT on lane_block"' in found.message
                assert '"SELECT on token"' in found.message
                assert '"EXECUTE on matches_filter"' in found.message
                assert found.action == f"as their owner: outbox migrate --{purpose} {name}"
                await migrate(owner, "relay", roles=[(purpose, name)])
                (found,) = await _says(connection)
                assert found.severity == "ok"


@pytest.mark.one_major
async def test_the_doctor_reports_roles_that_can_create_in_the_schema(
    owner: Connection[Any],
) -> None:
    await owner.execute("GRANT CREATE ON SCHEMA relay TO PUBLIC")
    (found,) = [f for f in await _says(owner) if f.severity == "problem"]
    assert "PUBLIC may create objects in the schema" in found.message
    await owner.execute(str(found.action))
    assert [f for f in await _says(owner) if f.severity == "problem"] == []


UNENTITLED = ((), ("reader",), ("producer",), ("producer", "reader"))
SECRET_GRANTS = (
    ("SELECT ON ALL TABLES IN SCHEMA relay", "endpoint endpoint_secret fetch_token token"),
    ("SELECT (id, hash) ON relay.token", "token"),
)


@pytest.mark.full
@pytest.mark.one_major
async def test_the_doctor_reports_unintended_readers_of_secrets(
    database: Database, owner: Connection[Any], subtests: pytest.Subtests
) -> None:
    async def reported() -> list[DoctorFinding]:
        return [f for f in await _says(owner) if "can read the secrets" in f.message]

    async with role(database, "relay", "operator"), role(database, "api"):
        for purposes, (granted, tables) in itertools.product(UNENTITLED, SECRET_GRANTS):
            with subtests.test(purposes=purposes, granted=granted):
                async with role(database, *purposes) as given:
                    await owner.execute(f'GRANT {granted} TO "{given}"')
                    # Without USAGE on the schema there is no way to it.
                    assert purposes or await reported() == []
                    await owner.execute(f'GRANT USAGE ON SCHEMA relay TO "{given}"')
                    (found,) = await reported()
                    what = "which has no purpose here"
                    if purposes:
                        what = f"a {' and a '.join(purposes)}"
                    names = ", ".join(f"relay.{table}" for table in tables.split())
                    assert found.severity == "warning"
                    assert found.message == f'"{given}", {what}, can read the secrets in {names}'
                    wanted = purposes[0] if purposes else "reader"
                    command = f"outbox migrate --{wanted} {shlex.quote(given)}"
                    assert str(found.action).endswith(command)
                    await migrate(owner, "relay", roles=[(wanted, given)])
                    assert await reported() == []


@pytest.mark.one_major
async def test_the_doctor_reports_publicly_readable_secrets(owner: Connection[Any]) -> None:
    async def reported() -> list[DoctorFinding]:
        return [f for f in await _says(owner) if "PUBLIC has" in f.message]

    await owner.execute("GRANT SELECT ON relay.endpoint_secret TO PUBLIC")
    (found,) = await reported()
    assert found.message == ("PUBLIC has SELECT on relay.endpoint_secret, including secrets")
    await owner.execute(str(found.action))
    assert await reported() == []


# --------------------------------------------------------------------- periods


async def _empties(relay: Connection[Any]) -> bool:
    try:
        return bool(await relay.fetchval("SELECT empty_partition('outbox', 0)"))
    except asyncpg.InvalidParameterValueError:
        return False


@pytest.mark.one_major
async def test_a_relay_drops_only_the_oldest_settled_period(
    database: Database, owner: Connection[Any]
) -> None:
    drop = "SELECT count(*) FROM drop_period($1, $2)"
    await add_endpoint(database)
    await publish(database, 1)
    await ranges.sequence_all(database)
    async with role(database, "relay") as name:
        relay = await _as(database, name)
        assert await relay.fetchval(drop, "events", 0) == 0  # It did not end,
        assert await relay.fetchval(drop, "log", 0) == 0
        assert await relay.fetchval("SELECT end_period('events', 0)")
        assert await relay.fetchval("SELECT end_period('log', 0)")
        assert await relay.fetchval(drop, "events", 0) == 0  # is not settled,
        assert await relay.fetchval("SELECT settle_period(1)") is False
        assert await relay.fetchval("SELECT settle_period(0)")
        assert await relay.fetchval("SELECT settle_period(0)") is False
        assert await relay.fetchval(drop, "events", 0) == 0  # is pending,
        assert await relay.fetchval(drop, "log", 0) == 0
        await relay.execute("UPDATE lane_progress SET acked_seq = 1")
        assert await relay.fetchval("SELECT end_period('log', 1)")
        assert await relay.fetchval(drop, "log", 1) == 0  # is not the oldest,
        assert await relay.fetchval(drop, "log", 2) == 0  # is written.
        assert await relay.fetchval(drop, "events", 0) == 1
        assert await relay.fetchval(drop, "events", 0) == 0  # Once and for all.
        assert await relay.fetchval(drop, "log", 0) == 0  # Its dead ids are not counted.
        assert await relay.fetchval("SELECT account_batches(10)") is False
        assert await relay.fetchval(drop, "log", 0) == 1
        assert await relay.fetchval(drop, "log", 1) == 1
        # Even then there is an hour for an operator to see it.
        assert not await _empties(relay)
        await owner.execute("UPDATE period SET dropped_at = dropped_at - interval '61 min'")
        assert await _empties(relay)


@pytest.mark.one_major
async def test_a_period_begins_once_and_only_with_its_partitions(
    database: Database, owner: Connection[Any]
) -> None:
    ends = "SELECT end_period($1, $2)"
    async with role(database, "relay") as name:
        relay = await _as(database, name)
        for kind in ("events", "log"):
            assert await relay.fetchval(ends, kind, 1) is False
            assert await relay.fetchval(ends, kind, 9_000_000) is False
            assert await relay.fetchval(ends, kind, 0) is True
            assert await relay.fetchval(ends, kind, 0) is False
            assert await relay.fetchval(ends, kind, 1) is True
            assert await relay.fetchval(ends, kind, 2) is False  # There is no partition 3.
        assert await relay.fetchval("SELECT add_partition('delivery_run', 3)") is None
        assert await relay.fetchval(ends, "log", 2) is False  # And the others?
    await publish(database, 1)
    assert await owner.fetchval("SELECT id FROM outbox") == 2 * WIDTH
    assert await owner.fetchval("SELECT array_agg(batch ORDER BY batch) FROM batch") == [
        0,
        WIDTH,
        2 * WIDTH,
    ]


# ------------------------------------------------------------------ partitions


async def _drop_first_events(owner: Connection[Any]) -> None:
    await owner.execute("""
        INSERT INTO period (kind, number) VALUES ('events', 1);
        UPDATE period SET ended_at = now(), dropped_at = now() - interval '2 days'
         WHERE kind = 'events' AND number = 0
    """)


@pytest.mark.one_major
async def test_emptied_partitions_are_reported_and_dropped_by_their_owner(
    database: Database, owner: Connection[Any]
) -> None:
    await publish(database, 1, 2)
    await _drop_first_events(owner)
    async with role(database, "relay") as name:
        relay = await _as(database, name)
        assert await relay.fetchval("SELECT empty_partition('outbox', 0)") is True
        assert await relay.fetchval("SELECT empty_partition('outbox', 0)") is False
        assert await fetchval(database, "SELECT count(*) FROM outbox") == 0
        (found,) = await _says(relay, "old periods")
        assert found.severity == "ok"
        assert "1 partition of dropped periods is empty and still attached" in found.message
        assert await PartitionStore(relay).drop_owned() == 0
        assert await PartitionStore(owner).drop_owned() == 1
        (found,) = await _says(relay, "old periods")
        assert found.message == "no partition of a dropped period is left"


@pytest.mark.one_major
async def test_a_partition_is_emptied_although_a_wrong_clock_decided_it(
    database: Database, owner: Connection[Any]
) -> None:
    decided = "UPDATE period SET dropped_at = now() + $1::interval WHERE dropped_at IS NOT NULL"
    await publish(database, 1)
    await _drop_first_events(owner)
    async with role(database, "relay") as name:
        relay = await _as(database, name)
        for ahead, empties in ((timedelta(minutes=30), False), (timedelta(days=30), True)):
            await owner.execute(decided, ahead)
            assert await PartitionStore(relay).drop() == (0, int(empties), [])
            if not empties:
                assert not await _empties(relay)
        (found,) = await _says(relay, "old periods")
        assert "1 partition of dropped periods is empty and still attached" in found.message


@pytest.mark.one_major
async def test_emptying_a_partition_waits_for_no_lock(
    database: Database, owner: Connection[Any]
) -> None:
    await publish(database, 1)
    await _drop_first_events(owner)
    async with role(database, "relay") as name, database.connection(**PATH) as reader:
        relay = await _as(database, name)
        async with reader.transaction():
            await reader.fetch("SELECT FROM outbox_0")
            assert await relay.fetchval("SELECT empty_partition('outbox', 0)") is False
        assert await relay.fetchval("SELECT empty_partition('outbox', 0)") is True
