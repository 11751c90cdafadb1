"""The listener for receivers: what was sent to them, for who lost it or was not there.

    GET  /v1/lanes                            how far each lane of the endpoint is
    GET  /v1/lanes/{lane}/deliveries?after=N  what was delivered or given up behind N
    POST /v1/lanes/{lane}/replay?after=N      have that sent again

A receiver shows its endpoint's fetch token, and sees that endpoint alone.  What it is
given are whole deliveries, headers and body, signed afresh: whatever verifies and
processes a delivery that was sent takes one that was fetched.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson
import structlog
from aiohttp import web

from outbox.api import problem
from outbox.api.auth import UNKNOWN
from outbox.api.host_check import is_loopback
from outbox.api.middleware import problems, unexpected
from outbox.api.problem import Kind, Problem
from outbox.api.rate_limit import Limits
from outbox.api.server import listening
from outbox.core.delivery.message import prepare
from outbox.core.model.api_token import digest, is_fetch_token
from outbox.core.model.headers import pairs
from outbox.errors import CannotRun, NotFound
from outbox.operations import fetch_tokens, lane_history, receiver_replays
from outbox.store import endpoints as destinations
from outbox.store.connection.secrets import CLEAR, Vault

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from asyncpg import Connection

    from outbox.api.database import Database
    from outbox.api.login_failures import FailedLogins
    from outbox.config import Settings
    from outbox.core.delivery.signature import SigningKey
    from outbox.operations.fetch_tokens import Fetcher
    from outbox.operations.lane_history import Fetched, Lane
    from outbox.web.address import Address

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
    Answering = Callable[[web.Request, Connection[Any], Fetcher], Awaitable[object]]

log = structlog.get_logger("outbox.receivers")

TIMEOUT_S = 30.0
LIMIT = 100
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="outbox"'}


@asynccontextmanager
async def running(settings: Settings, address: Address) -> AsyncIterator[Address]:
    """Serve receivers while the context lasts; yields where it really listens.

    Raises:
        CannotRun: the address is taken, or not ours.
    """
    limits = Limits(settings.api_rate_max, time.monotonic)
    vault = Vault.of(settings)

    def receivers(database: Database, failures: FailedLogins) -> web.Application:
        return application(database, failures, limits, vault)

    async with listening(settings, address, receivers) as at:
        log.info("receivers can fetch", url=at.url)
        if not is_loopback(address.host):
            log.warning(
                "receivers can reach this from other machines, and tokens cross in clear; "
                "put TLS in front of it"
            )
        yield at


def application(
    database: Database,
    failures: FailedLogins,
    limits: Limits,
    vault: Vault = CLEAR,
    *,
    clock: Callable[[], float] = time.time,
) -> web.Application:
    """The listener; `clock` tells epoch seconds, to sign with."""
    receivers = _Receivers(database, failures, limits, vault, clock)
    app = web.Application(middlewares=[problems("there is no such path; there is /v1/lanes")])
    app.router.add_get("/v1/lanes", receivers.handler(receivers.lanes))
    app.router.add_get("/v1/lanes/{lane}/deliveries", receivers.handler(receivers.deliveries))
    app.router.add_post("/v1/lanes/{lane}/replay", receivers.handler(receivers.replay))
    return app


class _Receivers:
    """Answers who shows a fetch token."""

    def __init__(
        self,
        database: Database,
        failures: FailedLogins,
        limits: Limits,
        vault: Vault,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._vault = vault
        self._failures = failures
        self._limits = limits
        self._clock = clock

    def handler(self, answering: Answering) -> Handler:
        """What answers the requests for a route."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    fetcher = await self._fetcher(request)
                    self._limits.let_ask(fetcher.endpoint_id)
                    async with self._database.connection() as connection:
                        answer = await answering(request, connection, fetcher)
            except Exception as error:
                raise _as_problem(error, request) from error
            return web.json_response(body=orjson.dumps(answer))

        return handle

    async def lanes(
        self, request: web.Request, connection: Connection[Any], fetcher: Fetcher
    ) -> object:
        """How far each lane is, those of older generations first."""
        limit = _number(request, "limit", LIMIT, lane_history.PAGE_MAX)
        after = (0, -1)
        if name := request.query.get("after"):
            last = await lane_history.lane(
                connection, self._database.schema, fetcher.endpoint_id, name
            )
            after = (last.generation, last.slot)
        found = await lane_history.lanes(
            connection, self._database.schema, fetcher.endpoint_id, after=after, limit=limit
        )
        more = len(found) == limit
        return {"items": [_lane(lane) for lane in found], "next": found[-1].name if more else None}

    async def deliveries(
        self, request: web.Request, connection: Connection[Any], fetcher: Fetcher
    ) -> object:
        """A page of what a lane delivered or gave up."""
        after = _number(request, "after", 0, lane_history.SEQUENCE_MAX)
        limit = max(1, _number(request, "limit", LIMIT, lane_history.PAGE_MAX))
        schema = self._database.schema
        lane = await lane_history.lane(
            connection, schema, fetcher.endpoint_id, request.match_info["lane"]
        )
        found = await lane_history.page(connection, schema, lane, after, limit)
        endpoints = await destinations.read(connection, [fetcher.endpoint_id], self._vault)
        if not endpoints:
            raise NotFound("the endpoint is removed")
        now = self._clock()
        if (why := endpoints[0].problem) is not None:
            raise CannotRun(why)
        keys = endpoints[0].secrets_at(now)
        last = found[-1].sequence if found else max(after, lane.acknowledged)
        return _lane(lane) | {
            # What lies between is not kept any more.
            "kept_from": found[0].sequence if found else last + 1,
            "items": [_item(lane, each, int(now), keys) for each in found],
            "next": last if last < lane.acknowledged else None,
        }

    async def replay(
        self, request: web.Request, connection: Connection[Any], fetcher: Fetcher
    ) -> object:
        """Have what a lane delivered sent again, at the end of the lanes."""
        if "after" not in request.query:
            raise Problem(Kind.INVALID, "say behind which number: ?after=N, 0 for all that is kept")
        after = _number(request, "after", 0, lane_history.SEQUENCE_MAX)
        lane, schema = request.match_info["lane"], self._database.schema
        to = _number(request, "to", lane_history.SEQUENCE_MAX, lane_history.SEQUENCE_MAX)
        asked = await receiver_replays.ask(connection, schema, fetcher, lane, after, to)
        return {
            "lane": asked.lane,
            "job": asked.job,
            "from": asked.from_sequence,
            "to": asked.to_sequence,
            "acknowledged": asked.acknowledged,
        }

    async def _fetcher(self, request: web.Request) -> Fetcher:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token, address = token.strip(), request.remote or UNKNOWN
        try:
            if not scheme:
                raise _unauthenticated("send Authorization: Bearer TOKEN")
            if scheme.lower() != "bearer" or not is_fetch_token(token):
                self._limits.let_try(address, None)
                self._limits.was_bad(address, None)
                raise _unauthenticated("this is not a fetch token")
            key = digest(token)
            self._limits.let_try(address, key)
            async with self._database.login() as connection:
                # Again, because others from there may have come before.
                self._limits.let_try(address, key)
                found = await fetch_tokens.find(connection, self._database.schema, token)
            if found is None:
                self._limits.was_bad(address, key)
                raise _unauthenticated("the fetch token is not known, or good no more")
            self._limits.was_good(key)
        except Problem as told:
            self._failures.note(address, told.detail)
            raise
        return found


