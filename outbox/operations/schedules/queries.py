"""Schedule queries, and the count of future events."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from outbox.core.model.text import did_you_mean
from outbox.core.schedules.cron import Cron
from outbox.errors import NotFound, UsageError
from outbox.operations.pages import convert, read_page
from outbox.operations.rows import RowPage, from_row
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Connection, Record

COLUMNS = """
name, cron, timezone, type, key, tenant, misfire, grace_s, overlap, state, state_at, state_by,
state_comment, CASE WHEN state = 'active' THEN next_at END AS next_at, last_at, last_run_at,
last_event_id AS last_event, created_at, clock_timestamp() AS now,
state = 'active' AND overlap = 'wait' AND last_outbox_id IS NOT NULL
    AND next_at <= clock_timestamp() AND due_at > next_at AS waits
"""

# Without payloads, each of which may be large.
PAGE = f"""
SELECT {COLUMNS}
  FROM schedule
 WHERE ($1::text IS NULL OR name COLLATE "C" > $1) AND ($3::text IS NULL OR tenant = $3)
 ORDER BY name COLLATE "C" LIMIT $2
"""  # noqa: S608 (constants only)

GET = f"""
SELECT {COLUMNS}, payload::text, headers::text
  FROM schedule WHERE name = $1
"""  # noqa: S608

# Candidates for a misspelled name.
READ_NAMES = "SELECT name FROM schedule LIMIT 10000"

# Those with a deliver_at, of applications and of tenants' tokens: an index has each kind.  Counted
# up to a limit: there may be a million, and more that are held.
READ_FUTURE = """
WITH delayed AS MATERIALIZED (
    (SELECT deliver_at FROM future_event WHERE cost IS NULL
      ORDER BY coalesce(retry_at, deliver_at), id LIMIT $1 + 1)
     UNION ALL
    (SELECT deliver_at FROM future_event WHERE cost IS NOT NULL AND held_before IS NULL
      ORDER BY coalesce(retry_at, deliver_at) LIMIT $1 + 1))
SELECT least(count(*), $1 + 1) AS events, min(deliver_at) AS first_at, clock_timestamp() AS now
  FROM delayed
"""

FUTURE_COUNT_MAX = 10_000
NEXT_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ListedSchedule:
    """A schedule with its state, as listed."""

    name: str
    cron: str
    timezone: str
    type: str
    key: str | None
    tenant: str | None
    misfire: str
    grace_s: float
    overlap: str
    state: str
    state_at: datetime
    state_by: str | None
    state_comment: str | None
    next_at: datetime | None
    """Next run; None: the schedule is paused."""
    next_runs: list[datetime]
    """The next runs, in the schedule's time zone; empty when it is paused."""
    last_at: datetime | None
    """Scheduled time of the last published run."""
    last_run_at: datetime | None
    last_event: UUID | None
    waits: bool
    """Due, and waiting until `last_event` is delivered or dead-lettered everywhere."""
    created_at: datetime
    now: datetime
    """Time of the query, by the database's clock."""


@dataclass(frozen=True, slots=True)
class Schedule(ListedSchedule):
    """A schedule with its state and its event; JSON is parsed."""

    payload: Any
    headers: dict[str, str] | None


def next_runs(next_at: datetime | None, cron: str, timezone: str) -> list[datetime]:
    """The next run and those after it, in a time zone; empty when there is none."""
    if next_at is None:
        return []
    try:
        parsed = Cron(cron, timezone)
    except UsageError:  # The time zone is unknown on this machine.
        return [next_at]
    runs = [next_at, *islice(parsed.after(next_at), NEXT_SHOWN - 1)]
    return [at.astimezone(parsed.zone) for at in runs]


@dataclass(frozen=True, slots=True)
class FutureEvents:
    """Count of future events, published with deliver_at."""

    events: int
    """Number of events; `FUTURE_COUNT_MAX` + 1 means more than `FUTURE_COUNT_MAX`."""
    first_at: datetime | None
    now: datetime


async def list_schedules(
    connection: Connection[Any],
    schema: str,
    *,
    tenant: str | None = None,
    limit: int = 100,
    after: str | None = None,
) -> RowPage[ListedSchedule]:
    """List schedules by name, at most `limit`, starting after the name `after`.

    There are fewer if they are large, as in `outbox.operations.pages`.

    Args:
        tenant: only schedules that publish for this tenant.
    """
    with map_errors(schema):
        page = await read_page(connection, PAGE, "name", after, limit, tenant)
    return await convert(page, lambda row: from_row(ListedSchedule, row, next_runs=_next_runs(row)))


async def get_schedule(connection: Connection[Any], schema: str, name: str) -> Schedule:
    """Read one schedule.

    Raises:
        NotFound: no schedule has this name.
    """
    with map_errors(schema):
        return await read_schedule(connection, name)


async def count_future_events(connection: Connection[Any], schema: str) -> FutureEvents:
    """Count the future events, with the time of the first."""
    with map_errors(schema):
        return FutureEvents(**dict(await connection.fetchrow(READ_FUTURE, FUTURE_COUNT_MAX)))


# ------------------------------------------------------------------ details


async def read_schedule(connection: Connection[Any], name: str) -> Schedule:
    """Read one schedule in the caller's transaction.

    Raises:
        NotFound: no schedule has this name.
    """
    row = await connection.fetchrow(GET, name)
    if row is None:
        raise await schedule_not_found(connection, name)
    return from_row(
        Schedule, row, parse=("headers",), embed=("payload",), next_runs=_next_runs(row)
    )


async def schedule_not_found(connection: Connection[Any], name: str) -> NotFound:
    """The error for an unknown name, with the closest match."""
    names = [row["name"] for row in await connection.fetch(READ_NAMES)]
    hint = did_you_mean(name, names, "see: outbox schedule list")
    return NotFound(f'there is no schedule "{name}"; {hint}')


def _next_runs(row: Record) -> list[datetime]:
    return next_runs(row["next_at"], row["cron"], row["timezone"])
