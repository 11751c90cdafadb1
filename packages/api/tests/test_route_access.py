"""Access to the API: the expected status of every route for every caller.

`TABLE` has at least one row for each route.  A row is one request, in which `{endpoint}`,
`{letter}` and other names stand for objects, and its statuses.  The callers:

no token, unknown token     401 on every route
read, publish, operate      a token with this scope alone and without a tenant, for objects that
                            do not exist: 403 on routes that need another scope
own                         a token of the tenant acme, for acme's objects
other                       the same token for objects of another tenant, for endpoints of all
                            tenants, and for objects that do not exist; all responses are equal
system                      a token without a tenant, for the objects of the other tenant: shows
                            that the requests of `other` name objects that exist
"""

from __future__ import annotations

import os
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from outbox_api import rate_limit
from outbox_api.routes import ROUTES
from outbox_api.tenancy import NOT_OWNED
from outbox_api.token_bucket import Allowance
from tests.support.api import ALL, make_token, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from outbox.core.model.api_token import Scope
    from packages.api.tests.two_tenants import World
    from tests.support.api import Api, AttemptResult
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

URL = "http://127.0.0.1:9/"
UUID = "00000000-0000-4000-8000-000000000000"
UNKNOWN_TOKEN = "obx_" + "A" * 43


@dataclass(frozen=True)
class Objects:
    """The objects that requests name; of the other tenant, all names contain "globex"."""

    tenant: str = "nobody"
    endpoint: str = "nobody"
    removable: str = "nobody"
    """Endpoint that a request removes."""
    schedule: str = "nobody"
    token: str = "nobody"
    once: str = "nobody"
    event: str = UUID
    published: str = UUID
    """Event published with an idempotency key and not sequenced."""
    waits: str = UUID
    """Future event."""
    delivery: str = UUID
    lane: str = "000000000000-1-0"
    outbox_id: int = 4_000_000
    letter: int = 4_000_000
    job: int = 4_000_000


MISSING = Objects()


@dataclass(frozen=True)
class Row:
    """One request to a route, and the status for each caller; None: not sent for this caller."""

    route: str
    scope: Scope | None
    own: int | None = None
    other: int | None = None
    missing: int | None = None
    """For a token without a tenant that has the scope."""
    system: int | None = None
    body: Any = None
    query: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""
    """The path with names of `Objects`; by default that of the route."""
    changes: bool = False
    """The request of a token without a tenant changes rows of the other tenant."""
    hides: bool = False
    """The response to a token without a tenant does not name the other tenant's objects."""

    @property
    def method(self) -> str:
        return self.route.split()[0]

    def request(self, objects: Objects) -> tuple[str, Any, dict[str, Any]]:
        """Path, body and query of the request for these objects."""
        template = self.path or self.route.split()[1]
        resource = template.split("/")[2]
        path = template.replace("{name}", NAMES.get(resource, "")).replace("{key}", "{once}")
        path = path.replace("{id}", IDS.get(resource, ""))
        return path.format_map(vars(objects)), fill(self.body, objects), fill(self.query, objects)

    def names_an_endpoint(self) -> bool:
        return "{endpoint}" in str((self.path, self.body, self.query)) or (
            not self.path and self.route.split()[1].startswith("/v1/endpoints/{name}")
        )


NAMES = {"endpoints": "{endpoint}", "schedules": "{schedule}", "tokens": "{token}"}
IDS = {
    "trace": "{event}",
    "deliveries": "{delivery}",
    "dead-letters": "{letter}",
    "replays": "{job}",
}


def fill(template: Any, objects: Objects) -> Any:
    """Replace the names of objects in a body or query."""
    if isinstance(template, dict):
        return {name: fill(value, objects) for name, value in template.items()}
    if isinstance(template, list):
        return [fill(each, objects) for each in template]
    if isinstance(template, str):
        for name, value in vars(objects).items():
            if template == f"{{{name}}}":
                return value
        return template.format_map(vars(objects))
    return template


def everyone(route: str, scope: Scope | None, **options: Any) -> Row:
    """A listing, or a response without objects: restricted to the caller's own."""
    statuses = {"own": 200, "other": 200, "missing": 200, "system": 200}
    return Row(route, scope, **statuses | options)


