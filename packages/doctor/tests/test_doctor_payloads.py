"""The doctor names payloads that receivers read as something else than was published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
import pytest

from tests.support.doctor import PATH, findings_of, reported_findings, the_one

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

PUBLISH = "SELECT publish_text(type => $1, payload => $2)"
TWICE = {
    "an object": {"total": 500},
    "an array": [1, 2],
    "an array of objects": [{"a": 1}],
    "an empty object": {},
    "an empty array": [],
    "a large object": {"a": "x" * 90_000},
}
OTHERS = {
    "an object": {"text": '{"a":1}'},
    "a text": "paid",
    "a line of a log": "[info] started]",
    "a template": "{name}",
    "the beginning of an object": '{"a":',
    "a number": 7,
    "null": None,
    "a number in a text": "7",
}


async def test_payloads_that_were_encoded_twice_are_counted(database: Database) -> None:
    db = await database.connect(**PATH)
    for name, payload in OTHERS.items():
        await db.execute(PUBLISH, f"other.{name.replace(' ', '_')}", orjson.dumps(payload).decode())
    await db.execute(
        "INSERT INTO outbox (type, body, content_type) VALUES ('a.b', 'x', 'text/css')"
    )
    assert await reported_findings(db, "payloads") == []
    counted = {}
    for number, (name, payload) in enumerate(TWICE.items(), 1):
        text = orjson.dumps(orjson.dumps(payload).decode()).decode()
        await db.execute(PUBLISH, "order.paid", text)
        counted[name] = (await the_one(db, "payloads")).message.partition(" ")[0] == str(number)
    assert all(counted.values()), counted
    finding = await the_one(db, "payloads")
    assert finding.message == (
        "6 of the last 14 events with JSON have a payload that is a string with the text of an "
        "object or an array, such as order.paid: encoded twice?"
    )
    assert "publish_text" in (finding.action or "")
    # It reads the last 1,000 events, however many there are.
    await db.execute(
        "INSERT INTO outbox (type, payload) SELECT 'a.b', '{}' FROM generate_series(1, 1000)"
    )
    (passed,) = await findings_of(db, "payloads")
    assert passed.message == "receivers can read the payloads of recent events"


HARMLESS = ("{}", '"text"', '"{braces}"', "9007199254740991", "[1e15, 0.1]", '"[1"')
REPORTED = {
    r'"{\"total\": 500}"': "1 of the last 7 events with JSON have a payload that is a string",
    "[9007199254740992]": "1 of the last 7 events with JSON have a number beyond 2^53",
    '{"n": 1e400}': "1 of the last 7 events with JSON have a number beyond the range of a double",
}


async def test_payloads_that_receivers_misread_are_reported(
    database: Database, subtests: pytest.Subtests
) -> None:
    db = await database.connect(**PATH)
    insert = "INSERT INTO outbox (type, payload) SELECT 'a', unnest($1::jsonb[])"
    await db.execute(insert, list(HARMLESS))
    assert await reported_findings(db, "payloads") == []
    for payload, message in REPORTED.items():
        with subtests.test(payload):
            async with db.transaction():
                await db.execute(insert, [payload])
                (finding,) = await reported_findings(db, "payloads")
                assert finding.message.startswith(message)
                assert finding.action
                await db.execute("SET LOCAL relay.remove = 'on'; DELETE FROM outbox WHERE id > 6")