def _lane(lane: Lane) -> dict[str, object]:
    return {
        "lane": lane.name,
        "generation": lane.generation,
        "acknowledged": lane.acknowledged,
        "last": lane.last,
        "ended": lane.ended,
    }


def _item(lane: Lane, fetched: Fetched, now: int, keys: Sequence[SigningKey]) -> dict[str, object]:
    item: dict[str, object] = {"sequence": fetched.sequence}
    if fetched.given_up is not None:
        item["given_up"] = fetched.given_up
    if fetched.delivery is None:
        return item | {"erased": True, "previous_sequence": fetched.previous_sequence}
    prepared = prepare(
        fetched.delivery,
        fetched.previous_sequence,
        lane_ends=lane.ended and fetched.sequence == lane.last,
    )
    # No attempt: nobody tried to deliver it just now.
    headers = dict(pairs(prepared.attempt(0, now, keys)))
    return item | {"headers": headers, "body": prepared.body.decode()}


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise Problem(Kind.INVALID, f"{name}: {text[:40]!r} is not a number from 0 to {most}")
    return int(text)


def _unauthenticated(detail: str) -> Problem:
    return Problem(
        Kind.UNAUTHENTICATED, f"{detail}; outbox endpoint fetch-token makes one", _CHALLENGE
    )


def _as_problem(error: Exception, request: web.Request) -> Exception:
    told = problem.of(error)
    if told is not None:
        return told
    return unexpected(log, error, request, request.path)
