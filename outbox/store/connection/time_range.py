"""Times beyond the range of Python's datetime, which an event of an older version may have.

PostgreSQL's range is larger, and asyncpg raises an error for a whole result if one of its times is
outside of Python's: one event would make every list unreadable that contains it.  Here such a time
becomes the nearest one that `outbox.store.sql.expressions.epoch_s` returns, too.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from outbox.core.model.event import EARLIEST, LATEST

if TYPE_CHECKING:
    from asyncpg import Connection

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_EARLIEST, _LATEST = (EARLIEST - _EPOCH) // _MICROSECOND, (LATEST - _EPOCH) // _MICROSECOND


async def limit_times(connection: Connection[Any]) -> None:
    """Limit what the connection reads as timestamptz to Python's range."""
    await connection.set_type_codec(
        "timestamptz", schema="pg_catalog", encoder=_encode, decoder=_decode, format="tuple"
    )


def _decode(value: tuple[int]) -> datetime:
    return _EPOCH + timedelta(microseconds=min(max(value[0], _EARLIEST), _LATEST))


def _encode(at: datetime) -> tuple[int]:
    return ((at - _EPOCH) // _MICROSECOND,)
