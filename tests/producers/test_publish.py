"""Publishing: from Python, by SQL and by INSERT; as a role that may do nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import decimal
import enum
import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

import outbox
from outbox import Event, InvalidEvent
from outbox.core.model.event import check_content_type
from outbox.errors import CannotRun, SchemaMissing
from outbox.store.connection.migrate import migrate
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

LIMIT = 262_144


@pytest.fixture
async def app(database: Database) -> Connection[Any]:
    """A connection of the role `app`, which was granted what a producer needs."""
    async with database.connection() as admin:
        # Roles belong to the server, so an earlier test may have made it.
        await admin.execute("DROP ROLE IF EXISTS app; CREATE ROLE app LOGIN")
        await admin.execute("SELECT relay.grant_producer('app')")
    return await database.connect(user="app")


async def events(database: Database) -> list[dict[str, Any]]:
    async with database.at_hand() as connection:
        rows = await connection.fetch("SELECT * FROM relay.outbox ORDER BY id")
    return [
        {
            name: orjson.loads(v) if name in ("payload", "headers") and v else v
            for name, v in r.items()
        }
        for r in rows
    ]


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Order:
    id: int
    at: dt.datetime


# --------------------------------------------------------------- publishing


async def test_an_event_is_part_of_the_callers_transaction(
    database: Database, app: Connection[Any]
) -> None:
    transaction = app.transaction()
    await transaction.start()
    event_id = await outbox.publish(app, "order.paid", {"order": 7}, autocommit=True)
    assert await events(database) == []
    await transaction.commit()
    (event,) = await events(database)
    assert event["event_id"] == event_id
    assert isinstance(event_id, UUID)
    transaction = app.transaction()
    await transaction.start()
    await outbox.publish(app, "order.paid", {"order": 8}, autocommit=True)
    await transaction.rollback()
    assert len(await events(database)) == 1


async def test_everything_is_stored(database: Database, app: Connection[Any]) -> None:
    await outbox.publish(
        app,
        "order.paid",
        {"order": 7, "note": "é \\u0000 \N{GRINNING FACE}"},
        key="order-7",
        tenant="acme",
        expires_in=dt.timedelta(minutes=5),
        headers={"X-Request-Id": "a b", "Accept-Language": "de"},
        autocommit=True,
    )
    (event,) = await events(database)
    assert event["payload"] == {"order": 7, "note": "é \\u0000 \N{GRINNING FACE}"}
    assert (event["type"], event["key"], event["tenant"]) == ("order.paid", "order-7", "acme")
    assert event["headers"] == {"X-Request-Id": "a b", "Accept-Language": "de"}
    seconds = (event["expires_at"] - event["created_at"]).total_seconds()
    assert seconds == pytest.approx(300, abs=1)


PAYLOADS = (
    (None, None),
    (True, True),
    (0, 0),
    (2**64 - 1, 2**64 - 1),
    (1.5, 1.5),
    ("", ""),
    ([], []),
    ((1, "a"), [1, "a"]),
    ({"a": {"b": [None]}}, {"a": {"b": [None]}}),
    (b' {"raw": 1} ', {"raw": 1}),
    (bytearray(b"1"), 1),
    (memoryview(b"[]"), []),
    (
        Order(1, dt.datetime(2026, 1, 2, tzinfo=dt.UTC)),
        {"id": 1, "at": "2026-01-02T00:00:00+00:00"},
    ),
    (Colour.RED, "red"),
    (UUID(int=1), str(UUID(int=1))),
    ("\\u0000", "\\u0000"),
    (lambda: {"late": 1}, {"late": 1}),
)


@pytest.mark.one_major
async def test_payloads(database: Database, subtests: pytest.Subtests) -> None:
    connection = await database.connect()
    for payload, stored in PAYLOADS:
        with subtests.test(payload=payload, stored=stored):
            await outbox.publish(connection, "a", payload, autocommit=True)
            assert (await events(database))[-1]["payload"] == stored


@pytest.mark.one_major
async def test_the_callers_search_path_and_codecs_do_not_matter(
    database: Database, app: Connection[Any]
) -> None:
    def broken(_: Any) -> Any:
        raise AssertionError("our values crossed in a codec of the caller's")

    await app.execute("SET search_path = ''")
    for kind in ("jsonb", "json", "uuid", "timestamptz"):
        await app.set_type_codec(kind, schema="pg_catalog", encoder=broken, decoder=broken)
    event_id = await outbox.publish(
        app, "a", {"b": 1}, once="k", expires_in=5, headers={"X-A": "b"}, autocommit=True
    )
    (other,) = await outbox.publish_many(
        app, [Event("a", [1], expires_in=5, headers={"X-A": "b"})], autocommit=True
    )
    assert [e["event_id"] for e in await events(database)] == [event_id, other]


@pytest.mark.one_major
async def test_a_pool_and_a_manual_transaction(database: Database) -> None:
    pool = await asyncpg.create_pool(database.dsn, min_size=1, max_size=1)
    async with pool, pool.acquire() as connection:
        await connection.execute("BEGIN")
        assert (
            await outbox.publish(connection, "a", lambda: 1, once="k", autocommit=True) is not None
        )
        assert await outbox.reset(connection, "k") is True
        assert (
            await outbox.publish(connection, "a", lambda: 2, once="k", autocommit=True) is not None
        )
        await connection.execute("COMMIT")
    assert [e["payload"] for e in await events(database)] == [1, 2]


@pytest.mark.one_major
async def test_another_schema(database: Database) -> None:
    connection = await database.connect()
    await migrate(connection, 'my "own"')
    assert await outbox.publish(connection, "a", 1, schema='my "own"', autocommit=True) is not None
    assert await connection.fetchval('SELECT count(*) FROM "my ""own""".outbox') == 1
    assert await events(database) == []


