"""The outbox has one constraint, which calls a function: no session evades it, and its errors are
those of a constraint for each rule.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest

from outbox.drivers.errors import server_error
from outbox.store.connection.migrate import migrate
from outbox.store.schema.migration_files import migrations
from outbox.store.schema.migration_statements import apply_statements
from tests.producers.applications import EACH_APPLICATION, Application, play
from tests.support.doctor import PATH
from tests.support.dumps import dump, restore
from tests.support.roles import role

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

LIMIT = 2000
BEFORE = 22
"""The version of the schema before the constraint."""
TYPE = "type_must_be_1_to_255_letters_digits_underscores_dots_dashes"
RESERVED = "type_outbox_is_reserved_for_operational_events"
KEY = "key_must_be_1_to_512_bytes"
TENANT = "tenant_must_be_1_to_255_bytes"
STRINGS = "headers_must_be_an_object_of_strings"
HEADERS = "headers_must_be_at_most_8192_bytes"
PAYLOAD = f"payload_must_be_at_most_{LIMIT}_bytes"
EITHER = "either_payload_or_body_with_content_type_must_be_set"
MEDIA_TYPE = "content_type_must_be_a_media_type_except_json_and_cloudevents"
EXPIRES_AT = "expires_at_must_be_from_year_1_to_9999"

# One event that violates each constraint, as an operator may write it, and the data of COPY.
REFUSED: dict[str, dict[str, str]] = {
    TYPE: {"type": "a b", "payload": "1"},
    RESERVED: {"type": "outbox.test", "payload": "1"},
    KEY: {"type": "a", "payload": "1", "key": "k" * 513},
    TENANT: {"type": "a", "payload": "1", "tenant": "t" * 256},
    STRINGS: {"type": "a", "payload": "1", "headers": '{"a": 1}'},
    HEADERS: {"type": "a", "payload": "1", "headers": f'{{"a": "{"x" * 8190}"}}'},
    PAYLOAD: {"type": "a", "payload": f'"{"x" * LIMIT}"'},
    EITHER: {"type": "a", "payload": "1", "content_type": "a/b"},
    MEDIA_TYPE: {"type": "a", "body": "x", "content_type": "application/json"},
    EXPIRES_AT: {"type": "a", "payload": "1", "expires_at": "10000-01-01 00:00:00+00"},
}
# The other sides of them.
ALSO_REFUSED: tuple[tuple[str, dict[str, str]], ...] = (
    (TYPE, {"type": "t" * 256, "payload": "1"}),
    (TYPE, {"type": "a!b", "payload": "1"}),
    (KEY, {"type": "a", "payload": "1", "key": ""}),
    (TENANT, {"type": "a", "payload": "1", "tenant": ""}),
    (STRINGS, {"type": "a", "payload": "1", "headers": "[]"}),
    (EXPIRES_AT, {"type": "a", "payload": "1", "expires_at": "0001-01-01 00:00:00+00"}),
)


def inserting(event: dict[str, str], table: str = "relay.outbox") -> str:
    values = ", ".join(f"'{value}'" for value in event.values())
    return f"INSERT INTO {table} ({', '.join(event)}) VALUES ({values})"


@pytest.fixture
async def owner(database: Database) -> Connection[Any]:
    async with database.connection() as admin:
        await migrate(admin, "relay", payload_bytes_max=LIMIT)
    return await database.connect(**PATH)


# ------------------------------------------------------------------ attacks

# What a role may create in a schema of its own, each with the result that evades the constraint.
SHADOWS = """
CREATE FUNCTION {own}.octet_length(text) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION {own}.octet_length(bytea) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION {own}.starts_with(text, text) RETURNS bool LANGUAGE sql AS 'SELECT false';
CREATE FUNCTION {own}.substr(text, int, int) RETURNS text LANGUAGE sql AS $$ SELECT '8' $$;
CREATE FUNCTION {own}.jsonb_typeof(jsonb) RETURNS text LANGUAGE sql AS $$ SELECT 'object' $$;
CREATE FUNCTION {own}.ints(int, int) RETURNS bool LANGUAGE sql AS 'SELECT false';
CREATE FUNCTION {own}.texts(text, text) RETURNS bool LANGUAGE sql AS 'SELECT false';
CREATE FUNCTION {own}.times(timestamptz, timestamptz) RETURNS bool LANGUAGE sql AS 'SELECT false';
CREATE FUNCTION {own}.paths(jsonb, jsonpath) RETURNS bool LANGUAGE sql AS 'SELECT false';
CREATE OPERATOR {own}.< (LEFTARG = int, RIGHTARG = int, FUNCTION = {own}.ints);
CREATE OPERATOR {own}.> (LEFTARG = int, RIGHTARG = int, FUNCTION = {own}.ints);
CREATE OPERATOR {own}.< (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = {own}.times);
CREATE OPERATOR {own}.> (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = {own}.times);
CREATE OPERATOR {own}.= (LEFTARG = text, RIGHTARG = text, FUNCTION = {own}.texts);
CREATE OPERATOR {own}.<> (LEFTARG = text, RIGHTARG = text, FUNCTION = {own}.texts);
CREATE OPERATOR {own}.!~ (LEFTARG = text, RIGHTARG = text, FUNCTION = {own}.texts);
CREATE OPERATOR {own}.@? (LEFTARG = jsonb, RIGHTARG = jsonpath, FUNCTION = {own}.paths);
CREATE DOMAIN {own}.text AS varchar(1);
CREATE DOMAIN {own}.jsonpath AS varchar(1);
"""
SESSIONS = {
    "its own functions and operators first": "SET search_path = own, pg_catalog",
    "its own types first": "SET search_path = pg_temp, own, pg_catalog",
    "no search_path": "SET search_path = ''",
    "literals in which a backslash escapes": "SET standard_conforming_strings = off",
    "another order of days and months": "SET DateStyle = 'German, DMY'",
    "another time zone": "SET TimeZone = 'America/New_York'; SET DateStyle = 'SQL, MDY'",
    "NULL equals NULL": "SET transform_null_equals = on",
}


@pytest.mark.parametrize("session", SESSIONS)
async def test_no_settings_of_a_producers_session_evade_the_constraint(
    database: Database, owner: Connection[Any], session: str
) -> None:
    async with role(database, "producer") as name:
        await owner.execute(f'CREATE SCHEMA own AUTHORIZATION "{name}"')
        await owner.execute(f'GRANT INSERT ON outbox TO "{name}"')
        app = await database.connect(user=name)
        await app.execute(SHADOWS.format(own="own"))
        await app.execute("CREATE DOMAIN pg_temp.text AS varchar(1)")
        await app.execute(SESSIONS[session])
        for constraint, event in (*REFUSED.items(), *ALSO_REFUSED):
            with pytest.raises(asyncpg.CheckViolationError) as caught:
                await app.execute(inserting(event))
            assert caught.value.constraint_name == constraint
        dots = {"type": "a-b.c_d", "payload": "1", "expires_at": "0001-01-02 00:00:00+00"}
        await app.execute(inserting(dots))
        await app.close()
    assert await owner.fetchval("SELECT count(*) FROM outbox") == 1


def _into(partition: str, event_id: int) -> str:
    columns = "(id, type, payload) OVERRIDING SYSTEM VALUE"
    return f"INSERT INTO {partition} {columns} VALUES ({event_id}, 'a b', '1')"


# Statements that prepare the table, and one that writes a bad row.
OWNERS_WAYS = {
    "a trigger that changes the row": (
        "CREATE FUNCTION public.spoil() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NEW.type := 'a b'; RETURN NEW; END $$;"
        "CREATE TRIGGER zzz BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION public.spoil()",
        inserting({"type": "a", "payload": "1"}),
    ),
    "the replica role": ("SET session_replication_role = replica", inserting(REFUSED[TYPE])),
    "disabled triggers": ("ALTER TABLE outbox DISABLE TRIGGER ALL", inserting(REFUSED[TYPE])),
    "an update": (
        inserting({"type": "a", "payload": "1"}),
        "UPDATE outbox SET type = 'a b' WHERE type = 'a'",
    ),
    "a partition": (
        "SELECT 1",
        _into("outbox_0", 7),
    ),
    "a partition made later": (
        "SELECT make_partition('outbox', 900)",
        _into("outbox_900", 90_000_000_000_007),
    ),
    "an upsert": (
        "SELECT 1",
        "INSERT INTO outbox (type, payload) VALUES ('a b', '1') ON CONFLICT DO NOTHING",
    ),
}


@pytest.mark.parametrize("way", OWNERS_WAYS)
async def test_no_way_of_writing_evades_the_constraint(owner: Connection[Any], way: str) -> None:
    before, statement = OWNERS_WAYS[way]
    await owner.execute(before)
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await owner.execute(statement)
    assert caught.value.constraint_name == TYPE


async def test_a_producer_neither_replaces_nor_withdraws_the_function(
    database: Database, owner: Connection[Any]
) -> None:
    """To call it has no effect."""
    body = await owner.fetchval("SELECT pg_get_functiondef('require_valid_event'::regproc)")
    async with role(database, "producer") as name:
        app = await database.connect(user=name)
        for statement in (
            body,
            "DROP FUNCTION relay.require_valid_event",
            "ALTER FUNCTION relay.require_valid_event SET search_path = own",
            "ALTER TABLE relay.outbox DROP CONSTRAINT event_must_be_valid",
            "SELECT relay.constrain_events(1)",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await app.execute(statement)
        await app.execute("REVOKE EXECUTE ON FUNCTION relay.require_valid_event FROM PUBLIC")
        called = (
            "SELECT relay.require_valid_event('pg_authid'::regclass, NULL, NULL, $1, NULL, '1', "
            "NULL, NULL, NULL, NULL, NULL, 9)"
        )
        assert await app.fetchval(called, "a") is None
        with pytest.raises(asyncpg.CheckViolationError):
            await app.execute(called, "a b")
        with pytest.raises(asyncpg.CheckViolationError):
            await app.execute(inserting({"type": "a b", "payload": "1"}))
        await app.close()


async def test_a_role_inserts_through_a_view_without_usage_of_the_schema(
    database: Database, owner: Connection[Any]
) -> None:
    """The function runs as the role that inserts, not as the owner of the view."""
    async with role(database) as name:
        await owner.execute(
            "CREATE VIEW public.events AS SELECT type, payload FROM outbox;"
            f'GRANT INSERT ON public.events TO "{name}"'
        )
        app = await database.connect(user=name)
        await app.execute(inserting({"type": "a", "payload": "1"}, "public.events"))
        with pytest.raises(asyncpg.CheckViolationError) as caught:
            await app.execute(inserting(REFUSED[TYPE], "public.events"))
        assert caught.value.constraint_name == TYPE
        await app.close()


# ------------------------------------------------------------------- errors


async def test_an_error_has_the_fields_of_a_constraint(owner: Connection[Any]) -> None:
    await owner.execute("CREATE TABLE twin (n int CONSTRAINT n_is_positive CHECK (n > 0))")
    fields = ("sqlstate", "severity", "message", "schema_name", "table_name", "constraint_name")

    async def fields_of(statement: str) -> list[str]:
        with pytest.raises(asyncpg.CheckViolationError) as caught:
            await owner.execute(statement)
        return [getattr(caught.value, field) for field in fields]

    expected = await fields_of("INSERT INTO twin VALUES (0)")
    for constraint, event in REFUSED.items():
        renamed = [each.replace("twin", "outbox_0") for each in expected]
        renamed = [each.replace("n_is_positive", constraint) for each in renamed]
        assert await fields_of(inserting(event)) == renamed


async def test_an_error_does_not_copy_the_row_to_the_log(owner: Connection[Any]) -> None:
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await owner.execute(inserting({"type": "a b", "payload": '"confidential"'}))
    assert caught.value.detail is None
    assert "confidential" not in str(caught.value.as_dict())


@pytest.mark.parametrize("kind", EACH_APPLICATION, ids=lambda kind: kind.__name__)
async def test_each_driver_names_the_violated_constraint(
    database: Database, owner: Connection[Any], kind: type[Application]
) -> None:
    async def scenario(application: Application) -> None:
        await application.open()
        for constraint, event in REFUSED.items():
            await application.begin()
            with pytest.raises(Exception, match=constraint) as caught:
                await application.execute(inserting(event))
            error = server_error(caught.value)
            assert (error.sqlstate, error.constraint) == ("23514", constraint)
            assert error.message.startswith('new row for relation "outbox_0" violates check')
            await application.rollback()

    await play(kind(database.dsn), scenario)
    assert await owner.fetchval("SELECT count(*) FROM outbox") == 0


async def test_copy_and_prepared_statements_report_the_same(
    database: Database, owner: Connection[Any]
) -> None:
    for constraint, event in REFUSED.items():
        columns = ", ".join(event)
        with psycopg.connect(database.dsn) as connection, connection.cursor() as cursor:
            with (
                pytest.raises(psycopg.errors.CheckViolation) as copied,
                cursor.copy(f"COPY relay.outbox ({columns}) FROM STDIN") as copy,
            ):
                copy.write_row(list(event.values()))
            connection.rollback()
            marks = ", ".join(["%s"] * len(event))
            statement = f"INSERT INTO relay.outbox ({columns}) VALUES ({marks})"
            with pytest.raises(psycopg.errors.CheckViolation) as prepared:
                cursor.execute(statement, list(event.values()), prepare=True)
            connection.rollback()
            good = {"type": "a", "payload": "1"}
            with pytest.raises(psycopg.errors.CheckViolation) as several:
                cursor.execute(f"{inserting(good)}; {inserting(event)}")
        for caught in (copied, prepared, several):
            assert caught.value.diag.constraint_name == constraint
            assert caught.value.diag.table_name == "outbox_0"
            assert caught.value.diag.schema_name == "relay"
    assert await owner.fetchval("SELECT count(*) FROM outbox") == 0


# -------------------------------------------------------------------- rules

VALUES = {
    "type": ("'a'", "'a-b.c_d'", "'-a'", "''", "'a..b'", "'outbox.x'", "repeat('x', 256)"),
    "event_id": ("gen_random_uuid()", "'00000000-0000-8000-8000-000000000000'"),
    "tenant": ("NULL", "''", "'t'", "repeat('é', 128)"),
    "key": ("NULL", "''", "'k'", "repeat('é', 257)"),
    "payload": ("NULL", "'1'", f"to_jsonb(repeat('x', {LIMIT}))"),
    "headers": ("NULL", "'{}'", "'[]'", """'{"a": null}'""", '\'{"a": "b"}\'', "'\"a\"'"),
    "expires_at": ("NULL", "'3000-01-01'", "'infinity'", "'0001-01-01 23:59:59+00'"),
    "body": ("NULL", "''", f"decode(repeat('00', {LIMIT + 1}), 'hex')"),
    "content_type": ("NULL", "'a/b'", "''", "'Application/Json ; a=b'"),
}
USUAL = dict.fromkeys(VALUES, "NULL") | {
    "type": "'a'",
    "event_id": "gen_random_uuid()",
    "payload": "'1'",
}
TRY = """
CREATE FUNCTION pg_temp.refusal(relation text, names text, given text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    name text;
BEGIN
    EXECUTE format('INSERT INTO %s (%s) VALUES (%s)', relation, names, given);
    RAISE SQLSTATE 'UNDO0';
EXCEPTION
WHEN SQLSTATE 'UNDO0' THEN
    RETURN NULL;
WHEN check_violation THEN
    GET STACKED DIAGNOSTICS name = CONSTRAINT_NAME;
    RETURN name;
END $$
"""


async def test_the_rules_and_their_order_are_those_of_separate_constraints(
    owner: Connection[Any],
) -> None:
    """Each pair of values: `future_event` has a constraint for each rule."""
    await owner.execute(
        f"ALTER TABLE future_event DROP CONSTRAINT expires_at_must_be_after_deliver_at; {TRY}"
    )
    rows = [USUAL]
    for (one, ones), (other, others) in itertools.combinations(VALUES.items(), 2):
        rows += [USUAL | {one: a, other: b} for a, b in itertools.product(ones, others)]
    names = ", ".join(VALUES)
    found = await owner.fetch(
        "SELECT given, pg_temp.refusal('outbox', $2, given) AS one, "
        "pg_temp.refusal('future_event', $2 || ', deliver_at', given || ', ''0001-01-02Z''') "
        "AS separate FROM unnest($1::text[]) AS given",
        [", ".join(row.values()) for row in rows],
        names,
    )
    assert [r["given"] for r in found if r["one"] != r["separate"]] == []
    seen = {row["one"] for row in found}
    assert seen == {None, *REFUSED} - {HEADERS}


async def test_an_erased_event_needs_no_content(owner: Connection[Any]) -> None:
    await owner.execute(
        "INSERT INTO outbox (type, payload) VALUES ('a', '1');"
        "UPDATE outbox SET payload = NULL, erased_at = now()"
    )
    for column in ("body = '', content_type = 'a/b'", "content_type = 'a/b'"):
        with pytest.raises(asyncpg.CheckViolationError) as caught:
            await owner.execute(f"UPDATE outbox SET {column}")
        assert caught.value.constraint_name == EITHER
    await owner.execute("UPDATE outbox SET expires_at = 'infinity'")


# ----------------------------------------------------------- upgrade and restore


async def _upgraded(database: Database, event: dict[str, str] | None) -> Connection[Any]:
    """A schema of the version before, with an event that only an older version accepted."""
    connection = await database.connect()
    for migration in migrations()[:BEFORE]:
        creates = migration.version == 1
        await connection.execute(
            ";\n".join(apply_statements("relay", [migration], creates_schema=creates))
        )
    await connection.execute(f"SET search_path = relay; SELECT set_payload_bytes_max({LIMIT})")
    if event is not None:
        await connection.execute(
            f"ALTER TABLE outbox DROP CONSTRAINT {TYPE};{inserting(event)};"
            f"ALTER TABLE outbox ADD CONSTRAINT {TYPE} CHECK (type <> 'a b') NOT VALID"
        )
    await migrate(connection, "relay")
    return connection


VALIDATED = """
SELECT array_agg(DISTINCT conname::text || ' ' || convalidated::text) FROM pg_constraint
 WHERE contype = 'c' AND conrelid = 'outbox'::regclass
"""


@pytest.mark.parametrize("event", [None, REFUSED[TYPE]], ids=["empty", "with an old event"])
async def test_an_upgraded_outbox_survives_dump_and_restore(
    empty_database: Database, event: dict[str, str] | None
) -> None:
    """Existing events are not read while the table is locked, and restored as they are."""
    connection = await _upgraded(empty_database, event)
    assert await connection.fetchval(VALIDATED) == [
        f"event_must_be_valid {'true' if event is None else 'false'}"
    ]
    await connection.execute(inserting({"type": "a", "payload": "1"}))
    dumped = await dump(empty_database)
    async with empty_database.server.database(migrated=False) as restored:
        await restore(restored, dumped)
        async with restored.connection(**PATH) as db:
            assert await db.fetchval("SELECT count(*) FROM outbox") == 1 + (event is not None)
            for constraint, refused in REFUSED.items():
                with pytest.raises(asyncpg.CheckViolationError) as caught:
                    await db.execute(inserting(refused))
                assert caught.value.constraint_name == constraint
            # The limit is changed as before, on what was restored.
            await migrate(db, "relay", payload_bytes_max=3 * LIMIT)
            await db.execute(inserting(REFUSED[PAYLOAD]))
            await db.execute("SELECT make_partition('outbox', 900)")
