"""Read, parse and validate JSON bodies, at a bounded cost to the event loop of the relay.

    size ─▶ type ─▶ read ─▶ count values ─▶ parse ─▶ validate

A parser holds the GIL, so a thread alone does not keep the loop free: the size and the number of
values are limited before.  What remains is a few milliseconds for a small body.  A large one is
parsed and validated in a thread, one at a time, and at most `LARGE_MAX` are held until their
response, which bounds the memory.  The time that this takes is charged to the token, whose share
of it is `PARSING`: a token that sends one costly body after another cannot slow deliveries down.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson

from outbox.core.model.json_values import decode_json
from outbox.destinations.endpoint_validation import run_in_thread
from outbox_api.problem import Problem, ProblemKind
from outbox_api.rate_limit import LIMITED_TOKENS_MAX, too_many_requests
from outbox_api.request_parsing import validate
from outbox_api.route import SMALL_BYTES_MAX
from outbox_api.token_bucket import Allowance, TokenBuckets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable

    from aiohttp import web

    from outbox_api.route import RequestModel, Route

BODY_TIMEOUT_S = 25.0
"""Time-out of a body.  It is shorter than that of a request, so that the client, not the relay, is
named as late."""
LARGE_MAX = 4
PARSING = Allowance(per_s=0.02, burst=0.1)
"""CPU seconds that the large bodies of one token may take.  A typical body of 20 KiB takes 0.1 ms,
one with as many values as possible 4 ms."""

_NOT_COUNTED = bytes(set(range(256)) - set(b'"[{,'))


class BodyReader:
    """Reads the bodies of one listener.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._large = asyncio.Semaphore(LARGE_MAX)
        self._parsing = TokenBuckets(PARSING, keys_max=LIMITED_TOKENS_MAX)

    @asynccontextmanager
    async def read(
        self,
        request: web.Request,
        route: Route,
        model: type[RequestModel],
        bytes_max: int,
        token_id: Hashable,
    ) -> AsyncIterator[tuple[RequestModel, bool]]:
        """Read and validate a body; yields it, and whether it is large.

        Args:
            bytes_max: the limit from `BodyLimits`.
            token_id: whose request it is.

        Raises:
            Problem: the body is late, too large, not JSON, or invalid, or the token has used up its
                share of `PARSING`.
        """
        if not request.body_exists and not route.body_required:
            yield validate(model, {}, "the body"), False
            return
        require_json(request)
        if body_bytes(request, route, bytes_max) > SMALL_BYTES_MAX:
            self._require_parsing_quota(token_id)
        raw = await _read(request, bytes_max)
        if len(raw) <= SMALL_BYTES_MAX:
            yield parse(raw, model, route.body_values_max), False
            return
        async with self._large:
            self._require_parsing_quota(token_id)  # Others of its bodies were parsed meanwhile.
            yield await self._parse_large(raw, model, route.body_values_max, token_id), True

    def _require_parsing_quota(self, token_id: Hashable) -> None:
        wait_s = self._parsing.wait_s(token_id, self._clock(), tokens=0)
        if wait_s > 0:
            reason = "the large bodies of this token take too long to parse; send fewer"
            raise too_many_requests(reason, wait_s)

    async def _parse_large(
        self,
        raw: bytes | bytearray,
        model: type[RequestModel],
        values_max: int,
        token_id: Hashable,
    ) -> RequestModel:
        cpu_s = 0.0

        def measured() -> RequestModel:
            nonlocal cpu_s
            started_at_s = time.thread_time()
            try:
                return parse(raw, model, values_max)
            finally:
                cpu_s = time.thread_time() - started_at_s

        try:
            return await run_in_thread(measured)
        finally:
            self._parsing.charge(token_id, self._clock(), cpu_s)


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


def parse(raw: bytes | bytearray, model: type[RequestModel], values_max: int) -> RequestModel:
    """Parse and validate a body.

    Args:
        values_max: limit of its values.  Half as many may be arrays and objects, which cost most:
            the garbage collector traverses the new ones while the parser creates them.

    Raises:
        Problem: the body has too many values, is not JSON, or is invalid.
    """
    _check_value_count(raw, values_max)
    try:
        values: Any = decode_json(raw)
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


def _check_value_count(raw: bytes | bytearray, values_max: int) -> None:
    """Limit the number of values before the parser creates them.

    Punctuation is counted, at gigabytes per second.  With that in strings it is an upper bound; a
    body above the limit is counted again without its strings.

    Raises:
        Problem: there are too many.
    """
    containers_max = values_max // 2
    containers, values = _count_values(raw)
    if containers <= containers_max and values <= values_max:
        return
    # In JSON each backslash belongs to a string, and escapes what follows.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_COUNTED)
    # A value and its name are two strings.
    if plain.count(b'"') <= 4 * values_max:
        # Without a pair of quotes, what is around it remains inside or outside of a string.
        containers, values = _count_values(b"".join(plain.replace(b'""', b"").split(b'"')[::2]))
    if containers > containers_max:
        raise Problem(
            ProblemKind.TOO_LARGE,
            f"the body has more than {containers_max} arrays and objects; split it",
        )
    if values > values_max:
        raise Problem(
            ProblemKind.TOO_LARGE, f"the body has more than {values_max} values; split it"
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