@pytest.mark.one_major
async def test_many_keep_their_order(database: Database, app: Connection[Any]) -> None:
    ids = await outbox.publish_many(
        app,
        [
            Event("a", {"n": 0}, key="k", tenant="t", headers={"X-A": "b"}, expires_in=60),
            Event("b", {"n": 1}, once="o"),
            Event("c", {"n": 2}, once="o"),
            *(Event("d", {"n": n}) for n in range(3, 500)),
        ],
        autocommit=True,
    )
    assert ids[2] is None
    found = await events(database)
    assert [e["event_id"] for e in found] == [i for i in ids if i is not None]
    assert [e["payload"]["n"] for e in found] == [0, 1, *range(3, 500)]
    first = found[0]
    assert (first["key"], first["tenant"], first["headers"]) == ("k", "t", {"X-A": "b"})
    assert first["expires_at"] is not None
    assert await outbox.publish_many(app, [], autocommit=True) == []


@pytest.mark.one_major
async def test_many_are_all_or_none(database: Database, app: Connection[Any]) -> None:
    async with app.transaction():
        with pytest.raises(InvalidEvent, match=r"type: 'b c' is not .* \(event 2\)"):
            await outbox.publish_many(app, [Event("a", 1), Event("b c", 1)], autocommit=True)
        with pytest.raises(InvalidEvent, match=r"payload: 262145 bytes .* \(event 2\)"):
            await outbox.publish_many(
                app, [Event("a", 1), Event("b", "x" * (LIMIT - 1))], autocommit=True
            )
        with pytest.raises(InvalidEvent, match=r"callables are accepted by publish"):
            await outbox.publish_many(app, [Event("a", lambda: 1)], autocommit=True)
    assert await events(database) == []


async def test_sql_and_insert_are_producers_too(database: Database, app: Connection[Any]) -> None:
    one = await app.fetchval("SELECT relay.publish(type => 'a', payload => '1', key => 'k')")
    many = await app.fetchval("SELECT relay.publish_many('{b,c}', '{2,3}', onces => '{o,o}')")
    await app.execute("INSERT INTO relay.outbox (type, body, content_type) VALUES ('e', '', 'a/b')")
    event = "type => 'e', body => '\\x00', content_type => 'a/b'"
    await app.execute(f"SELECT relay.publish_event({event})")
    await app.execute(
        "SELECT relay.publish_events('{e,e}', bodies => ARRAY[bytea '\\x01', NULL], "
        "content_types => '{a/b,NULL}', payloads => ARRAY[NULL, jsonb '5'])"
    )
    await app.execute(
        "INSERT INTO relay.outbox (type, key, payload, tenant, headers, expires_at) "
        "VALUES ('d', 'k', '4', 't', '{}', now())"
    )
    found = await events(database)
    assert [e["payload"] for e in found] == [1, 2, None, None, None, 5, 4]
    assert [e["body"] for e in found if e["content_type"]] == [b"", b"\0", b"\1"]
    assert [e["event_id"] for e in found][:2] == [one, many[0]]
    assert many[1] is None
    for statement in (
        "SELECT relay.publish(type => 'outbox.x', payload => '1')",
        "SELECT relay.publish_many('{a,outbox.x}', '{1,2}')",
    ):
        with pytest.raises(asyncpg.CheckViolationError, match=r'"outbox\." is reserved'):
            await app.execute(statement)


@pytest.mark.parametrize(
    "arguments",
    [
        "'{a,b}', '{1}'",
        "'{a}', '{1,2}'",
        "'{a,b}', '{1,2}', keys => '{k}'",
        "'{a}', '{1}', headers => '{}'",
        "'{a}', '{1}', digests => '{}'",
        "types => '{a,b}', bodies => ARRAY[bytea '']",
        "types => '{a,b}', payloads => '{1,2}', content_types => '{a/b}'",
    ],
)
async def test_arrays_of_unequal_length_are_refused(
    database: Database, app: Connection[Any], arguments: str
) -> None:
    function = "publish_events" if "types" in arguments else "publish_many"
    with pytest.raises(asyncpg.CheckViolationError, match="arrays: each must have one element"):
        await app.execute(f"SELECT relay.{function}({arguments})")
    assert await events(database) == []


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_isolation_levels(database: Database, app: Connection[Any], isolation: Any) -> None:
    async with app.transaction(isolation=isolation):
        assert await outbox.publish(app, "a", 1, once="k", autocommit=True) is not None
        assert await outbox.publish(app, "a", lambda: 1, once="k", autocommit=True) is None
        assert await outbox.reset(app, "k")
    assert len(await events(database)) == 1


