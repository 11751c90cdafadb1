"""The envelope: a JSON object with an event's metadata and payload.

    {"id", "type", "timestamp", "tenant", "key", "lane", "sequence", "previous_sequence",
     "replay_of", "backfill", "lane_ends", "data"}

Absent values are left out.  The payload's bytes are inserted as the database wrote them and are
never parsed here.  A payload that is not JSON is in "data_base64", with its "content_type".
"""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime
from functools import lru_cache
from math import floor
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from outbox.core.model.delivery import Delivery

_OFFSET_CHARS = len("+00:00")
_MICROSECONDS = 1_000_000


def rfc3339(at: float) -> str:
    """Epoch seconds in UTC with microseconds, `2026-01-31T12:00:00.000000Z` (RFC 3339, 5.6)."""
    second = floor(at)
    microsecond = round((at - second) * _MICROSECONDS)
    if microsecond == _MICROSECONDS:
        second, microsecond = second + 1, 0
    return f"{_date_time(second)}.{microsecond:06}Z"


def datetime_rfc3339(at: datetime) -> str:
    """`rfc3339` of a datetime with any time zone, exactly: a float is not, centuries from now."""
    return at.astimezone(UTC).isoformat(timespec="microseconds")[:-_OFFSET_CHARS] + "Z"


@lru_cache(64)
def _date_time(second: int) -> str:
    """`2026-01-31T12:00:00` of an epoch second; cached, because many events share one."""
    return datetime.fromtimestamp(second, UTC).isoformat()[:-_OFFSET_CHARS]


def envelope(
    delivery: Delivery,
    previous_seq: int,
    *,
    lane_ends: bool = False,
    first: str = "",
    thin: bool = False,
) -> bytes:
    """The JSON object of a delivery.

    Args:
        previous_seq: the last delivered sequence of the lane, 0: none.
        lane_ends: no delivery follows in its lane.
        first: JSON members to put first, each followed by a comma.
        thin: leave out the payload, but not its content type.
    """
    # Formatted by hand: most values need no quoting, and encoding a dictionary took longer than
    # everything else that is done for a body.
    tenant, key = delivery.tenant, delivery.key
    tenant_json = "" if tenant is None else f',"tenant":{_quoted(tenant)}'
    key_json = "" if key is None else f',"key":{orjson.dumps(key).decode()}'
    rest = ""
    if lane_ends or delivery.replay_of is not None or delivery.backfill_id is not None:
        rest = _rest(delivery, lane_ends=lane_ends)
    if delivery.content_type is not None:
        rest += f',"content_type":{_quoted(delivery.content_type)}'
    metadata = (
        f'{{{first}"id":"{delivery.event_id}","type":{_quoted(delivery.type)},'
        f'"timestamp":"{rfc3339(delivery.published_at)}"{tenant_json}{key_json},'
        f'"lane":"{delivery.lane}","sequence":{delivery.seq},'
        f'"previous_sequence":{previous_seq}{rest}'
    ).encode()
    return metadata + b"}" if thin else add_data(metadata, delivery)


def add_data(members: bytes, delivery: Delivery) -> bytes:
    """Add the payload to a JSON object that is not closed yet, and close it."""
    if delivery.content_type is None:
        return b"".join((members, b',"data":', delivery.payload, b"}"))
    return b"".join((members, b',"data_base64":"', b64encode(delivery.payload), b'"}'))


def _rest(delivery: Delivery, *, lane_ends: bool) -> str:
    """The members that only replays, backfills and the last delivery of a lane have."""
    members: dict[str, object] = {}
    if delivery.replay_of is not None:
        lane, sequence = delivery.replay_of
        members["replay_of"] = {"lane": lane, "sequence": sequence}
    if delivery.backfill_id is not None:
        members["backfill"] = delivery.backfill_id
    if lane_ends:
        members["lane_ends"] = True
    return f",{orjson.dumps(members)[1:-1].decode()}" if members else ""


@lru_cache(1024)
def _quoted(text: str) -> str:
    """A JSON string; cached, because there are few types and tenants."""
    return orjson.dumps(text).decode()
