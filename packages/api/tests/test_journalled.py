"""Every change through the API has a journal entry with its token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from packages.api.tests.walk import WALK, prepare
from tests.support.api import make_token
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


async def test_a_change_is_journalled_with_the_token(database: Database, client: Api) -> None:
    await prepare(database)
    api = client.with_token(await make_token(database, "walker"))
    newest = "SELECT coalesce(max(id), 0) FROM journal"
    by = "SELECT array_agg(DISTINCT actor) FROM journal WHERE id > $1"
    for step in WALK:
        before = await fetchval(database, newest)
        response = await step.send(database, api)
        assert response.status in (200, 201), (step.route, response.raw)
        found = await fetchval(database, by, before)
        changes = step.method != "GET" and step.route not in NOT_JOURNALLED
        assert found == (["token walker"] if changes else None), step.route
