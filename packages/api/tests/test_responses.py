"""Receiver responses are shown to operators only; tenants get the status and the time.

Every receiver response has a canary in its body, headers and error, and every route is requested
for every row.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from outbox.core.model.response import AttemptResult, Failure
from outbox.web.address import Address, parse_address
from outbox.web.serving import listen
from outbox.web.serving import serving as listening
from outbox_api.route import TenantAccess
from outbox_api.routes import ROUTES
from tests.support.api import make_token
from tests.support.relay import Network, Sent, add_endpoint, fetchval, publish, running
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

CANARY = "canary-9f31"
HEADERS = tuple((name, CANARY) for name in ("Server", "Location", "Via", "X-Request-Id", "Date"))
BODY = f"<h1>{CANARY}</h1>".encode()
RETRY = {"base_s": 0.02, "factor": 1.0, "cap_s": 0.1, "attempts_max": 10_000}
SHOWN = {"version", "status", "failure", "elapsed_ms"}


def script(sent: Sent) -> AttemptResult:
    """Respond with the canary in the body, the headers or an error."""
    kind = sent.url.rpartition("/")[2]
    match kind.split("-")[-1]:
        case "busy":
            return AttemptResult.completed(503, 0.01, headers=HEADERS, body=BODY, detail=CANARY)
        case "garbled":
            return AttemptResult.failed(Failure.PROTOCOL, f"bad status line {CANARY}", 0.01)
        case "inside":
            return AttemptResult.failed(Failure.EGRESS_REFUSED, f"{CANARY} leads to 10.0.0.5", 0.01)
        case "gone":
            return AttemptResult.completed(410, 0.01, headers=HEADERS, body=BODY, detail=CANARY)
        case "rejecting":
            return AttemptResult.completed(400, 0.01, headers=HEADERS, body=BODY, detail=CANARY)
    return AttemptResult.completed(200, 0.01, headers=HEADERS, body=BODY, detail=CANARY)


KINDS = ("well", "busy", "garbled", "inside", "gone", "rejecting")
READY = """
SELECT (SELECT count(DISTINCT endpoint_id) FROM dead_letter) >= 3
   AND (SELECT count(*) FROM attempt) >= 13
   AND (SELECT count(*) FROM endpoint WHERE state = 'disabled') = 2
   AND (SELECT count(*) FROM endpoint_health WHERE state = 'failing') >= 6
   AND (SELECT count(*) FROM lane_progress WHERE last_response IS NOT NULL) >= 6
