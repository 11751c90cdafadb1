"""Request rules shared by `AsyncReceiver` and `Receiver`, without database I/O.

`ReceiverRules` validates a request before a transaction is opened, selects the handlers
of a delivery, and maps the result to a response.  `outbox.receiver.pipeline` performs the
database work in between.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from outbox.core.messages.batch import ACCEPTED_THROUGH
from outbox.core.messages.signature import TOLERANCE_S, SignatureError
from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.drivers.errors import DatabaseCondition, condition_of
from outbox.errors import UsageError
from outbox.receiver.catch_up import FetchedOutcome
from outbox.receiver.errors import Busy, HandlerFailed, Refuse
from outbox.receiver.handlers import HandlerRegistry
from outbox.receiver.inbox.process import DeliveryOutcome
from outbox.receiver.message import BadMessage
from outbox.receiver.reporting import ReceiverReports, log
from outbox.receiver.requests import (
    DELIVERY_BODY_BYTES_MAX,
    RequestOutcome,
    Response,
    not_post,
    one_line,
    put_off,
    rejected,
    too_large,
    unverified,
)
from outbox.receiver.verification import Verified, Verifier

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from opentelemetry.metrics import MeterProvider

    from outbox.core.model.message_format import FormatName
    from outbox.receiver.handlers import Unhandled
    from outbox.receiver.inbox.process import DeliveryResult
    from outbox.receiver.message import Message
    from outbox.receiver.payload import Parse
    from outbox.receiver.requests import Request

RECEIVER_IN_FLIGHT_MAX = 100
HELD_MAX = 1000
HOLD_S = 5.0
UNAVAILABLE_S = 5
BUSY_RETRY_S = 1


class Gaps(StrEnum):
    """Policy for a delivery when deliveries before it are missing."""

    REPORT = "report"
    """Process it, and report the missing numbers."""
    HOLD = "hold"
    """Hold its request for up to `hold_s` seconds until the missing ones arrive."""
    CATCH_UP = "catch_up"
    """Fetch the missing ones from the relay and process them first."""


class ReceiverRules:
    """Validation, limits, counters and responses of a receiver; thread-safe.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(
        self,
        secrets: str | Sequence[str],
        *,
        tolerance_s: float = TOLERANCE_S,
        header_prefix: str | Sequence[str] = DEFAULT_PREFIX,
        formats: Collection[FormatName] | None = None,
        parse: Parse | None = None,
        unhandled: Unhandled = "refuse",
        body_bytes_max: int = DELIVERY_BODY_BYTES_MAX,
        in_flight_max: int = RECEIVER_IN_FLIGHT_MAX,
        on_delivery: Callable[[Message, DeliveryResult], None] | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        if body_bytes_max < 1:
            raise UsageError(f"body_bytes_max: must be 1 or more, not {body_bytes_max}")
        if in_flight_max < 1:
            raise UsageError(f"in_flight_max: must be 1 or more, not {in_flight_max}")
        self.verifier = Verifier(
            secrets,
            tolerance_s=tolerance_s,
            header_prefix=header_prefix,
            formats=formats,
            parse=parse,
        )
        self.body_bytes_max = body_bytes_max
        self.handlers = HandlerRegistry(unhandled)
        self.foreign: Callable[..., Any] | None = None
        self.reports = ReceiverReports(on_delivery, meter_provider)
        # Requests come in threads, too.
        self._mutex = threading.Lock()
        self._in_flight_max = in_flight_max
        self._in_flight = 0

    def begin(self) -> Response | float:
        """Admit a request, up to `in_flight_max` at once.

        Returns:
            The start time for `end` (`time.perf_counter`, seconds), or a 503 response
            when the limit is reached.
        """
        with self._mutex:
            others = self._in_flight
            is_full = others >= self._in_flight_max
            self._in_flight += not is_full
        if is_full:
            self.reports.request_ended(RequestOutcome.PUT_OFF)
            return put_off(f"{others} requests are being processed", 1)
        self.reports.metrics.in_flight(1)
        return time.perf_counter()

    def end(self, response: Response, began_at: float) -> None:
        """Count the end of a request that `begin` admitted."""
        self._add_in_flight(-1)
        self.reports.request_ended(response.outcome, time.perf_counter() - began_at)

    @contextlib.contextmanager
    def not_in_flight(self) -> Iterator[None]:
        """Do not count a held request as in flight: it uses no connection while it waits."""
        self._add_in_flight(-1)
        try:
            yield
        finally:
            self._add_in_flight(1)

    def _add_in_flight(self, change: int) -> None:
        with self._mutex:
            self._in_flight += change
        self.reports.metrics.in_flight(change)

    def read(self, request: Request, *, fetched: bool = False) -> Verified | Response:
        """Verify a request.

        Args:
            fetched: see `Verifier.verify`.

        Returns:
            The verified request, or the response that rejects it.
        """
        if request.method != "POST":
            return not_post()
        if len(request.body) > self.body_bytes_max:
            return too_large(self.body_bytes_max)
        try:
            verified = self.verifier.verify(request.headers, request.body, fetched=fetched)
        except SignatureError as error:
            return unverified(error)
        except BadMessage as error:
            return rejected(400, str(error))
        if not verified.messages and self.foreign is None:
            prefix = self.verifier.header_prefixes[0]
            return rejected(400, f"the headers {prefix}Lane and {prefix}Sequence are missing")
        return verified

    def delivery_committed(self, message: Message | None, taken: DeliveryResult) -> Response:
        """Count and report a committed delivery; returns its response."""
        if message is not None:
            self.reports.delivery_committed(message, taken)
        if taken.outcome is DeliveryOutcome.CONFLICT and message is not None:
            reason = f"sequence {message.sequence} of {message.lane} was used by another delivery"
            # Not 409: receivers use it for a duplicate that they already have.
            return Response(RequestOutcome.CONFLICT, 422, reason)
        if taken.fresh:
            return Response(RequestOutcome.PROCESSED, 200, "processed")
        return Response(RequestOutcome.DUPLICATE, 200, "processed before")

    def batch_committed(
        self, messages: Sequence[Message], taken: Sequence[DeliveryResult]
    ) -> Response:
        """Count and report the committed deliveries of a request; returns its response.

        Args:
            taken: results of the first messages; the remaining ones were not processed.
        """
        response = Response(RequestOutcome.DUPLICATE, 200, "processed before")
        for n, (message, each) in enumerate(zip(messages, taken, strict=False)):
            current = self.delivery_committed(message, each)
            if current.status >= 400:
                return partial_response(messages, n, current)
            if current.outcome is RequestOutcome.PROCESSED:
                response = current
        return response

    def fetched(self, message: Message, taken: DeliveryResult) -> FetchedOutcome:
        """Count and report a delivery that was fetched and committed."""
        self.reports.delivery_committed(message, taken)
        self.reports.delivery_fetched(taken)
        conflicts = taken.outcome is DeliveryOutcome.CONFLICT
        return FetchedOutcome.REFUSED if conflicts else FetchedOutcome.PROCESSED

    def failed(self, error: Exception, message_id: str) -> Response:
        """Map the error of a rolled-back request to its response.

        The response to an error does not contain its message, which may name the database.
        """
        match error:
            case Refuse():
                return Response(RequestOutcome.REFUSED, 422, one_line(str(error)))
            case Busy():
                return put_off(str(error), error.retry_after_s)
        match None if isinstance(error, HandlerFailed) else condition_of(error):
            case DatabaseCondition.UNAVAILABLE:
                log.error("the database is not available", exc_info=error)
                return put_off("the receiver's database is not available", UNAVAILABLE_S)
            case DatabaseCondition.BUSY:
                log.warning("the database is busy: %s is postponed", message_id, exc_info=error)
                return put_off("the receiver's database is busy", BUSY_RETRY_S)
        log.error("delivery %s was not processed", message_id, exc_info=error)
        return Response(RequestOutcome.FAILED, 500, "the receiver failed")


def can_share_transaction(messages: Sequence[Message]) -> bool:
    """Whether a batch may be processed in one transaction.

    Not with a replay from another lane: it also locks that lane, and the global lock order
    (lanes by name) holds only if the transaction has no lock yet.
    """
    return len(messages) > 1 and all(
        message.replay_of is None or message.replay_of[0] == message.lane for message in messages
    )


def partial_response(messages: Sequence[Message], at: int, response: Response) -> Response:
    """Build the response to a batch that stopped at one of its messages.

    Args:
        at: index of the first message that was not committed.
        response: the response to that message.

    Returns:
        `response`, with X-Accepted-Through if messages before it were committed.
    """
    if at == 0:
        return response
    accepted = (ACCEPTED_THROUGH, str(messages[at - 1].sequence))
    return replace(response, headers=(*response.headers, accepted))


def parse_gaps(gaps: Gaps | str) -> Gaps:
    """Parse a gap policy, given as a member or its value.

    Raises:
        UsageError: it is not one of them.
    """
    try:
        return Gaps(gaps)
    except ValueError:
        known = ", ".join(Gaps)
        raise UsageError(f"gaps: must be one of {known}, not {gaps!r}") from None
