"""What the response to one request costs the relay, over a database with costly data.

A tenant makes its own rows costly, within their limits: settings of endpoints, comments, schedules,
responses of its receivers.  Each GET operation of the OpenAPI document is walked page by page, with
the largest limit that it accepts, with a system token and with a token of the tenant.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import orjson
import pytest

from outbox.core.model import endpoint_config
from outbox.operations.apply import apply_file
from outbox.operations.page_bytes import PAGE_BYTES_MAX
from outbox_api.route import COMMENT_CHARS_MAX, LIMIT_MAX, TenantAccess
from outbox_api.routes import ROUTES
from outbox_api.tenancy import stored_key
from tests.support.api import api_document, make_token, serving
from tests.support.costly_rows import CA, ENDPOINT, KEY, ONCE, SCHEDULE, TENANT, fill
from tests.support.costs import connected_client, only_on_linux
from tests.support.relay import add_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox_api.route import Route
    from tests.support.api import Api
    from tests.support.costs import Costs
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

PAGES_MAX = 2
"""Pages that are read of each listing: they are alike."""
PATHS = {
    "/v1/endpoints/{name}": ENDPOINT.format(0),
    "/v1/endpoints/{name}/history": ENDPOINT.format(0),
    "/v1/endpoints/{name}/preview": ENDPOINT.format(0),
    "/v1/trace/{id}": KEY,
    "/v1/schedules/{name}": SCHEDULE.format(1),
    "/v1/once/{key}": ONCE.format(1),
}
"""Values of path parameters; an id is 1."""
QUERIES = {"event": (KEY,), "payload": ("true", "false"), "revoked": ("true",), "state": ("all",)}
"""Values with which a response has the most rows, besides the largest limits."""
LONG = ("dead-letters", "endpoints", "events", "journal", "once", "replays", "schedules")
"""Listings with more rows than a page."""
EMPTY = {
    ("/v1/live", "samples"): "a tenant does not see what is of all endpoints",
    ("/v1/endpoints/{name}", "ownership_history"): "a tenant does not see relays",
}
"""Lists that may be empty, and why."""


def _reads() -> Iterator[tuple[Route, dict[str, str]]]:
    """Every GET operation of the OpenAPI document, with its costliest queries."""
    paths = api_document()["paths"]
    for route in (each for each in ROUTES if each.method == "GET"):
        values = {}
        for each in paths[route.path]["get"].get("parameters", ()):
            name, schema = each["name"], each["schema"]
            if "maximum" in schema and each["in"] == "query" and name != "before":
                values[name] = (str(schema["maximum"]),)
            elif name in QUERIES and (name != "state" or "all" in str(schema)):
                values[name] = QUERIES[name]
        for query in product(*values.values()):
            yield route, dict(zip(values, query, strict=True))


async def test_a_page_of_large_settings_is_shorter_and_the_next_one_continues(
    database: Database, api: Api
) -> None:
    names = [f"n{n:02}" for n in range(40)]
    declared = [{"name": name, "url": "https://e.example/", "ca": CA} for name in names]
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        parsed = endpoint_config.parse_file({"endpoints": declared})
        await apply_file(connection, "relay", parsed, actor="ann")
    page = (await api.get("/v1/declaration", limit=LIMIT_MAX)).json
    assert page["next"] == page["items"][-1]["name"]
    assert abs(len(page["items"]) - PAGE_BYTES_MAX / len(CA)) < 1
    exported = await api.items("/v1/declaration", limit=LIMIT_MAX)
    assert [(each["name"], each["ca"]) for each in exported] == [(name, CA) for name in names]
    # The listing has no certificates.
    page = (await api.get("/v1/endpoints", limit=LIMIT_MAX)).json
    assert [each["name"] for each in page["items"]] == names
    assert page["next"] is None


async def test_a_comment_is_limited(database: Database, api: Api) -> None:
    await add_endpoint(database)
    path = "/v1/endpoints/shop/pause"
    refused = await api.post(path, {"comment": "c" * (COMMENT_CHARS_MAX + 1)})
    assert (refused.status, refused.detail[:8]) == (422, "comment:")
    assert (await api.post(path, {"comment": "c" * COMMENT_CHARS_MAX})).status == 200


@pytest.mark.full
@pytest.mark.one_major
@only_on_linux
@pytest.mark.parametrize("large", [True, False], ids=["large values", "many values"])
async def test_no_response_pauses_the_relay_or_fills_its_memory(
    database: Database, costs: Costs, large: bool
) -> None:
    await fill(database, large=large)
    tokens = {
        None: await make_token(database),
        TENANT: await make_token(database, "own", tenant=TENANT),
    }
    async with serving(database, api_rate_max=100_000.0) as api:
        for tenant, token in tokens.items():
            walk = _Walk(api.url, token, tenant, costs)
            for route, query in _reads():
                await asyncio.to_thread(walk.read, route, query)
            assert walk.continued >= {f"/v1/{each}" for each in LONG}
    costs.check()


@dataclass
class _Walk:
    """Reads operations page by page with one token."""

    url: str
    token: str
    tenant: str | None
    costs: Costs
    continued: set[str] = field(default_factory=set)
    """The listings with a next page."""

    def read(self, route: Route, query: dict[str, str]) -> None:
        may_call = self.tenant is None or route.tenants is not TenantAccess.SYSTEM
        for page in range(PAGES_MAX):
            name = f"{'tenant' if self.tenant else 'system'} {route.path} {query} page {page}"
            status, body = self._measure(name, self._path(route.path), query)
            assert status == (200 if may_call else 403), (name, status, body)
            if not may_call:
                return
            for field_name, value in body.items():
                assert value != [] or (route.path, field_name) in EMPTY, (name, field_name)
            if body.get("next") is None:
                return
            self.continued.add(route.path)
            query = query | {"after": body["next"]}

    def _path(self, template: str) -> str:
        value = PATHS.get(template, "1")
        if template.startswith("/v1/once/") and self.tenant is None:
            value = stored_key(TENANT, value)
        return re.sub(r"{\w+}", quote(value, safe=""), template)

    def _measure(self, name: str, path: str, query: dict[str, str]) -> tuple[int, Any]:
        def send() -> tuple[int, Any]:
            with connected_client(self.url) as client:
                headers = {"Authorization": f"Bearer {self.token}"}
                client.request("GET", f"{path}?{urlencode(query)}", headers=headers)
                response = client.getresponse()
                return response.status, orjson.loads(response.read())

        return self.costs.measure(name, send)