# ------------------------------------------------------------------- limits


INVALID_EVENTS = (
    ({"type": ""}, "type", "0 bytes, must be 1 to 255"),
    ({"type": "x" * 256}, "type", "256 bytes, must be 1 to 255"),
    ({"type": "a..b"}, "type", "'a..b' is not dot-separated segments"),
    ({"type": "a b"}, "type", "is not dot-separated"),
    ({"type": "a.é"}, "type", "is not dot-separated"),
    ({"type": "a\n"}, "type", "is not dot-separated"),
    ({"type": 7}, "type", "int is not text"),
    ({"type": "outbox.x"}, "type", '"outbox." is reserved'),
    ({"key": ""}, "key", "0 bytes, must be 1 to 512"),
    ({"key": "é" * 257}, "key", "514 bytes, must be 1 to 512"),
    ({"key": "a\0"}, "key", "NUL"),
    ({"key": "\ud800"}, "key", "surrogate"),
    ({"key": 7}, "key", "int is not text"),
    ({"tenant": "x" * 256}, "tenant", "256 bytes, must be 1 to 255"),
    ({"once": "x" * 513}, "once", "513 bytes, must be 1 to 512"),
    ({"expires_in": 0}, "expires_in", "not between 0 and a century"),
    ({"expires_in": float("nan")}, "expires_in", "not between"),
    ({"expires_in": dt.timedelta(days=-1)}, "expires_in", "not between"),
    ({"expires_in": "5m"}, "expires_in", "str is neither timedelta nor seconds"),
    ({"once": "k", "once_for": 0}, "once_for", "0 s is not between 0 and a century"),
    ({"once": "k", "once_for": 4e9}, "once_for", "not between 0 and a century"),
    ({"once": "k", "once_for": "1d"}, "once_for", "str is neither timedelta nor seconds"),
    ({"once_for": 5}, "once_for", "requires once"),
    ({"once_for": 5, "payload": lambda: 1}, "once_for", "requires once"),
    ({"headers": {"X-Lane": "a"}}, "headers", "'X-Lane' is set by the relay"),
    ({"headers": {"webhook-signature": "a"}}, "headers", "is set by the relay"),
    ({"headers": {"Host": "a"}}, "headers", "is set by the relay, or controls"),
    ({"headers": {"Transfer-Encoding": "a"}}, "headers", "controls the framing"),
    ({"headers": {"a b": "c"}}, "headers", "is not a header name"),
    ({"headers": {"": "c"}}, "headers", "is not a header name"),
    ({"headers": {"X-A": "b\r\nX-B: c"}}, "headers", "other than printable ASCII"),
    ({"headers": {"X-A": "é"}}, "headers", "other than printable ASCII"),
    ({"headers": {"X-A": 7}}, "headers", "not text"),
    ({"headers": {7: "x"}}, "headers", "a name is int"),
    ({"headers": {"X-A": "a", "x-a": "b"}}, "headers", "'x-a' occurs twice"),
    ({"headers": {"X-A": "x" * 8192}}, "headers", "8203 bytes as JSON, the limit is 8192"),
    ({"payload": "x" * LIMIT}, "payload", f"{LIMIT + 2} bytes as JSON, the limit is {LIMIT}"),
    # Smaller as it is sent than as jsonb writes it.
    ({"payload": [1] * 100_000}, "payload", f"300000 bytes as JSON, the limit is {LIMIT}"),
    ({"payload": float("nan")}, "payload", "NaN and infinity"),
    ({"payload": {"a": [None, float("inf")]}}, "payload", "NaN and infinity"),
    ({"payload": Order(float("nan"), None)}, "payload", "NaN and infinity"),
    ({"payload": {1: 2}}, "payload", "Dict key must be str"),
    ({"payload": {"a"}}, "payload", "not JSON"),
    ({"payload": 2**64}, "payload", "64 bits"),
    ({"payload": "\ud800"}, "payload", "not JSON"),
    ({"payload": {"a": "b\0"}}, "payload", "NUL"),
    ({"payload": b'"\\\\\\u0000"'}, "payload", "NUL"),
    ({"payload": b"{"}, "payload", "not JSON"),
    ({"payload": b"NaN"}, "payload", "not JSON"),
    ({"payload": b"1e999"}, "payload", "not JSON"),
    ({"payload": b"\xff"}, "payload", "not JSON"),
    ({"payload": b"\xff"}, "payload", "other bytes need a content_type"),
    ({"payload": lambda: object(), "once": "k"}, "payload", "not JSON"),
    ({"payload": {}, "content_type": "a/b"}, "payload", "must be bytes, not dict"),
    ({"payload": "x", "content_type": "a/b"}, "payload", "must be bytes, not str"),
    ({"payload": lambda: "x", "content_type": "a/b"}, "payload", "must be bytes, not str"),
    ({"payload": b"x", "content_type": "png"}, "content_type", "'png' is not a media type"),
    ({"payload": b"x", "content_type": "a/b\r\nX-C: d"}, "content_type", "is not a media type"),
    ({"payload": b"x", "content_type": ""}, "content_type", "0 bytes, must be 1 to 255"),
    ({"payload": b"x", "content_type": "a/" + "b" * 254}, "content_type", "256 bytes"),
    ({"payload": b"x", "content_type": 7}, "content_type", "int is not text"),
    (
        {"payload": b"{}", "content_type": "Application/JSON ; charset=utf-8"},
        "content_type",
        "application/json is what a payload without content_type has",
    ),
    (
        {"payload": b"{}", "content_type": "application/CloudEvents-batch+json"},
        "content_type",
        "is that of a whole CloudEvent",
    ),
    (
        {"payload": b"x" * (LIMIT + 1), "content_type": "a/b"},
        "payload",
        f"{LIMIT + 1} bytes, the limit is {LIMIT}",
    ),
)


