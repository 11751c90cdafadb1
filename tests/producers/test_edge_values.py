"""Values at the edge: refused where they enter, and harmless where they are stored already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg
import orjson
import pytest

from outbox.operations.criteria import Criteria
from outbox.operations.dead_letters import queries as dead_letters
from outbox.operations.events import erase
from outbox.operations.events import queries as events
from outbox.operations.rows import encode_other
from outbox.store.connection.connect import connect
from outbox.store.connection.dsn import parse
from outbox_doctor.trace import queries as trace
from tests.core.test_marks import ATTACKS
from tests.support.api import make_token, serving
from tests.support.old_rows import DEEP, NUMBER, OLD_ROWS, Refusing, insert_old_rows
from tests.support.relay import Network, add_endpoint, all_ended, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.store.connection.store_connection import StoreConnection
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

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
TIMES_CONSTRAINTS = (
    "expires_at_must_be_from_year_1_to_9999",
    "deliver_at_must_be_from_year_1_to_9999",
)


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
        for function in ("publish", "publish_text", "publish_checked", "publish_many"):
            with (
                subtests.test(payload=name, function=function),
                pytest.raises(asyncpg.CheckViolationError, match="payload: has"),
            ):
                await db.execute(published(function, payload))
    for at in TIMES:
        statements = {
            "insert": f"INSERT INTO outbox (type, payload, expires_at) VALUES ('a', '1', '{at}')",
            "publish": f"SELECT publish(type => 'a', payload => '1', expires_at => '{at}')",
            "publish_many": f"SELECT publish_many('{{a}}', '{{1}}', expires_at => '{{\"{at}\"}}')",
            "deliver_at": f"SELECT publish(type => 'a', payload => '1', deliver_at => '{at}')",
            "deliver_at as text": f"SELECT publish_checked('a', '1', deliver_at => '{at}')",
            "deliver_at of text": f"SELECT publish_text('a', '1', deliver_at => '{at}')",
        }
        for name, statement in statements.items():
            if name.startswith("deliver_at") and (at.startswith("-") or at.endswith("BC")):
                continue  # In the past, so it means now.
            with subtests.test(time=at, statement=name):
                with pytest.raises(asyncpg.CheckViolationError) as error:
                    await db.execute(statement)
                assert error.value.constraint_name in TIMES_CONSTRAINTS
    for name in ATTACKS:
        headers = orjson.dumps({name: "x"}).decode()
        statements = (
            f"SELECT publish(type => 'a', payload => '1', headers => '{headers}')",
            f"SELECT publish_text('a', '1', headers => '{headers}')",
            f"SELECT publish_checked('a', '1', headers => '{headers}')",
            f"SELECT publish_many('{{a}}', '{{1}}', headers => ARRAY['{headers}'::jsonb])",
            "SELECT publish_event('a', body => '1', content_type => 'a/b', "
            f"headers => '{headers}')",
            "SELECT publish(type => 'a', payload => '1', deliver_at => now() + interval '1 h', "
            f"headers => '{headers}')",
        )
        for statement in statements:
            with (
                subtests.test(header=name, statement=statement),
                pytest.raises(
                    asyncpg.CheckViolationError, match=r"headers: .* is set by the relay"
                ),
            ):
                await db.execute(statement)
    with subtests.test("values are not names"):
        harmless = {"A": '", "outbox-control": "end', "traceparent": "body", "X-B": "X-Lane"}
        await db.execute(
            "SELECT publish(type => 'payment-intent.created', payload => $1, headers => $2)",
            "1" * 2_000,
            orjson.dumps(harmless).decode(),
        )


async def test_the_api_refuses_marks_and_publishes_numbers_exactly(
    database: Database, db: StoreConnection, subtests: pytest.Subtests
) -> None:
    exact = "[18446744073709551616, 9007199254740993, 1234567890.12345678901234567890, 1.10]"
    async with serving(database) as client:
        api = client.with_token(await make_token(database))
        for name in ATTACKS:
            with subtests.test(header=name):
                response = await api.post("/v1/events", {"type": "a", "headers": {name: "x"}})
                assert response.status == 422
                assert "is set by the relay" in response.detail
        for payload in ("1e400", "[" * 2_000 + "]" * 2_000, '"\\u0000"', '"\\ud800"'):
            with subtests.test(refused=payload[:10]):
                body = f'{{"type": "a", "payload": {payload}}}'.encode()
                response = await api.request("POST", "/v1/events", data=body)
                assert response.status in (400, 422)
        for at in ("9999-12-31T00:00:00Z", "+10000-01-01T00:00:00Z"):
            with subtests.test(deliver_at=at):
                response = await api.post("/v1/events", {"type": "a", "deliver_at": at})
                assert response.status == 422
        body = f'{{"type": "a", "payload": {exact}}}'.encode()
        for _ in range(2):
            response = await api.request(
                "POST", "/v1/events", data=body, headers={"Idempotency-Key": "k"}
            )
            assert response.status in (200, 201)
    stored = await db.fetchval("SELECT payload::text FROM outbox")
    assert stored == exact.replace("1.10]", "1.1]")


async def test_marks_of_a_plain_insert_are_not_sent(
    database: Database, db: StoreConnection
) -> None:
    await add_endpoint(database)
    headers = orjson.dumps(dict.fromkeys(ATTACKS, "forged") | {"X-Order": "7"}).decode()
    await db.execute("INSERT INTO outbox (type, payload, headers) VALUES ('a', '1', $1)", headers)
    network = Network()
    async with running(database, network):
        await all_ended(database)
    (sent,) = network.accepted
    assert "forged" not in sent.headers.values()
    assert sent.headers["x-order"] == "7"


async def test_old_rows_blind_no_reader(
    database: Database, db: StoreConnection, subtests: pytest.Subtests
) -> None:
    """Lists, traces, dead letters and the API show each of them, and each can be erased."""
    await add_endpoint(database, "shop")
    await insert_old_rows(db)
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
