"""No backend of an API request waits for its client while it holds anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox_api.routes import ROUTES
from packages.api.tests.walk import FORGOT
from tests.cli.test_hold_points import DISABLE, prepare
from tests.support.api import make_token, serving
from tests.support.identity import identity
from tests.support.lockstep import in_lockstep
from tests.support.ranges import next_pending, sequence_all
from tests.support.relay import publish

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

NOT_COVERED = {
    # Between two messages that are sent at once, Execute and Sync, it holds an idempotency key and,
    # if it is held, the row of its tenant: only the same tenant waits for them.
    ("POST", "/v1/events"),
    # They change nothing.
    ("POST", "/v1/endpoints/{name}/test"),
    ("POST", "/v1/verify"),
    # See the test of the command.
    ("POST", "/v1/resequence"),
}


async def test_no_route_holds_locks_while_it_waits_for_its_client(database: Database) -> None:
    await prepare(database)
    await publish(database, "stuck")
    await sequence_all(database)
    lane, sequence = await next_pending(database, "moved")
    secret = await make_token(database)
    left = {(r.method, r.path) for r in ROUTES if r.method != "GET"} - NOT_COVERED
    async with in_lockstep(database) as (seen, dsn), serving(database, dsn=dsn) as anonymous:
        api = anonymous.with_token(secret)

        async def request(method: str, path: str, body: Any = None, **place: object) -> Any:
            response = await api.request(method, path.format(**place), body)
            assert response.status < 300, (method, path, response.raw)
            assert not seen.hold_points, (method, path, seen.report())
            left.discard((method, path))
            return response.json if response.raw else None

        endpoint = "/v1/endpoints/{name}"
        shop = {"name": "shop"}
        body = {**shop, "url": "https://example.com/", "headers": {"X-Key": "hunter2"}}
        await request("POST", "/v1/endpoints", body)
        await request("PATCH", endpoint, {"lanes": 4, "types": ["a.*"]}, **shop)
        await request("POST", endpoint + "/pause", {}, **shop)
        await request("POST", endpoint + "/resume", {}, **shop)
        await request("POST", "/v1/endpoints/pause", {"names": ["shop", "moved"]})
        await request("POST", "/v1/endpoints/resume", {"names": ["shop", "moved"]})
        await request("POST", endpoint + "/rotate-secret", **shop)
        async with database.at_hand() as db:
            await db.execute(FORGOT.replace("'shop'", "'moved'"))
        await request("POST", endpoint + "/refill", {}, name="moved")
        await request("POST", endpoint + "/adopt", {}, name="moved")
        stuck = {"lane": lane, "sequence": sequence}
        await request("POST", endpoint + "/skip", stuck, name="moved")
        stream = {"name": "stream", "url": "redis://127.0.0.1:9/orders"}
        await request("POST", "/v1/endpoints", {**stream, "allow_networks": ["127.0.0.0/8"]})
        credentials = {"credentials": "relay:hunter2"}
        await request("PUT", endpoint + "/credentials", credentials, name="stream")
        await request("DELETE", endpoint + "/credentials", name="stream")
        await request("PUT", endpoint + "/certificate", {"pem": identity()}, **shop)
        await request("DELETE", endpoint + "/certificate", **shop)
        async with database.connection() as db:
            await db.execute(DISABLE.replace("shop2", "shop"))
        await request("POST", endpoint + "/enable", {}, **shop)
        await request("POST", "/v1/endpoints/enable", {"names": ["moved"]})
        await request("DELETE", endpoint, **shop)
        declaration = [{"name": "moved", "url": "https://example.com/", "lanes": 3}]
        await request("PUT", "/v1/declaration", {"endpoints": [*declaration, body]})
        job = (await request("POST", "/v1/dead-letters/replay", {"ids": [1]}))["job"]
        await request("POST", "/v1/replays/{id}/abort", id=job)
        await request("POST", "/v1/dead-letters/discard", {"ids": [1]})
        await request("POST", "/v1/dead-letters/discard", {"all": True})
        backfill = {"endpoint": "moved", "since": "2020-01-01T00:00Z"}
        await request("POST", "/v1/replays", backfill)
        schedule = {"name": "s", "cron": "@daily", "type": "a.b", "payload": {}}
        await request("POST", "/v1/schedules", schedule)
        for verb in ("pause", "resume"):
            await request("POST", "/v1/schedules/{name}/" + verb, {}, name="s")
        await request("POST", "/v1/schedules/{name}/run-now", name="s")
        await request("DELETE", "/v1/schedules/{name}", name="s")
        await request("POST", "/v1/once/{key}/reset", key="plan:7")
        await request("POST", "/v1/tokens", {"name": "ci", "scopes": ["read"]})
        await request("DELETE", "/v1/tokens/{name}", name="ci")
        await request("PUT", "/v1/quotas", {"tenant": "acme", "lanes": 9})
        await request("DELETE", "/v1/quotas/{tenant}", tenant="acme")
        await request("POST", "/v1/erase", {"tenant": "acme"})
    assert not left, "routes without a test"