@pytest.mark.one_major
async def test_a_bad_event_is_refused_and_the_transaction_lives(
    database: Database, app: Connection[Any], subtests: pytest.Subtests
) -> None:
    for arguments, field, says in INVALID_EVENTS:
        with subtests.test(arguments=arguments, field=field, says=says):
            arguments = {"type": "a", "payload": 1} | arguments
            async with app.transaction():
                with pytest.raises(InvalidEvent) as caught:
                    await outbox.publish(
                        app,
                        arguments.pop("type"),
                        arguments.pop("payload"),
                        **arguments,
                        autocommit=True,
                    )
                assert caught.value.field == field
                assert str(caught.value).startswith(f"{field}: ")
                assert says in str(caught.value)
                assert "\n" not in str(caught.value)
                await outbox.publish(app, "good", 1, autocommit=True)
    assert [e["type"] for e in await events(database)] == ["good"] * len(INVALID_EVENTS)


@pytest.mark.one_major
async def test_limits_are_exact_to_the_byte(database: Database, app: Connection[Any]) -> None:
    headers = {"X-A": "x" * (8192 - len('{"X-A": ""}'))}
    await outbox.publish(
        app,
        "t" * 255,
        "x" * (LIMIT - 2),
        key="é" * 256,
        tenant="x" * 255,
        headers=headers,
        autocommit=True,
    )
    longest = "a/" + "b" * 253
    await outbox.publish(app, "t", b"\0" * LIMIT, content_type=longest, autocommit=True)
    assert len(await events(database)) == 2


STRINGS = "headers_must_be_an_object_of_strings"
CONSTRAINTS = (
    ("type", "repeat('x', 256)", "type_must_be_1_to_255_letters_digits_underscores_dots_dashes"),
    ("type", "'a..b'", "type_must_be_1_to_255_letters_digits_underscores_dots_dashes"),
    ("type", "E'a\\n'", "type_must_be_1_to_255_letters_digits_underscores_dots_dashes"),
    ("key", "''", "key_must_be_1_to_512_bytes"),
    ("key", "repeat('é', 257)", "key_must_be_1_to_512_bytes"),
    ("tenant", "repeat('x', 256)", "tenant_must_be_1_to_255_bytes"),
    ("headers", "'[]'", STRINGS),
    ("headers", """'{"a": 1}'""", STRINGS),
    ("headers", """'{"a": ["b"]}'""", STRINGS),
    ("headers", """'{"a": null}'""", STRINGS),
    (
        "headers",
        "jsonb_build_object('a', repeat('x', 8184))",
        "headers_must_be_at_most_8192_bytes",
    ),
    (
        "payload",
        f"to_jsonb(repeat('x', {LIMIT - 1}))",
        f"payload_must_be_at_most_{LIMIT}_bytes",
    ),
    ("payload", "NULL", "either_payload_or_body_with_content_type_must_be_set"),
    ("body, content_type", "'', 'a/b'", "either_payload_or_body_with_content_type_must_be_set"),
    ("content_type", "'a/b'", "either_payload_or_body_with_content_type_must_be_set"),
    ("payload, body", "NULL, ''", "either_payload_or_body_with_content_type_must_be_set"),
    (
        "payload, body, content_type",
        f"NULL, decode(repeat('00', {LIMIT + 1}), 'hex'), 'a/b'",
        f"payload_must_be_at_most_{LIMIT}_bytes",
    ),
    (
        "payload, body, content_type",
        "NULL, '', E'a/b\\nX-C: d'",
        "content_type_must_be_a_media_type_except_json_and_cloudevents",
    ),
    (
        "payload, body, content_type",
        "NULL, '', 'application/json;charset=utf-8'",
        "content_type_must_be_a_media_type_except_json_and_cloudevents",
    ),
)


