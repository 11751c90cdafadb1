"""Quotas by the API: system tokens set them, and a tenant sees its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from packages.api.tests.two_tenants import World
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "http://127.0.0.1:9/"
PROBLEM = "urn:outbox:problem:quota-exceeded"


async def test_a_tenant_sees_its_quotas_and_its_use(world: World) -> None:
    acme, system = world.acme, world.everything
    assert (await system.request("PUT", "/v1/quotas", {"tenant": "acme", "lanes": 8})).status == 200
    shown = (await acme.get("/v1/quotas/acme")).json
    assert shown["endpoints"] == {"used": 1, "max": 100}
    assert shown["lanes"]["max"] == 8
    assert (await acme.get("/v1/quotas/globex")).status == 404
    assert (await acme.get("/v1/quotas")).status == 403
    body = {"tenant": "acme", "lanes": 9}
    assert (await acme.request("PUT", "/v1/quotas", body)).status == 403
    assert (await acme.request("DELETE", "/v1/quotas/acme")).status == 403
    assert [row["tenant"] for row in await system.items("/v1/quotas")] == [None, "acme"]
    first = (await system.get("/v1/quotas", limit=1)).json
    assert [row["tenant"] for row in first["items"]] == [None]
    assert first["next"]  # Also for a client that stops at an empty one.
    second = (await system.get("/v1/quotas", limit=1, after=first["next"])).json
    assert ([row["tenant"] for row in second["items"]], second["next"]) == (["acme"], None)
    assert (await system.request("DELETE", "/v1/quotas/acme")).json["lanes"]["max"] == 1024
    assert (await system.request("DELETE", "/v1/quotas/acme")).status == 404


async def test_no_request_passes_a_quota(world: World) -> None:
    acme, system = world.acme, world.everything
    quota = {"tenant": "acme", "endpoints": 1, "schedules": 1}
    assert (await system.request("PUT", "/v1/quotas", quota)).status == 200
    lanes = {"tenant": "acme", "lanes": (await acme.get("/v1/quotas/acme")).json["lanes"]["used"]}
    assert (await system.request("PUT", "/v1/quotas", lanes)).status == 200
    new = {"name": "acme.more", "url": URL}
    schedule = {"name": "acme.more", "cron": "@daily", "type": "a.b"}
    refused = [
        await acme.post("/v1/endpoints", new),
        await acme.request("PATCH", "/v1/endpoints/acme-shop", {"lanes": lanes["lanes"] + 1}),
        await acme.post("/v1/schedules", schedule),
        await system.post("/v1/endpoints", {**new, "tenant": "acme"}),
        await system.request("PATCH", "/v1/endpoints/globex-shop", {"tenant": "acme"}),
        await system.request("PUT", "/v1/declaration", {"endpoints": [{**new, "tenant": "acme"}]}),
    ]
    assert [(each.status, each.json["type"]) for each in refused] == [(422, PROBLEM)] * 6
    assert "would have 2, and its quota is 1" in refused[0].detail
    assert "PUT /v1/quotas" in refused[0].detail


async def test_idempotency_keys_are_counted_by_maintenance(
    database: Database, world: World
) -> None:
    acme, body = world.acme, {"tenant": "acme", "once_keys": 2}
    assert (await world.everything.request("PUT", "/v1/quotas", body)).status == 200
    for key in "abc":
        # Approximately: what was claimed since the last count is not counted.
        assert (await acme.post("/v1/events", {"type": "a.b", "once": key})).status == 201
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        await connection.execute("SELECT count_idempotency_keys()")
    assert (await acme.get("/v1/quotas/acme")).json["once_keys"] == {"used": 3, "max": 2}
    refused = await acme.post("/v1/events", {"type": "a.b", "once": "d"})
    assert (refused.status, refused.json["type"]) == (422, PROBLEM)
    assert "has 3 idempotency keys, and its quota is 2" in refused.detail
    assert (await acme.post("/v1/events", {"type": "a.b", "once": "a"})).json["already"]
    assert (await acme.post("/v1/events", {"type": "a.b"})).status == 201
    other = {"type": "a.b", "tenant": "acme", "once": "d"}
    assert (await world.everything.post("/v1/events", other)).status == 201
