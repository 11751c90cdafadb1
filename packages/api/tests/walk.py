"""Requests that use every route once, in an order in which each one finds what it names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from outbox.core.model.response import AttemptResult
from outbox_api.events import NewEvents
from outbox_api.routes import ROUTES
from outbox_api.schedules import ScheduleBody
from tests.support.api import make_token
from tests.support.identity import identity
from tests.support.ranges import next_pending, sequence_all
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    Sent,
    add_endpoint,
    all_ended,
    fetchval,
    publish,
    running,
)
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox_api.route import Route
    from tests.support.api import Api
    from tests.support.api import AttemptResult as Response
    from tests.support.postgres import Database

URL = "http://127.0.0.1:9/"

FORGOT = """
UPDATE lane_progress SET attempts = 1, retry_seq = acked_seq + 1, first_attempt_at = now(),
       last_response = '{"failure": "forgot"}'
 WHERE endpoint_id = (SELECT id FROM endpoint WHERE name = 'shop')
"""
"""As if the streams of a broker had lost messages."""

SKIPPED = "UPDATE batch SET dead = int8multirange(int8range(high, high + 1)) WHERE batch = 1"
"""As if the first event had been skipped."""

NEWEST_JOB = "SELECT max(id) FROM replay_job"
FIRST_EVENT = "SELECT event_id FROM outbox ORDER BY id LIMIT 1"

CERTIFICATE, STUCK = "made when it is needed", "read when it is needed"
EXAMPLE = "that of the OpenAPI document"


@dataclass(frozen=True)
class Step:
    """A request of a route; `{job}` and `{event}` in its path are replaced.

    Args:
        route: as in the table of routes; a second request of one adds what differs, in brackets.
        tenant: sent with a token of this tenant.
    """

    route: str
    path: str
    body: Any = None
    query: Mapping[str, Any] = field(default_factory=dict)
    tenant: str | None = None

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def name(self) -> str:
        """The method and the path in the table of routes."""
        return self.route.partition(" (")[0]

    @property
    def declared(self) -> Route:
        """The route in the table."""
        return next(each for each in ROUTES if f"{each.method} {each.path}" == self.name)

    async def send(
        self, database: Database, api: Api, fill: Callable[[Any], Any] = lambda body: body
    ) -> Response:
        """Send it.

        Args:
            fill: changes the body.
        """
        if self.tenant is not None:
            token = await make_token(database, str(uuid4()), tenant=self.tenant)
            api = api.with_token(token)
        body = self.body
        if body is EXAMPLE:
            body = self.declared.bodies[0].example
        if body is STUCK:
            lane, sequence = await next_pending(database, "shop")
            body = {"lane": lane, "sequence": sequence}
        if body is CERTIFICATE:
            body = {"pem": identity()}
        path, query = self.path, dict(self.query)
        if "{job}" in path:
            path = path.replace("{job}", str(await fetchval(database, NEWEST_JOB)))
        if "{event}" in path + str(query):
            event = str(await fetchval(database, FIRST_EVENT))
            path = path.replace("{event}", event)
            query = {name: event if value == "{event}" else value for name, value in query.items()}
        if "{delivery}" in path:
            (row,) = (await api.get("/v1/endpoints/shop/deliveries", limit=1)).json["items"]
            path = path.replace("{delivery}", row["delivery"])
        return await api.request(self.method, path, fill(body), **query)


def _read(path: str, route: str | None = None, **query: Any) -> Step:
    return Step(f"GET {route or path}", path, None, query)


WALK = (
    _read("/v1/me"),
    _read("/v1/status"),
    _read("/v1/endpoint-statuses"),
    _read("/v1/replicas"),
    _read("/v1/doctor"),
    _read("/v1/live"),
    _read("/v1/endpoints"),
    _read("/v1/endpoints/shop", "/v1/endpoints/{name}"),
    _read("/v1/endpoints/shop/preview", "/v1/endpoints/{name}/preview", event="{event}"),
    _read("/v1/endpoints/shop/history", "/v1/endpoints/{name}/history"),
    _read("/v1/endpoint-settings"),
    _read("/v1/declaration"),
    _read("/v1/events"),
    _read("/v1/future-events"),
    _read("/v1/trace/{event}", "/v1/trace/{id}"),
    _read("/v1/endpoints/shop/deliveries", "/v1/endpoints/{name}/deliveries", failed=True),
    _read("/v1/deliveries", event="{event}"),
    _read("/v1/deliveries/{delivery}", "/v1/deliveries/{id}"),
    _read("/v1/history"),
    _read("/v1/endpoint-histories"),
    _read("/v1/dead-letters"),
    _read("/v1/dead-letters/counts"),
    _read("/v1/dead-letters/1", "/v1/dead-letters/{id}"),
    _read("/v1/once"),
    _read("/v1/once/o", "/v1/once/{key}"),
    _read("/v1/journal"),
    _read("/v1/tokens"),
    Step("POST /v1/endpoints", "/v1/endpoints", EXAMPLE),
    Step(
        "POST /v1/endpoints (from the beginning)",
        "/v1/endpoints",
        {"name": "search", "url": URL, "from": "beginning"},
    ),
    Step("PATCH /v1/endpoints/{name}", "/v1/endpoints/billing", EXAMPLE),
    Step("POST /v1/endpoints/pause", "/v1/endpoints/pause", EXAMPLE),
    Step("POST /v1/endpoints/resume", "/v1/endpoints/resume", EXAMPLE),
    Step("POST /v1/endpoints/{name}/pause", "/v1/endpoints/billing/pause", EXAMPLE),
    Step("POST /v1/endpoints/{name}/resume", "/v1/endpoints/billing/resume", EXAMPLE),
    Step("POST /v1/endpoints/{name}/refill", "/v1/endpoints/shop/refill", EXAMPLE),
    Step("POST /v1/endpoints/{name}/adopt", "/v1/endpoints/shop/adopt", EXAMPLE),
    Step("POST /v1/endpoints/{name}/skip", "/v1/endpoints/shop/skip", STUCK),
    Step("POST /v1/endpoints/{name}/enable", "/v1/endpoints/off/enable", EXAMPLE),
    Step("POST /v1/endpoints/enable", "/v1/endpoints/enable", {"names": ["off2"]}),
    Step("POST /v1/endpoints/{name}/rotate-secret", "/v1/endpoints/billing/rotate-secret", EXAMPLE),
    Step("PUT /v1/endpoints/{name}/certificate", "/v1/endpoints/billing/certificate", CERTIFICATE),
    Step("DELETE /v1/endpoints/{name}/certificate", "/v1/endpoints/billing/certificate"),
    Step(
        "PUT /v1/endpoints/{name}/credentials",
        "/v1/endpoints/stream/credentials",
        EXAMPLE,
    ),
    Step("DELETE /v1/endpoints/{name}/credentials", "/v1/endpoints/stream/credentials"),
    Step("PUT /v1/declaration", "/v1/declaration", {"endpoints": [{"name": "put", "url": URL}]}),
    Step("POST /v1/dead-letters/replay", "/v1/dead-letters/replay", EXAMPLE),
    Step("POST /v1/dead-letters/discard", "/v1/dead-letters/discard", EXAMPLE),
    Step("POST /v1/replays", "/v1/replays", EXAMPLE),
    _read("/v1/replays"),
    _read("/v1/replays/{job}", "/v1/replays/{id}"),
    Step("POST /v1/replays/{id}/abort", "/v1/replays/{job}/abort"),
    Step("POST /v1/schedules", "/v1/schedules", EXAMPLE),
    Step(
        "POST /v1/schedules (replace)", "/v1/schedules", {**ScheduleBody.example, "replace": True}
    ),
    _read("/v1/schedules"),
    _read("/v1/schedules/nightly", "/v1/schedules/{name}"),
    Step("POST /v1/schedules/{name}/pause", "/v1/schedules/nightly/pause", EXAMPLE),
    Step("POST /v1/schedules/{name}/resume", "/v1/schedules/nightly/resume", EXAMPLE),
    Step("POST /v1/schedules/{name}/run-now", "/v1/schedules/nightly/run-now"),
    Step("DELETE /v1/schedules/{name}", "/v1/schedules/nightly"),
    Step(
        "POST /v1/schedules (of a tenant)",
        "/v1/schedules",
        {**ScheduleBody.example, "tenant": "acme", "replace": True},
    ),
    Step("POST /v1/schedules/{name}/run-now (of a tenant)", "/v1/schedules/nightly/run-now"),
    Step("POST /v1/once/{key}/reset", "/v1/once/o/reset"),
    Step("PUT /v1/quotas", "/v1/quotas", EXAMPLE),
    _read("/v1/quotas"),
    _read("/v1/quotas/acme", "/v1/quotas/{tenant}"),
    Step("DELETE /v1/quotas/{tenant}", "/v1/quotas/acme"),
    Step("POST /v1/tokens", "/v1/tokens", EXAMPLE),
    Step("DELETE /v1/tokens/{name}", "/v1/tokens/dashboard"),
    Step("POST /v1/events", "/v1/events", EXAMPLE),
    Step("POST /v1/events (several)", "/v1/events", NewEvents.example),
    Step("POST /v1/events (of a tenant)", "/v1/events", {"type": "a.b"}, tenant="acme"),
    Step("POST /v1/verify", "/v1/verify"),
    Step("POST /v1/resequence", "/v1/resequence"),
    Step("POST /v1/endpoints/{name}/test", "/v1/endpoints/put/test"),
    Step("DELETE /v1/endpoints/{name}", "/v1/endpoints/shop", None, {"dead_letter": True}),
    Step("POST /v1/erase", "/v1/erase", {"key": "k"}),
)


def _respond(sent: Sent) -> AttemptResult:
    if sent.url.endswith(("off", "off2")):
        return AttemptResult.completed(410, 0.001)
    return REFUSED if sent.seq < 3 else OK


async def prepare(database: Database) -> None:
    """Create what the walk names."""
    await add_endpoint(database)
    await add_endpoint(database, "off")
    await add_endpoint(database, "off2")
    await add_endpoint(database, "stream", url="redis://127.0.0.1:9/s")
    async with running(database, Network(_respond)):
        await publish(database, 1, 2, 3, key="k")
        await all_ended(database)
        off = "SELECT bool_and(state = 'disabled') FROM endpoint WHERE name LIKE 'off%'"
        await until(lambda: fetchval(database, off), what="them to be disabled")
    await fetchval(database, "SELECT publish('a.b', '{}', once => 'o')")
    await publish(database, "stuck")
    await sequence_all(database)
    await fetchval(database, FORGOT)
    await fetchval(database, SKIPPED)
