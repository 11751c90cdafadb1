"""Publishing for tokens of tenants: within the tenant's share at once, or held.

`outbox_api.shares` has the theory.  One statement in autocommit mode: it locks the row of a tenant
whose request is held, and never waits for its client meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import orjson

from outbox.core.model.text import count
from outbox.core.sequencing.tenant_pace import HELD_DELIVERIES_MAX
from outbox.drivers.connections import open_connection
from outbox.errors import OutboxError
from outbox.producers.publishing import publish_by
from outbox.producers.statements import PUBLISH_SHARED
from outbox.store.connection.connect import map_errors
from outbox.store.sql.type_match import SUBSCRIBERS
from outbox_api.problem import Refusal
from outbox_api.rate_limit import too_many_requests
from outbox_api.shares import SHARE, TENANT_SEGMENTS_MAX, Shares, build_routes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncpg import Connection

    from outbox.producers.event import Event
    from outbox_api.meters import ApiMeters

ATTEMPTS_MAX = 5
"""Publications of a request while the routes change.  The last one has the costs that were found
last."""

# What endpoints of a tenant alone ($1; NULL: none), and those of all tenants ($2), get of new
# events, with the routing version: a row without types if there are none.  The first are found by
# their endpoints, which have an index: each tenant's are read again with each change of anybody's
# routing.
READ_SUBSCRIPTIONS = f"""
SELECT c.version, found.types, found.all_tenants
  FROM cursor c
  LEFT JOIN (
       SELECT s.types, s.all_tenants
         FROM endpoint e CROSS JOIN LATERAL (
              SELECT types, tenant, all_tenants FROM {SUBSCRIBERS} each
               WHERE endpoint_id = e.id OFFSET 0) s
        WHERE e.tenant = $1 AND s.tenant = $1 AND NOT s.all_tenants
          AND e.state IN ('active', 'paused')
        UNION ALL
       SELECT s.types, s.all_tenants
         FROM {SUBSCRIBERS} s JOIN endpoint e ON e.id = s.endpoint_id
        WHERE $2 AND e.state IN ('active', 'paused') AND s.all_tenants) found ON true
"""  # noqa: S608 (constants only)


class FairPublisher:
    """Publishes for tokens of tenants.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        meters: ApiMeters,
        clock: Callable[[], float],
        *,
        shares: Shares | None = None,
        held_max: int = HELD_DELIVERIES_MAX,
    ) -> None:
        self._shares = shares or Shares()
        self._meters = meters
        self._clock = clock
        self._held_max = held_max

    async def publish(
        self,
        connection: Connection[Any],
        schema: str,
        tenant: str,
        events: Sequence[Event],
        encoded: bytes,
        digests: list[bytes] | None,
    ) -> list[UUID | None]:
        """Publish events, or let the database hold them.

        Args:
            encoded, digests: see `publish_encoded`.

        Raises:
            Problem: too many deliveries of the tenant are held already.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            costs = await self._costs(connection, schema, tenant, events)
            given: dict[str, Any] = {
                "events": encoded,
                "digests": digests,
                "tenant": tenant,
                "costs": costs,
                "costs_version": self._shares.version if attempt < ATTEMPTS_MAX else None,
                "held_max": self._held_max,
            }
            event_ids = await self._publish(connection, schema, events, given)
            if event_ids is not None:
                return event_ids
        raise AssertionError("without a version it is published")

    async def _publish(
        self,
        connection: Connection[Any],
        schema: str,
        events: Sequence[Event],
        given: dict[str, Any],
    ) -> list[UUID | None] | None:
        """Publish events; None: the routes have changed, and nothing is published."""
        tenant, costs = given["tenant"], given["costs"]
        # What has a `deliver_at` is paced when it is due.
        at_once = sum(n for n, each in zip(costs, events, strict=True) if each.deliver_at is None)
        passes = self._shares.reserve(tenant, at_once, self._clock())
        try:
            published = orjson.loads(
                await publish_by(
                    await open_connection(connection),
                    PUBLISH_SHARED,
                    given | {"passes": passes},
                    schema=schema,
                )
            )
        except asyncpg.PostgresConnectionError:
            raise  # It may have been published, as after a time-out.
        except (OutboxError, asyncpg.PostgresError):
            if passes:
                self._shares.release(tenant, at_once, self._clock())
            raise
        self._shares.version = published["version"]
        if passes and (published["held"] or published["event_ids"] is None):
            self._shares.release(tenant, at_once, self._clock())
        if published["held"]:
            self._shares.drain(tenant, self._clock())
        if published["over"] is not None:
            raise too_many_requests(
                f'more than {count(self._held_max, "delivery")} of the tenant "{tenant}" would be '
                f"held for its share of {SHARE.per_s:,.0f} deliveries a second",
                published["over"] / SHARE.per_s,
                Refusal.SHARE,
            )
        if published["event_ids"] is None:
            return None
        if published["held"]:
            self._meters.count_held()
        return [None if each is None else UUID(each) for each in published["event_ids"]]

    async def _costs(
        self, connection: Connection[Any], schema: str, tenant: str, events: Sequence[Event]
    ) -> list[int]:
        # Routes that are read may have another version than those that were known.
        while any(missing := self._shares.lacks_routes(tenant)):
            own, of_all = missing
            with map_errors(schema):
                rows = await connection.fetch(READ_SUBSCRIPTIONS, tenant if own else None, of_all)
            version = rows[0]["version"]
            types: dict[bool, list[Sequence[str]]] = {False: [], True: []}
            for row in rows:
                if row["types"] is not None:
                    types[row["all_tenants"]].append(row["types"])
            self._shares.set_routes(
                tenant,
                build_routes(version, types[False], segments_max=TENANT_SEGMENTS_MAX)
                if own
                else None,
                build_routes(version, types[True]) if of_all else None,
            )
        return self._shares.costs(tenant, [each.type for each in events])
