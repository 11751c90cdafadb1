"""What a response means for its delivery: delivered, retried or refused, and 410.

The status line decides.  After it, the body may be endless, malformed or truncated: a 2xx is a
success, because the receiver acknowledged the event and a retry would only be a duplicate.

A failure without a status line is always retried.  That includes two failures that may seem
permanent:

* **TLS**: certificates expire and are renewed, and a wrong certificate during a roll-out is a
  frequent outage.  Not retrying would dead-letter a backlog for a fault of five minutes.
* **an address that egress rules refuse**: names get new addresses, and operators allow
  networks.  A retry costs one DNS lookup and never connects.
"""

from __future__ import annotations

from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox.core.model.response import AttemptResult

RETRY_AFTER_S_MAX = 3600.0

RETRYABLE = frozenset({408, 421, 425, 429, *range(500, 600)})
"""Statuses that are retried, unless the endpoint has its own list."""

EVERY_FAILURE = frozenset({*range(100, 200), *range(300, 600)} - {HTTPStatus.GONE})
"""Statuses that are retried if the retry policy retries refusals, too."""

UNPROCESSED = frozenset({408, 421, 425, 429, 502, 503, 504})
"""Statuses that say nothing about the delivery: the application has not processed it, or a server
in front of it responded."""


class AttemptOutcome(Enum):
    """What an attempt means for its delivery."""

    DELIVERED = "delivered"
    RETRY = "retry"
    REFUSED = "refused"
    """A permanent rejection; a retry would get the same response."""


# Bound once: enum member access is slow in Python 3.11, and every delivery uses it.
_DELIVERED = AttemptOutcome.DELIVERED


def is_success(status: int) -> bool:
    """Whether the status acknowledges the delivery."""
    return 200 <= status <= 299


def classify(
    response: AttemptResult, *, maybe_sent_before: bool, retryable: frozenset[int] = RETRYABLE
) -> AttemptOutcome:
    """The outcome of a result for its delivery.

    Redirects are never followed (the signature is for one URL, and the target may be internal),
    so they are refusals, like any status that is neither a success nor retryable.  A status
    outside 100 to 599 is handled as 500 (RFC 9110, 15).

    Args:
        maybe_sent_before: whether this sequence was, or may have been, sent before; a 409 then
            means that the receiver has it already.
        retryable: statuses to retry.
    """
    status = response.status
    if status is None:
        return AttemptOutcome.RETRY
    if not 100 <= status <= 599:
        status = 500
    if is_success(status):
        return _DELIVERED
    if status == 409 and maybe_sent_before:
        return AttemptOutcome.DELIVERED
    if status in retryable:
        return AttemptOutcome.RETRY
    return AttemptOutcome.REFUSED


def is_application_failure(status: int | None) -> bool:
    """Whether a failed attempt failed in the application itself, which may fail each time."""
    return status is not None and status not in UNPROCESSED


def disables_endpoint(response: AttemptResult) -> bool:
    """Whether the receiver wants no more deliveries: 410 (Gone), whatever is retryable."""
    return response.status == HTTPStatus.GONE


def retry_after_s(headers: Iterable[tuple[str, str]], now: float) -> float | None:
    """The hold-off in seconds that Retry-After requests, limited to one hour.

    The value is seconds or a date in any of the three forms (RFC 9110, 10.2.3 and 5.6.7).
    None if the header is absent or invalid.  `now` is in epoch seconds.
    """
    for name, value in headers:
        if name.lower() != "retry-after":
            continue
        text = value.strip()
        if text.isascii() and text.isdigit():
            # Longer numbers exceed the limit anyway.
            requested_s = float(text) if len(text) <= 18 else RETRY_AFTER_S_MAX
        else:
            try:
                date = parsedate_to_datetime(text)
                # A date without a zone is UTC, like every date in HTTP.
                date = date if date.tzinfo else date.replace(tzinfo=UTC)
                requested_s = date.timestamp() - now
            except (ValueError, TypeError, IndexError, OverflowError):
                continue
        return min(max(requested_s, 0.0), RETRY_AFTER_S_MAX)
    return None
