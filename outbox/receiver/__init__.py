"""Receiver library: idempotent, ordered processing of deliveries, with gap detection.

    from outbox.receiver import AsyncReceiver

    receiver = AsyncReceiver("whsec_…", pool)

    @receiver.on("order.paid")
    async def paid(delivery, connection):
        await connection.execute("UPDATE orders SET …", delivery.data["order"])

The package imports only `outbox.core`, `outbox.drivers` and `outbox.errors`.  The names exported
here are imported lazily, on first use.

    verify          verifies the signature of a request
    Inbox           records each delivery once, in the transaction of its effects
    AsyncReceiver   the complete receiver for asyncio; `Receiver` is the threaded one
    StreamReceiver  reads the streams of a broker instead
    adapters        ASGI, aiohttp and WSGI
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.core.messages.signature import (
        MalformedHeader,
        MissingHeader,
        RepeatedHeader,
        SignatureError,
        SignatureMismatch,
        TimestampRefused,
        TimestampTooNew,
        TimestampTooOld,
    )
    from outbox.receiver.asynchronous import AsyncReceiver
    from outbox.receiver.decisions import Gaps
    from outbox.receiver.errors import Busy, Refuse, UnreadablePayload
    from outbox.receiver.fetch import CannotFetch, FetchClient
    from outbox.receiver.inbox.inbox import Inbox
    from outbox.receiver.inbox.memory import MemoryDatabase
    from outbox.receiver.inbox.process import DeliveryOutcome, DeliveryResult
    from outbox.receiver.message import BadMessage, Message
    from outbox.receiver.requests import Request, Response
    from outbox.receiver.streams.entries import read_message
    from outbox.receiver.streams.lane_reader import StopReason
    from outbox.receiver.streams.processor import LaneActivity, LaneStatus
    from outbox.receiver.streams.receiver import ReadFailed, StreamReceiver
    from outbox.receiver.streams.source import StreamUnavailable
    from outbox.receiver.synchronous import Receiver
    from outbox.receiver.verification import Verified, Verifier, verify

_MODULES = {
    "outbox.core.messages.signature": (
        "MalformedHeader",
        "MissingHeader",
        "RepeatedHeader",
        "SignatureError",
        "SignatureMismatch",
        "TimestampRefused",
        "TimestampTooNew",
        "TimestampTooOld",
    ),
    "outbox.receiver.asynchronous": ("AsyncReceiver",),
    "outbox.receiver.fetch": ("CannotFetch", "FetchClient"),
    "outbox.receiver.inbox.inbox": ("Inbox",),
    "outbox.receiver.inbox.memory": ("MemoryDatabase",),
    "outbox.receiver.inbox.process": ("DeliveryOutcome", "DeliveryResult"),
    "outbox.receiver.message": ("BadMessage", "Message"),
    "outbox.receiver.decisions": ("Gaps",),
    "outbox.receiver.errors": ("Busy", "Refuse", "UnreadablePayload"),
    "outbox.receiver.requests": ("Response", "Request"),
    "outbox.receiver.streams.entries": ("read_message",),
    "outbox.receiver.streams.lane_reader": ("StopReason",),
    "outbox.receiver.streams.processor": ("LaneActivity", "LaneStatus"),
    "outbox.receiver.streams.receiver": ("ReadFailed", "StreamReceiver"),
    "outbox.receiver.streams.source": ("StreamUnavailable",),
    "outbox.receiver.synchronous": ("Receiver",),
    "outbox.receiver.verification": ("Verified", "Verifier", "verify"),
}

__all__ = [
    "AsyncReceiver",
    "BadMessage",
    "Busy",
    "CannotFetch",
    "DeliveryOutcome",
    "DeliveryResult",
    "FetchClient",
    "Gaps",
    "Inbox",
    "LaneActivity",
    "LaneStatus",
    "MalformedHeader",
    "MemoryDatabase",
    "Message",
    "MissingHeader",
    "ReadFailed",
    "Receiver",
    "Refuse",
    "RepeatedHeader",
    "Request",
    "Response",
    "SignatureError",
    "SignatureMismatch",
    "StopReason",
    "StreamReceiver",
    "StreamUnavailable",
    "TimestampRefused",
    "TimestampTooNew",
    "TimestampTooOld",
    "UnreadablePayload",
    "Verified",
    "Verifier",
    "read_message",
    "verify",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
