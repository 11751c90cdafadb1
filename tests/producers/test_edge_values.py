"""Values at the edge: refused where they enter, and harmless where they are stored already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import orjson
import pytest

from outbox.operations import dead_letters, erase, events, trace
from outbox.operations.criteria import Criteria
from outbox.operations.rows import encode_other
from outbox.store.connection.connect import connect
from outbox.store.connection.dsn import parse
from tests.core.test_marks import ATTACKS
from tests.support.api import make_token, serving
from tests.support.old_rows import without_rules
from tests.support.relay import REFUSED, Network, add_endpoint, all_ended, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.core.model.response import AttemptResult
    from outbox.destinations.interface import Request
    from outbox.store.connection.store_connection import StoreConnection
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

DEEP = 3_000
NUMBER = "1e131000"
PAYLOADS = {
    "a number of 131,000 digits": f"'{{\"n\": {NUMBER}}}'",
    "a negative one": f"'[-{NUMBER}]'",
    "as long as it looks": "('[' || repeat('7', 131000) || ']')",
    "a fraction behind it": "'9e2000'",
    "nesting": f"(repeat('[', {DEEP}) || repeat(']', {DEEP}))",
    "nesting in objects": "(repeat('{\"a\":[', 513) || '1' || repeat(']}', 513))",
}
"""JSON that nothing can parse."""
TIMES = ("infinity", "-infinity", "10000-01-01Z", "9999-12-31Z", "294276-12-31Z", "0044-03-15Z BC")
TIMES_CONSTRAINT = "times_must_be_from_year_1_to_9999"
HEADERS_CONSTRAINT = "headers_must_be_an_object_of_strings_without_reserved_names"


def published(function: str, payload: str) -> str:
    if function == "publish_many":
        return f"SELECT publish_many('{{a}}', ARRAY[{payload}::jsonb])"
    cast = "::jsonb" if function == "publish" else ""
    return f"SELECT {function}(type => 'a', payload => {payload}{cast})"


@pytest.fixture
async def db(database: Database) -> AsyncIterator[StoreConnection]:
    dsn = parse(database.dsn, source="test", env={})
    connection = await connect(dsn, schema="relay", application_name="test")
    yield connection
    await connection.close()


async def test_the_database_refuses_them(db: StoreConnection, subtests: pytest.Subtests) -> None:
    for name, payload in PAYLOADS.items():
        for function in ("publish", "publish_text", "publish_many"):
            with (
                subtests.test(payload=name, function=function),
                pytest.raises(asyncpg.CheckViolationError, match="payload: has"),
            ):
                await db.execute(published(function, payload))
    for at in TIMES:
        statements = {
            "insert": f"INSERT INTO outbox (type, payload, expires_at) VALUES ('a', '1', '{at}')",
            "created_at": "INSERT INTO outbox (type, payload, created_at) "
            f"VALUES ('a', '1', '{at}')",
            "publish": f"SELECT publish(type => 'a', payload => '1', expires_at => '{at}')",
            "publish_many": f"SELECT publish_many('{{a}}', '{{1}}', expires_at => '{{\"{at}\"}}')",
            "deliver_at": f"SELECT publish(type => 'a', payload => '1', deliver_at => '{at}')",
            "deliver_at as text": f"SELECT publish_text('a', '1', deliver_at => '{at}')",
        }
        for name, statement in statements.items():
            if name.startswith("deliver_at") and (at.startswith("-") or at.endswith("BC")):
                continue  # In the past, so it means now.
            with subtests.test(time=at, statement=name):
                with pytest.raises(asyncpg.CheckViolationError) as error:
                    await db.execute(statement)
                assert error.value.constraint_name in (
                    TIMES_CONSTRAINT,
                    "deliver_at_must_be_finite",
                )
    for name in ATTACKS:
        headers = orjson.dumps({name: "x"}).decode()
        statements = {
            "insert": f"INSERT INTO outbox (type, payload, headers) VALUES ('a', '1', '{headers}')",
            "publish": f"SELECT publish(type => 'a', payload => '1', headers => '{headers}')",
            "publish_text": f"SELECT publish_text('a', '1', headers => '{headers}')",
            "later": "INSERT INTO future_event (event_id, type, payload, deliver_at, headers) "
            f"VALUES (gen_random_uuid(), 'a', '1', '3000-01-01', '{headers}')",
        }
        for how, statement in statements.items():
            with subtests.test(header=name, statement=how):
                with pytest.raises(asyncpg.CheckViolationError) as error:
                    await db.execute(statement)
                assert error.value.constraint_name == HEADERS_CONSTRAINT
    with subtests.test("values are not names"):
        harmless = {"A": '", "outbox-control": "end', "traceparent": "body", "X-B": "X-Lane"}
        await db.execute(
            "INSERT INTO outbox (type, payload, headers) VALUES ('payment-intent.created', $1, $2)",
            "1" * 2_000,
            orjson.dumps(harmless).decode(),
        )


class Refusing(Network):
    """Refuses each delivery, whatever its body is."""

    async def _send(self, request: Request) -> AttemptResult:
        return REFUSED


OLD_ROWS = {
    "expires in 20000": ("expires_at", "'20000-01-01'"),
    "expires never": ("expires_at", "'infinity'"),
    "created in 20000": ("created_at", "'20000-01-01'"),
    "created before Christ": ("created_at", "'0044-03-15 BC'"),
    "created at no time": ("created_at", "'-infinity'"),
    "an endless number": ("payload", f"'{{\"n\": {NUMBER}}}'"),
    "a number of 400 digits": ("payload", "'1e400'"),
    "nesting": ("payload", f"(repeat('[', {DEEP}) || repeat(']', {DEEP}))::jsonb"),
    "a control mark": ("headers", """'{"outbox-control": "end"}'"""),
    "numbers that are rounded": ("payload", "'[9007199254740993, 18446744073709551616, 0.10]'"),
}


async def test_old_rows_blind_no_reader(
    database: Database, db: StoreConnection, subtests: pytest.Subtests
) -> None:
    """Lists, traces, dead letters and the API show each of them, and each can be erased."""
    await add_endpoint(database, "shop")
    async with without_rules(db):
        for name, (column, value) in OLD_ROWS.items():
            row = {"type": "'a'", "payload": "'1'", "tenant": "NULL", "key": f"'{name}'"}
            row[column] = value
            await db.execute(
                f"INSERT INTO outbox ({', '.join(row)}) VALUES ({', '.join(row.values())})"
            )
    async with running(database, Refusing()):
        await all_ended(database)
    with subtests.test("events"):
        page = await events.search_events(db, "relay", Criteria())
        assert {each.key for each in page.events} == OLD_ROWS.keys()
    ids = {each.key: each.outbox_id for each in page.events}
    for name, outbox_id in ids.items():
        with subtests.test(trace=name):
            found = await trace.read_trace(db, "relay", outbox_id, payload=True)
            assert orjson.dumps(found, default=encode_other)
    letters = await dead_letters.list_dead_letters(db, "relay")
    async with serving(database) as client:
        api = client.with_token(await make_token(database))
        for path in ("/v1/events", "/v1/dead-letters", "/v1/schedules"):
            with subtests.test(path=path):
                assert (await api.get(path)).status == 200
        for letter in letters:
            with subtests.test(dead_letter=letter.id):
                await dead_letters.get_dead_letter(db, "relay", letter.id)
                url = f"{api.url}/v1/dead-letters/{letter.id}"
                authorized = {"Authorization": f"Bearer {api.secret}"}
                async with api.session.get(url, headers=authorized) as response:
                    assert response.status == 200
        for name, outbox_id in ids.items():
            with subtests.test(trace=name, of="API"):
                # Not validated: the validator cannot parse what browsers and jq can.
                url = f"{api.url}/v1/trace/{outbox_id}?payload=true"
                authorized = {"Authorization": f"Bearer {api.secret}"}
                async with api.session.get(url, headers=authorized) as response:
                    assert response.status == 200
                    text = await response.text()
                if name.startswith("numbers"):
                    assert "[9007199254740993, 18446744073709551616, 0.10]" in text
    for name in OLD_ROWS:
        with subtests.test(erase=name):
            target = erase.ErasureTarget(key=name)
            assert (await erase.erase_events(db, "relay", target, actor="test")).events == 1
    assert not await db.fetchval("SELECT count(*) FROM outbox WHERE erased_at IS NULL")
