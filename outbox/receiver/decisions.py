"""What every receiver decides, whichever framework and database it has.

`Rules` reads a request before a transaction is opened, chooses who processes a
delivery, and says what is answered in the end.  `AsyncReceiver` and `Receiver` do the
waiting in between.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.batch import ACCEPTED_THROUGH
from outbox.core.delivery.receiver_checkpoint import TYPE as CHECKPOINT
from outbox.core.delivery.signature import TOLERANCE_S, SignatureError
from outbox.errors import OutboxError, UsageError
from outbox.receiver.catch_up import Fate
from outbox.receiver.inbox.process import Outcome
from outbox.receiver.lane_order import Kind
from outbox.receiver.message import BadMessage
from outbox.receiver.metrics import Metering
from outbox.receiver.requests import (
    BODY_BYTES_MAX,
    Answer,
    Ended,
    not_post,
    one_line,
    put_off,
    rejected,
    too_large,
)
from outbox.receiver.verification import Verified, Verifier

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterator, Sequence

    from opentelemetry.metrics import MeterProvider

    from outbox.receiver.catch_up import CaughtUp
    from outbox.receiver.inbox.process import Compared, Taken
    from outbox.receiver.message import Message
    from outbox.receiver.requests import Request

log = logging.getLogger("outbox.receiver")

IN_FLIGHT_MAX = 100
HELD_MAX = 1000
HOLD_S = 5.0
NO_DATABASE_S = 5
EXPIRE_EVERY = 1000
"""Deliveries after which what is old is looked for."""


class Refuse(OutboxError):
    """Raised by a handler: this event can never be processed, and why.

    It is answered with 422, so that it becomes a dead letter of the sender's, with the
    reason, to be looked at and sent again by a person.
    """


class Busy(OutboxError):
    """Raised by a handler: not now.  The sender is asked to come back later."""

    def __init__(self, why: str = "busy", *, retry_after_s: int = 1) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class NoDatabase(OutboxError):
    """A transaction could not be begun, or a delivery not be looked up."""


class Gaps(StrEnum):
    """What becomes of a delivery before which others are missing."""

    TELL = "tell"
    """It is processed, and what is missing is told."""
    HOLD = "hold"
    """It waits, for some seconds at most, for those before it."""
    CATCH_UP = "catch_up"
    """Those before it are fetched from the relay, and processed first."""


@dataclass(slots=True)
class ReceiverTotals:
    """What came since this receiver began."""

    ended: Counter[Ended] = field(default_factory=Counter)
    """Requests, by what became of them."""
    fetched: int = 0
    """Deliveries that were fetched from the relay, and processed."""
    gaps: int = 0
    """Deliveries before which numbers were missing."""
    old: int = 0
    """Deliveries that a higher number had overtaken."""
    overdue: int = 0
    """Numbers that were missing for longer than is tolerated."""


@dataclass(slots=True)
class Handlers:
    """Who processes which types."""

    _handlers: list[tuple[re.Pattern[str], Callable[..., Any]]] = field(default_factory=list)
    _unwanted: set[str] = field(default_factory=set)

    def add(self, wanted: re.Pattern[str], handler: Callable[..., Any]) -> None:
        """Let this handler process the types that match."""
        self._handlers.append((wanted, handler))

    def of(self, event_type: str) -> Sequence[Callable[..., Any]]:
        """Those of this type, in the order in which they were added."""
        found = [handler for pattern, handler in self._handlers if pattern.fullmatch(event_type)]
        if not found and event_type not in self._unwanted and len(self._unwanted) < 1000:
            self._unwanted.add(event_type)
            log.warning("no handler wants %r: such events are only taken note of", event_type)
        return found


class Rules:
    """What does not depend on how a receiver waits.

    Raises:
        UsageError: an argument is out of its bounds.
    """

    def __init__(
        self,
        secrets: str | Sequence[str],
        *,
        tolerance_s: float = TOLERANCE_S,
        body_bytes_max: int = BODY_BYTES_MAX,
        in_flight_max: int = IN_FLIGHT_MAX,
        told: Callable[[Message, Taken], None] | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        if body_bytes_max < 1:
            raise UsageError(f"body_bytes_max: must be 1 or more, not {body_bytes_max}")
        if in_flight_max < 1:
            raise UsageError(f"in_flight_max: must be 1 or more, not {in_flight_max}")
        self.verifier = Verifier(secrets, tolerance_s=tolerance_s)
        self.body_bytes_max = body_bytes_max
        self.handlers = Handlers()
        self.foreign: Callable[..., Any] | None = None
        self.totals = ReceiverTotals()
        self._metering = Metering(meter_provider)
        # Requests come in threads, too.
        self._mutex = threading.Lock()
        self._in_flight_max = in_flight_max
        self._in_flight = 0
        self._told = told
        self._taken = 0

    def begin(self) -> Answer | float:
        """Count a request in; an answer if there are too many already.

        Otherwise gives what `end` wants to know: when it began, in seconds of a clock that
        is nobody else's.
        """
        with self._mutex:
            others = self._in_flight
            is_full = others >= self._in_flight_max
            if is_full:
                self.totals.ended[Ended.PUT_OFF] += 1
            else:
                self._in_flight += 1
        if is_full:
            self._metering.ended(Ended.PUT_OFF)
            return put_off(f"{others} requests are being processed", 1)
        self._metering.in_flight(1)
        return time.perf_counter()

    def end(self, answer: Answer, began_at: float) -> None:
        """Count a request out that `begin` counted in."""
        with self._mutex:
            self._in_flight -= 1
            self.totals.ended[answer.ended] += 1
        self._metering.in_flight(-1)
        self._metering.ended(answer.ended, time.perf_counter() - began_at)

    @contextlib.contextmanager
    def not_in_flight(self) -> Iterator[None]:
        """A request that only waits, and needs nothing meanwhile."""
        self._in_flight -= 1
        self._metering.in_flight(-1)
        try:
            yield
        finally:
            self._in_flight += 1
            self._metering.in_flight(1)

    def read(self, request: Request) -> Verified | Answer:
        """What was sent, if it is to be looked at any further."""
        if request.method != "POST":
            return not_post()
        if len(request.body) > self.body_bytes_max:
            return too_large(self.body_bytes_max)
        try:
            verified = self.verifier.verify(request.headers, request.body)
        except SignatureError as error:
            return rejected(401, str(error))
        except BadMessage as error:
            return rejected(400, str(error))
        is_known = verified.messages or verified.checkpoint is not None
        if not is_known and self.foreign is None:
            return rejected(400, "the headers X-Lane and X-Sequence are missing")
        return verified

    def taken(self, message: Message | None, taken: Taken) -> Answer:
        """Count and tell what was committed, and say what to answer."""
        if message is not None:
            self._tell(message, taken)
        if taken.outcome is Outcome.CONFLICT and message is not None:
            why = f"number {message.sequence} of {message.lane} was taken by another delivery"
            # Not 409, by which a receiver says that it has what was sent before.
            return Answer(Ended.CONFLICT, 422, why)
        if taken.fresh:
            return Answer(Ended.PROCESSED, 200, "processed")
        return Answer(Ended.DUPLICATE, 200, "processed before")

    def all_taken(self, messages: Sequence[Message], taken: Sequence[Taken]) -> Answer:
        """Count and tell what was committed of a request, and say what to answer.

        Args:
            taken: of the first of them; after the last of these it was not gone on.
        """
        answer = Answer(Ended.DUPLICATE, 200, "processed before")
        for n, (message, each) in enumerate(zip(messages, taken, strict=False)):
            became = self.taken(message, each)
            if became.status >= 400:
                return stopped(messages, n, became)
            if became.ended is Ended.PROCESSED:
                answer = became
        return answer

    def fetched(self, message: Message, taken: Taken) -> Fate:
        """Count and tell what was fetched and committed, and what became of it."""
        self._tell(message, taken)
        with self._mutex:
            self.totals.fetched += taken.fresh
        self._metering.fetched(int(taken.fresh))
        return Fate.NEVER if taken.outcome is Outcome.CONFLICT else Fate.TAKEN

    def compared(self, compared: Compared, *, fetches: bool) -> Answer:
        """Count and tell what a checkpoint shows to be missing, and say what to answer.

        Args:
            fetches: it is about to be fetched.
        """
        for lane, numbers in compared.missing.items():
            shown = compared.shown.get(lane)
            if shown is not None:
                self._count(gap=True)
            what = "acknowledged, and not here" if shown is not None else "still not here"
            level = logging.WARNING if fetches or shown is None else logging.ERROR
            log.log(level, "lane %s: %s: %s", lane, what, _ranges(shown or numbers))
        told = "something is missing" if compared.missing else "all is here"
        return Answer(Ended.COMPARED, 200, told)

    def failed(self, error: Exception, message_id: str) -> Answer:
        """What to answer when nothing was committed, by what went wrong."""
        match error:
            case Refuse():
                return Answer(Ended.REFUSED, 422, one_line(str(error)))
            case Busy():
                return put_off(str(error), error.retry_after_s)
            case NoDatabase():
                # The sender need not know which database there is.
                log.error("cannot take deliveries", exc_info=error.__cause__)
                return put_off("the receiver's database is not available", NO_DATABASE_S)
        log.error("delivery %s was not processed", message_id, exc_info=error)
        return Answer(Ended.FAILED, 500, "the receiver failed")

    def is_time_to_expire(self, taken: int) -> bool:
        """Once in a while, and at the beginning; so many more were taken."""
        with self._mutex:
            before = self._taken
            self._taken += taken
            return before == 0 or before // EXPIRE_EVERY < self._taken // EXPIRE_EVERY

    def _tell(self, message: Message, taken: Taken) -> None:
        kind = taken.observation.kind if taken.observation is not None else None
        gap, old = kind is Kind.GAP, kind is Kind.OLD
        self._count(gap=gap, old=old, overdue=sum(hi - lo + 1 for lo, hi in taken.overdue))
        _log(message, taken)
        if self._told is not None:
            try:
                self._told(message, taken)
            except Exception:
                # It is committed, whatever somebody makes of it.
                log.exception("telling of delivery %s failed", message.delivery_id)

    def _count(self, *, gap: bool, old: bool = False, overdue: int = 0) -> None:
        with self._mutex:
            self.totals.gaps += gap
            self.totals.old += old
            self.totals.overdue += overdue
        self._metering.taken(gap=gap, old=old, overdue=overdue)


def stopped(messages: Sequence[Message], at: int, answer: Answer) -> Answer:
    """What is answered when of a request's messages this one was not taken, nor those after it.

    Args:
        at: its place.
        answer: what is said of it.
    """
    if at == 0:
        return answer
    accepted = (ACCEPTED_THROUGH, str(messages[at - 1].sequence))
    return replace(answer, headers=(*answer.headers, accepted))


def choice(gaps: Gaps | str) -> Gaps:
    """What becomes of gaps, by its member or value.

    Raises:
        UsageError: there is no such choice.
    """
    try:
        return Gaps(gaps)
    except ValueError:
        known = ", ".join(Gaps)
        raise UsageError(f"gaps: must be one of {known}, not {gaps!r}") from None


def tell_caught_up(done: CaughtUp) -> CaughtUp:
    """Say what was fetched, if it was anything."""
    if done.fetched or done.gone or done.failed is not None:
        gone = f"; given up, refused or not kept any more: {_ranges(done.gone)}"
        failed = f"; number {done.failed} could not be processed"
        log.log(
            logging.INFO if done.failed is None else logging.WARNING,
            "lane %s: caught up with %d deliveries%s%s",
            done.lane,
            done.fetched,
            gone if done.gone else "",
            failed if done.failed is not None else "",
        )
    return done


def logged(verified: Verified, answer: Answer) -> dict[str, Any]:
    """What is written down of a request.

    Only of those that are signed: of the others anybody could send any number.
    """
    first = verified.messages[0] if verified.messages else None
    return {
        "delivery_id": verified.message_id,
        "lane": first.lane if first is not None else None,
        "sequence": first.sequence if first is not None else None,
        "type": _type(verified),
        "attempt": first.attempt if first is not None else None,
        "outcome": answer.ended.value,
        "status": answer.status,
        "why": answer.text,
    }


def _type(verified: Verified) -> str | None:
    if verified.checkpoint is not None:
        return CHECKPOINT
    types = {message.type for message in verified.messages}
    return types.pop() if len(types) == 1 else None


def _log(message: Message, taken: Taken) -> None:
    seen = taken.observation
    if taken.overdue:
        log.error("lane %s: missing for too long: %s", message.lane, _ranges(taken.overdue))
    elif seen is not None and seen.missing:
        log.warning(
            "lane %s: number %d came before %s",
            message.lane,
            message.sequence,
            _ranges(seen.missing),
        )
    if taken.outcome is Outcome.CONFLICT:
        log.error(
            "lane %s: number %d was taken by another delivery than %s",
            message.lane,
            message.sequence,
            message.delivery_id,
        )
    if seen is not None and seen.lost is not None:
        log.error(
            "lane %s: the sender lost numbers %s, which were received",
            message.lane,
            _ranges((seen.lost,)),
        )


def _ranges(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(str(lo) if lo == hi else f"{lo} to {hi}" for lo, hi in ranges)
