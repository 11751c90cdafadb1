"""The whole API, up to its first database query."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from ipaddress import IPv4Network
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import quote

import asyncpg
import orjson
from aiohttp import StreamReader, web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import HttpVersion11
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

import outbox_api.app
from outbox.config import Settings
from outbox.core.model.api_token import SCOPES, digest
from outbox.operations import tenancy
from outbox.operations.tokens import api as api_tokens
from outbox.store.routing_change import READ_NOW
from outbox.web.address import Address
from outbox.web.serving import Connection
from outbox_api import request_body
from outbox_api.app import application
from outbox_api.database import Database
from outbox_api.logins import PREFIX_BYTES, READ_PREFIXES
from outbox_api.loop_time import LoopTime
from outbox_api.routes import ROUTES
from outbox_api.shared import Shared
from tests.fuzz.data import Data, fields
from tests.fuzz.target import Target, hold, one_line, storable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox_api.route import Route

_LOOP = asyncio.new_event_loop()
_TOKEN, _TENANTS = "obx_" + "a" * 43, "obx_" + "b" * 43
_READ_PREFIXES = READ_PREFIXES.format(PREFIX_BYTES, "token")
_NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
INTEGER_MAX = 2**63 - 1
PAYLOAD_BYTES_MAX = 262_144
DETAIL_CHARS_MAX = 4000


class Reached(web.HTTPException):
    """The database was queried: everything before the query held."""

    status_code = 218


_SETTINGS = Settings(allow_networks=(IPv4Network("127.0.0.0/8"),))


class _Connection:
    """Checks the arguments of a query, and returns nothing."""

    __class__ = asyncpg.Connection
    """Drivers are found by it."""
    reopen = None
    """How a change gets another connection; none is lost here."""

    def terminate(self) -> None:
        hold(False, "the database is asked for longer than it may take")

    @asynccontextmanager
    async def transaction(self, **_: Any) -> AsyncIterator[None]:
        yield

    def is_in_transaction(self) -> bool:
        return True

    async def fetchval(self, query: str, *arguments: Any, **_: Any) -> Any:
        _require_valid_sql(arguments)
        if query == _READ_PREFIXES:
            return b"".join(sorted(digest(each)[:PREFIX_BYTES] for each in (_TOKEN, _TENANTS)))
        if query == READ_NOW:
            return _NOW
        if query == request_body.READ_LIMIT:
            return PAYLOAD_BYTES_MAX
        if query in (tenancy.OWNS_SCHEDULE, tenancy.OWNS_JOB):
            return True
        if query in (tenancy.COUNT_ENDPOINTS, tenancy.COUNT_DEAD_LETTERS):
            return len(arguments[1])
        raise Reached

    async def _asked(self, _: str, *arguments: Any, **__: Any) -> Any:
        _require_valid_sql(arguments)
        raise Reached

    fetch = fetchrow = execute = executemany = _asked


class _Database(Database):
    """Limits and shares of the API, without a server."""

    @asynccontextmanager
    async def _acquired(self, _: Any) -> AsyncIterator[Any]:
        yield _Connection()


def _require_valid_sql(value: Any) -> None:
    """A value that PostgreSQL cannot accept must be rejected before the query."""
    if isinstance(value, str):
        value.encode()
        hold("\0" not in value, f"the database is asked with {value[:100]!r}")
    elif isinstance(value, int):
        hold(-INTEGER_MAX <= value <= INTEGER_MAX, f"the database is asked with {value}")
    elif isinstance(value, datetime):
        value.astimezone(UTC)
    elif isinstance(value, list | tuple | set):
        for each in value:
            _require_valid_sql(each)


def _row(name: str, tenant: str | None) -> Any:
    return SimpleNamespace(
        id=1, name=name, scopes=SCOPES, tenant=tenant, expires_at=None, state="live"
    )


async def _find(_: Any, __: str, secret: str) -> Any:
    return _row("t", "acme") if secret == _TENANTS else _row("all", None)


def _broken(_: Any, error: Exception, *__: Any) -> Exception:
    raise error


def _prepare() -> None:
    api_tokens.find_token = _find  # type: ignore[assignment]
    # The traceback in an error contains more than an id for the log.
    app: Any = outbox_api.app
    app.log_unexpected = _broken


async def _make() -> web.Application:
    # Hours pass between two steps, so that inputs are not refused for their rate.
    clock = partial(next, count(step=3600.0))
    database = _Database(SimpleNamespace(settings=_SETTINGS))  # type: ignore[arg-type]
    shared = Shared(loop_time=LoopTime(clock))
    address = Address("127.0.0.1", 80)
    app = application(_SETTINGS, address, database, mock.Mock(), shared, clock=clock)
    app.freeze()
    return app


_APP = _LOOP.run_until_complete(_make())
_PROTOCOL = mock.Mock(Connection, _reading_paused=False, transport=None, awaited=None)


def api(raw: bytes) -> None:
    """Any path, query and body yields a problem document with the reason, or a valid query."""
    data = Data(raw)
    route = ROUTES[data.number(255) % len(ROUTES)]
    token, as_json = data.pick((_TOKEN, _TENANTS)), data.number(3) > 0
    path, query, key = _path(route, data), data.text(), data.maybe()
    body = data.rest()
    headers = CIMultiDict({"Host": "127.0.0.1", "Authorization": f"Bearer {token}"})
    if body or as_json:
        headers["Content-Type"] = "application/json"
        headers["Content-Length"] = str(len(body))
    if key is not None:
        headers["Idempotency-Key"] = key
    _LOOP.run_until_complete(_request(route.method, f"{path}?{_query(query)}", headers, body))


def _path(route: Route, data: Data) -> str:
    return "/".join(
        quote(data.text().encode("utf-8", "surrogateescape") or b"x", safe="%")
        if part.startswith("{")
        else part
        for part in route.path.split("/")
    )


def _query(text: str) -> str:
    return quote(text.encode("utf-8", "surrogateescape"), safe="=&%+")


async def _request(method: str, target: str, headers: CIMultiDict[str], body: bytes) -> None:
    payload = StreamReader(_PROTOCOL, 2**20, loop=_LOOP)
    payload.feed_data(body)
    payload.feed_eof()
    raw_headers = tuple(
        (n.encode(), v.encode("utf-8", "surrogateescape")) for n, v in headers.items()
    )
    message = RawRequestMessage(
        method, target, HttpVersion11, CIMultiDictProxy(headers), raw_headers, False, None, False,
        False, URL(target, encoded=True),
    )  # fmt: skip
    writer = mock.Mock(write_headers=mock.AsyncMock(), write_eof=mock.AsyncMock())
    request = web.Request(
        message, payload, _PROTOCOL, writer, _LOOP.create_task(asyncio.sleep(0)), _LOOP,
    )  # fmt: skip
    try:
        response = await _APP._handle(request)
    except Reached:
        return
    except web.HTTPException as error:
        hold(False, f"{method} {target} ends with {error.status}")
        return
    hold(response.status < 500, f"{method} {target} ends with {response.status}")
    assert isinstance(response, web.Response)
    if response.status >= 400:
        assert isinstance(response.body, bytes)
        problem = orjson.loads(response.body)
        one_line(problem["detail"], "detail", DETAIL_CHARS_MAX)
        storable(problem, "problem")


_NUMBERS = {route.operation_id: chr((ord("0") + i) % 256) for i, route in enumerate(ROUTES)}


def _to(operation: str, *parts: str, body: Any = None, token: bytes = b"0") -> bytes:
    """A seed: a valid request for this operation; b"1" is the token of a tenant."""
    output = b"" if body is None else orjson.dumps(body)
    return _NUMBERS[operation].encode("latin-1") + token + b"1" + fields(*parts) + b"\x1f" + output


_ENDPOINT = {
    "name": "shop", "url": "https://example.com/", "types": ["order.*"], "filter": "@.a == 1",
    "headers": {"X-A": "b"}, "timeout": "5s", "retry": {"preset": "stepped", "attempts": 3},
    "retryable": [429, "5xx"], "lanes": 2, "backlog_max": 9,
    "keep_alive": False,
}  # fmt: skip
_EVENT = {"type": "order.paid", "payload": {"a": 1}, "key": "k", "once": "o", "expires_in": "2h",
          "deliver_at": "2026-02-01T00:00:00Z", "headers": {"A": "b"}}  # fmt: skip

TARGETS = (
    Target(
        name="api",
        short_run_modules=(
            "outbox_api.request_body", "outbox_api.request_parsing",
            "outbox_api.validation_errors", "outbox_api.tenancy",
            "outbox.core.model.endpoint_config", "outbox.core.model.endpoint_settings",
            "outbox.core.model.event",
        ),
        one=api,
        prepare=_prepare,
        seeds=(
            _to("post_endpoints", "", "", body=_ENDPOINT),
            _to("patch_endpoints_name", "shop", "", "", body={"lanes": 3, "filter": None}),
            _to("put_declaration", "dry_run=true&prune=1", "", body={"endpoints": [_ENDPOINT]}),
            _to("post_events", "", "", body=_EVENT), _to("post_events", "", "k", body=_EVENT),
            _to("post_events", "", "", body={"events": [_EVENT, {"type": "a"}]}),
            _to("get_events", "since=2h&until=2026-01-31T12:00:00Z&type=a.*&limit=5&after=7", ""),
            _to("get_dead_letters", "since=3d&state=all&reason=refused&after=5", ""),
            _to("post_dead_letters_replay", "", "", body={"ids": [1, 2], "rate": 5.0}),
            _to("post_schedules", "", "", body={"name": "acme.n", "cron": "@daily", "type": "a",
            "grace": "1m"}),
            _to("post_tokens", "", "", body={"name": "ci", "scopes": ["read"]}),
            _to("get_trace_id", "order-7", "limit=3&payload=1", ""),
            _to("get_dead_letters_id", "0" * 19 + "1" + "9" * 20, "", ""),
            _to("get_events", "after=" + "0" * 20 + "9" * 20, ""),
            *(_to(route.operation_id, *["7"] * route.path.count("{"), "", "", token=token)
              for route in ROUTES for token in (b"0", b"1")),
        ),
        words=(
            "limit=", "after=", "since=", "until=", "type=", "tenant=", "endpoint=", "state=",
            "%00", "%ff",
            "&", "=", "999999999d", "9223372036854775808", "00000000000000000001",
            "0001-01-01T00:00:00+14:00",
            "9999-12-31T23:59:59-14:00", '"url":', '"name":', '"retry":', '"headers":{', "null",
            "true", "-1",
            "1e308", "1e400", "0.0", "NaN", '"\\u0000"', '"\\ud800"', "[", "{", '"events":[',
            '"payload":',
            '"deliver_at":', '"once":', '"ids":[', '"all":true', '"lanes":', '"filter":"', "\u2028",
            "acme.",
            "²", "\u0661",
        ),
        bytes_max=1500,
        runs=400,
    ),
)  # fmt: skip
