"""Limits of request bodies: that of the route, or a larger one for large payloads.

A body with payloads has at most `PAYLOAD_BODY_BYTES_MAX`, which suffices for the default limit of
payloads.  Where `outbox migrate --payload-bytes-max` allows larger ones, the limit is theirs in
Base64 plus `EVENT_BYTES_MAX` for the rest of the event.  It is read from the database, for a body
that requires it only, and is kept for `PAYLOAD_LIMIT_KEEP_S`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import asyncpg

from outbox_api.route import PAYLOAD_BODY_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from outbox_api.database import Database
    from outbox_api.route import Route

EVENT_BYTES_MAX = 64 * 1024
"""Bytes that the fields of an event besides its payload may have."""
PAYLOAD_LIMIT_KEEP_S = 10.0
READ_LIMIT = "SELECT payload_bytes_max()"


class BodyLimits:
    """The limits of one listener.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._bytes_max = PAYLOAD_BODY_BYTES_MAX
        self._read_at = float("-inf")

    async def body_bytes_max(self, request: web.Request, route: Route) -> int:
        """Return the maximum number of bytes of a request's body.

        Raises:
            OutboxError, Problem: the database is unavailable.
        """
        if route.body_bytes_max != PAYLOAD_BODY_BYTES_MAX or not request.body_exists:
            return route.body_bytes_max
        length = request.content_length
        if length is not None and length <= PAYLOAD_BODY_BYTES_MAX:
            return route.body_bytes_max
        if self._clock() - self._read_at >= PAYLOAD_LIMIT_KEEP_S:
            self._bytes_max = await self._read()
            self._read_at = self._clock()
        return self._bytes_max

    async def _read(self) -> int:
        async with self._database.login() as connection:
            try:
                payload_bytes_max: int = await connection.fetchval(READ_LIMIT)
            except asyncpg.InsufficientPrivilegeError:  # This role may not publish.
                return PAYLOAD_BODY_BYTES_MAX
        return max(PAYLOAD_BODY_BYTES_MAX, payload_bytes_max * 4 // 3 + EVENT_BYTES_MAX)
