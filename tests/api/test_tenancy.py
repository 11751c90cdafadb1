"""Isolation of tenants: every route with ids of another tenant.

A route without a case here fails the test.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from outbox.api.route import TenantAccess
from outbox.api.routes import ROUTES
from outbox.api.tenancy import NOT_OWNED, stored_key
from tests.support.api import make_token
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.api.route import Route
    from tests.support.api import Api, AttemptResult
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "http://127.0.0.1:9/"

# Everything of the other tenant, or without a tenant, as one value.
ACME_ONCE = stored_key("acme", "")
THEIRS = f"""
SELECT md5(concat_ws('|',
    (SELECT string_agg(e::text, '' ORDER BY id) FROM endpoint e
      WHERE tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(s::text, '' ORDER BY s.endpoint_id, s.id) FROM endpoint_secret s
       JOIN endpoint e ON e.id = s.endpoint_id WHERE e.tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(o::text, '' ORDER BY id) FROM outbox o
      WHERE tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(d::text, '' ORDER BY d.id) FROM dead_letter d
       JOIN endpoint e ON e.id = d.endpoint_id WHERE e.tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(s::text, '' ORDER BY id) FROM schedule s
      WHERE tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(f::text, '' ORDER BY id) FROM future_event f
      WHERE tenant IS DISTINCT FROM 'acme'),
    (SELECT string_agg(o::text, '' ORDER BY key) FROM idempotency_key o
      WHERE NOT starts_with(key, '{ACME_ONCE}')),
    (SELECT string_agg(j::text, '' ORDER BY id) FROM replay_job j
      WHERE tenant IS DISTINCT FROM 'acme' AND endpoint IS DISTINCT FROM 'acme-shop'),
    (SELECT string_agg(t::text, '' ORDER BY name) FROM
            (SELECT name, scopes, tenant, revoked_at FROM token) t)))
"""


class World:
    """Two tenants, and rows without one; every row that is not acme's contains "globex"."""

    def __init__(self, database: Database, everything: Api, acme: Api) -> None:
        self.database = database
        self.everything = everything
        self.acme = acme
        self.ids: dict[str, dict[str, Any]] = {}

    async def make(self) -> None:
        for tenant in ("acme", "globex"):
            await add_endpoint(self.database, f"{tenant}-shop", tenant=tenant)
        await add_endpoint(self.database, "globex-all", all_tenants=True)
        sent: list[Any] = []

        def refuse(request: Any) -> Any:
            sent.append(request)
            return REFUSED

        async with running(self.database, Network(refuse)):
            for tenant in ("acme", "globex"):
                await publish(self.database, {"who": tenant}, key="same-key", tenant=tenant)
            await publish(self.database, {"who": "globex, or nobody"}, key="same-key")
            await all_ended(self.database)
        post = self.everything.post
        for tenant in ("acme", "globex"):
            (letter,) = await self.everything.items("/v1/dead-letters", endpoint=f"{tenant}-shop")
            await post(
                "/v1/schedules",
                {"name": f"{tenant}-nightly", "cron": "@daily", "type": "a.b", "tenant": tenant},
            )
            once = {"type": "a.b", "tenant": tenant, "once": f"{tenant}-once"}
            published = (await post("/v1/events", once)).json["id"]
            later = {"type": "a.b", "tenant": tenant, "deliver_at": "2999-01-01T00:00:00Z"}
            waits = (await post("/v1/events", later)).json["id"]
            job = await post("/v1/replays", {"endpoint": f"{tenant}-shop", "since": "1h"})
            delivery = next(s.delivery for s in sent if s.url.endswith(f"{tenant}-shop"))
            self.ids[tenant] = {
                "letter": letter["id"],
                "event": letter["event"],
                "published": published,
                "waits": waits,
                "job": job.json["id"],
                "delivery": delivery,
            }

    async def theirs(self) -> str:
        return str(await fetchval(self.database, THEIRS))


@pytest.fixture
async def world(database: Database, api: Api) -> World:
    secret = await make_token(database, "acme", ("read", "publish", "operate"), tenant="acme")
    made = World(database, api, api.with_token(secret))
    await made.make()
    return made


Request = tuple[str, Any, dict[str, Any]]


