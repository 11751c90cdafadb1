"""A receiver that processes a request, closes the connection, and knows the second copy.

The relay sends a request again at once when a reused connection ends before a response.  The relay,
PostgreSQL and the network are real.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.destinations.servers import OK, serving
from tests.integration.test_unsolicited_data import delivering
from tests.support.relay import add_endpoint, all_ended, fetchval, publish

if TYPE_CHECKING:
    from tests.destinations.servers import Connection
    from tests.support.postgres import Database

CONFLICT = b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\n\r\n"
ATTEMPTS = "SELECT coalesce(max(attempt), 0) FROM attempt"
DEAD = "SELECT count(*) FROM dead_letter"


class Recycled:
    """Every second request on a connection is processed, and the connection ends."""

    def __init__(self) -> None:
        self.processed: list[int] = []

    async def script(self, connection: Connection) -> None:
        for ends in (False, True):
            content = orjson.loads((await connection.request()).body)
            items = content if isinstance(content, list) else [content]
            numbers = [item["sequence"] for item in items]
            known = [number for number in numbers if number in self.processed]
            self.processed += [number for number in numbers if number not in known]
            if not ends:
                await connection.send(CONFLICT if known else OK)


@pytest.mark.parametrize("settings", [{}, {"batch_max": 3}], ids=["one", "batches"])
async def test_a_409_to_a_second_copy_means_that_it_was_delivered(
    database: Database, settings: dict[str, Any]
) -> None:
    receiver = Recycled()
    retry = {"base_s": 0.02, "factor": 1.0, "cap_s": 0.02, "jitter": "none", "attempts_max": 9}
    async with serving(receiver.script) as server:
        await add_endpoint(database, url=server.url, lanes=1, retry=retry, **settings)
        await publish(database, *range(1, 13))
        async with delivering(database):
            await all_ended(database)
    assert receiver.processed == list(range(1, 13))
    assert await fetchval(database, DEAD) == 0
    if not settings:
        assert await fetchval(database, ATTEMPTS) == 1
