"""What a broker's responses mean for deliveries: the results of attempts.

The broker's failures are about the stream or the account and concern every delivery alike, except
one: a message that it refuses for ever is dead-lettered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.brokers.port import StopKind
from outbox.core.brokers.take_over import Hold, HoldReason
from outbox.core.model.response import STREAM_HOLD_FAILURES, AttemptResult, Failure
from outbox.core.model.response_policy import AttemptOutcome

if TYPE_CHECKING:
    from outbox.core.brokers.port import Appended, Stop

_FAILURES = {
    StopKind.REFUSED: Failure.REFUSED,
    StopKind.UNAVAILABLE: Failure.UNAVAILABLE,
    StopKind.MISCONFIGURED: Failure.MISCONFIGURED,
    StopKind.MOVED: Failure.MOVED,
    StopKind.CLOSED: Failure.UNKNOWN,
    StopKind.UNKNOWN: Failure.UNKNOWN,
    StopKind.LOCAL: Failure.LOCAL,
}
_HOLDS = {
    HoldReason.FORGOT: Failure.FORGOT,
    HoldReason.AHEAD: Failure.AHEAD,
    HoldReason.FOREIGN: Failure.FOREIGN,
    HoldReason.FENCED: Failure.FENCED,
}
BROKER_FAILURES = (STREAM_HOLD_FAILURES | frozenset(_FAILURES.values())) - {Failure.LOCAL}
"""Failures that only brokers have; they are never the fault of a delivery."""


def stored_result(elapsed_s: float) -> AttemptResult:
    """The result of an append that stored all of its messages."""
    return AttemptResult(None, None, "", (), b"", elapsed_s)


def failed_result(stopped: Stop | Hold, elapsed_s: float) -> AttemptResult:
    """The result of an attempt that ended with this."""
    if isinstance(stopped, Hold):
        return AttemptResult.failed(_HOLDS[stopped.reason], stopped.detail, elapsed_s)
    return AttemptResult.failed(_FAILURES[stopped.kind], stopped.detail, elapsed_s)


def append_outcome(appended: Appended) -> AttemptOutcome:
    """The outcome of an append for the first message that it did not store, if there is one."""
    if appended.stop is None:
        return AttemptOutcome.DELIVERED
    if appended.stop.kind is StopKind.REFUSED:
        return AttemptOutcome.REFUSED
    return AttemptOutcome.RETRY
