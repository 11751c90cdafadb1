"""An API client for a real server that validates every response against the OpenAPI document."""

from __future__ import annotations

import io
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import aiohttp
import jsonschema_rs
import orjson
from yarl import URL

from outbox.core.model.api_token import TokenSettings
from outbox.operations.tokens import api as api_tokens
from outbox.web.address import Address
from outbox_api import server
from outbox_api.openapi import document
from outbox_api.problem import RETRIED_STATUSES
from outbox_api.routes import ROUTES
from tests.support.postgres import API_ROLE
from tests.support.relay import current, settings_for
from tests.support.roles import dsn_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from outbox.core.model.api_token import Scope
    from outbox_api.shared import Shared
    from tests.support.postgres import Database

ALL: tuple[Scope, ...] = ("read", "publish", "operate")
HERE = Address("127.0.0.1", 0)
UNROUTED = (404, 405, 421)
"""Statuses of requests that no route takes."""


@dataclass(frozen=True)
class AttemptResult:
    """A response."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.raw)

    @property
    def detail(self) -> str:
        """The detail of a problem response."""
        assert self.headers["Content-Type"].startswith("application/problem+json"), self.raw
        detail: str = self.json["detail"]
        return detail


class Api:
    """A client with a token that validates every response."""

    def __init__(self, session: aiohttp.ClientSession, url: str, secret: str | None) -> None:
        self.session = session
        self.url = url.rstrip("/")
        self.secret = secret

    def with_token(self, secret: str | None) -> Api:
        return Api(self.session, self.url, secret)

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
        **query: Any,
    ) -> AttemptResult:
        sent = dict(headers or {})
        if self.secret is not None:
            sent.setdefault("Authorization", f"Bearer {self.secret}")
        if body is not None:
            data = orjson.dumps(body)
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        async with self.session.request(
            method,
            URL(self.url + path, encoded=True).update_query(_flat(query)),
            headers=sent,
            # aiohttp warns about large bytes bodies.
            data=None if data is None else io.BytesIO(data),
        ) as reply:
            response = AttemptResult(reply.status, reply.headers, await reply.read())
        check(method, path.partition("?")[0], response)
        if response.status == 200 and "items" in response.json:
            assert len(response.json["items"]) <= int(query.get("limit", 100))
        return response

    async def get(self, path: str, **query: Any) -> AttemptResult:
        return await self.request("GET", path, **query)

    async def post(self, path: str, body: Any = None, **rest: Any) -> AttemptResult:
        return await self.request("POST", path, body, **rest)

    async def items(self, path: str, **query: Any) -> list[Any]:
        """All items of a listing, page by page."""
        found: list[Any] = []
        after: dict[str, str] = {}
        while True:
            page = (await self.get(path, **query, **after)).json
            found += page["items"]
            if page["next"] is None:
                return found
            after = {"after": page["next"]}


def _flat(query: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (name, str(each).lower() if isinstance(each, bool) else str(each))
        for name, value in query.items()
        for each in (value if isinstance(value, list | tuple) else [value])
    ]


# ------------------------------------------------------------- the document


@cache
def api_document() -> dict[str, Any]:
    """The OpenAPI document, made once: it takes a second."""
    return document(ROUTES)


@cache
def _closed_document() -> dict[str, Any]:
    """The same, but no undocumented property is allowed."""
    closed: dict[str, Any] = _closed(api_document())
    return closed


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(each) for name, each in schema.items()}
    if closed.get("type") == "object" and "properties" in closed:
        closed["additionalProperties"] = False
    return closed


def check(method: str, path: str, response: AttemptResult) -> None:
    """Validate a response against the document."""
    assert response.headers["Cache-Control"] == "no-store"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Server"] == "outbox"
    if method == "HEAD":
        return
    if response.status >= 400:
        assert response.headers["Content-Type"].startswith("application/problem+json"), response.raw
        _validator("Problem")[0].validate(response.json)
        assert (response.status in RETRIED_STATUSES) == ("Retry-After" in response.headers)
    if path == "/openapi.json":
        return
    if (template := _template(method, path)) is None:
        assert response.status in UNROUTED, response.raw
        return
    responses = _closed_document()["paths"][template][method.lower()]["responses"]
    missing = f"{response.status} is not documented for {method} {template}"
    assert str(response.status) in responses, missing
    if response.status >= 400:
        return
    _validator(template, method.lower(), str(response.status))[0].validate(response.json)


@cache
def _template(method: str, path: str) -> str | None:
    """The path template that matches; the one with the fewest parameters."""
    fitting = [
        route for route in ROUTES if re.fullmatch(re.sub(r"{\w+}", "[^/]+", route.path), path)
    ]
    fewest = min((len(each.parameters) for each in fitting), default=0)
    own = (each for each in fitting if len(each.parameters) == fewest and each.method == method)
    return next((each.path for each in own), None)


@cache
def _validator(*place: str) -> list[Any]:
    document = _closed_document()
    if place == ("Problem",):
        schema = document["components"]["schemas"]["Problem"]
    else:
        template, method, status = place
        response = document["paths"][template][method]["responses"][status]
        schema = response["content"]["application/json"]["schema"]
    whole = {**schema, "components": document["components"]}
    return [jsonschema_rs.Draft202012Validator(whole, validate_formats=True)]


# ----------------------------------------------------------------- fixtures


async def make_token(
    database: Database, name: str = "all", scopes: tuple[Scope, ...] = ALL, **options: Any
) -> str:
    """Create a token and return its secret."""
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        settings = TokenSettings(name=name, scopes=scopes, **options)
        return (await api_tokens.add_token(connection, "relay", settings, actor="test")).secret


@asynccontextmanager
async def serving(
    database: Database, *, shared: Shared | None = None, **settings: Any
) -> AsyncIterator[Api]:
    """A server of this database with the role of an API, and a client without a token."""
    dsn = dsn_of(database, API_ROLE)
    usual = {"dsn": dsn, "dsn_source": "test", "allow_networks": ("127.0.0.0/8",)}
    given = settings_for(database, **usual | settings)
    async with (
        server.running(current(given), given.admin or HERE, shared=shared) as at,
        aiohttp.ClientSession() as session,
    ):
        yield Api(session, at.url, None)
