"""The other end: each event processed once, in order, and nothing missing unnoticed.

    from outbox.receiver import AsyncReceiver

    receiver = AsyncReceiver("whsec_…", pool)

    @receiver.on("order.paid")
    async def paid(delivery, connection):
        await connection.execute("UPDATE orders SET …", delivery.data["order"])

Imports nothing of the relay but its core.  What is named here is loaded when it is
first used.

    verify          is this request what a holder of the secret sent?
    Inbox           each delivery once, in the transaction of its effects
    AsyncReceiver   all of it, with asyncio; `Receiver` in threads
    adapters        ASGI, aiohttp, WSGI
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.core.delivery.signature import (
        MalformedHeader,
        MissingHeader,
        RepeatedHeader,
        SignatureError,
        SignatureMismatch,
        TimestampTooNew,
        TimestampTooOld,
    )
    from outbox.receiver.asynchronous import AsyncReceiver
    from outbox.receiver.decisions import Busy, Gaps, Refuse
    from outbox.receiver.fetch import AlreadyAsked, CannotFetch, Fetch
    from outbox.receiver.inbox.inbox import Inbox
    from outbox.receiver.inbox.memory import MemoryDatabase
    from outbox.receiver.inbox.process import Outcome, Taken
    from outbox.receiver.message import BadMessage, Message
    from outbox.receiver.requests import Answer, Request
    from outbox.receiver.synchronous import Receiver
    from outbox.receiver.verification import Verified, Verifier, verify

_HOMES = {
    "outbox.core.delivery.signature": (
        "MalformedHeader",
        "MissingHeader",
        "RepeatedHeader",
        "SignatureError",
        "SignatureMismatch",
        "TimestampTooNew",
        "TimestampTooOld",
    ),
    "outbox.receiver.asynchronous": ("AsyncReceiver",),
    "outbox.receiver.fetch": ("AlreadyAsked", "CannotFetch", "Fetch"),
    "outbox.receiver.inbox.inbox": ("Inbox",),
    "outbox.receiver.inbox.memory": ("MemoryDatabase",),
    "outbox.receiver.inbox.process": ("Outcome", "Taken"),
    "outbox.receiver.message": ("BadMessage", "Message"),
    "outbox.receiver.decisions": ("Busy", "Gaps", "Refuse"),
    "outbox.receiver.requests": ("Answer", "Request"),
    "outbox.receiver.synchronous": ("Receiver",),
    "outbox.receiver.verification": ("Verified", "Verifier", "verify"),
}

__all__ = [
    "AlreadyAsked",
    "Answer",
    "AsyncReceiver",
    "BadMessage",
    "Busy",
    "CannotFetch",
    "Fetch",
    "Gaps",
    "Inbox",
    "MalformedHeader",
    "MemoryDatabase",
    "Message",
    "MissingHeader",
    "Outcome",
    "Receiver",
    "Refuse",
    "RepeatedHeader",
    "Request",
    "SignatureError",
    "SignatureMismatch",
    "Taken",
    "TimestampTooNew",
    "TimestampTooOld",
    "Verified",
    "Verifier",
    "verify",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