def requests(route: Route, ids: Mapping[str, Any]) -> list[Request] | None:
    """Requests to a route for rows of another tenant: path, body and query.

    None: the route has no case.
    """
    name, number = "globex-shop", ids["letter"]
    match (route.method, route.path):
        case (_, "/v1/status" | "/v1/replicas" | "/v1/doctor" | "/v1/verify" | "/v1/me"):
            return [(route.path, None, {})]
        case ("GET", "/v1/endpoint-settings"):
            return [(route.path, None, {})]
        case ("POST", "/v1/resequence"):
            return [(route.path, None, {})]
        case ("GET" | "POST", "/v1/tokens"):
            return [(route.path, {"name": "x", "scopes": ["read"]}, {})]
        case ("DELETE", "/v1/tokens/{name}"):
            return [("/v1/tokens/all", None, {})]
        case ("GET", "/v1/declaration"):
            return [(route.path, None, {})]
        case ("PUT", "/v1/declaration"):
            return [(route.path, {"endpoints": []}, {"prune": True, "dead_letter": True})]
        case ("GET", "/v1/live" | "/v1/history" | "/v1/endpoint-statuses"):
            return [(route.path, None, {})]
        case ("GET", "/v1/endpoints" | "/v1/endpoint-histories"):
            return [(route.path, None, {}), (route.path, None, {"tenant": "globex"})]
        case ("POST", "/v1/endpoints/pause" | "/v1/endpoints/resume" | "/v1/endpoints/enable"):
            names = [[name], ["globex-all"], ["acme-shop", name], ["globex-shp"]]
            return [
                (route.path, {"names": n, "dry_run": dry}, {})
                for n in names
                for dry in (True, False)
            ]
        case ("POST", "/v1/endpoints"):
            new = {"name": "acme.new", "url": URL}
            return [
                (route.path, {**new, "tenant": "globex"}, {}),
                (route.path, {**new, "all_tenants": True}, {}),
            ]
        case ("PATCH", "/v1/endpoints/{name}"):
            return [
                ("/v1/endpoints/globex-shop", {"url": URL}, {}),
                ("/v1/endpoints/globex-all", {"url": URL}, {}),
                ("/v1/endpoints/acme-shop", {"tenant": "globex"}, {}),
                ("/v1/endpoints/acme-shop", {"tenant": None, "all_tenants": True}, {}),
                ("/v1/endpoints/acme-shop", {"tenant": None}, {}),
            ]
        case ("DELETE", "/v1/endpoints/{name}"):
            return [
                (f"/v1/endpoints/{each}", None, query)
                for each in (name, "globex-all")
                for query in ({}, {"dead_letter": True}, {"drain": True})
            ]
        case ("POST", "/v1/endpoints/{name}/skip" as path):
            stuck = {"lane": "000000000000-1-0", "sequence": 1}
            return [(path.replace("{name}", each), stuck, {}) for each in (name, "globex-all")]
        case ("GET", "/v1/endpoints/{name}/preview"):
            own = "/v1/endpoints/acme-shop/preview"
            theirs = [(own, None, {"event": str(ids[k])}) for k in ("event", "delivery")]
            return [
                *theirs,
                (own, None, {"event": "same-key"}),
                (f"/v1/endpoints/{name}/preview", None, {"event": "same-key"}),
            ]
        case ("PUT", "/v1/endpoints/{name}/credentials" as path):
            body = {"credentials": "user:secret"}
            return [(path.replace("{name}", each), body, {}) for each in (name, "globex-all")]
        case (_, path) if path.startswith("/v1/endpoints/{name}"):
            return [
                (path.replace("{name}", each), {} if route.body else None, {})
                for each in (name, "globex-all")
            ]
        case ("POST", "/v1/events"):
            return [
                (route.path, {"type": "a.b", "tenant": "globex"}, {}),
                (route.path, {"events": [{"type": "a.b", "tenant": "globex"}]}, {}),
            ]
        case ("GET", "/v1/events"):
            return [
                (route.path, None, {}),
                (route.path, None, {"key": "same-key"}),
                (route.path, None, {"tenant": "globex"}),
            ]
        case ("GET", "/v1/trace/{id}"):
            texts = [*(ids[k] for k in ("event", "published", "waits", "delivery")), "globex-once"]
            return [(f"/v1/trace/{text}", None, {}) for text in (*texts, "2", "3")] + [
                ("/v1/trace/same-key", None, {"payload": True}),
                ("/v1/trace/same-key", None, {"endpoint": name}),
                ("/v1/trace/same-key", None, {"endpoint": "globex-all"}),
            ]
        case ("GET", "/v1/dead-letters" | "/v1/dead-letters/counts" as path):
            return [
                (path, None, {}),
                (path, None, {"endpoint": name}),
                (path, None, {"endpoint": "globex-all"}),
                (path, None, {"tenant": "globex"}),
            ]
        case ("GET", "/v1/dead-letters/{id}"):
            return [(f"/v1/dead-letters/{number}", None, {})]
        case ("POST", "/v1/dead-letters/replay" | "/v1/dead-letters/discard" as path):
            bodies: list[Any] = [
                {"ids": [number]},
                {"endpoint": name},
                {"endpoint": "globex-all"},
                {"tenant": "globex"},
                {"all": True},
            ]
            return [(path, {**b, "dry_run": dry}, {}) for b in bodies for dry in (True, False)]
        case ("GET", "/v1/replays"):
            return [(route.path, None, {"state": "all"})]
        case ("POST", "/v1/replays"):
            return [
                (route.path, {"endpoint": each, "since": "1h", "dry_run": dry}, {})
                for each in (name, "globex-all")
                for dry in (True, False)
            ]
        case (_, path) if path.startswith("/v1/replays/{id}"):
            return [(path.replace("{id}", str(ids["job"])), None, {})]
        case ("GET", "/v1/schedules"):
            return [(route.path, None, {})]
        case ("POST", "/v1/schedules"):
            new = {"cron": "@daily", "type": "a.b"}
            return [
                (route.path, {**new, "name": "x", "tenant": "globex"}, {}),
                (route.path, {**new, "name": "globex-nightly"}, {}),
                (route.path, {**new, "name": "globex-nightly", "replace": True}, {}),
            ]
        case (_, path) if path.startswith("/v1/schedules/{name}"):
            return [(path.replace("{name}", "globex-nightly"), {} if route.body else None, {})]
        case ("GET", "/v1/once"):
            return [(route.path, None, {}), (route.path, None, {"prefix": "globex"})]
        case (_, path) if path.startswith("/v1/once/{key}"):
            return [(path.replace("{key}", "globex-once"), None, {})]
        case ("POST", "/v1/erase"):
            bodies = [{"tenant": "globex"}, {"key": "same-key"}]
            return [
                (route.path, {**b, "dry_run": dry}, {}) for b in bodies for dry in (True, False)
            ]
        case ("GET", "/v1/journal"):
            return [(route.path, None, {}), (route.path, None, {"endpoint": name})]
    return None


