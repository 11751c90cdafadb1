"""The application: the one way in for every request.

    host ─▶ route ─▶ token ─▶ rate ─▶ scope ─▶ tenant ─▶ query, body ─▶ its own? ─▶ handler

Whatever goes wrong on it ends as a problem (RFC 9457), and nothing of it reaches the
relay, beside which this runs.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import orjson
import structlog
from aiohttp import web

from outbox.api import openapi, page, problem, tenancy
from outbox.api.auth import Authenticator, require
from outbox.api.host_check import hold_to_host
from outbox.api.live import LiveBook
from outbox.api.middleware import problems, unexpected
from outbox.api.problem import Kind, Problem
from outbox.api.rate_limit import Limits
from outbox.api.request_parsing import BODY_BYTES_MAX, NoQuery, hold_to_text, read_body, read_query
from outbox.api.route import Call, Later, Page, Reply
from outbox.api.routes import ROUTES
from outbox.destinations.http.endpoint_validation import policy_of
from outbox.destinations.http.test_deliveries import Trials
from outbox.store.connection.connect import in_one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from asyncpg import Connection

    from outbox.api.database import Database
    from outbox.api.login_failures import FailedLogins
    from outbox.api.route import Caller, Route
    from outbox.config import Settings
    from outbox.web.address import Address

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger("outbox.api")

NO_SUCH_PATH = "there is no such path; see: /openapi.json"


def application(
    settings: Settings,
    address: Address,
    database: Database,
    failures: FailedLogins,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> web.Application:
    """The API for these settings, as it is served at `address`."""
    limits = Limits(settings.api_rate_max, clock)
    authenticator = Authenticator(database, failures, limits, clock)
    admin = _Admin(settings, database, authenticator, limits, clock)
    app = web.Application(
        middlewares=[problems(NO_SUCH_PATH), hold_to_host(address)], client_max_size=BODY_BYTES_MAX
    )
    app.on_cleanup.append(admin.close)
    page.add_routes(app)
    app.router.add_get("/openapi.json", openapi.handler(ROUTES))
    for route in ROUTES:
        if route.method == "GET":
            app.router.add_get(route.path, admin.handler(route))  # And HEAD.
        else:
            app.router.add_route(route.method, route.path, admin.handler(route))
    return app


class _Admin:
    """Answers requests by the rows of the table."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        authenticator: Authenticator,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._database = database
        self._authenticator = authenticator
        self._limits = limits
        self._live = LiveBook(clock)
        self._trials = Trials(policy_of(settings), settings.leaves_by)
        self._trouble: str | None = None
        """Why the database could not be used when it was asked last."""

    async def close(self, _: web.Application) -> None:
        """Leave nothing open."""
        await self._trials.aclose()

    def handler(self, route: Route) -> Handler:
        """What answers the requests for a route."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                async with asyncio.timeout(route.timeout_s):
                    caller = await self._authenticator.caller(
                        request.headers.get("Authorization"), request.remote
                    )
                    self._limits.let_ask(caller.id)
                    answer = await self._answer(route, request, caller)
            except Exception as error:
                raise self._as_problem(error, request, route) from error
            return answer

        return handle

    async def _answer(
        self, route: Route, request: web.Request, caller: Caller
    ) -> web.StreamResponse:
        require(caller, route.scope)
        tenancy.let_in(route, caller)
        path = dict(request.match_info)
        hold_to_text(path)
        query = read_query(request.query, route.query or NoQuery)
        hold_to_text(list(request.query.values()))
        body = None
        if route.body is not None:
            body = await read_body(request, route.body, required=route.body_required)
        try:
            async with (
                self._connection(route) as connection,
                tenancy.steady(connection, route, caller.tenant),
            ):
                await tenancy.require_own(connection, route, caller.tenant, path)
                call: Call[Any, Any] = Call(
                    caller,
                    connection,
                    self._settings,
                    path,
                    request.headers,
                    query,
                    body,
                    self._live,
                    self._trials,
                )
                answer = await route.handler(call)
        except Exception as error:
            told = problem.of(error)
            if told is not None and told.kind is Kind.NOT_FOUND and caller.tenant is not None:
                # Whether somebody else has it, or nobody, and what it may have meant.
                raise Problem(Kind.NOT_FOUND, tenancy.NOT_YOURS) from error
            raise
        if isinstance(answer, Later):
            answer = await answer.go()
        return _response(answer)

    @asynccontextmanager
    async def _connection(self, route: Route) -> AsyncIterator[Connection[Any]]:
        """What the route asks the database by."""
        if not route.asks:
            yield cast("Connection[Any]", None)
            return
        async with self._database.connection(long=route.long) as connection:
            self._note(None)
            yield connection

    def _as_problem(self, error: Exception, request: web.Request, route: Route) -> Exception:
        """What to answer for an error; one that nobody expected is logged."""
        if isinstance(error, web.HTTPException):
            return error
        told = problem.of(error)
        if told is not None:
            if problem.is_veiled(told):
                self._note(in_one_line(error))
            return told
        return unexpected(log, error, request, route.path)

    def _note(self, trouble: str | None) -> None:
        """Log how the database is, when that has changed: not for each who asks."""
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble is not None:
            log.warning("the database cannot be used", reason=trouble)
        else:
            log.info("the database can be used again")


def _response(answer: Any) -> web.Response:
    status = 200
    if isinstance(answer, Reply):
        answer, status = answer.value, answer.status
    if isinstance(answer, Page):
        answer = {"items": answer.items, "next": answer.next, **answer.rest}
    return web.Response(body=encode(answer), status=status, content_type="application/json")


def encode(value: Any) -> bytes:
    """As `--json` has it: times in RFC 3339, dataclasses as objects."""
    # asyncpg's UUIDs are a class of its own, which orjson does not know.
    return orjson.dumps(value, default=str, option=orjson.OPT_UTC_Z)
