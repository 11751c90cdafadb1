"""Isolation of tenants: what a tenant's token reads, creates and changes.

`test_route_access` requests every route for objects of another tenant.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.relay import OK, Network, all_ended, fetchval, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from packages.api.tests.two_tenants import World
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "http://127.0.0.1:9/"


async def test_a_tenant_reads_its_own_rows(world: World) -> None:
    acme, ids = world.acme, world.ids["acme"]
    assert [e["name"] for e in await acme.items("/v1/endpoints")] == ["acme-shop"]
    shown = (await acme.get("/v1/endpoints/acme-shop")).json
    assert (shown["endpoint"]["tenant"], shown["ownership_history"]) == ("acme", [])
    statuses = (await acme.get("/v1/endpoint-statuses")).json
    assert statuses["endpoints_total"] == 1
    (status,) = statuses["endpoints"]
    assert (status["name"], status["dead_letters"], status["replica"]) == ("acme-shop", 1, None)
    planned = await acme.post("/v1/endpoints/pause", {"names": ["acme-shop"], "dry_run": True})
    assert planned.json["changed"] == ["acme-shop"]
    events = await acme.items("/v1/events")
    assert {e["tenant"] for e in events} == {"acme"}
    assert len(events) == 2
    (letter,) = await acme.items("/v1/dead-letters")
    assert letter["id"] == ids["letter"]
    assert (await acme.get(f"/v1/dead-letters/{letter['id']}")).json["payload"] == {"who": "acme"}
    counts = (await acme.get("/v1/dead-letters/counts")).json
    assert counts["total"]["dead"] == 1
    for text in ("same-key", ids["event"], ids["delivery"]):
        (trace,) = (await acme.get(f"/v1/trace/{text}", payload=True)).json["events"]
        assert trace["event"]["payload"] == {"who": "acme"}
        assert [d["endpoint"] for d in trace["deliveries"]] == ["acme-shop"]
    assert (await acme.get(f"/v1/trace/{ids['waits']}")).json["future"]["id"] == ids["waits"]
    assert [each["id"] for each in await acme.items("/v1/future-events")] == [ids["waits"]]
    assert [j["id"] for j in await acme.items("/v1/replays")] == [ids["job"]]
    assert (await acme.post(f"/v1/replays/{ids['job']}/abort")).status == 200
    assert [s["name"] for s in await acme.items("/v1/schedules")] == ["acme-nightly"]
    assert (await acme.get("/v1/schedules")).json["future_events"] is None
    assert (await acme.post("/v1/schedules/acme-nightly/run-now")).status == 201
    kinds = {row["kind"] for row in await acme.items("/v1/journal")}
    assert "endpoint_added" in kinds
    assert "endpoint_claimed" not in kinds
    assert (await acme.get("/v1/me")).json["tenant"] == "acme"


@pytest.mark.full
async def test_rows_that_a_tenant_creates_belong_to_it(world: World) -> None:
    acme, database = world.acme, world.database
    made = await acme.post("/v1/endpoints", {"name": "acme.new", "url": URL})
    assert made.json["waiting"] is None, "it counts events of all tenants"
    assert made.status == 201
    sql = "SELECT tenant FROM endpoint WHERE name = 'acme.new'"
    assert await fetchval(database, sql) == "acme"
    assert (await acme.request("PATCH", "/v1/endpoints/acme.new", {"lanes": 2})).status == 200
    event = (await acme.post("/v1/events", {"type": "a.b"})).json["id"]
    sql = "SELECT tenant FROM outbox WHERE event_id::text = $1"
    assert await fetchval(database, sql, event) == "acme"
    body = {"name": "acme.weekly", "cron": "@weekly", "type": "a.b"}
    assert (await acme.post("/v1/schedules", body)).json["tenant"] == "acme"
    assert (await acme.post("/v1/schedules", {**body, "replace": True})).status == 201
    replayed = await acme.post("/v1/dead-letters/replay", {"all": True})
    assert replayed.json["replaying"] == 1
    assert await fetchval(database, "SELECT count(*) FROM replay_job_endpoint") == 3
    network = Network(lambda _: OK)
    async with running(database, network):
        await all_ended(database)
    again = [s.url for s in network.accepted if s.body.get("replay_of")]
    assert again == ["http://receiver.test/acme-shop"]
    erased = (await acme.post("/v1/erase", {"tenant": "acme"})).json
    assert erased["events"] > 0
    sql = "SELECT count(*) FROM outbox WHERE payload IS NULL AND tenant IS DISTINCT FROM 'acme'"
    assert await fetchval(database, sql) == 0


async def test_idempotency_keys_are_separate_for_each_tenant(world: World) -> None:
    event = {"type": "a.b", "once": "globex-once"}
    first = await world.acme.post("/v1/events", event)
    again = await world.acme.post("/v1/events", event)
    assert (first.status, again.status) == (201, 200)
    assert again.json["id"] == first.json["id"] != world.ids["globex"]["published"]
    assert [row["key"] for row in await world.acme.items("/v1/once")] == ["globex-once"]
    shown = (await world.acme.get("/v1/once/globex-once")).json
    assert (shown["key"], shown["event_id"]) == ("globex-once", first.json["id"])
    (trace,) = (await world.acme.get("/v1/trace/globex-once")).json["events"]
    assert trace["event"]["event_id"] == first.json["id"]
    assert (await world.acme.post("/v1/once/globex-once/reset")).json["reset"] is True
    held = (await world.everything.get("/v1/once/globex-once")).json
    assert (held["state"], held["event_id"]) == ("held", world.ids["globex"]["published"])


@pytest.mark.full
async def test_dead_letters_stay_with_the_former_tenant_of_an_endpoint(
    world: World, database: Database
) -> None:
    number = world.ids["globex"]["letter"]
    body = {"tenant": "acme"}
    assert (
        await world.everything.request("PATCH", "/v1/endpoints/globex-shop", body)
    ).status == 200
    assert number not in [row["id"] for row in await world.acme.items("/v1/dead-letters")]
    assert (await world.acme.get(f"/v1/dead-letters/{number}")).status == 404
    counts = await world.acme.get("/v1/dead-letters/counts")
    assert counts.json["total"]["dead"] == 1
    swept = await world.acme.post("/v1/dead-letters/discard", {"all": True})
    assert swept.json["discarded"] == 1
    assert await fetchval(database, "SELECT state FROM dead_letter WHERE id = $1", number) == "dead"


async def test_a_tenant_sees_no_relay_names_in_a_trace(world: World) -> None:
    """The lane state of a paused endpoint shows that a relay owns it, but not which."""
    await world.acme.post("/v1/endpoints/acme-shop/pause")
    async with running(world.database, Network(lambda _: OK)):
        made = (await world.acme.post("/v1/events", {"type": "a.b", "key": "waits"})).json["id"]

        async def standing() -> Any:
            (trace,) = (await world.acme.get("/v1/trace/waits")).json["events"]
            found = trace["deliveries"] and trace["deliveries"][0]["lane_state"]
            # It may be sequenced before a relay owns its lane.
            return found if found and found["relay"] else None

        reported = await until(standing, what="the delivery, and whose it is")
        assert (reported["state"], reported["relay"]) == ("paused", "(not shown)")
        known = (await world.everything.get(f"/v1/trace/{made}", endpoint="acme-shop")).json
        assert str(os.getpid()) in known["events"][0]["deliveries"][0]["lane_state"]["relay"]