async def test_the_database_has_the_limits_too(
    app: Connection[Any], subtests: pytest.Subtests
) -> None:
    for column, value, constraint in CONSTRAINTS:
        with subtests.test(column=column, value=value, constraint=constraint):
            row = {"type": "'a'", "payload": "'1'"} | {column: value}
            if column.startswith("payload, "):
                del row["payload"]
            columns, values = ", ".join(row), ", ".join(row.values())
            with pytest.raises(asyncpg.CheckViolationError) as caught:
                await app.execute(f"INSERT INTO relay.outbox ({columns}) VALUES ({values})")
            assert caught.value.constraint_name == constraint


@pytest.mark.one_major
async def test_the_databases_payload_limit_counts(database: Database, app: Connection[Any]) -> None:
    async with database.connection() as admin:
        await migrate(admin, "relay", payload_bytes_max=2000)
    with pytest.raises(InvalidEvent, match="3002 bytes as JSON, the limit is 2000"):
        await outbox.publish(app, "a", "x" * 3000, autocommit=True)
    async with database.connection() as admin:
        await migrate(admin, "relay", payload_bytes_max=300_000)
    # The same prepared statement now knows the new limit.
    await outbox.publish(app, "a", "x" * 290_000, autocommit=True)
    assert len(await events(database)) == 1


CONTENT_TYPES = st.text(st.sampled_from('aB0/;= "\\.-+~\t\n]^é'), min_size=1, max_size=12) | (
    st.sampled_from(
        [
            "application/json",
            "Application/Json ;a=b",
            "application/jsonx",
            "a/b;c=d",
            "application/cloudevents+json",
            "Application/CloudEvents",
            "application/cloudevent",
            "text/application/cloudevents",
        ]
    )
)


@pytest.mark.one_major
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content_type=CONTENT_TYPES)
async def test_the_database_accepts_the_content_types_that_publish_accepts(
    database: Database, content_type: str
) -> None:
    try:
        accepted = check_content_type(content_type) == content_type
    except InvalidEvent:
        accepted = False
    statement = "INSERT INTO relay.outbox (type, body, content_type) VALUES ('a', '', $1)"
    async with database.at_hand() as connection:
        try:
            await connection.execute(statement, content_type)
        except asyncpg.CheckViolationError:
            assert not accepted
        else:
            assert accepted


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.one_major
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=JSON)
async def test_any_json_is_stored_as_it_is_or_refused(database: Database, payload: Any) -> None:
    async with database.at_hand() as connection, connection.transaction():
        try:
            await outbox.publish(connection, "a", payload, autocommit=True)
        except InvalidEvent as error:
            assert "NUL" in str(error)  # noqa: PT017
            return
        stored = await connection.fetchval("SELECT payload FROM relay.outbox ORDER BY id DESC")
        # jsonb keeps a number's decimal value, but writes 1e16 without an exponent.
        assert exact(stored) == exact(orjson.dumps(payload))


def exact(text: str | bytes) -> Any:
    return json.loads(text, parse_int=decimal.Decimal, parse_float=decimal.Decimal)


async def test_publish_text_is_publish_with_texts(database: Database, app: Connection[Any]) -> None:
    text = "SELECT relay.publish_text(type => $1, payload => $2, key => $3)"
    assert isinstance(await app.fetchval(text, "order.paid", '{"total": 5.10}', "k"), UUID)
    with pytest.raises(asyncpg.InvalidTextRepresentationError, match="json"):
        await app.execute(text, "a", "{", None)
    with pytest.raises(asyncpg.CheckViolationError, match="payload"):
        await app.execute(text, "a", None, None)
    limit = await app.fetchval("SELECT relay.payload_bytes_max()")
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await app.execute(text, "a", json.dumps("x" * limit), None)
    assert caught.value.constraint_name == f"payload_must_be_at_most_{limit}_bytes"
    with pytest.raises(asyncpg.CheckViolationError, match="once_for: requires"):
        await app.execute("SELECT relay.publish_text('a', '1', once_for => '1 hour')")
    with pytest.raises(asyncpg.UndefinedFunctionError):
        await app.execute("SELECT relay.publish_text('a', '1', once => 'k', claimed => true)")
    every = (
        "SELECT relay.publish_text(type => $1, payload => $2, key => $3, tenant => $4, once => $5,"
        " headers => $6, expires_at => now() + interval '1 day', deliver_at => $7,"
        " once_for => '1 hour')"
    )
    later = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    for once, at in (("now", None), ("later", later)):
        given = ("a", "[1]", "k", "t", once, '{"X-A": "b"}', at)
        assert await app.fetchval(every, *given) is not None
        assert await app.fetchval(every, *given) is None
    stored = (
        "SELECT type, payload::text, key, tenant, headers ->> 'X-A', expires_at > now()"
        "  FROM relay.{} WHERE type = 'a'"
    )
    kept = "SELECT array_agg(key ORDER BY key) FROM relay.idempotency_key WHERE expires_at < $1"
    async with database.connection() as admin:
        for table in ("outbox", "future_event"):
            rows = [tuple(row) for row in await admin.fetch(stored.format(table))]
            assert rows == [("a", "[1]", "k", "t", "b", True)]
        assert await admin.fetchval("SELECT deliver_at FROM relay.future_event") == later
        assert await admin.fetchval(kept, later + dt.timedelta(minutes=1)) == ["later", "now"]
        paid = "SELECT payload::text FROM relay.outbox WHERE type = 'order.paid'"
        assert await admin.fetchval(paid) == '{"total": 5.10}'


