"""Read, parse and validate JSON bodies, at a bounded cost to the event loop of the relay.

    size ─▶ type ─▶ read ─▶ count values ─▶ parse ─▶ validate

A parser holds the GIL, so a thread alone does not keep the loop free: the size and the number of
values are limited before.  What remains is a few milliseconds for a small body.  A large one is
parsed and validated in a thread, one at a time, and at most `LARGE_MAX` are held until their
response, which bounds the memory.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson

from outbox.api.problem import Problem, ProblemKind
from outbox.api.request_parsing import validate
from outbox.api.route import SMALL_BYTES_MAX
from outbox.destinations.http.endpoint_validation import run_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import web

    from outbox.api.route import RequestModel, Route

BODY_TIMEOUT_S = 25.0
"""Shorter than the time-out of a request, so that the client, not the relay, is named as late."""
LARGE_MAX = 4
VALUES_MAX = 100_000
"""Objects with that many entries take 10 ms to parse."""
CONTAINERS_MAX = 50_000
"""Maximum number of arrays and objects.  They cost most: each is known to the garbage collector,
which traverses the new ones while the parser creates them."""

_NOT_COUNTED = bytes(set(range(256)) - set(b'"[{,'))


class BodyReader:
    """Reads the bodies of one listener."""

    def __init__(self) -> None:
        self._large = asyncio.Semaphore(LARGE_MAX)

    @asynccontextmanager
    async def read(
        self, request: web.Request, route: Route, model: type[RequestModel], bytes_max: int
    ) -> AsyncIterator[tuple[RequestModel, bool]]:
        """Read and validate a body; yields it, and whether it is large.

        Args:
            bytes_max: from `BodyLimits`.

        Raises:
            Problem: the body is late, too large, not JSON, or invalid.
        """
        if not request.body_exists and not route.body_required:
            yield validate(model, {}, "the body"), False
            return
        require_json(request)
        raw = await _read(request, bytes_max)
        if len(raw) <= SMALL_BYTES_MAX:
            yield parse(raw, model), False
            return
        async with self._large:
            yield await run_in_thread(parse, raw, model), True


def body_bytes(request: web.Request, route: Route, bytes_max: int) -> int:
    """Return how many bytes of body a request may send.

    Raises:
        Problem: its Content-Length is above the limit.
    """
    if route.body is None or not request.body_exists:
        return 0
    length = request.content_length
    if length is None:  # Chunked.
        return bytes_max
    if length > bytes_max:
        raise _too_large(bytes_max)
    return length


def require_json(request: web.Request) -> None:
    """Check the content type.

    Raises:
        Problem: the body is not JSON, or compressed.
    """
    if request.content_type != "application/json" or "Content-Encoding" in request.headers:
        raise Problem(
            ProblemKind.WRONG_CONTENT_TYPE,
            "send Content-Type: application/json without Content-Encoding",
        )


async def _read(request: web.Request, bytes_max: int) -> bytearray:
    """Read a body.  One whose chunks cannot be decoded is late: aiohttp reports no error."""
    raw = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
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


def parse(raw: bytes | bytearray, model: type[RequestModel]) -> RequestModel:
    """Parse and validate a body.

    Raises:
        Problem: the body has too many values, is not JSON, or is invalid.
    """
    _check_value_count(raw)
    try:
        values: Any = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Problem(
            ProblemKind.BAD_REQUEST,
            f"the body is not JSON: line {error.lineno}, column {error.colno}: {error.msg}",
        ) from None
    if not isinstance(values, dict):
        list_field = model.list_field if isinstance(values, list) else None
        hint = f'; send several as {{"{list_field}": [...]}}' if list_field else ""
        raise Problem(ProblemKind.INVALID, f"the body: must be a JSON object{hint}")
    return validate(model, values, "the body")


def _check_value_count(raw: bytes | bytearray) -> None:
    """Limit the number of values before the parser creates them.

    Punctuation is counted, at gigabytes per second.  With that in strings it is an upper bound; a
    body above the limit is counted again without its strings.

    Raises:
        Problem: there are too many.
    """
    containers, values = _count_values(raw)
    if containers <= CONTAINERS_MAX and values <= VALUES_MAX:
        return
    # In JSON each backslash belongs to a string, and escapes what follows.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_COUNTED)
    # A value and its name are two strings.
    if plain.count(b'"') <= 4 * VALUES_MAX:
        # Without a pair of quotes, what is around it remains inside or outside of a string.
        containers, values = _count_values(b"".join(plain.replace(b'""', b"").split(b'"')[::2]))
    if containers > CONTAINERS_MAX:
        raise Problem(
            ProblemKind.TOO_LARGE,
            f"the body has more than {CONTAINERS_MAX} arrays and objects; split it",
        )
    if values > VALUES_MAX:
        raise Problem(
            ProblemKind.TOO_LARGE, f"the body has more than {VALUES_MAX} values; split it"
        )


def _count_values(raw: bytes | bytearray) -> tuple[int, int]:
    """Count arrays and objects, and an upper bound of all values."""
    containers = raw.count(b"[") + raw.count(b"{")
    return containers, containers + raw.count(b",")


def _too_large(bytes_max: int) -> Problem:
    return Problem(
        ProblemKind.TOO_LARGE,
        f"the body is larger than {bytes_max} bytes, the limit of this route; "
        "split it, or use the command line",
    )
