"""Errors of handlers, and what each of them means for the delivery."""

from __future__ import annotations

from outbox.errors import OutboxError


class Refuse(OutboxError):
    """Raised by a handler when an event can never be processed.

    The response is 422 with the message as its reason.  The sender makes the event a
    dead letter, which an operator can inspect and replay.
    """


class UnhandledType(Refuse):
    """No handler has the type of an event; see `unhandled=`."""


class UnreadablePayload(Refuse):
    """Raised by `Message.data`: the payload cannot be parsed without rounding a number.

    A handler that does not catch it refuses the event.
    """


class Busy(OutboxError):
    """Raised by a handler to postpone a delivery: the response is 503 with Retry-After.

    Args:
        reason: one line for the sender's log.
        retry_after_s: hold-off in whole seconds.
    """

    def __init__(self, reason: str = "busy", *, retry_after_s: int = 1) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class HandlerFailed(OutboxError):
    """A handler raised an OSError: of its own I/O, not of the receiver's database."""