# --------------------------------------------------------------------- once


async def test_the_first_commit_claims_an_idempotency_key(
    database: Database, app: Connection[Any]
) -> None:
    async with database.connection(user="app") as second:
        first = app.transaction()
        await first.start()
        assert await outbox.publish(app, "a", 1, once="k", autocommit=True) is not None
        waiting = asyncio.create_task(outbox.publish(second, "a", 2, once="k", autocommit=True))
        async with database.connection() as admin:
            await until(lambda: admin.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))
        await first.commit()
        assert await waiting is None
    assert [e["payload"] for e in await events(database)] == [1]


@pytest.mark.one_major
async def test_a_rolled_back_once_is_free(database: Database, app: Connection[Any]) -> None:
    transaction = app.transaction()
    await transaction.start()
    await outbox.publish(app, "a", 1, once="k", autocommit=True)
    await transaction.rollback()
    assert await outbox.publish(app, "a", 2, once="k", autocommit=True) is not None
    assert [e["payload"] for e in await events(database)] == [2]


@pytest.mark.one_major
async def test_a_loser_does_not_hold_up_the_next_one(
    database: Database, app: Connection[Any]
) -> None:
    await outbox.publish(app, "a", 1, once="k", autocommit=True)
    async with app.transaction(), database.connection(user="app") as next_one:
        assert await outbox.publish(app, "a", 2, once="k", autocommit=True) is None
        await next_one.execute("SET lock_timeout = '1s'")
        assert await outbox.reset(next_one, "k") is True


@pytest.mark.one_major
async def test_an_expired_once_is_free(database: Database, app: Connection[Any]) -> None:
    await outbox.publish(app, "a", 1, once="k", autocommit=True)
    async with database.connection() as admin:
        age = await admin.fetchval("SELECT expires_at - claimed_at FROM relay.idempotency_key")
        # Two looks at the clock, some microseconds apart.
        assert abs(age - dt.timedelta(days=30)) < dt.timedelta(minutes=1)
        await admin.execute("UPDATE relay.idempotency_key SET expires_at = clock_timestamp()")
    assert await outbox.publish(app, "a", 2, once="k", autocommit=True) is not None
    assert await outbox.publish(app, "a", 3, once="k", autocommit=True) is None


@pytest.mark.one_major
async def test_how_long_a_once_key_is_kept_is_for_the_producer_to_say(
    database: Database, app: Connection[Any]
) -> None:
    await outbox.publish(app, "a", 1, once="a", once_for=5, autocommit=True)
    await outbox.publish(
        app, "a", lambda: 1, once="b", once_for=dt.timedelta(days=400), autocommit=True
    )
    await outbox.publish_many(
        app,
        [Event("a", 1, once="c", once_for=7200), Event("a", 1, once="d"), Event("a", 1)],
        autocommit=True,
    )
    await app.execute("SELECT relay.publish('a', '1', once => 'e', once_for => '1 hour')")
    await app.execute("SELECT relay.publish_many('{a}', '{1}', onces => '{f}')")
    await outbox.publish(app, "a", 1, once="g", once_for=100 * 365.25 * 86400, autocommit=True)
    async with database.connection() as admin:
        kept = await admin.fetch(
            "SELECT key, round(extract(epoch FROM expires_at - claimed_at))::bigint AS s "
            "FROM relay.idempotency_key ORDER BY key"
        )
    month = 30 * 86400
    assert {row["key"]: row["s"] for row in kept} == {
        "a": 5,
        "b": 400 * 86400,
        "c": 7200,
        "d": month,
        "e": 3600,
        "f": month,
        "g": 3155760000,
    }


INVALID_CLAIMS = (
    ("publish('a', '1', once => 'k', once_for => '-1 s')", "must be more than 0"),
    ("publish('a', '1', once => 'k', once_for => '102 years')", "at most a century"),
    ("publish('a', '1', once_for => '1 s')", "requires an idempotency key"),
    ("publish('a', '1', once => 'k', claimed => true, once_for => '1 s')", "not claimed yet"),
    ("claim_once('k', keep => '0')", "must be more than 0"),
)


@pytest.mark.one_major
async def test_a_time_to_keep_a_once_key_that_cannot_be(
    app: Connection[Any], subtests: pytest.Subtests
) -> None:
    for call, says in INVALID_CLAIMS:
        with (
            subtests.test(call=call, says=says),
            pytest.raises(asyncpg.CheckViolationError, match=says),
        ):
            await app.execute(f"SELECT relay.{call}")


