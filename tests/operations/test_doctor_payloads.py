"""The doctor names payloads that receivers read as something else than was published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.doctor import PATH, reported_findings

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = [pytest.mark.system, pytest.mark.one_major]

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
