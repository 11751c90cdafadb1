"""Delivery history of the last 24 hours; see `outbox.core.delivery.delivery_history`.

Intervals in which nothing was sent are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.delivery_history import (
    ALL_ENDPOINTS,
    HISTORY_INTERVAL_S,
    LATENCY_BOUNDS_S,
    latency_quantile_s,
)
from outbox.operations.endpoints.queries import ANY, NAMES_PAGE
from outbox.operations.pages import convert, page_of
from outbox.store.connection.connect import map_errors
from outbox.store.delivery.endpoints import endpoint_not_found

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection, Record

    from outbox.operations.endpoints.filter import EndpointFilter
    from outbox.operations.rows import RowPage

HOUR_S = 3600
KEPT_HOURS = 24
"""How far histories reach back."""
_LATENCIES = ", ".join(
    f"sum(h.latencies[{n}])::bigint" for n in range(1, len(LATENCY_BOUNDS_S) + 2)
)


def _history_by(subject: str) -> str:
    return f"""
SELECT {subject} AS endpoint_id,
       to_timestamp(floor(extract(epoch FROM h.began_at) / $2) * $2) AS at,
       sum(h.successes)::bigint AS successes, sum(h.failures)::bigint AS failures,
       ARRAY[{_LATENCIES}] AS latencies
  FROM delivery_history h
 WHERE h.endpoint_id = ANY ($1::uuid[])
   AND h.began_at BETWEEN clock_timestamp() - $3::integer * interval '1 hour'
                      AND clock_timestamp()
 GROUP BY 1, 2 ORDER BY 1, 2
"""  # noqa: S608 (constants only)


# The history of endpoints ($1), each for itself or together, in intervals of $2 seconds, of the
# last $3 hours.
HISTORY_OF_EACH, HISTORY_TOGETHER = map(_history_by, ("h.endpoint_id", f"'{ALL_ENDPOINTS}'::uuid"))

OF_TENANT = "SELECT id FROM endpoint WHERE tenant = $1 AND NOT all_tenants AND state <> 'removed'"
OF_NAME = "SELECT id FROM endpoint WHERE name = $1 AND state <> 'removed'"


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """What was delivered in an interval."""

    at: datetime
    """Its beginning."""
    successes: int
    """Deliveries that were acknowledged."""
    failures: int
    """Requests that failed."""
    p50_ms: float | None
    """Median duration of the successful requests; None: there were none."""
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Totals:
    """The last hours together."""

    successes: int
    failures: int
    p50_ms: float | None
    """Median duration of all their successful requests; None: there were none."""
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class History(Totals):
    """The last `hours` hours, in intervals."""

    hours: int
    interval_s: int
    items: list[HistoryPoint]


@dataclass(frozen=True, slots=True)
class EndpointHistory(Totals):
    """The last 24 hours of an endpoint, by the hour."""

    name: str
    items: list[HistoryPoint]


async def read_history(
    connection: Connection[Any],
    schema: str,
    *,
    endpoint: str | None = None,
    tenant: str | None = None,
    hours: int = KEPT_HOURS,
    interval_s: int = HISTORY_INTERVAL_S,
) -> History:
    """Read the history of one endpoint, or of all together.

    Args:
        endpoint: the endpoint's name; None: all.
        tenant: only endpoints of this tenant alone; without `endpoint`.
        hours: at most `KEPT_HOURS`.
        interval_s: a multiple of `HISTORY_INTERVAL_S`.

    Raises:
        NotFound: no such endpoint.
    """
    with map_errors(schema):
        if endpoint is not None:
            ids = [row["id"] for row in await connection.fetch(OF_NAME, endpoint)]
            if not ids:
                raise await endpoint_not_found(connection, endpoint)
        elif tenant is not None:
            ids = [row["id"] for row in await connection.fetch(OF_TENANT, tenant)]
        else:
            ids = [ALL_ENDPOINTS]
        rows = await connection.fetch(HISTORY_TOGETHER, ids, interval_s, hours)
    return History(*_totals(rows), hours, interval_s, list(map(_point, rows)))


async def list_histories(
    connection: Connection[Any],
    schema: str,
    *,
    tenant: str | None = None,
    only: EndpointFilter = ANY,
    limit: int = 100,
    after: str | None = None,
) -> RowPage[EndpointHistory]:
    """Read the histories of endpoints by name, at most `limit`, starting after the name `after`.

    Args:
        tenant: only endpoints of this tenant alone.
    """
    with map_errors(schema):
        found = await connection.fetch(NAMES_PAGE, after, limit + 1, tenant, *only.arguments)
        page = page_of(found, limit)
        ids = [row["id"] for row in page]
        rows = await connection.fetch(HISTORY_OF_EACH, ids, HOUR_S, KEPT_HOURS)
    by_id: dict[UUID, list[Record]] = {}
    for row in rows:
        by_id.setdefault(row["endpoint_id"], []).append(row)
    return await convert(page, lambda each: _history(each["name"], by_id.get(each["id"], [])))


def _history(name: str, rows: Sequence[Record]) -> EndpointHistory:
    return EndpointHistory(*_totals(rows), name, list(map(_point, rows)))


def _totals(rows: Sequence[Record]) -> tuple[int, int, float | None, float | None]:
    """The fields of `Totals`."""
    latencies = [sum(column) for column in zip(*(row["latencies"] for row in rows), strict=True)]
    return (
        sum(row["successes"] for row in rows),
        sum(row["failures"] for row in rows),
        _quantile_ms(latencies, 0.5),
        _quantile_ms(latencies, 0.99),
    )


def _point(row: Record) -> HistoryPoint:
    latencies = row["latencies"]
    return HistoryPoint(
        row["at"],
        row["successes"],
        row["failures"],
        _quantile_ms(latencies, 0.5),
        _quantile_ms(latencies, 0.99),
    )


def _quantile_ms(latencies: Sequence[int], share: float) -> float | None:
    found = latency_quantile_s(latencies, share)
    return None if found is None else round(found * 1000, 1)
