"""Paths that name nothing that can exist, and methods that a path does not have."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from outbox.web.address import parse_address
from outbox_api.problem import NOT_STORABLE
from outbox_api.routes import ROUTES
from tests.support.api import make_token, serving

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "SEARCH")
NOT_STORED = ("%00", "a%00b")
OTHERS = (
    "%01",
    "%1F",
    "%7F",
    "%0D%0A",
    "%zz",
    "%",
    "%FF",
    "%C3%28",
    "%ED%A0%80",
    "%2F",
    "%2e%2e",
    "%C2%85",
    "?",
)
"""Control characters, encodings that are not ones, a slash, and an empty name."""


def _routes_by_path() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for route in ROUTES:
        found[route.path] |= {route.method, "HEAD"} if route.method == "GET" else {route.method}
    return found


async def test_every_method_that_a_path_does_not_have_is_a_405_with_those_that_it_has(
    api: Api,
) -> None:
    for path, methods in _routes_by_path().items():
        for method in METHODS:
            if method in methods:
                continue
            response = await api.request(method, path.replace("{", "").replace("}", ""))
            assert response.status == 405, (method, path)
            assert response.headers["Allow"] == ", ".join(sorted(methods)), (method, path)


@pytest.mark.parametrize("word", ["pause", "resume", "enable"])
async def test_no_endpoint_gets_the_name_of_a_path_of_its_own(api: Api, word: str) -> None:
    url = "http://127.0.0.1:9/"
    response = await api.post("/v1/endpoints", {"name": word, "url": url})
    assert (response.status, "path of an action" in response.detail) == (422, True)
    assert (await api.post("/v1/endpoints", {"name": "shop", "url": url})).status == 201
    response = await api.request("PATCH", "/v1/endpoints/shop", {"name": word})
    assert (response.status, "path of an action" in response.detail) == (422, True)


async def test_a_name_in_a_path_is_stored_or_refused_by_a_problem_of_ours(
    database: Database,
) -> None:
    """Never by an exception of the framework or of the driver."""
    secret = await make_token(database)
    async with serving(database, api_rate_max=100_000.0) as anonymous:
        await _require_problems(anonymous.with_token(secret))


async def _require_problems(api: Api) -> None:
    for route in ROUTES:
        if not route.parameters:
            continue
        before, _, after = route.path.partition(f"{{{route.parameters[0]}}}")
        query = {"event": "x"} if after == "/preview" else {}
        for name in (*NOT_STORED, *OTHERS):
            body = dict(route.bodies[0].example or {"pem": "x"}) if route.bodies else None
            response = await api.request(route.method, f"{before}{name}{after}", body, **query)
            if response.status == 200:  # A tenant may have any name.
                assert (route.operation_id, name in NOT_STORED) == ("get_quotas_tenant", False)
                continue
            assert response.status in (400, 404, 405, 422), (route.operation_id, name, response.raw)
            assert "Error" not in response.detail, response.detail
            if name in NOT_STORED:
                assert (response.status, response.detail) == (400, NOT_STORABLE), route.operation_id


async def test_a_nul_in_a_body_or_a_query_is_the_same_problem(api: Api) -> None:
    for verb in ("pause", "resume", "enable"):
        response = await api.post(f"/v1/endpoints/{verb}", {"names": ["a\0b"]})
        assert (response.status, response.detail) == (400, NOT_STORABLE), verb
    response = await api.get("/v1/endpoints", search="\0")
    assert (response.status, response.detail) == (400, NOT_STORABLE)


@pytest.mark.parametrize(
    "target", [b"/v1/endpoints/\x00", b"/v1/endpoints/\x7f", b"/v1/\xff", b"v1"]
)
async def test_a_target_that_is_not_one_is_no_500(api: Api, target: bytes) -> None:
    at = parse_address(api.url.removeprefix("http://"))
    reader, writer = await asyncio.open_connection(at.host, at.port)
    token = f"Authorization: Bearer {api.secret}\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    writer.write(b"GET " + target + b" HTTP/1.1\r\n" + token.encode())
    status = await reader.readline()
    assert status.split()[1] in (b"400", b"404"), status
    writer.close()
