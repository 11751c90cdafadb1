"""The doctor names headers that some servers refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
import pytest

from outbox.core.model.encryption_keys import format_key, parse_keys
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.operations.endpoints.changes import add_endpoint
from outbox.store.connection.secrets import CLEAR, Vault
from tests.support.doctor import PATH, reported_findings

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.system


async def test_headers_that_some_servers_refuse_are_reported(database: Database) -> None:
    """Also encrypted ones, without their key."""
    db = await database.connect(**PATH)
    vault = Vault(parse_keys(format_key(bytes(32))))
    for name, size, keys in [("a", 7161, CLEAR), ("b", 7160, vault), ("c", 7161, vault)]:
        settings = EndpointSettings(
            name=name, url="https://example.com/", headers={"X-A": "a" * size}
        )
        await add_endpoint(db, "relay", settings, actor="test", vault=keys)
    for size in (7000, 7168):
        headers = orjson.dumps({"X-A": "a" * size}).decode()
        await db.execute("SELECT publish_text(type => 'a', payload => '1', headers => $1)", headers)
    assert [f.message.partition(";")[0] for f in await reported_findings(db, "headers")] == [
        "1 of the last 2 events have headers of 7168 bytes or more",
        'the headers of endpoint "a" have 7168 bytes',
        'the headers of endpoint "c" have 7168 bytes',
    ]
