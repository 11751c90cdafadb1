"""Responses of other senders' APIs about their endpoints, in the shapes that these document.

https://api.svix.com/docs, https://www.getconvoy.io/docs/api-reference,
https://hookdeck.com/docs/outpost/api
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SVIX_KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

SVIX_APPLICATION: dict[str, Any] = {
    "id": "app_1srOrx2ZWZBpBUvZwXKQmoEYga2",
    "uid": "acme",
    "name": "Acme",
    "rateLimit": None,
    "metadata": {},
    "createdAt": "2026-01-31T12:00:00Z",
    "updatedAt": "2026-01-31T12:00:00Z",
}

SVIX_ENDPOINT: dict[str, Any] = {
    "id": "ep_1srOrx2ZWZBpBUvZwXKQmoEYga2",
    "uid": "billing",
    "url": "https://acme.example/hooks",
    "version": 1,
    "description": "Billing",
    "filterTypes": None,
    "channels": None,
    "disabled": False,
    "rateLimit": None,
    "metadata": {},
    "createdAt": "2026-01-31T12:00:00Z",
    "updatedAt": "2026-01-31T12:00:00Z",
}

CONVOY_ENDPOINT: dict[str, Any] = {
    "uid": "01H3FRSZYKNYWGPVV46RN98PM5",
    "project_id": "01H28MWP1TQV5AC5QR54BSX8HJ",
    "owner_id": "acme",
    "url": "https://acme.example/convoy",
    "name": "billing",
    "secrets": [
        {
            "uid": "01H3FRSZYKNYWGPVV46T42NYA8",
            "value": "convoy-secret",
            "created_at": "2026-01-31T12:00:00Z",
            "expires_at": None,
        }
    ],
    "advanced_signatures": False,
    "description": "",
    "slack_webhook_url": "",
    "support_email": "ops@acme.example",
    "http_timeout": 10,
    "rate_limit": 0,
    "rate_limit_duration": 0,
    "authentication": None,
    "status": "active",
    "events": 12,
    "created_at": "2026-01-31T12:00:00Z",
    "updated_at": "2026-01-31T12:00:00Z",
}

CONVOY_SUBSCRIPTION: dict[str, Any] = {
    "uid": "01H3FRT2M3A7S5T5N9XW9C0Q6E",
    "name": "billing",
    "type": "api",
    "status": "active",
    "function": None,
    "filter_config": {"event_types": ["*"], "filter": {"headers": {}, "body": {}}},
    "filters": [],
}

OUTPOST_DESTINATION: dict[str, Any] = {
    "id": "des_1",
    "tenant_id": "acme",
    "type": "webhook",
    "topics": ["user.created"],
    "config": {"url": "https://acme.example/outpost", "custom_headers": '{"X-Env": "prod"}'},
    "credentials": {"secret": "whsec_" + "0123456789abcdef" * 4},
    "disabled_at": None,
    "created_at": "2026-01-31T12:00:00Z",
    "target": "https://acme.example/outpost",
}


# ------------------------------------------------------------- small imitations


def _page(found: list[Any], request: web.Request, size: int = 2) -> tuple[list[Any], int | None]:
    """A small page, and the place of the next one."""
    begin = int(request.query.get("iterator") or request.query.get("next_page_cursor") or 0)
    end = begin + size
    return found[begin:end], end if end < len(found) else None


def svix_api(endpoints: dict[str, list[dict[str, Any]]]) -> web.Application:
    """Svix, with records by application.

    Args:
        endpoints: records with `endpoint`, `headers` and `transformation`.
    """

    def paged(found: list[Any], request: web.Request) -> web.Response:
        some, following = _page(found, request)
        return web.json_response(
            {"data": some, "iterator": str(following or ""), "done": following is None}
        )

    async def applications(request: web.Request) -> web.Response:
        return paged(
            [{**SVIX_APPLICATION, "id": f"app_{uid}", "uid": uid} for uid in endpoints], request
        )

    def records_of(request: web.Request) -> list[dict[str, Any]]:
        return endpoints[request.match_info["app"].removeprefix("app_")]

    async def listed(request: web.Request) -> web.Response:
        return paged([each["endpoint"] for each in records_of(request)], request)

    async def part(request: web.Request) -> web.Response:
        (record,) = (
            r for r in records_of(request) if r["endpoint"]["id"] == request.match_info["ep"]
        )
        empty = {
            "secret": {"key": SVIX_KEY},
            "headers": {"headers": {}, "sensitive": []},
            "transformation": {"code": None, "enabled": False},
        }
        name = request.match_info["part"]
        return web.json_response(record.get(name, empty[name]))

    app = web.Application()
    app.router.add_get("/api/v1/app/", applications)
    app.router.add_get("/api/v1/app/{app}/endpoint/", listed)
    app.router.add_get("/api/v1/app/{app}/endpoint/{ep}/{part}/", part)
    return app


def convoy_api(records: list[dict[str, Any]]) -> web.Application:
    """A project of Convoy.

    Args:
        records: records with `endpoint` and `subscriptions`.
    """

    def paged(found: list[Any], request: web.Request) -> web.Response:
        some, following = _page(found, request)
        pagination = {"has_next_page": following is not None, "next_page_cursor": str(following)}
        data = {"content": some, "pagination": pagination}
        return web.json_response({"status": True, "message": "fetched", "data": data})

    async def endpoints(request: web.Request) -> web.Response:
        return paged([each["endpoint"] for each in records], request)

    async def subscriptions(request: web.Request) -> web.Response:
        wanted = request.query["endpointId"]
        found = (r["subscriptions"] for r in records if r["endpoint"]["uid"] == wanted)
        return paged(next(found), request)

    async def filters(request: web.Request) -> web.Response:
        wanted = request.match_info["id"]
        every = (each for record in records for each in record["subscriptions"])
        found = next(each.get("filters", []) for each in every if each["uid"] == wanted)
        return web.json_response({"status": True, "message": "fetched", "data": found})

    app = web.Application()
    app.router.add_get("/api/v1/projects/{project}/endpoints", endpoints)
    app.router.add_get("/api/v1/projects/{project}/subscriptions", subscriptions)
    app.router.add_get("/api/v1/projects/{project}/subscriptions/{id}/filters", filters)
    return app


def outpost_api(destinations: dict[str, list[dict[str, Any]]]) -> web.Application:
    """Outpost, with the destinations of each tenant."""

    async def listed(request: web.Request) -> web.Response:
        return web.json_response(destinations.get(request.match_info["tenant"], []))

    app = web.Application()
    app.router.add_get("/api/v1/tenants/{tenant}/destinations", listed)
    return app


@asynccontextmanager
async def serving(app: web.Application, token: str) -> AsyncIterator[int]:
    """Serve an API to those who have its token; yields the port."""

    @web.middleware
    async def log_in(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {token}":
            raise web.HTTPUnauthorized
        return await handler(request)

    app.middlewares.append(log_in)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