def owner(route: str, scope: Scope, status: int = 200, **options: Any) -> Row:
    """A request for an object that must be the caller's own."""
    statuses = {"own": status, "other": 404, "missing": 404, "system": status}
    return Row(route, scope, **statuses | options)


def not_for_tenants(route: str, scope: Scope, **options: Any) -> Row:
    return Row(route, scope, **{"own": 403, "other": 403, "missing": 200, "system": 200} | options)


def tenants_only(route: str, scope: Scope, own: int | None, other: int, **options: Any) -> Row:
    """A request that a token without a tenant does not repeat."""
    return Row(route, scope, own=own, other=other, **options)


ENDPOINT = "/v1/endpoints/{name}"
BOTH = (True, False)
ONE, TWO = ["{endpoint}"], ["acme-shop", "{endpoint}"]
CHANGING = (("pause", ONE, False), ("resume", ONE, False), ("resume", TWO, False))
"""Changes of several endpoints that are not without effect; a resumed endpoint retries at once."""
SAME_KEY = "/v1/trace/same-key"

# In this order: requests that remove what others name are the last ones.
TABLE: tuple[Row, ...] = (
    everyone("GET /v1/me", None, hides=True),
    not_for_tenants("GET /v1/status", "read"),
    everyone("GET /v1/endpoint-statuses", "read"),
    not_for_tenants("GET /v1/replicas", "read", hides=True),
    not_for_tenants("GET /v1/doctor", "read"),
    not_for_tenants("POST /v1/verify", "operate"),
    not_for_tenants("POST /v1/resequence", "operate"),
    everyone("GET /v1/live", "read"),
    everyone("GET /v1/history", "read", hides=True),
    everyone("GET /v1/endpoint-settings", "read", hides=True),
    everyone("GET /v1/journal", "read"),
    owner("GET /v1/journal", "read", query={"endpoint": "{endpoint}"}),
    # ---- endpoints
    everyone("GET /v1/endpoints", "read"),
    everyone("GET /v1/endpoints", "read", query={"tenant": "{tenant}"}),
    everyone("GET /v1/endpoint-histories", "read"),
    everyone("GET /v1/endpoint-histories", "read", query={"tenant": "{tenant}"}),
    Row(
        "POST /v1/endpoints",
        "operate",
        *(201, 422, 201, 201),
        body={"name": "acme.of-{tenant}", "url": URL, "tenant": "{tenant}"},
        changes=True,
    ),
    tenants_only(
        "POST /v1/endpoints",
        "operate",
        422,
        422,
        body={"name": "acme.all-{tenant}", "url": URL, "all_tenants": True},
    ),
    Row(
        "POST /v1/endpoints",
        "operate",
        own=422,
        other=422,
        system=409,
        body={"name": "{endpoint}", "url": URL},
    ),
    owner(f"GET {ENDPOINT}", "read"),
    owner(f"GET {ENDPOINT}/history", "read", hides=True),
    owner(f"GET {ENDPOINT}/preview", "read", query={"event": "same-key"}),
    *(
        owner(
            f"GET {ENDPOINT}/preview",
            "read",
            path="/v1/endpoints/acme-shop/preview",
            query={"event": event},
        )
        for event in ("{event}", "{delivery}")
    ),
    owner(f"POST {ENDPOINT}/skip", "operate", 409, body={"lane": "{lane}", "sequence": 1}),
    owner(f"POST {ENDPOINT}/refill", "operate", 409),
    owner(f"POST {ENDPOINT}/adopt", "operate", 409),
    owner(f"POST {ENDPOINT}/test", "operate", hides=True),
    owner(f"POST {ENDPOINT}/pause", "operate", changes=True),
    owner(f"POST {ENDPOINT}/resume", "operate", changes=True),
    owner(f"POST {ENDPOINT}/enable", "operate", 409),
    *(
        owner(
            f"POST /v1/endpoints/{action}",
            "operate",
            body={"names": names, "dry_run": dry},
            changes=(action, names, dry) in CHANGING,
        )
        for action in ("pause", "resume", "enable")
        for names in (ONE, TWO)
        for dry in BOTH
    ),
    owner(f"POST {ENDPOINT}/rotate-secret", "operate", changes=True),
    owner(f"PUT {ENDPOINT}/certificate", "operate", 422, missing=422, body={"pem": "none"}),
    owner(f"DELETE {ENDPOINT}/certificate", "operate"),
    owner(f"PUT {ENDPOINT}/credentials", "operate", 422, body={"credentials": "user:secret"}),
    owner(f"DELETE {ENDPOINT}/credentials", "operate", 422),
    owner(f"PATCH {ENDPOINT}", "operate", body={"lanes": 2}, changes=True),
    *(
        tenants_only(
            f"PATCH {ENDPOINT}", "operate", None, 422, path="/v1/endpoints/acme-shop", body=body
        )
        for body in (
            {"tenant": "{tenant}"},
            {"tenant": None, "all_tenants": True},
            {"tenant": None},
        )
    ),
    # ---- events
    Row(
        "POST /v1/events",
        "publish",
        *(201, 422, 201, 201),
        body={"type": "a.b", "tenant": "{tenant}"},
        changes=True,
    ),
    Row(
        "POST /v1/events",
        "publish",
        *(201, 422, 201, 201),
        body={"events": [{"type": "a.b", "tenant": "{tenant}"}]},
        changes=True,
    ),
    everyone("GET /v1/events", "read"),
    everyone("GET /v1/events", "read", query={"key": "same-key"}),
    Row(
        "GET /v1/events",
        "read",
        *(200, 422, 200, 200),
        query={"tenant": "{tenant}"},
    ),
    *(
        owner("GET /v1/trace/{id}", "read", path=f"/v1/trace/{{{text}}}")
        for text in ("event", "published", "waits", "delivery", "once", "outbox_id")
    ),
    everyone("GET /v1/trace/{id}", "read", missing=404, path=SAME_KEY, query={"payload": True}),
    owner("GET /v1/trace/{id}", "read", path=SAME_KEY, query={"endpoint": "{endpoint}"}),
    Row(
        "GET /v1/deliveries",
        "read",
        *(200, 422, 200, 200),
        query={"tenant": "{tenant}"},
    ),
    everyone("GET /v1/deliveries", "read", query={"key": "same-key"}),
    owner("GET /v1/deliveries", "read", query={"event": "{event}"}),
    owner("GET /v1/deliveries/{id}", "read"),
    owner(f"GET {ENDPOINT}/deliveries", "read"),
    owner(f"GET {ENDPOINT}/deliveries", "read", query={"failed": True}),
    everyone("GET /v1/future-events", "read"),
    everyone("GET /v1/future-events", "read", query={"held": True}, hides=True),
    Row(
        "GET /v1/future-events",
        "read",
        *(200, 422, 200, 200),
        query={"tenant": "{tenant}"},
    ),
    # ---- idempotency keys
    everyone("GET /v1/once", "read"),
    everyone("GET /v1/once", "read", query={"prefix": "{tenant}"}),
    owner("GET /v1/once/{key}", "read"),
    owner("POST /v1/once/{key}/reset", "operate", changes=True),
    # ---- replays and dead letters
    everyone("GET /v1/replays", "read", query={"state": "all"}),
    owner("GET /v1/replays/{id}", "read"),
    *(
        owner(
            "POST /v1/replays",
            "operate",
            200 if dry else 201,
            body={"endpoint": "{endpoint}", "since": "1h", "dry_run": dry},
            changes=not dry,
        )
        for dry in BOTH
    ),
    # The event must be the caller's own, too.
    owner(
        "POST /v1/replays",
        "operate",
        body={"endpoint": "acme-shop", "events": ["{event}"], "dry_run": True},
    ),
    owner("POST /v1/replays/{id}/abort", "operate", changes=True),
    *(
        row
        for path in ("/v1/dead-letters", "/v1/dead-letters/counts")
        for row in (
            everyone(f"GET {path}", "read"),
            owner(f"GET {path}", "read", query={"endpoint": "{endpoint}"}),
            everyone(f"GET {path}", "read", query={"tenant": "{tenant}"}),
        )
    ),
    owner("GET /v1/dead-letters/{id}", "read"),
    *(
        row
        for dry in BOTH
        # The second one finds dead letters that are being replayed.
        for action, status in (("replay", 200), ("discard", 200 if dry else 409))
        for row in (
            owner(
                f"POST /v1/dead-letters/{action}",
                "operate",
                status,
                body={"ids": ["{letter}"], "dry_run": dry},
                changes=not dry and action == "replay",
            ),
            owner(
                f"POST /v1/dead-letters/{action}",
                "operate",
                body={"endpoint": "{endpoint}", "dry_run": dry},
            ),
            Row(
                f"POST /v1/dead-letters/{action}",
                "operate",
                *(200, 422, 200, 200),
                body={"tenant": "{tenant}", "dry_run": dry},
                # Also dead letters of an endpoint of all tenants.
                changes=not dry,
            ),
            tenants_only(
                f"POST /v1/dead-letters/{action}",
                "operate",
                200,
                200,
                body={"all": True, "dry_run": dry},
            ),
        )
    ),
    # ---- schedules
    everyone("GET /v1/schedules", "read"),
    Row(
        "POST /v1/schedules",
        "operate",
        *(201, 422, 201, 201),
        body={"name": "acme.of-{tenant}", "cron": "@daily", "type": "a.b", "tenant": "{tenant}"},
        changes=True,
    ),
    *(
        Row(
            "POST /v1/schedules",
            "operate",
            own=own,
            other=422,
            system=system,
            body={"name": "{schedule}", "cron": "@daily", "type": "a.b", **options},
            changes=system == 201,
        )
        for options, own, system in (({}, 422, 409), ({"replace": True}, 201, 201))
    ),
    owner("GET /v1/schedules/{name}", "read"),
    owner("POST /v1/schedules/{name}/pause", "operate", changes=True),
    owner("POST /v1/schedules/{name}/resume", "operate", changes=True),
    owner("POST /v1/schedules/{name}/run-now", "operate", 201, changes=True),
    owner("DELETE /v1/schedules/{name}", "operate", changes=True),
    # ---- removals
    *(
        Row(
            "POST /v1/erase",
            "operate",
            # It would erase responses of endpoints of all tenants to its events, too.
            *(200 if dry else None, 422, 200, 200),
            body={"tenant": "{tenant}", "dry_run": dry},
            changes=not dry,
        )
        for dry in BOTH
    ),
    *(
        Row(
            "POST /v1/erase",
            "operate",
            own=422,
            other=422,
            system=200,
            body={"key": "same-key", "dry_run": dry},
            changes=not dry,
        )
        for dry in BOTH
    ),
    *(
        Row(
            f"DELETE {ENDPOINT}",
            "operate",
            own=own,
            other=404,
            missing=404,
            system=system,
            path="/v1/endpoints/{removable}",
            query=query,
            changes=system == 200,
        )
        for query, own, system in (
            ({"drain": True}, None, None),
            ({"dead_letter": True}, 200, None),
            ({}, None, 200),
        )
    ),
    not_for_tenants("GET /v1/declaration", "operate"),
    not_for_tenants("PUT /v1/declaration", "operate", body={"endpoints": []}),
    Row(
        "PUT /v1/declaration",
        "operate",
        own=403,
        other=403,
        system=200,
        body={"endpoints": []},
        query={"prune": True, "dead_letter": True},
        changes=True,
    ),
    not_for_tenants("GET /v1/quotas", "read", hides=True),
    not_for_tenants(
        "PUT /v1/quotas", "operate", body={"tenant": "{tenant}", "lanes": 99}, hides=True
    ),
    owner("GET /v1/quotas/{tenant}", "read", missing=200),
    not_for_tenants("DELETE /v1/quotas/{tenant}", "operate"),
    not_for_tenants("GET /v1/tokens", "operate"),
    not_for_tenants(
        "POST /v1/tokens",
        "operate",
        missing=201,
        system=201,
        body={"name": "of-{tenant}", "scopes": ["operate"]},
        changes=True,
    ),
    not_for_tenants("DELETE /v1/tokens/{name}", "operate", missing=404, changes=True),
)
NUMBERED = tuple((f"{n} {row.route}", row) for n, row in enumerate(TABLE))