"""


async def live_through(database: Database) -> None:
    for tenant in (None, "acme"):
        for kind in KINDS:
            name = f"{tenant or 'our'}-{kind}"
            await add_endpoint(database, name, tenant=tenant, retry=RETRY)
    await add_endpoint(database, "told", types=["outbox.**"], all_tenants=True)
    async with running(database, Network(script)):
        await publish(database, 1, key="k")
        await publish(database, 1, key="k", tenant="acme")
        await until(lambda: fetchval(database, READY), what="everything to have happened")


@asynccontextmanager
async def receiver() -> AsyncIterator[Address]:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(status=500, text=CANARY, headers={"Via": CANARY})

    application = web.Application()
    application.router.add_post("/", handle)
    async with listening(application, await listen(Address("127.0.0.1", 0))) as at:
        yield at


async def asked(api: Api, tenant: str | None) -> dict[str, bytes]:
    """The responses of all routes by path."""
    own = tenant or "our"
    sent = (await api.get("/v1/deliveries", key="k")).json["items"]
    letters = [row["id"] for row in await api.items("/v1/dead-letters", state="all")]
    places: dict[str, list[str]] = {
        "/v1/endpoints/{name}": [f"/v1/endpoints/{own}-{kind}" for kind in KINDS],
        "/v1/dead-letters/{id}": [f"/v1/dead-letters/{each}" for each in letters],
        "/v1/endpoints/{name}/history": [f"/v1/endpoints/{own}-{KINDS[0]}/history"],
        "/v1/endpoints/{name}/preview": [f"/v1/endpoints/{own}-{kind}/preview" for kind in KINDS],
        "/v1/endpoints/{name}/deliveries": [
            f"/v1/endpoints/{own}-{kind}/deliveries" for kind in KINDS
        ],
        "/v1/deliveries/{id}": [f"/v1/deliveries/{each['delivery']}" for each in sent],
        "/v1/trace/{id}": ["/v1/trace/k"],
        "/v1/schedules/{name}": [],
        "/v1/once/{key}": [],
        "/v1/replays/{id}": [],
        "/v1/quotas/{tenant}": [f"/v1/quotas/{own}"],
    }
    output = {}
    for route in ROUTES:
        if route.method != "GET" or route.scope == "operate":
            continue
        if tenant is not None and route.tenants is TenantAccess.SYSTEM:
            continue
        for path in places.get(route.path, [route.path]):
            query: dict[str, object] = {"payload": True} if "trace" in path else {}
            if path == "/v1/deliveries":
                query = {"key": "k"}
            if "preview" in path:
                query = {"event": "k"}
            response = await api.get(path, **query)
            assert response.status == 200, (path, response.raw)
            output[path] = response.raw
    assert len(letters) >= 2
    assert len(sent) >= len(KINDS)
    return output


READERS = (
    (None, ("read",)),
    (None, ("read", "publish")),
    ("acme", ("read",)),
    ("acme", ("read", "operate")),
)


async def test_only_operators_see_receiver_responses(
    database: Database, client: Api, subtests: pytest.Subtests
) -> None:
    await live_through(database)
    for n, (tenant, scopes) in enumerate(READERS):
        with subtests.test(tenant=tenant, scopes=scopes):
            api = client.with_token(
                await make_token(database, f"reader-{n}", scopes, tenant=tenant)
            )
            await reads_no_response(api, tenant)
    with subtests.test("an operator"):
        api = client.with_token(await make_token(database, "op", ("read", "operate")))
        output = await asked(api, None)
        received = {path for path, text in output.items() if CANARY.encode() in text}
        assert {"/v1/endpoints/our-busy", "/v1/endpoints/our-garbled", "/v1/trace/k"} <= received
        assert "/v1/status" in received
        assert any(path.startswith("/v1/dead-letters/") for path in received)
        assert any(path.startswith("/v1/deliveries/") for path in received)
    with subtests.test("operational events"):
        await contain_no_response(database)


async def reads_no_response(api: Api, tenant: str | None) -> None:
    """Check that no response of the API shows that of a receiver."""
    for path, output in (await asked(api, tenant)).items():
        assert CANARY.encode() not in output, path
        assert tenant is None or b"egress_refused" not in output, path
    own = tenant or "our"
    shown = (await api.get(f"/v1/endpoints/{own}-garbled")).json
    assert shown["health"]["last_response"]["failure"] == "protocol"
    assert shown["lanes"][0]["last_response"].keys() <= SHOWN
    # Which names lead inside is not for customers to find out.
    shown = (await api.get(f"/v1/endpoints/{own}-inside")).json
    failure = "egress_refused" if tenant is None else "connect"
    assert shown["health"]["last_response"]["failure"] == failure
    assert shown["lanes"][0]["last_response"]["failure"] == failure
    shown = (await api.get(f"/v1/endpoints/{own}-busy")).json
    assert shown["health"]["last_response"]["status"] == 503
    events = (await api.get("/v1/trace/k")).json["events"]
    attempts = {
        delivery["endpoint"]: delivery["attempts"][0]
        for event in events
        for delivery in event["deliveries"]
        if delivery["attempts"]
    }
    garbled = attempts[f"{own}-garbled"]
    assert (garbled["status"], garbled["error"], garbled["response"]) == (None, "protocol", None)
    assert attempts[f"{own}-inside"]["error"] == failure
    assert attempts[f"{own}-busy"]["status"] == 503
    assert any(
        "it responded with 503" in reason for event in events for reason in event["diagnosis"]
    )


async def contain_no_response(database: Database) -> None:
    """Check the operational events."""
    reported = "SELECT count(*) FROM outbox WHERE type LIKE 'outbox.%'"
    assert await fetchval(database, reported) >= 3
    leaks = "SELECT count(*) FROM outbox WHERE payload::text LIKE '%' || $1 || '%'"
    assert await fetchval(database, leaks, CANARY) == 0
    failures = """
        SELECT jsonb_object_agg(payload -> 'endpoint' ->> 'name', payload -> 'failure') FROM outbox
         WHERE type = 'outbox.endpoint.failing' AND payload -> 'endpoint' ->> 'name' LIKE '%-inside'
    """
    reported_of = json.loads(await fetchval(database, failures))
    assert reported_of == {"our-inside": "egress_refused", "acme-inside": "connect"}


@pytest.mark.parametrize("tenant", sampled([None, "acme"]))
async def test_a_test_delivery_shows_the_response_to_operators_only(
    database: Database, client: Api, tenant: str | None
) -> None:
    async with receiver() as at:
        await add_endpoint(database, url=at.url, tenant=tenant)
        secret = await make_token(database, "op", ("read", "operate"), tenant=tenant)
        response = await client.with_token(secret).post("/v1/endpoints/shop/test")
    assert (response.status, response.json["response"]["status"]) == (200, 500)
    assert response.json["outcome"] == "retried"
    assert (response.json["meaning"] is None) == (tenant is not None)
    assert (CANARY.encode() in response.raw) == (tenant is None)


# ---------------------------------------------------------------- other sites


async def test_a_cross_site_form_post_is_rejected(database: Database, api: Api) -> None:
    """There are no cookies, and content types that a form can send are rejected."""
    body = b'{"type": "a.b"}'
    for content_type in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
    ):
        headers = {"Content-Type": content_type, "Origin": "https://evil.example"}
        reported = await api.with_token(None).post("/v1/events", data=body, headers=headers)
        assert reported.status == 401
        reported = await api.post("/v1/events", data=body, headers=headers)
        assert reported.status == 415
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 0


async def test_no_response_sets_a_cookie_allows_cross_origin_reads_or_framing(api: Api) -> None:
    responses = [
        await api.get("/v1/me"),
        await api.get("/v1/endpoints"),
        await api.get("/openapi.json"),
        await api.get("/nowhere"),
        await api.request("DELETE", "/v1/endpoints"),
        await api.post("/v1/events", {"xyz": 1}),
        await api.with_token(None).get("/v1/me"),
        await api.request("OPTIONS", "/v1/events", headers={"Origin": "https://evil.example"}),
        await api.request("GET", "/openapi.json", headers={"Host": "evil.example"}),
    ]
    for response in responses:
        assert "Set-Cookie" not in response.headers
        assert not any(name.startswith("Access-Control") for name in response.headers)
        assert response.headers["X-Frame-Options"] == "DENY"
        assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]
        assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    async with api.session.get(f"{api.url}/") as page:
        assert page.headers["X-Frame-Options"] == "DENY"
        assert "script-src 'self'" in page.headers["Content-Security-Policy"]
        assert "unsafe" not in page.headers["Content-Security-Policy"]
        assert "Set-Cookie" not in page.headers


@pytest.mark.parametrize("sent", [b"1\r\n{\r\n", b"1\r\n{\r\nzz\r\n"], ids=["late", "undecodable"])
async def test_a_body_that_is_not_complete_in_time_is_a_408(
    database: Database, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    from outbox_api import request_body
    from tests.support.api import serving

    monkeypatch.setattr(request_body, "BODY_TIMEOUT_S", 0.3)
    secret = await make_token(database)
    async with serving(database) as api:
        at = parse_address(api.url.removeprefix("http://"))
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(
            f"POST /v1/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\n"
            "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
            "Expect: 100-continue\r\n\r\n".encode()
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(sent)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        assert b"urn:outbox:problem:body-late" in await reader.read()
        writer.close()