async def test_of_many_at_once_one_works_the_payload_out(
    database: Database, app: Connection[Any]
) -> None:
    calls = []

    async def work() -> Any:
        calls.append(1)
        # Everybody else has asked by now, and waits for this one's transaction.
        async with database.connection() as admin:
            waiting = "SELECT count(*) >= 7 FROM pg_locks WHERE NOT granted"
            await until(lambda: admin.fetchval(waiting), what="the others")
        return {"n": len(calls)}

    async def one() -> UUID | None:
        async with database.connection(user="app") as connection, connection.transaction():
            return await outbox.publish(connection, "a", work, once="k", autocommit=True)

    ids = await asyncio.gather(*(one() for _ in range(8)))
    assert (len(calls), [e["payload"] for e in await events(database)]) == (1, [{"n": 1}])
    assert sorted(id_ is None for id_ in ids) == [False] + [True] * 7


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_only_the_winner_works_the_payload_out(
    database: Database, app: Connection[Any], asynchronous: bool
) -> None:
    calls = []

    def work() -> Any:
        calls.append(1)
        return {"n": len(calls)}

    async def later() -> Any:
        return work()

    payload: Callable[[], Any] = later if asynchronous else work
    async with app.transaction():
        event_id = await outbox.publish(app, "a", payload, once="k", key="x", autocommit=True)
        assert await outbox.publish(app, "a", payload, once="k", autocommit=True) is None
    (event,) = await events(database)
    assert (event["event_id"], event["payload"], event["key"]) == (event_id, {"n": 1}, "x")
    async with database.connection() as admin:
        assert await admin.fetchval("SELECT event_id FROM relay.idempotency_key") == event_id


@pytest.mark.one_major
async def test_a_payload_that_fails_leaves_the_key_free(
    database: Database, app: Connection[Any]
) -> None:
    async with app.transaction():
        with pytest.raises(ZeroDivisionError):
            await outbox.publish(app, "a", lambda: 1 / 0, once="k", autocommit=True)
        with pytest.raises(InvalidEvent, match="limit"):
            await outbox.publish(app, "a", lambda: "x" * LIMIT, once="k", autocommit=True)
        assert await outbox.publish(app, "a", lambda: 1, once="k", autocommit=True) is not None
    # Outside of a transaction the claim and the event are one as well.
    with pytest.raises(ZeroDivisionError):
        await outbox.publish(app, "a", lambda: 1 / 0, once="l", autocommit=True)
    assert await outbox.publish(app, "a", 2, once="l", autocommit=True) is not None
    assert [e["payload"] for e in await events(database)] == [1, 2]


# -------------------------------------------------------------------- reset


@pytest.mark.one_major
async def test_reset_frees_a_key(database: Database, app: Connection[Any]) -> None:
    assert await outbox.reset(app, "k") is False
    await outbox.publish(app, "a", 1, once="k", autocommit=True)
    assert await outbox.reset(app, "k") is True
    assert await outbox.reset(app, "k") is False
    assert await outbox.publish(app, "a", 2, once="k", autocommit=True) is not None
    async with database.connection() as admin:
        assert await admin.fetchval("SELECT resets FROM relay.idempotency_key") == 1


@pytest.mark.one_major
@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_failing_reset_does_not_abort_the_transaction(
    database: Database, app: Connection[Any], by_hand: bool, caplog: pytest.LogCaptureFixture
) -> None:
    transaction = app.transaction()
    await (app.execute("BEGIN") if by_hand else transaction.start())
    await outbox.publish(app, "a", 1, autocommit=True)
    with caplog.at_level(logging.WARNING, logger="outbox.producers"):
        assert await outbox.reset(app, "k", schema="nowhere") is False
        assert await outbox.reset(app, 7) is False  # type: ignore[arg-type]
        assert await outbox.reset(app, "a\0b") is False
    assert len(caplog.records) == 3
    await outbox.publish(app, "b", 2, autocommit=True)
    await (app.execute("COMMIT") if by_hand else transaction.commit())
    assert [e["type"] for e in await events(database)] == ["a", "b"]


@pytest.mark.one_major
async def test_a_reset_that_waits_too_long_does_not_abort(
    database: Database, app: Connection[Any]
) -> None:
    await outbox.publish(app, "a", 1, once="k", autocommit=True)
    async with database.connection() as holder, app.transaction():
        await holder.execute("BEGIN; SELECT FROM relay.idempotency_key FOR UPDATE")
        await app.execute("SET LOCAL lock_timeout = '10ms'")
        assert await outbox.reset(app, "k") is False
        await outbox.publish(app, "b", 2, autocommit=True)
    assert len(await events(database)) == 2


@pytest.mark.one_major
async def test_a_reset_on_a_broken_transaction_or_connection(app: Connection[Any]) -> None:
    await app.execute("BEGIN")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await app.execute("SELECT 1/0")
    assert await outbox.reset(app, "k") is False
    await app.execute("ROLLBACK")
    await app.close()
    assert await outbox.reset(app, "k") is False


# ------------------------------------------------------------------- rights


