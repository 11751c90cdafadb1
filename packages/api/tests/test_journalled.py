"""Every change through the API has a journal entry with its token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.response import AttemptResult
from outbox_api.routes import ROUTES
from tests.support.api import make_token
from tests.support.identity import identity
from tests.support.ranges import next_pending, sequence_all
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "http://127.0.0.1:9/"

NOT_JOURNALLED = {
    "POST /v1/events": "an event is its own record, and is there for as long as events are kept",
    "POST /v1/verify": "it changes nothing",
    "POST /v1/endpoints/{name}/test": "it changes nothing here, and is no delivery",
}

FORGOT = """
UPDATE lane_progress SET attempts = 1, retry_seq = acked_seq + 1,
       last_response = '{"failure": "forgot"}'
 WHERE endpoint_id = (SELECT id FROM endpoint WHERE name = 'shop')
"""
"""As if the streams of a broker had lost messages."""

CERTIFICATE, STUCK = "made when it is needed", "read when it is needed"
WALK: dict[str, tuple[str, Any]] = {
    "POST /v1/endpoints": ("/v1/endpoints", {"name": "new", "url": URL}),
    "PATCH /v1/endpoints/{name}": ("/v1/endpoints/new", {"lanes": 2}),
    "POST /v1/endpoints/pause": ("/v1/endpoints/pause", {"names": ["new"]}),
    "POST /v1/endpoints/resume": ("/v1/endpoints/resume", {"names": ["new"]}),
    "POST /v1/endpoints/{name}/pause": ("/v1/endpoints/new/pause", {}),
    "POST /v1/endpoints/{name}/resume": ("/v1/endpoints/new/resume", {}),
    "POST /v1/endpoints/{name}/refill": ("/v1/endpoints/shop/refill", {}),
    "POST /v1/endpoints/{name}/adopt": ("/v1/endpoints/shop/adopt", {}),
    "POST /v1/endpoints/{name}/skip": ("/v1/endpoints/shop/skip", STUCK),
    "POST /v1/endpoints/{name}/enable": ("/v1/endpoints/off/enable", {}),
    "POST /v1/endpoints/enable": ("/v1/endpoints/enable", {"names": ["off2"]}),
    "POST /v1/endpoints/{name}/rotate-secret": ("/v1/endpoints/new/rotate-secret", {}),
    "PUT /v1/endpoints/{name}/certificate": ("/v1/endpoints/new/certificate", CERTIFICATE),
    "DELETE /v1/endpoints/{name}/certificate": ("/v1/endpoints/new/certificate", None),
    "PUT /v1/endpoints/{name}/credentials": (
        "/v1/endpoints/stream/credentials",
        {"credentials": "relay:secret"},
    ),
    "DELETE /v1/endpoints/{name}/credentials": ("/v1/endpoints/stream/credentials", None),
    "DELETE /v1/endpoints/{name}": ("/v1/endpoints/new", None),
    "PUT /v1/declaration": ("/v1/declaration", {"endpoints": [{"name": "put", "url": URL}]}),
    "POST /v1/dead-letters/replay": ("/v1/dead-letters/replay", {"ids": [1]}),
    "POST /v1/dead-letters/discard": ("/v1/dead-letters/discard", {"ids": [2]}),
    "POST /v1/replays": ("/v1/replays", {"endpoint": "shop", "since": "1h"}),
    "POST /v1/replays/{id}/abort": ("/v1/replays/{job}/abort", None),
    "POST /v1/schedules": (
        "/v1/schedules",
        {"name": "nightly", "cron": "@daily", "type": "a.b"},
    ),
    "POST /v1/schedules/{name}/pause": ("/v1/schedules/nightly/pause", {}),
    "POST /v1/schedules/{name}/resume": ("/v1/schedules/nightly/resume", {}),
    "POST /v1/schedules/{name}/run-now": ("/v1/schedules/nightly/run-now", None),
    "DELETE /v1/schedules/{name}": ("/v1/schedules/nightly", None),
    "POST /v1/once/{key}/reset": ("/v1/once/o/reset", None),
    "POST /v1/erase": ("/v1/erase", {"key": "k"}),
    "POST /v1/tokens": ("/v1/tokens", {"name": "made", "scopes": ["read"]}),
    "DELETE /v1/tokens/{name}": ("/v1/tokens/made", None),
    "POST /v1/events": ("/v1/events", {"type": "a.b"}),
    "POST /v1/verify": ("/v1/verify", None),
    "POST /v1/resequence": ("/v1/resequence", None),
    "POST /v1/endpoints/{name}/test": ("/v1/endpoints/put/test", None),
}
"""In this order."""


def script(sent: Sent) -> AttemptResult:
    if sent.url.endswith(("off", "off2")):
        return AttemptResult.completed(410, 0.001)
    return REFUSED if sent.seq < 3 else OK


def test_every_changing_route_is_tested() -> None:
    changing = [f"{r.method} {r.path}" for r in ROUTES if r.method != "GET"]
    assert sorted(changing) == sorted(WALK)


async def test_a_change_is_journalled_with_the_token(database: Database, client: Api) -> None:
    await add_endpoint(database)
    await add_endpoint(database, "off")
    await add_endpoint(database, "off2")
    await add_endpoint(database, "stream", url="redis://127.0.0.1:9/s")
    async with running(database, Network(script)):
        await publish(database, 1, 2, 3, key="k")
        await all_ended(database)
        off = "SELECT bool_and(state = 'disabled') FROM endpoint WHERE name LIKE 'off%'"
        await until(lambda: fetchval(database, off), 20, "them to be disabled")
    await fetchval(database, "SELECT publish('a.b', '{}', once => 'o')")
    await publish(database, "stuck")
    await sequence_all(database)
    await fetchval(database, FORGOT)
    await fetchval(
        database,
        "UPDATE batch SET dead = int8multirange(int8range(high, high + 1)) WHERE batch = 1",
    )
    api = client.with_token(await make_token(database, "walker"))
    newest = "SELECT coalesce(max(id), 0) FROM journal"
    by = "SELECT array_agg(DISTINCT actor) FROM journal WHERE id > $1"
    for route, (path, body) in WALK.items():
        before = await fetchval(database, newest)
        if body is STUCK:
            lane, sequence = await next_pending(database, "shop")
            body = {"lane": lane, "sequence": sequence}
        if body is CERTIFICATE:
            body = {"pem": identity()}
        job = await fetchval(database, "SELECT max(id) FROM replay_job")
        path = path.replace("{job}", str(job))
        response = await api.request(route.partition(" ")[0], path, body)
        assert response.status in (200, 201), (route, response.raw)
        found = await fetchval(database, by, before)
        assert found == (None if route in NOT_JOURNALLED else ["token walker"]), route
