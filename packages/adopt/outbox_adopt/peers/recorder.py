"""The recorder of a dual run: a receiver to which both senders send.

    POST /theirs/NAME   what the other sender sends for the endpoint NAME
    POST /ours/NAME     what outbox sends for it

It accepts everything, so that no sender retries, and compares it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, get_args

import structlog
from aiohttp import web

from outbox.core.messages.signature import ID_HEADER
from outbox_adopt.peers.comparison import RecordedRequest, Side, hashes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox_adopt.peers.comparison import ComparedEvent, Comparison
    from outbox_adopt.peers.compat_check import CompatCheck

log = structlog.get_logger("outbox.compare")

BODY_BYTES_MAX = 8 * 1024 * 1024
EVENT_HEADER = "x-event-id"


def application(
    comparison: Comparison,
    checks: Mapping[str, CompatCheck],
    on_event: Callable[[ComparedEvent], None],
    wall: Callable[[], float] = time.time,
) -> web.Application:
    """Create the application.

    Args:
        checks: how each endpoint's receiver checks it, by the endpoint's name.
        on_event: called with each event that both have sent.
    """

    async def record(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        side: Side = "theirs" if request.match_info["side"] == "theirs" else "ours"
        if (check := checks.get(name)) is None:
            raise web.HTTPNotFound(text=f"there is no endpoint {name} with a compat signature\n")
        if comparison.is_full:
            raise web.HTTPServiceUnavailable(text="only one of the senders sends\n")
        body = await request.read()
        headers = {key.lower(): value for key, value in request.headers.items()}
        event = (
            headers.get(EVENT_HEADER)
            or headers.get(ID_HEADER)
            or next((value for key, value in headers.items() if key.endswith("-id")), "-")
        )
        recorded = RecordedRequest(
            name, event, wall(), *hashes_of(body), check.accepts(headers, body)
        )
        if (compared := comparison.add(side, recorded)) is not None:
            on_event(compared)
        return web.Response(status=204)

    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.router.add_route("*", f"/{{side:{'|'.join(get_args(Side))}}}/{{name}}", record)
    return app
