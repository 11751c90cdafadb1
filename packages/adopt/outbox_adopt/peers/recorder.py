"""The recorder of a dual run: a receiver to which both senders send.

    POST /theirs/NAME   what the other sender sends for the endpoint NAME
    POST /ours/NAME     what outbox sends for it

NAME is percent-encoded.  It accepts every request that it can compare, so that no sender retries.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, get_args

import structlog
from aiohttp import web

from outbox.core.messages.signature import ID_HEADER
from outbox_adopt.peers.comparison import (
    METHOD,
    RecordedRequest,
    Side,
    TooManyUnpaired,
    hashes_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox_adopt.peers.comparison import ComparedEvent, Comparison

log = structlog.get_logger("outbox.compare")

BODY_BYTES_MAX = 8 * 1024 * 1024
BODIES_BYTES_MAX = 64 * 1024 * 1024
"""Limit of all bodies that are being received: anybody may send one."""
RECORD_TIMEOUT_S = 30.0
EVENT_HEADER = "x-event-id"
_EVENT = re.compile(r"[!-~]{1,64}")
"""Ids that are kept and printed; a forged request may have any other text."""


class Bodies:
    """Receives bodies, and limits what all of them take together."""

    def __init__(self) -> None:
        self._held_bytes = 0

    async def read(self, request: web.Request) -> bytes:
        """Read a body; senders send again what is refused.

        Raises:
            HTTPException: it is too large or late, or there is no room for it.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(RECORD_TIMEOUT_S):
                async for part in request.content.iter_any():
                    body += part
                    self._held_bytes += len(part)
                    if len(body) > BODY_BYTES_MAX:
                        raise web.HTTPRequestEntityTooLarge(BODY_BYTES_MAX, len(body))
                    if self._held_bytes > BODIES_BYTES_MAX:
                        raise web.HTTPServiceUnavailable(text="too many bodies at once\n")
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        finally:
            self._held_bytes -= len(body)
        return bytes(body)


def application(
    comparison: Comparison,
    on_event: Callable[[ComparedEvent], None],
    wall: Callable[[], float] = time.time,
) -> web.Application:
    """Create the application.

    Args:
        on_event: called with each event that both have sent.
    """

    bodies = Bodies()

    async def record(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        side: Side = "theirs" if request.match_info["side"] == "theirs" else "ours"
        if (endpoint := comparison.endpoints.get(name)) is None:
            raise web.HTTPNotFound(text="no compared endpoint has this name\n")
        body = await bodies.read(request)
        headers = {
            each.lower(): ", ".join(request.headers.getall(each)) for each in request.headers
        }
        compared = {**headers, METHOD: request.method}
        recorded = RecordedRequest(
            name,
            _event_of(headers),
            wall(),
            *hashes_of(body),
            tuple(hash(compared.get(each)) for each in endpoint.headers),
            endpoint.check.accepts(headers, body),
        )
        try:
            event = comparison.add(side, recorded)
        except TooManyUnpaired:
            raise web.HTTPServiceUnavailable(text="only one of the senders sends\n") from None
        if event is not None:
            on_event(event)
        return web.Response(status=204)

    app = web.Application()
    app.router.add_route("*", f"/{{side:{'|'.join(get_args(Side))}}}/{{name:.+}}", record)
    return app


def _event_of(headers: Mapping[str, str]) -> str:
    """The event's id in the headers; "-": there is none that can be printed."""
    names = (EVENT_HEADER, ID_HEADER, *(name for name in headers if name.endswith("-id")))
    found = (headers.get(name, "") for name in names)
    return next((text for text in found if _EVENT.fullmatch(text)), "-")
