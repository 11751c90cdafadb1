"""The API application: the request pipeline.

    host ─▶ route ─▶ token ─▶ loop time ─▶ rate ─▶ in flight ─▶ scope ─▶ tenant ─▶ query
      ─▶ read body ─▶ connection ─▶ parse body ─▶ ownership ─▶ handler ─▶ encode ─▶ write response

A body is parsed, and a response encoded, while the request has one of the few connections to the
database: so many requests have their values in memory.  Every error becomes a problem (RFC 9457).
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import orjson
import structlog
from aiohttp import web

from outbox.destinations.endpoint_validation import policy_of
from outbox.operations.rows import encode_other
from outbox.store.connection.connect import in_one_line
from outbox.web.serving import awaiting_share
from outbox_api import openapi, page, problem, tenancy
from outbox_api.auth import API_TOKENS, require_scope
from outbox_api.endpoint_tester import EndpointTester
from outbox_api.fair_publishing import FairPublisher
from outbox_api.host_check import host_middleware
from outbox_api.in_flight import request_in_flight
from outbox_api.limits import (
    LARGE_BODIES_MAX,
    REQUEST_BODY_BYTES_MAX,
    TENANT_LARGE_BODIES_MAX,
)
from outbox_api.live_cache import LiveStatusCache
from outbox_api.logins import Logins
from outbox_api.middleware import log_unexpected, problem_middleware
from outbox_api.problem import Problem, ProblemKind
from outbox_api.rate_limit import RateLimiter
from outbox_api.request_body import BodyReader, parse
from outbox_api.request_parsing import read_query, require_storable_text
from outbox_api.route import Call, DeferredReply, NoQuery, Page, Reply
from outbox_api.routes import ROUTES
from outbox_api.slots import SharedSlots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.web.address import Address
    from outbox_api.database import Database
    from outbox_api.login_failures import FailedLogins
    from outbox_api.loop_time import LoopTime
    from outbox_api.route import Caller, Route
    from outbox_api.shared import Shared

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger("outbox.api")

NO_SUCH_PATH = "no such path; see /openapi.json"


def application(
    settings: Settings,
    address: Address,
    database: Database,
    failures: FailedLogins,
    shared: Shared,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> web.Application:
    """Create the API application for a listener at `address`."""
    limits = RateLimiter(settings.api_rate_max, clock)
    logins = Logins(API_TOKENS, database, failures, limits, clock)
    publisher = FairPublisher(shared.meters, clock)
    handlers = _RouteHandlers(
        settings, database, logins, limits, publisher, shared.loop_time, clock
    )
    app = web.Application(
        middlewares=[
            shared.meters.middleware("api"),
            shared.requests.middleware(),
            problem_middleware(NO_SUCH_PATH),
            host_middleware(address),
        ]
    )
    app.on_cleanup.extend([logins.close, handlers.close])
    page.add_routes(app)
    app.router.add_get("/openapi.json", openapi.handler(ROUTES))
    for route in ROUTES:
        if route.method == "GET":
            app.router.add_get(route.path, handlers.handler(route))  # And HEAD.
        else:
            app.router.add_route(route.method, route.path, handlers.handler(route))
    for path in {route.path for route in ROUTES if not route.parameters}:
        # As in OpenAPI, it is not also the path of an object that has its last word as a name.
        app.router.add_route("*", path, _refuse_method)
    return app


async def _refuse_method(request: web.Request) -> web.StreamResponse:
    allowed = {each.method for each in ROUTES if each.path == request.path}
    raise web.HTTPMethodNotAllowed(
        request.method, allowed | {"HEAD"} if "GET" in allowed else allowed
    )


class _RouteHandlers:
    """Request handlers for the table of routes."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        logins: Logins[Caller],
        limits: RateLimiter,
        publisher: FairPublisher,
        loop_time: LoopTime,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._logins = logins
        self._limits = limits
        self._publisher = publisher
        self._loop_time = loop_time
        self._bodies = BodyReader(database, clock)
        self._large_bodies = asyncio.Semaphore(LARGE_BODIES_MAX)
        self._large_slots = SharedSlots(TENANT_LARGE_BODIES_MAX, "slot for a large body")
        self._live = LiveStatusCache(clock)
        self._tester = EndpointTester(policy_of(settings), settings.outbound_proxy)

    async def close(self, _: web.Application) -> None:
        await self._tester.aclose()

    def handler(self, route: Route) -> Handler:
        """Create the handler of a route."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                async with asyncio.timeout(route.timeout_s):
                    caller = await self._logins.log_in(
                        request.headers.get("Authorization"), request.remote
                    )
                    respond = partial(self._respond, route, request, caller)
                    if caller.tenant is not None:
                        waiting = awaiting_share(request)
                        return await self._loop_time.run(caller.holder, respond, waiting)
                    self._loop_time.note(caller.holder)
                    return await respond()
            except web.HTTPException:
                raise
            except Problem as error:
                # Not from itself: a reference cycle would keep the body in memory.
                self._log_hidden_cause(error, error)
                raise
            except Exception as error:
                raise self._as_problem(error, request, route) from error

        return handle

    async def _respond(
        self, route: Route, request: web.Request, caller: Caller
    ) -> web.StreamResponse:
        self._limits.require_request_quota(caller.holder)
        request_in_flight(request).count(caller.holder)
        require_scope(caller, route.scope)
        tenancy.require_tenant_access(route, caller)
        path = dict(request.match_info)
        require_storable_text(path)
        query = read_query(request.query, route.query or NoQuery)
        require_storable_text(list(request.query.values()))
        raw = None
        if route.bodies:
            raw = await self._bodies.read(request, route, request_in_flight(request))
        is_large = raw is not None and len(raw) > REQUEST_BODY_BYTES_MAX
        async with self._large_body(caller) if is_large else nullcontext():
            try:
                async with self._connection(route, caller) as connection:
                    body = parse(raw, route.bodies) if route.bodies else None
                    del raw
                    request_in_flight(request).hold(0)
                    await tenancy.require_owned_path(connection, route, caller.tenant, path)
                    call: Call[Any, Any] = Call(
                        caller,
                        connection,
                        self._database.settings,
                        path,
                        request.headers,
                        query,
                        body,
                        self._live,
                        self._tester,
                        self._publisher,
                    )
                    result = await route.handler(call)
                    if not isinstance(result, DeferredReply):
                        return _response(result, route.status)
            except Exception as error:
                if caller.tenant is not None and _is_not_found(error):
                    # The original detail could reveal objects of other tenants.
                    raise Problem(ProblemKind.NOT_FOUND, tenancy.NOT_OWNED) from error
                raise
        return _response(await result.produce(), route.status)

    def _large_body(self, caller: Caller) -> AbstractAsyncContextManager[None]:
        if caller.tenant is None:
            return self._large_bodies
        return self._large_slots.slot(caller.holder)

    @asynccontextmanager
    async def _connection(self, route: Route, caller: Caller) -> AsyncIterator[Connection[Any]]:
        if not route.needs_connection:
            yield cast("Connection[Any]", None)
            return
        holder = None if caller.tenant is None else caller.holder
        async with self._database.connection(holder, long=route.long) as connection:
            self._database.note(None)
            yield connection

    def _as_problem(self, error: Exception, request: web.Request, route: Route) -> Problem:
        """Map an exception to a problem; unexpected ones are logged."""
        mapped = problem.problem_for(error)
        if mapped is None:
            return log_unexpected(log, error, request, route.path)
        self._log_hidden_cause(mapped, error)
        return mapped

    def _log_hidden_cause(self, mapped: Problem, error: Exception) -> None:
        if problem.hides_cause(mapped):
            self._database.note(in_one_line(error))


def _is_not_found(error: Exception) -> bool:
    mapped = problem.problem_for(error)
    return mapped is not None and mapped.kind is ProblemKind.NOT_FOUND


def _response(response: Any, status: int) -> web.Response:
    if isinstance(response, Reply):
        response, status = response.value, response.status
    if isinstance(response, Page):
        response = {"items": response.items, "next": response.next, **response.extra}
    return web.Response(body=encode(response), status=status, content_type="application/json")


def encode(value: Any) -> bytes:
    """Encode a result as JSON, like `--json`: RFC 3339 times, dataclasses as objects."""
    # default=encode_other: asyncpg has its own UUID class, which orjson does not encode.
    return orjson.dumps(value, default=encode_other, option=orjson.OPT_UTC_Z)
