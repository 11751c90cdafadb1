"""Every change through the API has a journal entry with its token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox_api.shared import Shared
from packages.api.tests.walk import WALK, prepare
from tests.support.api import make_token, serving
from tests.support.relay import fetchval

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

NOT_JOURNALLED = {
    "POST /v1/events": "an event is its own record, and is there for as long as events are kept",
    "POST /v1/verify": "it changes nothing",
    "POST /v1/endpoints/{name}/test": "it changes nothing here, and is no delivery",
}


READ_SETTINGS = "SELECT name, setting FROM pg_settings"
ADVISORY_LOCKS = """
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'
"""


async def test_a_change_is_journalled_with_the_token_and_leaves_its_session_as_it_was(
    database: Database,
) -> None:
    shared = Shared()
    async with serving(database, shared=shared) as client:
        (connections,) = shared.databases
        async with connections.connection() as session:
            before = await session.fetch(READ_SETTINGS)
        await prepare(database)
        await _walk(database, client.with_token(await make_token(database, "walker")))
        async with connections.connection() as session:
            assert await session.fetch(READ_SETTINGS) == before
            assert await session.fetchval(ADVISORY_LOCKS) == 0


async def _walk(database: Database, api: Api) -> None:
    newest = "SELECT coalesce(max(id), 0) FROM journal"
    by = "SELECT array_agg(DISTINCT actor) FROM journal WHERE id > $1"
    for step in (each for each in WALK if each.tenant is None):  # Adding its token is a change.
        before = await fetchval(database, newest)
        response = await step.send(database, api)
        assert response.status in (200, 201), (step.route, response.raw)
        found = await fetchval(database, by, before)
        changes = step.method != "GET" and step.name not in NOT_JOURNALLED
        assert found == (["token walker"] if changes else None), step.route
