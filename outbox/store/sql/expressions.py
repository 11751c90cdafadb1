"""SQL expressions over the columns of events and lanes, which several statements share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model.event import EARLIEST, LATEST
from outbox.core.model.response import HOLD_FAILURES, STREAM_HOLD_FAILURES
from outbox.core.sequencing.partition_window import WIDTH

if TYPE_CHECKING:
    from collections.abc import Collection

    from outbox.core.model.response import Failure

PAYLOAD_BYTES = "coalesce(body, convert_to(payload::text, 'UTF8'))"
"""The bytes of a payload, JSON or not; NULL: the event was erased."""
PAYLOAD_SIZE = "coalesce(octet_length(body), octet_length(payload::text))"
"""Their number."""
CURRENT_XID = "pg_current_xact_id()::xid::text::bigint"
"""The id of this transaction, as the column xmin of the rows that it writes has it."""
RUN_LENGTH = "coalesce(cardinality(offsets), 1)"
"""Deliveries in a row of `delivery_run`.  The view `delivery` unnests a row before a condition on
`seq` or `outbox_id` is asked, so statements that would read many in vain name the table."""
RUN_DELIVERIES_MAX = 256
"""Deliveries in such a row, and attempts in one of `attempt_run`: so many fit into a page."""
SERVER_FENCE = """(coalesce(server_timeline(), 0) << 32
            | coalesce((SELECT xmin::text::bigint FROM incarnation), 0))"""
"""`server_fence()`, for statements that are executed often: PostgreSQL plans the body of a function
in SQL with each of them, which costs as much as all the rest of some."""


def is_found_late(event: str) -> str:
    """Whether the first batch to pass an event did not sequence it, but a later one that found it.

    The first batch of the kept log sequences nothing: an event that it is the first to pass was
    sequenced before it, or found later.

    Args:
        event: its outbox id.
    """
    return f"""(young @> {event}::bigint OR batch > 0 AND batch = (
               SELECT min(number) * {WIDTH} FROM period
                WHERE kind = 'log' AND dropped_at IS NULL))"""  # noqa: S608 (constants only)


def lease_runs(row: str) -> str:
    """Whether the lease of a replica runs.

    One that ends later than a lease can was renewed by a clock that has been set back, and a living
    replica renews it soon; twice its length, for small steps back.

    Args:
        row: its alias.
    """
    return f"""({row}.expires_at BETWEEN clock_timestamp()
            AND clock_timestamp() + make_interval(secs => 2 * {row}.lease_s))"""


def proves_itself(row: str) -> str:
    """Whether a row of `incarnation` or `lane_counter` was written here, and not restored.

    Args:
        row: its alias.
    """
    return f"({row}.by_xid IS NOT DISTINCT FROM {row}.xmin::text::bigint)"


def epoch_s(column: str) -> str:
    """A timestamp in epoch seconds, limited to the range of Python's datetime.

    PostgreSQL has others (infinity), and its least and greatest ignore NULL.  The seconds are exact
    to the microsecond for a few centuries: asyncpg takes as long to build one datetime as for the
    rest of a row.
    """
    return f"""CASE WHEN {column} IS NOT NULL
            THEN date_part('epoch', greatest(least({column}, '{LATEST.date()}'),
                                             '{EARLIEST.date()}')) END"""


def key_hash(key: str, event_id: str) -> str:
    """The hash of an event's key, or the event's id if it has no key.

    `Router.placements` takes it modulo the number of lanes.  It is not negative, as `abs` of a
    hash can be.

    Args:
        key: an expression for the key.
        event_id: an expression for the id.
    """
    return f"""CASE WHEN {key} IS NULL THEN {event_id}
            ELSE hashtextextended({key}, 0) & 9223372036854775807 END"""


def is_held(response: str, failures: Collection[Failure] = HOLD_FAILURES) -> str:
    """Whether a stored response is of a lane that is held until a person acts.

    Args:
        response: the column.
    """
    values = ", ".join(f"'{failure.value}'" for failure in sorted(failures))
    return f"{response} ->> 'failure' IN ({values})"


def is_stream_held(response: str) -> str:
    """Whether it is of a broker's lane that is held because its stream does not match."""
    return is_held(response, STREAM_HOLD_FAILURES)