async def test_a_producer_can_do_nothing_else(database: Database, app: Connection[Any]) -> None:
    insert = "INSERT INTO relay.outbox (type, payload, {}) VALUES ('a', '1', {})"
    for statement in (
        insert.format("event_id", "gen_random_uuid()"),
        insert.format("created_at", "now()"),
        "INSERT INTO relay.outbox (id, type, payload) OVERRIDING SYSTEM VALUE VALUES (5, 'a', '1')",
        "COPY relay.outbox (id, type, payload) FROM STDIN",
        "SELECT * FROM relay.outbox",
        "SELECT id FROM relay.outbox_0",
        "INSERT INTO relay.outbox_0 (type, payload) VALUES ('a', '1')",
        "UPDATE relay.outbox SET type = 'b'",
        "DELETE FROM relay.outbox",
        "TRUNCATE relay.outbox",
        "SELECT * FROM relay.idempotency_key",
        "SELECT * FROM relay.endpoint_secret",
        "SELECT * FROM relay.migration",
        "SELECT nextval('relay.outbox_id_seq')",
        "SELECT setval('relay.wakeup', 1)",
        "SELECT relay.set_payload_bytes_max(5000)",
        "SELECT relay.grant_producer('app')",
        "SELECT relay.add_partition('relay.outbox', 3)",
        "SELECT relay.make_partition('relay.outbox', 3)",
        "CREATE TABLE relay.mine ()",
    ):
        with pytest.raises((asyncpg.InsufficientPrivilegeError, asyncpg.GeneratedAlwaysError)):
            await app.execute(statement)
    with pytest.raises(asyncpg.GeneratedAlwaysError):
        async with database.connection() as owner:
            await owner.execute("INSERT INTO relay.outbox (id, type, payload) VALUES (5, 'a', '1')")
    # No function takes an event's id from outside either.
    with pytest.raises(asyncpg.CheckViolationError, match="the key is not claimed"):
        await app.execute("SELECT relay.publish('a', '1', once => 'k', claimed => true)")
    await app.execute("SELECT relay.claim_once('k', gen_random_uuid())")
    with pytest.raises(asyncpg.CheckViolationError, match="or its event is already published"):
        await app.execute("SELECT relay.publish('a', '1', once => 'k', claimed => true)")
    assert await events(database) == []


@pytest.mark.one_major
async def test_a_role_without_grants(database: Database) -> None:
    async with database.connection() as admin:
        await admin.execute("DROP ROLE IF EXISTS stranger; CREATE ROLE stranger LOGIN")
        await admin.execute("GRANT USAGE ON SCHEMA relay TO stranger")
    connection = await database.connect(user="stranger")
    with pytest.raises(CannotRun) as caught:
        await outbox.publish(connection, "a", 1, autocommit=True)
    assert str(caught.value) == (
        "permission denied for function publish_checked: this role may not publish; "
        "run: outbox migrate --producer ROLE"
    )
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute("INSERT INTO relay.outbox (type, payload) VALUES ('a', '1')")


@pytest.mark.one_major
@pytest.mark.parametrize("schema", ["nowhere", "public"])
async def test_a_missing_schema(database: Database, schema: str) -> None:
    connection = await database.connect()
    for attempt in (
        outbox.publish(connection, "a", 1, schema=schema, autocommit=True),
        outbox.publish(connection, "a", lambda: 1, once="k", schema=schema, autocommit=True),
        outbox.publish_many(connection, [Event("a", 1)], schema=schema, autocommit=True),
    ):
        with pytest.raises(SchemaMissing, match=f'schema "{schema}" is not there; run: outbox'):
            await attempt


@pytest.mark.one_major
async def test_other_errors_stay_asyncpgs(database: Database) -> None:
    connection = await database.connect()
    await connection.close()
    with pytest.raises(asyncpg.InterfaceError):
        await outbox.publish(connection, "a", 1, autocommit=True)


# -------------------------------------------------------------------- trace


@pytest.mark.one_major
async def test_the_running_trace_goes_along(database: Database) -> None:
    connection = await database.connect()
    context = SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1))
    with trace.use_span(NonRecordingSpan(context)):
        await outbox.publish(connection, "a", 1, headers={"X-A": "b"}, autocommit=True)
        await outbox.publish_many(connection, [Event("b", 1)], autocommit=True)
        await outbox.publish(connection, "c", 1, headers={"Traceparent": "mine"}, autocommit=True)
    await outbox.publish(connection, "d", 1, autocommit=True)
    traceparent = f"00-{0xABC:032x}-{0xDEF:016x}-01"
    assert [e["headers"] for e in await events(database)] == [
        {"traceparent": traceparent, "X-A": "b"},
        {"traceparent": traceparent},
        {"Traceparent": "mine"},
        None,
    ]


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = ["asyncpg", "aiohttp", "click", "pydantic", "rich", "structlog", "opentelemetry"]
    heavy += ["orjson", "tenacity"]
    code = f"""
import sys, outbox, outbox.errors
print([m for m in {heavy!r} if m in sys.modules])
outbox.publish
print([m for m in {heavy!r} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n['orjson']\n"
    with pytest.raises(AttributeError, match="no attribute 'nix'"):
        _ = outbox.nix
