"""Endpoints through the API: each change is stored and journalled."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from outbox.core.messages.signature import parse_secret
from outbox.core.model.response import AttemptResult
from outbox.destinations.http.transport import HttpTransport
from outbox.network.egress import EgressPolicy
from outbox_api import endpoint_tester
from outbox_api.endpoint_tester import CONCURRENT_MAX, TENANT_MAX
from outbox_devtools.development_receiver import DevelopmentReceiver
from tests.destinations import hostile
from tests.destinations.servers import OK, Connection
from tests.destinations.servers import serving as receiver
from tests.support.api import make_token
from tests.support.identity import identity
from tests.support.operators import routing_transaction
from tests.support.relay import (
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.api import AttemptResult as Responded
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "http://127.0.0.1:9/hooks"


async def actors(database: Database, kind: str) -> list[str]:
    sql = "SELECT array_agg(actor ORDER BY id) FROM journal WHERE kind = $1"
    return list(await fetchval(database, sql, kind) or ())


async def test_an_endpoint_is_added_with_its_settings(database: Database, api: Api) -> None:
    response = await api.post(
        "/v1/endpoints",
        {
            "name": "a/b shop",
            "url": URL,
            "types": ["order.*"],
            "filter": "@.total > 10",
            "headers": {"X-Shop": "7", "Authorization": "Bearer 4711"},
            "timeout": "30s",
            "connect_timeout": 2.5,
            "retry": {"preset": "stepped", "attempts": 8},
            "retryable": [429, "5xx"],
            "on_dead_letter": "block",
            "on_missing": "hold",
            "backlog_max": 100,
            "lanes": 4,
        },
    )
    assert response.status == 201
    assert response.json["secret"].startswith("whsec_")
    assert response.json["warnings"] == []
    assert await actors(database, "endpoint_added") == ["token all"]
    shown = (await api.get("/v1/endpoints/a%2Fb%20shop")).json
    assert shown["endpoint"]["id"] == response.json["id"]
    reported = shown["settings"]
    assert (reported["timeout"], reported["connect_timeout"], reported["lanes"]) == (
        "30s",
        "2.5s",
        4,
    )
    assert reported["retryable"] == ["429", "5xx"]
    assert reported["headers"] == {"X-Shop": None, "Authorization": None}
    assert len(shown["lanes"]) == 4
    assert response.json["secret"] not in str(shown)


async def test_headers_that_some_servers_refuse_cause_a_warning(
    database: Database, api: Api
) -> None:
    large = {"name": "a", "url": URL, "headers": {"X-A": "a" * 7500}}
    says = "headers: the headers have 7507 bytes: Jetty, lighttpd and Tomcat refuse requests"
    assert (await api.post("/v1/endpoints", large)).json["warnings"][0].startswith(says)
    assert (await api.request("PATCH", "/v1/endpoints/a", {"lanes": 2})).json["warnings"] == []
    changed = await api.request("PATCH", "/v1/endpoints/a", {"headers": {"X-A": "b" * 7500}})
    assert changed.json["warnings"][0].startswith(says)


INVALID_ENDPOINTS = (
    ({"url": URL}, 422, "name: is required"),
    ({"name": "x"}, 422, "url: is required"),
    ({"name": "x", "url": "ftp://a/"}, 422, "url: "),
    ({"name": "x", "url": "http://10.0.0.1/"}, 422, "url: "),
    ({"name": "x", "url": URL, "lanes": 0}, 422, "lanes: must be between 1 and 1024"),
    ({"name": "x", "url": URL, "types": ["a..b"]}, 422, "types: "),
    ({"name": "x", "url": URL, "retry": {"base": "never"}}, 422, "retry"),
    ({"name": "x", "url": URL, "filter": "@.a ="}, 422, "filter: "),
    ({"name": "x", "url": URL, "tenant": "t", "all_tenants": True}, 422, "tenant: "),
    ({"name": "taken", "url": URL}, 409, 'endpoint "taken" exists already'),
)


async def test_an_invalid_endpoint_is_rejected(
    database: Database, api: Api, subtests: pytest.Subtests
) -> None:
    await add_endpoint(database, "taken")
    for body, status, says in INVALID_ENDPOINTS:
        with subtests.test(body=body, status=status, says=says):
            response = await api.post("/v1/endpoints", body)
            assert response.status == status
            assert says in response.detail
            assert await fetchval(database, "SELECT count(*) FROM endpoint") == 1


async def test_an_update_changes_the_given_fields_and_null_is_the_default(
    database: Database, api: Api
) -> None:
    made = await add_endpoint(database, "shop", lanes=2, tenant="acme", filter="@.a == 1")
    response = await api.request(
        "PATCH",
        "/v1/endpoints/shop",
        {"name": "store", "timeout": 20, "filter": None, "types": ["a.*"]},
    )
    assert response.json == {
        "id": str(made.id),
        "name": "store",
        "changed": {
            "name": ["shop", "store"],
            "types": ["**", "a.*"],
            "filter": ["@.a == 1", "none"],
            "timeout": ["15s", "20s"],
        },
        "warnings": [],
        "ahead": None,
    }
    assert (await api.get("/v1/endpoints/shop")).status == 404
    reported = (await api.get("/v1/endpoints/store")).json["settings"]
    assert (reported["lanes"], reported["tenant"], reported["filter"]) == (2, "acme", None)
    again = await api.request("PATCH", "/v1/endpoints/store", {"timeout": "20s"})
    assert again.json["changed"] == {}
    assert await actors(database, "endpoint_updated") == ["token all"]
    assert await exceptions(database) == {}


INVALID_UPDATES = (
    ({"url": None}, 422),
    ({"url": "http://10.0.0.1/"}, 422),
    ({"lanes": 5000}, 422),
    ({"name": "other"}, 409),
)


async def test_an_invalid_update_is_rejected(
    database: Database, api: Api, subtests: pytest.Subtests
) -> None:
    await add_endpoint(database, "shop")
    await add_endpoint(database, "other")
    for body, status in INVALID_UPDATES:
        with subtests.test(body=body, status=status):
            assert (await api.request("PATCH", "/v1/endpoints/shop", body)).status == status
            assert await actors(database, "endpoint_updated") == []


async def test_endpoints_are_paused_and_resumed(database: Database, api: Api) -> None:
    await add_endpoint(database, "shop")
    paused = await api.post("/v1/endpoints/shop/pause", {"comment": "their database moves"})
    assert (paused.json["state"], paused.json["changed"]) == ("paused", True)
    row = (await api.get("/v1/endpoints/shop")).json["endpoint"]
    assert (row["state"], row["state_by"], row["state_comment"]) == (
        "paused",
        "token all",
        "their database moves",
    )
    assert (await api.post("/v1/endpoints/shop/pause")).json["changed"] is False
    assert (await api.post("/v1/endpoints/shop/enable")).status == 409
    resumed = await api.post("/v1/endpoints/shop/resume")
    assert (resumed.json["state"], resumed.json["changed"]) == ("active", True)
    assert await actors(database, "endpoint_resumed") == ["token all"]


async def test_endpoints_are_filtered_and_changed_together(database: Database, api: Api) -> None:
    for name in ("shop", "audit", "shop-2"):
        await add_endpoint(database, name, types=["order.*"] if name == "audit" else ["**"])
    page = (await api.get("/v1/endpoints", search="SHOP", limit=1)).json
    assert ([each["name"] for each in page["items"]], page["total"]) == (["shop"], 2)
    histories = await api.items("/v1/endpoint-histories", search="shop")
    assert [each["name"] for each in histories] == ["shop", "shop-2"]
    body = {"names": ["shop", "shop-2"], "comment": "they move"}
    planned = (await api.post("/v1/endpoints/pause", {**body, "dry_run": True})).json
    assert (planned["changed"], planned["unblocked"]) == (["shop", "shop-2"], 0)
    assert (await api.get("/v1/endpoints", condition="paused")).json["total"] == 0
    assert (await api.post("/v1/endpoints/pause", body)).json == {**planned, "dry_run": False}
    assert await actors(database, "endpoint_paused") == ["token all"] * 2
    paused = (await api.get("/v1/endpoints", condition="paused", type="order.paid")).json
    assert [each["name"] for each in paused["items"]] == ["shop", "shop-2"]
    assert {each["state_comment"] for each in paused["items"]} == {"they move"}
    for wrong in ({"names": []}, {"names": ["n"] * 201}, {}, {"all": True}):
        assert (await api.post("/v1/endpoints/pause", wrong)).status == 422, wrong
    assert (await api.post("/v1/endpoints/pause", {"names": ["nothing"]})).status == 404
    assert (await api.get("/v1/endpoints", condition="tired")).status == 422


async def test_a_disabled_endpoint_is_enabled(database: Database, api: Api) -> None:
    await add_endpoint(database, "shop")
    async with running(database, Network(lambda _: AttemptResult.completed(410, 0.001))):
        await publish(database, 1)
        state = "SELECT state = 'disabled' FROM endpoint"
        await until(lambda: fetchval(database, state), what="it to be disabled")
        assert (await api.post("/v1/endpoints/shop/resume")).status == 409
        enabled = await api.post("/v1/endpoints/shop/enable", {"comment": "a new address"})
    assert (enabled.json["state"], enabled.json["changed"]) == ("active", True)
    assert await actors(database, "endpoint_enabled") == ["token all"]


async def test_resuming_unblocks_blocked_lanes(database: Database, api: Api) -> None:
    await add_endpoint(database, "shop", on_dead_letter="block")
    network = Network(
        lambda sent: REFUSED if sent.body["data"] == 1 else AttemptResult.completed(200, 0.001)
    )
    async with running(database, network):
        await publish(database, 1, 2)
        blocked = "SELECT count(*) FROM lane_block"
        await until(lambda: fetchval(database, blocked), what="the lane to be blocked")
        assert (await api.post("/v1/endpoints/shop/resume")).json["unblocked"] == 1
        await all_ended(database)
    assert network.data() == [2]


async def test_a_secret_is_rotated(database: Database, api: Api) -> None:
    made = await add_endpoint(database, "shop")
    rotated = (await api.post("/v1/endpoints/shop/rotate-secret", {"overlap": "2h"})).json
    assert rotated["secret"] not in ("", made.secret)
    assert rotated["old_until"] is not None
    gone = (await api.post("/v1/endpoints/shop/rotate-secret", {"overlap": 0})).json
    assert (gone["live"], gone["old_until"]) == (1, None)
    assert (await api.post("/v1/endpoints/shop/rotate-secret", {"overlap": -1})).status == 422
    assert await actors(database, "endpoint_secret_rotated") == ["token all"] * 2


async def test_a_removal_with_pending_deliveries_requires_a_choice(
    database: Database, api: Api
) -> None:
    await add_endpoint(database, "idle")
    assert (await api.request("DELETE", "/v1/endpoints/idle")).json["state"] == "removed"
    await add_endpoint(database, "shop")
    assert (await api.post("/v1/endpoints/shop/pause")).status == 200
    async with running(database, Network()):
        await publish(database, 1, 2)
        made = "SELECT count(*) = 2 FROM delivery"
        await until(lambda: fetchval(database, made), what="the deliveries")
        kept = await api.request("DELETE", "/v1/endpoints/shop")
        assert (kept.status, "2 deliveries pending" in kept.detail) == (409, True)
        both = await api.request("DELETE", "/v1/endpoints/shop", dead_letter=True, drain=True)
        assert both.status == 422
        gone = await api.request("DELETE", "/v1/endpoints/shop", dead_letter=True)
        assert (gone.json["state"], gone.json["pending"]) == ("removing", 2)
        none = "SELECT count(*) = 0 FROM endpoint WHERE state <> 'removed'"
        await until(lambda: fetchval(database, none), what="the removal")


@pytest.mark.full
async def test_a_drain_is_polled_until_its_deliveries_are_done(
    database: Database, api: Api
) -> None:
    await add_endpoint(database, "shop")
    open_ = False

    def receive(_: Any) -> AttemptResult:
        return AttemptResult.completed(200 if open_ else 503, 0.001)

    retry = {"base_s": 0.02, "factor": 2.0, "cap_s": 0.1, "attempts_max": 10_000}
    await add_endpoint(database, "slow", retry=retry)
    network = Network(receive)
    async with running(database, network):
        await publish(database, 1)
        sent = lambda: any(s.url.endswith("slow") for s in network.sent)  # noqa: E731
        await until(sent, what="an attempt")
        waiting = await api.request("DELETE", "/v1/endpoints/slow", drain=True)
        assert (waiting.status, waiting.json["pending"]) == (202, 1)
        open_ = True

        async def removed() -> bool:
            response = await api.request("DELETE", "/v1/endpoints/slow", drain=True)
            return response.status == 200 and response.json["state"] == "removed"

        await until(removed, what="the removal")
    assert 1 in network.data()


async def test_a_test_delivery_returns_the_response(database: Database, api: Api) -> None:
    secret = (await add_endpoint(database, "shop", header_prefix="Acme-")).secret
    receiver = DevelopmentReceiver(secrets=(parse_secret(secret),), header_prefix="Acme-")
    async with receiver.serve() as url:
        await api.request("PATCH", "/v1/endpoints/shop", {"url": url})
        reported = (await api.post("/v1/endpoints/shop/test")).json
    assert (reported["outcome"], reported["url"]) == ("delivered", url)
    gone = (await api.post("/v1/endpoints/shop/test")).json
    assert (gone["outcome"], gone["response"]["failure"]) == ("retried", "connect")


async def test_a_preview_is_the_request_of_an_event(database: Database, api: Api) -> None:
    await add_endpoint(database, "shop", format="cloudevents-binary", headers={"X-Key": "hidden"})
    await publish(database, {"order": 7}, key="order-7")
    shown = (await api.get("/v1/endpoints/shop/preview", event="order-7")).json
    headers = dict(shown["headers"])
    assert (headers["ce-subject"], headers["X-Event-Key"]) == ("order-7", "order-7")
    assert {headers[name] for name in ("X-Key", "webhook-signature")} == {"***"}
    assert (shown["body"], shown["is_sequenced"]) == ('{"order": 7}', False)
    assert (await api.get("/v1/endpoints/shop/preview", event="order-8")).status == 404
    assert (await api.get("/v1/endpoints/shop/preview")).status == 422


@pytest.mark.full
async def test_concurrent_test_deliveries_are_limited_also_by_tenant(
    database: Database, api: Api
) -> None:
    tenants = {
        name: api.with_token(await make_token(database, name, tenant=name))
        for name in ("acme", "umbrella")
    }
    release = asyncio.Event()

    async def slow(connection: Connection) -> None:
        await connection.request()
        await release.wait()
        await connection.send(OK)
        await connection.closed_by_peer()  # A trial is of the whole way: none is kept.

    async with receiver(slow) as server, asyncio.TaskGroup() as asking:

        async def asked(by: Api, path: str, times: int) -> list[asyncio.Task[Responded]]:
            so_far = server.connections
            tasks = [asking.create_task(by.post(path)) for _ in range(times)]
            await until(lambda: server.connections == so_far + times, what="the test deliveries")
            return tasks

        paths = {}
        for name, by in tenants.items():
            await by.post("/v1/endpoints", {"name": f"{name}.shop", "url": server.url})
            paths[name] = f"/v1/endpoints/{name}.shop/test"
        under_way = await asked(tenants["acme"], paths["acme"], TENANT_MAX)
        refused = await tenants["acme"].post(paths["acme"])
        assert (refused.status, refused.headers["Retry-After"]) == (429, "5")
        assert "of this tenant" in refused.detail
        under_way += await asked(tenants["umbrella"], paths["umbrella"], 1)
        under_way += await asked(api, paths["acme"], CONCURRENT_MAX - TENANT_MAX - 1)
        refused = await api.post(paths["acme"])
        assert refused.status == 429
        release.set()
        for task in under_way:
            assert (await task).json["outcome"] == "delivered"
        assert (await tenants["acme"].post(paths["acme"])).status == 200


async def test_all_test_deliveries_share_a_transport(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[HttpTransport] = []

    def make(*args: Any, **options: Any) -> HttpTransport:
        made.append(HttpTransport(*args, **options))
        return made[-1]

    monkeypatch.setattr(endpoint_tester, "HttpTransport", make)
    await add_endpoint(database, "shop", url=URL)
    for response in await asyncio.gather(*[api.post("/v1/endpoints/shop/test") for _ in range(4)]):
        assert response.json["response"]["failure"] == "connect"
    assert len(made) == 1


async def test_a_test_delivery_ends_before_the_time_out_of_its_endpoint(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert endpoint_tester.TEST_S <= 30
    monkeypatch.setattr(endpoint_tester, "TEST_S", 0.2)

    async def never(connection: Connection) -> None:
        await connection.closed_by_peer()

    async with receiver(never) as server:
        await api.post("/v1/endpoints", {"name": "a", "url": server.url, "timeout": 60})
        reported = (await api.post("/v1/endpoints/a/test")).json["response"]
    assert (reported["failure"], reported["detail"]) == (
        "timeout",
        "no complete response within 0.2 s",
    )


ENDPOINT_ROUTES = (
    ("GET", ""),
    ("PATCH", ""),
    ("DELETE", ""),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/enable"),
    ("POST", "/rotate-secret"),
    ("POST", "/test"),
)


async def test_an_unknown_endpoint_is_not_found(
    database: Database, api: Api, subtests: pytest.Subtests
) -> None:
    await add_endpoint(database, "shop")
    for method, rest in ENDPOINT_ROUTES:
        with subtests.test(method=method, rest=rest):
            response = await api.request(
                method, f"/v1/endpoints/shopp{rest}", {} if method == "PATCH" else None
            )
            assert response.status == 404
            assert 'did you mean "shop"?' in response.detail


async def test_a_listing_is_complete_while_endpoints_are_added(
    database: Database, api: Api
) -> None:
    for n in range(7):
        await add_endpoint(database, f"e{n}")
    page = (await api.get("/v1/endpoints", limit=3)).json
    found = [row["name"] for row in page["items"]]
    await add_endpoint(database, "a-new-one")
    await add_endpoint(database, "z-new-one")
    while page["next"] is not None:
        page = (await api.get("/v1/endpoints", limit=3, after=page["next"])).json
        found += [row["name"] for row in page["items"]]
    assert found == [*(f"e{n}" for n in range(7)), "z-new-one"]


# ------------------------------------------------------------- declarations


async def test_all_endpoints_are_applied_in_one_request(database: Database, api: Api) -> None:
    await add_endpoint(database, "old")
    body = {
        "defaults": {"retry": "patient"},
        "endpoints": [{"name": "a", "url": URL, "headers": {"X-Key": "k"}}],
    }
    dry = (await api.request("PUT", "/v1/declaration", body, dry_run=True)).json
    assert (dry["dry_run"], dry["changes"], dry["not_in_the_file"]) == (True, 1, ["old"])
    assert await fetchval(database, "SELECT count(*) FROM endpoint") == 1
    done = (await api.request("PUT", "/v1/declaration", body, prune=True)).json
    assert [(s["action"], s["name"]) for s in done["endpoints"]] == [
        ("remove", "old"),
        ("add", "a"),
    ]
    assert done["endpoints"][1]["secret"].startswith("whsec_")
    (declared,) = await api.items("/v1/declaration")
    assert (declared["name"], declared["retry"], declared["headers"]) == (
        "a",
        "patient",
        {"X-Key": None},
    )
    again = await api.request("PUT", "/v1/declaration", {"endpoints": [declared]})
    assert again.json["changes"] == 0


INVALID_DECLARATIONS = (
    ({"endpoints": [{"name": "a"}]}, {}, "endpoints[0].url: is missing"),
    ({"endpoints": [{"name": "a", "url": "http://10.0.0.1/"}]}, {}, "endpoints[0].url: "),
    ({"endpoints": [], "more": 1}, {}, 'unknown field "more"'),
    ({"endpoints": []}, {"dead_letter": True}, "prune"),
)


async def test_an_invalid_declaration_is_rejected(api: Api, subtests: pytest.Subtests) -> None:
    for body, query, says in INVALID_DECLARATIONS:
        with subtests.test(body=body, query=query, says=says):
            response = await api.request("PUT", "/v1/declaration", body, **query)
            assert response.status == 422
            assert says in response.detail


# ------------------------------------------------- secrets, networks, certificates


async def test_a_certificate_is_stored_and_described_but_never_shown(
    database: Database, api: Api
) -> None:
    await add_endpoint(database, "shop")
    path, pem = "/v1/endpoints/shop/certificate", identity()
    reported = (await api.request("PUT", path, {"pem": pem})).json
    shown = await api.request("GET", "/v1/endpoints/shop")
    assert shown.json["certificate"] == reported["certificate"]
    assert reported["certificate"]["not_after"].endswith("Z")
    assert sorted(reported["certificate"]) == ["more", "not_after", "sha256", "subject"]
    assert "BEGIN" not in str(shown.json) + str(reported)
    wrong = await api.request("PUT", path, {"pem": pem.replace("PRIVATE KEY", "PUBLIC KEY")})
    assert wrong.status == 422
    assert wrong.detail.startswith("identity: ")
    removed = (await api.request("DELETE", path)).json
    assert removed["certificate"] is None
    assert await fetchval(database, "SELECT identity IS NULL FROM endpoint")
    kinds = await fetchval(
        database, "SELECT array_agg(kind ORDER BY id) FROM journal WHERE kind LIKE '%certificate%'"
    )
    assert kinds == ["endpoint_certificate_set", "endpoint_certificate_removed"]


async def test_an_ed25519_endpoint_shows_a_public_key(api: Api) -> None:
    body = {"name": "a", "url": URL, "ed25519": True}
    assert (await api.post("/v1/endpoints", body)).json["secret"].startswith("whpk_")
    # The kind of key stays unless the request names another one.
    for body, prefix in (({}, "whpk_"), ({"ed25519": False}, "whsec_"), ({}, "whsec_")):
        rotated = await api.post("/v1/endpoints/a/rotate-secret", {"overlap": 0, **body})
        assert rotated.json["secret"].startswith(prefix)
        (secret,) = (await api.get("/v1/endpoints/a")).json["secrets"]
        public = rotated.json["secret"] if prefix == "whpk_" else None
        assert secret["public_key"] == public


async def test_certificate_authorities_are_validated(api: Api) -> None:
    pem = trustme.CA().cert_pem.bytes().decode()
    made = await api.post("/v1/endpoints", {"name": "a", "url": URL, "ca": pem})
    assert made.status == 201
    broken = pem[:100] + pem[164:]
    for ca in (broken, "x"):
        refused = await api.request("PATCH", "/v1/endpoints/a", {"ca": ca})
        assert (refused.status, refused.detail[:4]) == (422, "ca: ")


async def test_a_tenant_token_cannot_open_a_network(database: Database, api: Api) -> None:
    tenant = api.with_token(await make_token(database, "acme", tenant="acme"))
    inside = "http://10.1.2.3:8080/hooks"
    body = {"name": "acme.a", "url": inside, "allow_networks": ["10.1.2.3"]}
    refused = await tenant.post("/v1/endpoints", body)
    assert refused.status == 422
    assert "a tenant token cannot open networks" in refused.detail
    made = await api.post("/v1/endpoints", {**body, "tenant": "acme"})
    assert made.status == 201, made.json
    # Where it goes in there is the operator's word, too; everything else is the tenant's.
    for change in (
        {"url": "http://10.1.2.3:9/"},
        {"allow_networks": ["10.0.0.0/8"]},
        {"allow_networks": None},
    ):
        refused = await tenant.request("PATCH", "/v1/endpoints/acme.a", change)
        assert refused.status == 422, change
    assert (await tenant.request("PATCH", "/v1/endpoints/acme.a", {"lanes": 2})).status == 200


@pytest.mark.full
async def test_no_endpoint_gets_a_hostile_url(database: Database, api: Api) -> None:
    await add_endpoint(database, "good")
    policy = EgressPolicy(["127.0.0.0/8"])  # As the API under test has it.
    refused = [url for url in hostile.URLS if policy.refusal_of_url(url)]
    assert len(refused) > 150
    for n, url in enumerate(refused):
        if n % 50 == 0:  # One token may not ask as much as this in a moment.
            api = api.with_token(await make_token(database, f"t{n}"))
        added = await api.post("/v1/endpoints", {"name": "x", "url": url})
        assert added.status == 422, url
        assert "url: " in added.detail, url
        changed = await api.request("PATCH", "/v1/endpoints/good", {"url": url})
        assert changed.status == 422, url
    assert await fetchval(database, "SELECT count(*) FROM endpoint") == 1


async def test_a_tenant_cannot_send_kept_headers_to_another_host(
    database: Database, api: Api
) -> None:
    tenant = api.with_token(await make_token(database, "acme", tenant="acme"))
    body = {"name": "acme.a", "url": URL, "tenant": "acme", "headers": {"X-Key": "hunter2"}}
    assert (await api.post("/v1/endpoints", body)).status == 201
    path, away = "/v1/endpoints/acme.a", "https://attacker.example.com/"
    for change in ({"url": away}, {"url": away, "headers": {"X-Key": None}}):
        refused = await tenant.request("PATCH", path, change)
        assert refused.status == 422
        assert "would receive the stored header X-Key" in refused.detail
    same = await tenant.request("PATCH", path, {"url": URL + "/other"})
    assert same.status == 200
    for headers in ({"X-Key": "mine"}, {}):
        moved = await tenant.request("PATCH", path, {"url": away, "headers": headers})
        assert moved.status == 200, moved.json


async def test_a_concurrent_rename_does_not_expose_another_tenants_endpoint(
    database: Database, api: Api
) -> None:
    tenant = api.with_token(await make_token(database, "acme", tenant="acme"))
    await add_endpoint(database, "acme.a", tenant="acme")
    await add_endpoint(database, "theirs", tenant="globex")
    async with (
        database.connection(server_settings={"search_path": "relay"}) as operator,
        routing_transaction(operator),
    ):
        rotated = asyncio.ensure_future(tenant.post("/v1/endpoints/acme.a/rotate-secret"))
        waits = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"
        await until(lambda: fetchval(database, waits), what="the tenant to wait")
        await operator.execute("UPDATE endpoint SET name = 'x' WHERE name = 'acme.a'")
        await operator.execute("UPDATE endpoint SET name = 'acme.a' WHERE name = 'theirs'")
    response = await rotated
    assert response.status == 404
    assert await fetchval(database, "SELECT count(*) FROM endpoint_secret") == 2
