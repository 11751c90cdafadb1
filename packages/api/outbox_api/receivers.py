"""Listener for receivers: fetch the deliveries of an endpoint.

    GET  /v1/lanes                            progress of the endpoint's lanes
    GET  /v1/lanes/{lane}/deliveries?after=N  deliveries completed after sequence N
    GET  /v1/lanes/{lane}/deliveries/{N}      one delivery, which may be pending
    GET  /.well-known/outbox-egress.json      addresses that deliveries come from, for anybody

A receiver authenticates with the fetch token of its endpoint and has access to that endpoint
only.  Fetched deliveries have headers and body with a new signature, so that a receiver can
verify and process them like sent ones.

They are signed by the database's clock.  While that differs from this machine's, a request that an
endpoint repeats is signed by the other one, and so are those after it: a receiver that refuses the
time of a signature does not report it to this listener, but it fetches the same again.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import structlog
from aiohttp import web

from outbox.core.delivery.signing_clock import ClockDifference
from outbox.core.messages.message import encode_body, prepare
from outbox.core.model.api_token import is_fetch_token
from outbox.core.model.headers import parse_lines
from outbox.errors import NotFound
from outbox.operations import lane_history
from outbox.operations.tokens import fetch as fetch_tokens
from outbox.store.connection.secrets import Vault
from outbox.store.delivery.endpoints import read_endpoints, require_usable
from outbox.web.loopback_hosts import is_loopback
from outbox.web.serving import awaiting_share
from outbox_api import fetched_deliveries, problem
from outbox_api.in_flight import request_in_flight
from outbox_api.limits import REQUEST_TIMEOUT_S
from outbox_api.logins import Logins, TokenKind
from outbox_api.middleware import log_unexpected, problem_middleware
from outbox_api.problem import Problem, ProblemKind
from outbox_api.rate_limit import RateLimiter
from outbox_api.server import listening
from outbox_api.shared import Shared

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from socket import socket
    from uuid import UUID

    from asyncpg import Connection

    from outbox.config import Network
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.messages.signature import SigningKey
    from outbox.operations.lane_history import LaneHistory
    from outbox.operations.tokens.fetch import Fetcher
    from outbox.store.connection.current_settings import CurrentSettings
    from outbox.web.address import Address
    from outbox_api.database import Database
    from outbox_api.fetched_deliveries import FetchedDelivery
    from outbox_api.login_failures import FailedLogins
    from outbox_api.loop_time import LoopTime
    from outbox_api.rate_limit import Holder

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    LaneHandler = Callable[[web.Request, Connection[Any], Fetcher], Awaitable[object]]

log = structlog.get_logger("outbox.receivers")

READ_NOW = "SELECT extract(epoch FROM clock_timestamp())::float8"

SIGNED_MAX = 100
"""The last requests of an endpoint in which a repeated one is recognized, while clocks differ."""
LIMIT = 100
EGRESS_PATH = "/.well-known/outbox-egress.json"


@asynccontextmanager
async def running(
    current: CurrentSettings,
    address: Address,
    sockets: list[socket] | None = None,
    *,
    shared: Shared | None = None,
    wall: Callable[[], float] = time.time,
) -> AsyncIterator[Address]:
    """Serve receivers while the context lasts; yields the bound address.

    Args:
        sockets: they listen there already; None: bind the address.
        shared: what it shares with other listeners of the process; None: there are none.
        wall: this machine's clock in epoch seconds, for comparison with the database's.

    Raises:
        CannotRun: the address cannot be bound.
    """
    limits = RateLimiter(current.settings.api_rate_max, time.monotonic)
    shared = shared or Shared()

    def receivers(database: Database, failures: FailedLogins) -> web.Application:
        egress = current.settings.egress_addresses
        return application(database, failures, limits, shared, wall, egress=egress)

    async with listening(current, address, sockets, shared, receivers) as at:
        log.info("listening for receivers", url=at.url)
        if not is_loopback(address.host):
            log.warning(
                "the receiver API listens on a non-loopback address without TLS; "
                "put a TLS proxy in front of it"
            )
        yield at


def application(
    database: Database,
    failures: FailedLogins,
    limits: RateLimiter,
    shared: Shared,
    wall: Callable[[], float] = time.time,
    *,
    clock: Callable[[], float] = time.monotonic,
    egress: Sequence[Network] = (),
) -> web.Application:
    """Create the application; for `wall` see `running`.

    Args:
        egress: addresses from which deliveries are sent, as the operator says; none: not served.
    """
    logins = Logins(FETCH_TOKENS, database, failures, limits, clock)
    receivers = _Receivers(database, logins, limits, shared.loop_time, wall)
    errors = problem_middleware("no such path; see /v1/lanes")
    counted = shared.meters.middleware("receivers")
    app = web.Application(middlewares=[counted, shared.requests.middleware(), errors])
    app.on_cleanup.append(logins.close)
    app.router.add_get("/v1/lanes", receivers.handler(receivers.lanes))
    deliveries = "/v1/lanes/{lane}/deliveries"
    app.router.add_get(deliveries, receivers.handler(receivers.deliveries))
    app.router.add_get(deliveries + "/{sequence}", receivers.handler(receivers.delivery))
    if egress:
        app.router.add_get(EGRESS_PATH, _egress_handler(egress))
    return app


def _egress_handler(egress: Sequence[Network]) -> Handler:
    """Create the handler of the addresses of deliveries, which anybody may know."""
    body = orjson.dumps({"addresses": [str(each) for each in egress]})

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(body=body)

    return handle


async def _find_fetcher(connection: Connection[Any], schema: str, secret: str) -> Fetcher | str:
    found = await fetch_tokens.find_fetcher(connection, schema, secret)
    return found or "the fetch token is expired or revoked"


# A receiver sends few requests: a valid token is looked up for each, and a revocation is effective
# at once.
FETCH_TOKENS = TokenKind(
    "fetch token",
    "fetch_token",
    "create one with outbox endpoint fetch-token",
    is_fetch_token,
    _find_fetcher,
    kept_s=0,
)


class _Signer(NamedTuple):
    """Signs the deliveries of one response."""

    endpoint: Endpoint
    keys: list[SigningKey]
    at_s: int
    """The time of the signature, in epoch seconds."""


class _Receivers:
    """Request handlers, authenticated by fetch token."""

    def __init__(
        self,
        database: Database,
        logins: Logins[Fetcher],
        limits: RateLimiter,
        loop_time: LoopTime,
        wall: Callable[[], float],
    ) -> None:
        self._database = database
        self._logins = logins
        self._limits = limits
        self._loop_time = loop_time
        self._wall = wall
        self._clocks = ClockDifference()
        # Whether this machine's clock signs for an endpoint, and the requests that it has signed.
        self._signed: dict[UUID, tuple[bool, tuple[str, ...]]] = {}

    def handler(self, respond: LaneHandler) -> Handler:
        """Create the handler of a route."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    fetcher = await self._logins.log_in(
                        request.headers.get("Authorization"), request.remote
                    )
                    return await self._loop_time.run(
                        _holder(fetcher),
                        partial(self._respond, request, fetcher, respond),
                        awaiting_share(request),
                    )
            except Problem:
                raise
            except Exception as error:
                raise _as_problem(error, request) from error

        return handle

    async def _respond(
        self, request: web.Request, fetcher: Fetcher, respond: LaneHandler
    ) -> web.StreamResponse:
        holder = _holder(fetcher)
        self._limits.require_request_quota(holder)
        request_in_flight(request).count(holder)
        async with self._database.connection(holder) as connection:
            found = await respond(request, connection, fetcher)
            return web.json_response(body=orjson.dumps(found))

    async def lanes(
        self, request: web.Request, connection: Connection[Any], fetcher: Fetcher
    ) -> object:
        """List lanes with their progress, older generations first."""
        limit = _parse_number(request, "limit", LIMIT, fetched_deliveries.PAGE_MAX)
        after = (0, -1)
        if name := request.query.get("after"):
            last = await lane_history.get_lane(
                connection, self._database.schema, fetcher.endpoint_id, name
            )
            after = (last.generation, last.slot)
        found = await lane_history.list_lanes(
            connection, self._database.schema, fetcher.endpoint_id, after=after, limit=limit
        )
        more = len(found) == limit
        return {"items": [_lane(lane) for lane in found], "next": found[-1].name if more else None}

    async def deliveries(
        self, request: web.Request, connection: Connection[Any], fetcher: Fetcher
    ) -> object:
        """List completed deliveries of a lane."""
        after = _parse_number(request, "after", 0, fetched_deliveries.SEQUENCE_MAX)
        limit = max(1, _parse_number(request, "limit", LIMIT, fetched_deliveries.PAGE_MAX))
        schema = self._database.schema
        lane = await lane_history.get_lane(
            connection, schema, fetcher.endpoint_id, request.match_info["lane"]
        )
        found = await fetched_deliveries.list_deliveries(connection, schema, lane, after, limit)
        sign = await self._signer(request, connection, fetcher)
        last = found[-1].sequence if found else max(after, lane.acknowledged)
        return _lane(lane) | {
            # Earlier deliveries were removed by retention.
            "kept_from": found[0].sequence if found else last + 1,
            "items": [_item(lane, each, sign) for each in found],
            "next": last if last < lane.acknowledged else None,
        }

    async def delivery(
        self, request: web.Request, connection: Connection[Any], fetcher: Fetcher
    ) -> object:
        """Return one delivery of a lane, which may be pending, with its payload."""
        schema, text = self._database.schema, request.match_info["sequence"]
        sequence = _number("sequence", text, fetched_deliveries.SEQUENCE_MAX)
        lane = await lane_history.get_lane(
            connection, schema, fetcher.endpoint_id, request.match_info["lane"]
        )
        found = await fetched_deliveries.get_delivery(connection, schema, lane, sequence)
        return _item(lane, found, await self._signer(request, connection, fetcher))

    async def _signer(
        self, request: web.Request, connection: Connection[Any], fetcher: Fetcher
    ) -> _Signer:
        vault = Vault.from_settings(self._database.settings)
        endpoints = await read_endpoints(connection, [fetcher.endpoint_id], vault)
        if not endpoints:
            raise NotFound("the endpoint is removed")
        require_usable(endpoints[0])
        now: float = await connection.fetchval(READ_NOW)
        self._clocks.measure(self._wall(), now)
        is_local = self._signs_locally(fetcher.endpoint_id, request.path_qs)
        at = now + self._clocks.ahead_s if is_local else now
        return _Signer(endpoints[0], endpoints[0].secrets_at(now), int(at))

    def _signs_locally(self, endpoint_id: UUID, request: str) -> bool:
        if not self._clocks.matters:
            self._signed.clear()
            return False
        is_local, signed = self._signed.get(endpoint_id, (False, ()))
        if request in signed:
            is_local, signed = not is_local, ()
        self._signed[endpoint_id] = is_local, (*signed, request)[-SIGNED_MAX:]
        return is_local