async def send_request(api: Api, route: Route, request: Request) -> AttemptResult:
    path, body, query = request
    return await api.request(route.method, path, body if route.body else None, **query)


async def test_no_route_reads_or_changes_rows_of_another_tenant(world: World) -> None:
    before = await world.theirs()
    ids = {**world.ids["globex"]}
    for route in ROUTES:
        asked = requests(route, ids)
        assert asked, f"{route.method} {route.path} is not in the walk"
        for request in asked:
            response = await send_request(world.acme, route, request)
            where = f"{route.method} {request}: {response.status} {response.raw!r}"
            if route.tenants is TenantAccess.SYSTEM:
                assert response.status == 403, where
            assert response.status < 500, where
            reported = response.raw.decode().replace("globex-nightly", "")
            assert "globex" not in reported or response.status == 422, where
            # The relays that were at work are not the tenant's, either.
            assert f"{socket.gethostname()}:{os.getpid()}" not in reported, where
            if response.status == 404:
                assert response.detail == NOT_OWNED, where
            assert await world.theirs() == before, where


async def test_a_route_without_tenant_checks_would_be_detected(world: World) -> None:
    """A token without a tenant gets the other tenant's rows with the same requests."""
    shown = 0
    for route in ROUTES:
        if route.method != "GET" or route.tenants is TenantAccess.ALL_CALLERS:
            continue
        for request in requests(route, world.ids["globex"]) or ():
            response = await send_request(world.everything, route, request)
            shown += "globex" in response.raw.decode()
    assert shown >= 20
    before = await world.theirs()
    await world.everything.post("/v1/schedules/globex-nightly/pause")
    assert await world.theirs() != before


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
    assert (await acme.get(f"/v1/trace/{ids['waits']}")).status == 404
    assert [j["id"] for j in await acme.items("/v1/replays")] == [ids["job"]]
    assert (await acme.post(f"/v1/replays/{ids['job']}/abort")).status == 200
    assert [s["name"] for s in await acme.items("/v1/schedules")] == ["acme-nightly"]
    assert (await acme.get("/v1/schedules")).json["future_events"] is None
    assert (await acme.post("/v1/schedules/acme-nightly/run-now")).status == 201
    kinds = {row["kind"] for row in await acme.items("/v1/journal")}
    assert "endpoint_added" in kinds
    assert "endpoint_claimed" not in kinds
    assert (await acme.get("/v1/me")).json["tenant"] == "acme"


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

        reported = await until(standing, 20, "the delivery, and whose it is")
        assert (reported["state"], reported["relay"]) == ("paused", "(not shown)")
        known = (await world.everything.get(f"/v1/trace/{made}", endpoint="acme-shop")).json
        assert str(os.getpid()) in known["events"][0]["deliveries"][0]["lane_state"]["relay"]
