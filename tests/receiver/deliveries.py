"""Deliveries as a relay sends them."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from multidict import CIMultiDict

from outbox.core.messages.message import prepare
from outbox.core.model.delivery import Delivery
from outbox.core.model.headers import format_lines, parse_lines
from outbox.core.model.message_format import FormatName, MessageFormat
from outbox.destinations.interface import Recipient, Request

ENDPOINT = UUID("6f1c2a34-9d55-4f0e-8a55-2f6a1b0c9d3e")
SECRET = bytes(range(32))
OTHER = bytes(range(1, 33))
DAY = datetime(2026, 1, 31, tzinfo=UTC)
"""When the events are published."""


def delivery(seq: int, **changes: Any) -> Delivery:
    """Return number `seq` of a lane; its event has the same number."""
    given: dict[str, Any] = {
        "endpoint_id": ENDPOINT,
        "lane": "a-1-0",
        "seq": seq,
        "batch": 1,
        "outbox_id": seq,
        "event_id": UUID(int=seq),
        "type": "order.paid",
        "tenant": "acme",
        "key": "order-7",
        "published_at": DAY.timestamp(),
        "expires_at": None,
        "payload": b'{"n": %d}' % seq,
        "headers": None,
    }
    return Delivery(**(given | changes))


def signed(
    which: Delivery,
    *,
    previous: int | None = None,
    attempt: int = 1,
    secret: bytes = SECRET,
    timestamp: int | None = None,
    lane_ends: bool = False,
    format_name: FormatName = "envelope",
) -> tuple[CIMultiDict[str], bytes]:
    """Return headers and body of an attempt; `previous` is by default the number before."""
    prepared = prepare(
        which,
        which.seq - 1 if previous is None else previous,
        lane_ends=lane_ends,
        message_format=MessageFormat(format_name),
    )
    at = int(time.time()) if timestamp is None else timestamp
    return CIMultiDict(parse_lines(prepared.attempt(attempt, at, [secret]))), prepared.body


def request(url: str, which: Delivery, **attempt: Any) -> Request:
    """Return an attempt as a request for a transport."""
    headers, body = signed(which, **attempt)
    recipient = Recipient(url, timeout_s=10)
    return Request(recipient, format_lines(tuple(headers.items())), body)