def _holder(fetcher: Fetcher) -> Holder:
    """Whose limits a request counts against; those of endpoints without a tenant are their own."""
    if fetcher.tenant is None:
        return "endpoint", fetcher.endpoint_id
    return "tenant", fetcher.tenant


def _lane(lane: LaneHistory) -> dict[str, object]:
    return {
        "lane": lane.name,
        "generation": lane.generation,
        "acknowledged": lane.acknowledged,
        "last": lane.last,
        "ended": lane.ended,
    }


def _item(lane: LaneHistory, fetched: FetchedDelivery, sign: _Signer) -> dict[str, object]:
    item: dict[str, object] = {"sequence": fetched.sequence}
    if fetched.dead_lettered is not None:
        item["dead_lettered"] = fetched.dead_lettered
    if fetched.delivery is None:
        reason = "missing" if fetched.is_missing else "erased"
        return item | {reason: True, "previous_sequence": fetched.previous_sequence}
    prepared = prepare(
        fetched.delivery,
        fetched.previous_sequence,
        lane_ends=lane.ended and fetched.sequence == lane.last,
        # Its own headers may be credentials.
        headers=sign.endpoint.headers._replace(own=()),
        message_format=sign.endpoint.message_format.fetched,
    )
    # Attempt 0: fetching is not a delivery attempt.
    lines = prepared.attempt(0, sign.at_s, sign.keys)
    return item | {"headers": dict(parse_lines(lines)), **encode_body(prepared, fetched.delivery)}


def _parse_number(request: web.Request, name: str, default: int, maximum: int) -> int:
    text = request.query.get(name)
    return default if text is None else _number(name, text, maximum)


def _number(name: str, text: str, maximum: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= maximum):
        raise Problem(
            ProblemKind.INVALID, f"{name}: {text[:40]!r} is not a number from 0 to {maximum}"
        )
    return int(text)


def _as_problem(error: Exception, request: web.Request) -> Exception:
    mapped = problem.problem_for(error)
    if mapped is not None:
        return mapped
    return log_unexpected(log, error, request, request.path)
