"""/v1/live: what moves, for a page that asks again and again.

Nothing is looked at while nobody asks.  However many ask, the database is asked once in
`FRESH_S`, and the last minutes are remembered as long as somebody watches now and then.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import AwareDatetime, Field

from outbox.api.route import Call, For, Model, Route, Shown
from outbox.api.schemas import joined
from outbox.operations import live_status
from outbox.operations.live_status import EndpointView, Look, Totals
from outbox.operations.status import rates
from outbox.operations.views.merge import flat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from asyncpg import Connection

FRESH_S = 1.0
SAMPLES_MAX = 600
"""Ten minutes, however many watch."""
LATELY_S = 10.0
"""What was seen so long ago will do for whoever asks while it is looked at again."""
FORGET_S = 600.0
"""A look that is older says nothing of rates."""
WATCHED_MAX = 50
"""Tenants whose last minutes are remembered at once."""
ENDPOINTS, ENDPOINTS_MAX = 30, 200


@dataclass(frozen=True, slots=True)
class Sample:
    """How fast things moved up to a time, per second."""

    at: datetime
    seconds: float
    """Over so long: of what was between two looks that are far apart nothing is known."""
    events: float
    """Sequenced; 0 for a tenant, of which it is not known."""
    numbered: float
    """Deliveries that were made of them."""
    ended: float
    """Deliveries that were acknowledged or given up."""
    owed: int


class _Watched:
    """The last minutes of what one tenant, or everybody, sees."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self.seen: Look | None = None
        self.limit = 0
        """So many endpoints are looked at."""
        self.much_at = float("-inf")
        """When more than the usual were asked for."""
        self.looked_at = float("-inf")
        self.looking = asyncio.Lock()

    def shown(self, limit: int) -> Look | None:
        """What was seen last, if that is as much as is asked for."""
        if self.seen is None or self.limit < limit:
            return None
        return replace(self.seen, endpoints=self.seen.endpoints[:limit])


class LiveBook:
    """What was seen lately.

    Args:
        clock: steady seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watched: OrderedDict[str | None, _Watched] = OrderedDict()

    async def look(
        self, connection: Connection[Any], schema: str, tenant: str | None, limit: int
    ) -> tuple[Look, Iterable[Sample]]:
        """What there is to see, looked at now unless that was just done, and how it got there.

        Args:
            limit: show so many endpoints, at most.
        """
        watched = self._watched.setdefault(tenant, _Watched())
        self._watched.move_to_end(tenant)
        while len(self._watched) > WATCHED_MAX:
            self._watched.popitem(last=False)
        lately = self._clock() - watched.looked_at < LATELY_S
        if watched.looking.locked() and lately and (seen := watched.shown(limit)) is not None:
            return seen, watched.samples  # Nobody waits with a connection in hand.
        async with watched.looking:
            now = self._clock()
            age_s = now - watched.looked_at
            before = watched.seen if age_s < FORGET_S else None
            if age_s < FRESH_S and (seen := watched.shown(limit)) is not None:
                return seen, watched.samples
            if limit > ENDPOINTS:
                watched.much_at = now
            # Who asks for more gets it at once, and then everybody is served of that.
            watched.limit = ENDPOINTS_MAX if now - watched.much_at < FORGET_S else ENDPOINTS
            seen = await live_status.look(
                connection,
                schema,
                tenant=tenant,
                since_batch=None if before is None else before.totals.batch,
                limit=watched.limit,
            )
            if before is not None and age_s < FRESH_S:
                # Of rates so short a time says nothing.
                watched.seen = replace(seen, totals=before.totals)
            else:
                if before is None:
                    watched.samples.clear()
                elif (sample := _sample(before.totals, seen.totals)) is not None:
                    watched.samples.append(sample)
                watched.seen, watched.looked_at = seen, now
            seen = watched.shown(limit)
            assert seen is not None
        return seen, watched.samples


def _sample(before: Totals, now: Totals) -> Sample | None:
    moved = rates(before, now, now.events)
    if moved is None:
        return None
    seconds = (now.at - before.at).total_seconds()
    return Sample(now.at, seconds, moved.events, moved.deliveries, moved.ended, now.owed)


class LiveQuery(Model):
    endpoints: int = Field(default=ENDPOINTS, ge=0, le=ENDPOINTS_MAX)
    """At most so many, those that are owed most first."""
    since: AwareDatetime | None = None
    """Leave out samples up to this time: the page has them already."""


TotalsShown: Any = joined("Totals", Totals, batch=int | None)


class Live(Shown):
    """What moves."""

    totals: TotalsShown
    """Of a tenant's endpoints to that tenant, which is not told the batch."""
    samples: list[Sample]
    """How fast things moved lately, for as long as somebody was watching."""
    endpoints: list[EndpointView]


async def _live(call: Call[LiveQuery, None]) -> dict[str, Any]:
    seen, samples = await call.live.look(call.db, call.schema, call.tenant, call.query.endpoints)
    since = call.query.since
    totals = flat(seen.totals)
    if call.tenant is not None:
        totals["batch"] = None
    return {
        "totals": totals,
        "samples": [each for each in samples if since is None or each.at > since],
        "endpoints": seen.endpoints,
    }


ROUTES = (
    Route(
        method="GET",
        path="/v1/live",
        summary="What moves, for a page that asks every few seconds",
        handler=_live,
        scope="read",
        tenants=For.NARROWED,
        query=LiveQuery,
        answers={200: Live},
    ),
)
