"""Read, parse and validate JSON bodies.

The size is limited while a body is read, its depth by the parser (`BODY_DEPTH_MAX`), and the number
of items by the models.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson

from outbox.core.model.json_values import decode_json
from outbox_api.limits import (
    BODY_TIMEOUT_S,
    EVENT_BYTES_MAX,
    PAYLOAD_BODY_BYTES_MAX,
    PAYLOAD_LIMIT_KEEP_S,
)
from outbox_api.problem import Problem, ProblemKind
from outbox_api.request_parsing import validate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import web

    from outbox_api.database import Database
    from outbox_api.in_flight import RequestInFlight
    from outbox_api.route import RequestModel, Route

READ_LIMIT = "SELECT payload_bytes_max()"


class BodyReader:
    """Reads the bodies of one listener.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._payload_body_bytes_max = PAYLOAD_BODY_BYTES_MAX
        self._read_at = float("-inf")

    async def read(
        self, request: web.Request, route: Route, in_flight: RequestInFlight
    ) -> bytearray | None:
        """Read a body; None: there is none, and the route does not require it.

        Raises:
            Problem: the body is late, too large, or not JSON, or there is no room for it.
            OutboxError: the database is unavailable.
        """
        if not request.body_exists and not route.body_required:
            return None
        codings = request.headers.get("Transfer-Encoding", "chunked").lower()
        if (
            request.content_type != "application/json"
            or "Content-Encoding" in request.headers
            or codings != "chunked"
        ):
            raise Problem(
                ProblemKind.WRONG_CONTENT_TYPE,
                "send Content-Type: application/json without Content-Encoding, and without "
                "Transfer-Encoding other than chunked",
            )
        length = request.content_length  # None: it is chunked.
        bytes_max = await self._bytes_max(route, length)
        if length is not None and length > bytes_max:
            raise _too_large(bytes_max)
        in_flight.hold(bytes_max if length is None else length)
        raw = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                # aiohttp reports no error of chunks that cannot be decoded: such a body is late.
                async for part in request.content.iter_any():
                    raw += part
                    if len(raw) > bytes_max:
                        raise _too_large(bytes_max)
        except TimeoutError:
            raise Problem(
                ProblemKind.BODY_LATE,
                f"the body was not complete within {BODY_TIMEOUT_S:g} s; send the request again",
            ) from None
        return raw

    async def _bytes_max(self, route: Route, length: int | None) -> int:
        """The limit of the route, or the one of larger payloads for a body that requires it."""
        if route.body_bytes_max != PAYLOAD_BODY_BYTES_MAX:
            return route.body_bytes_max
        if length is not None and length <= PAYLOAD_BODY_BYTES_MAX:
            return PAYLOAD_BODY_BYTES_MAX
        if self._clock() - self._read_at >= PAYLOAD_LIMIT_KEEP_S:
            self._payload_body_bytes_max = await self._read_payload_limit()
            self._read_at = self._clock()
        return self._payload_body_bytes_max

    async def _read_payload_limit(self) -> int:
        async with self._database.login() as connection:
            try:
                payload_bytes_max: int = await connection.fetchval(READ_LIMIT)
            except asyncpg.InsufficientPrivilegeError:  # This role may not publish.
                return PAYLOAD_BODY_BYTES_MAX
        return max(PAYLOAD_BODY_BYTES_MAX, payload_bytes_max * 4 // 3 + EVENT_BYTES_MAX)


def parse(raw: bytes | bytearray | None, models: Sequence[type[RequestModel]]) -> RequestModel:
    """Parse and validate a body; None: no field is set.

    Args:
        models: the first one, unless the body has the list of another one.

    Raises:
        Problem: the body is not JSON, too deep, or invalid.
    """
    try:
        values: Any = {} if raw is None else decode_json(raw)
    except orjson.JSONDecodeError as error:
        raise Problem(
            ProblemKind.BAD_REQUEST,
            f"the body is not JSON: line {error.lineno}, column {error.colno}: {error.msg}",
        ) from None
    if not isinstance(values, dict):
        fields = [each.list_field for each in models if each.list_field]
        list_field = fields[0] if fields and isinstance(values, list) else None
        hint = f'; send several as {{"{list_field}": [...]}}' if list_field else ""
        raise Problem(ProblemKind.INVALID, f"the body: must be a JSON object{hint}")
    model = next((each for each in models if each.list_field in values), models[0])
    return validate(model, values, "the body")


def _too_large(bytes_max: int) -> Problem:
    return Problem(
        ProblemKind.TOO_LARGE,
        f"the body is larger than {bytes_max} bytes, the limit of this route; "
        "split it, or use the command line",
    )