def test_every_route_has_a_row() -> None:
    routes = [f"{route.method} {route.path}" for route in ROUTES]
    assert {row.route for row in TABLE} == set(routes)


async def send(api: Api, row: Row, objects: Objects) -> AttemptResult:
    path, body, query = row.request(objects)
    return await api.request(row.method, path, body, **query)


@pytest.mark.parametrize("secret", [None, UNKNOWN_TOKEN], ids=["none", "unknown"])
async def test_a_caller_without_a_valid_token(
    database: Database,
    subtests: pytest.Subtests,
    monkeypatch: pytest.MonkeyPatch,
    secret: str | None,
) -> None:
    monkeypatch.setattr(rate_limit, "FAILURES", Allowance(per_s=1000.0, burst=10_000))
    async with serving(database) as client:
        for name, row in NUMBERED:
            with subtests.test(name):
                assert (await send(client.with_token(secret), row, MISSING)).status == 401


async def test_a_caller_with_one_scope(
    database: Database, client: Api, subtests: pytest.Subtests
) -> None:
    callers = {
        scope: client.with_token(await make_token(database, scope, (scope,))) for scope in ALL
    }
    for name, row in NUMBERED:
        for scope, api in callers.items():
            is_allowed = row.scope in (None, scope)
            if is_allowed and row.missing is None:
                continue
            with subtests.test(name, scope=scope):
                response = await send(api, row, MISSING)
                if is_allowed:
                    assert response.status == row.missing
                else:
                    assert response.status == 403
                    assert response.json["type"] == "urn:outbox:problem:scope-missing"
                    assert f'scope="{row.scope}"' in response.headers["WWW-Authenticate"]


def objects_of(world: World, tenant: str) -> Objects:
    ids = world.ids[tenant]
    return Objects(
        tenant=tenant,
        endpoint=f"{tenant}-shop",
        removable="acme.of-acme" if tenant == "acme" else f"{tenant}-shop",
        schedule=f"{tenant}-nightly",
        token=f"{tenant}-token",
        once=f"{tenant}-once",
        outbox_id={"acme": 1, "globex": 2}[tenant],
        **{n: ids[n] for n in ("event", "published", "waits", "delivery", "lane", "letter", "job")},
    )


async def test_a_token_of_a_tenant_and_one_without(world: World, subtests: pytest.Subtests) -> None:
    await make_token(world.database, "globex-token", tenant="globex")
    await world.acme.post("/v1/events", {"type": "a.b", "once": "acme-once"})
    acme, globex = objects_of(world, "acme"), objects_of(world, "globex")
    before = await world.theirs()
    for name, row in NUMBERED:
        if row.own is not None:
            with subtests.test(name, caller="own"):
                async with unchanged(world, before):
                    response = await send(world.acme, row, acme)
                assert response.status == row.own, response.raw
                require_hidden(response)
    for name, row in NUMBERED:
        if row.other is None:
            continue
        problems = set()
        for caller, objects in foreign_objects(row, globex):
            with subtests.test(name, caller=caller):
                async with unchanged(world, before):
                    response = await send(world.acme, row, objects)
                assert response.status == row.other, response.raw
                require_hidden(response)
                if response.status >= 400:
                    problems.add(without_names(response.detail, objects))
        with subtests.test(name, caller="other"):
            assert len(problems) <= 1, "the response shows which objects exist"
            assert row.other != 404 or problems == {NOT_OWNED}
    for name, row in NUMBERED:
        if row.system is not None:
            with subtests.test(name, caller="system"):
                before = await world.theirs()
                response = await send(world.everything, row, globex)
                assert response.status == row.system, response.raw
                if row.method == "GET":
                    assert ("globex" in response.raw.decode()) != row.hides
                assert (await world.theirs() != before) == row.changes


def foreign_objects(row: Row, globex: Objects) -> Iterator[tuple[str, Objects]]:
    yield "other", globex
    yield "missing", MISSING
    if row.names_an_endpoint():
        yield "all tenants", replace(globex, endpoint="globex-all", removable="globex-all")


@asynccontextmanager
async def unchanged(world: World, before: str) -> AsyncIterator[None]:
    """Check that the rows of others than acme are those before."""
    yield
    assert await world.theirs() == before


def require_hidden(response: AttemptResult) -> None:
    """Check that a response to a tenant has nothing of others: neither rows nor relays."""
    text = response.raw.decode()
    # An error may repeat a name of the request.
    assert response.status == 422 or "globex" not in text
    assert f"{socket.gethostname()}:{os.getpid()}" not in text


def without_names(text: str, objects: Objects) -> str:
    names = [value for value in vars(objects).values() if isinstance(value, str)]
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, "?")
    return text
