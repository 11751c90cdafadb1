"""Responses: the result of an attempt, its outcome for the delivery, and the stored form.

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

import math
import re
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum, StrEnum
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Headers: TypeAlias = tuple[tuple[str, str], ...]

BODY_BYTES_MAX = 16 * 1024
"""Bytes of a response's body that are read at most."""
DETAIL_CHARS_MAX = 300
STORED_VERSION = 1
"""Version of the stored form of responses; raised when the meaning of a field changes."""
STORED_BODY_CHARS_MAX = 2048
STORED_SUCCESS_BODY_CHARS_MAX = 256
"""Less is stored of a success, because there are many more of them."""
STORED_HEADER_CHARS_MAX = 256
RETRY_AFTER_S_MAX = 3600.0

RETRYABLE = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses that are retried, unless the endpoint has its own list."""

# These identify a request in the receiver's logs.
_TRACE_HEADERS = frozenset(
    {
        "cf-ray",
        "request-id",
        "traceparent",
        "x-accepted-through",
        "x-amz-cf-id",
        "x-amzn-requestid",
        "x-correlation-id",
        "x-request-id",
    }
)
# These describe the response; none of them can be a credential of the receiver (set-cookie,
# www-authenticate).
_STORED_HEADERS = _TRACE_HEADERS | frozenset(
    {
        "content-encoding",
        "content-length",
        "content-type",
        "date",
        "location",
        "retry-after",
        "server",
        "via",
    }
)

# Control characters could steer an operator's terminal, and jsonb cannot hold
# U+0000 or a lone surrogate.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_BREAKS = re.compile(r"[\s\x00-\x1f]+")


class Failure(StrEnum):
    """Why an attempt has no status."""

    CONNECT = "connect"
    """The connection was refused, or there is no route."""
    RESET = "reset"
    """The connection was closed before the response."""
    TIMEOUT = "timeout"
    DNS = "dns"
    """The name has no address, or the lookup failed."""
    TLS = "tls"
    """The handshake failed, or the certificate is not trusted."""
    EGRESS_REFUSED = "egress_refused"
    """The relay's egress rules forbid the address; nothing was sent."""
    PROTOCOL = "protocol"
    """The response is not HTTP, or its header section is too large."""
    INTERNAL = "internal"
    """A fault of the relay; the detail describes it."""


class AttemptOutcome(Enum):
    """What an attempt means for its delivery."""

    DELIVERED = "delivered"
    RETRY = "retry"
    REFUSED = "refused"
    """A permanent rejection; a retry would get the same response."""


# Bound once: enum member access is slow in Python 3.11, and every delivery uses it.
_DELIVERED = AttemptOutcome.DELIVERED


class AttemptResult(NamedTuple):
    """The result of one attempt: either a status or a failure, never both."""

    status: int | None
    failure: Failure | None
    detail: str
    """One bounded line of text; may be empty."""
    headers: Headers
    body: bytes
    """At most `BODY_BYTES_MAX`, as received, never decompressed."""
    elapsed_s: float

    @classmethod
    def completed(
        cls,
        status: int,
        elapsed_s: float,
        *,
        headers: Headers = (),
        body: bytes = b"",
        detail: str = "",
    ) -> AttemptResult:
        """The result of an attempt with a status line; `detail` may describe a body error."""
        return cls(status, None, one_line(detail), headers, body[:BODY_BYTES_MAX], elapsed_s)

    @classmethod
    def failed(cls, failure: Failure, detail: str, elapsed_s: float) -> AttemptResult:
        """The result of an attempt without a status line."""
        return cls(None, failure, one_line(detail), (), b"", elapsed_s)


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


def stored_response(response: AttemptResult) -> dict[str, Any]:
    """The response as bounded JSON, stored as the last response.

    Its text has only characters that are valid in jsonb and safe for a terminal.
    """
    stored: dict[str, Any] = {"version": STORED_VERSION}
    if response.status is not None:
        stored["status"] = response.status
    if response.failure is not None:
        stored["failure"] = response.failure.value
    if response.detail:
        stored["detail"] = response.detail
    stored["elapsed_ms"] = round(response.elapsed_s * 1000, 1)
    return stored | _stored_content(response, _STORED_HEADERS, STORED_BODY_CHARS_MAX)


_FAILURE_TEXTS = {
    Failure.CONNECT: "no connection",
    Failure.RESET: "the connection was closed before the response",
    Failure.TIMEOUT: "no response in time",
    Failure.DNS: "its name has no address",
    Failure.TLS: "the TLS handshake failed",
    Failure.EGRESS_REFUSED: "its address is not allowed",
    Failure.PROTOCOL: "the response is not HTTP",
    Failure.INTERNAL: "a fault of the relay",
}


def describe_response(stored: Mapping[str, Any] | None) -> str:
    """Describe a stored response: "it responded with 503", or why there was none."""
    stored = stored or {}
    if (status := stored.get("status")) is not None:
        return f"it responded with {status}"
    if detail := stored.get("detail"):
        return str(detail)
    failure = stored.get("failure")
    return _FAILURE_TEXTS[Failure(failure)] if failure in set(Failure) else "no response"


def describe_attempts(attempts: int, probes: int) -> str:
    """Describe the attempts of a delivery: "3 attempts and 1 probe, which does not count".

    Args:
        attempts: all requests, probes included.
        probes: those that only probed the receiver, and do not count against the retry limit.
    """
    own = attempts - probes
    text = "1 attempt" if own == 1 else f"{own} attempts"
    if not probes:
        return text
    return f"{text} and " + (
        "1 probe, which does not count" if probes == 1 else f"{probes} probes, which do not count"
    )


_OUTCOME_FIELDS = ("version", "status", "failure", "elapsed_ms")


def outcome_fields(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a stored response that do not come from the receiver's text.

    Headers, body and detail may contain anything that is reachable from the relay, so only
    operators may see them.
    """
    return {name: stored[name] for name in _OUTCOME_FIELDS if name in stored}


_UNREACHABLE = (Failure.CONNECT, Failure.DNS, Failure.EGRESS_REFUSED)


def generalize_failure(failure: str | None) -> str | None:
    """A failure as tenants may see it: connect, dns and egress_refused become connect.

    The difference between a refused and a missing address would let a tenant scan the relay's
    network.  A proxy does not always report the difference, so all three have one value.
    """
    return Failure.CONNECT if failure in _UNREACHABLE else failure


def generalize_elapsed_s(failure: str | None, elapsed_s: float) -> float:
    """The duration of a failed attempt as tenants may see it: see `generalize_failure`.

    An address is refused sooner than a connection fails, so the durations of these failures are
    rounded up to whole seconds.
    """
    return float(math.ceil(elapsed_s)) if failure in _UNREACHABLE else elapsed_s


def stored_success(response: AttemptResult) -> dict[str, Any] | None:
    """The stored form of a success: trace headers and the start of the body; None: neither."""
    content = _stored_content(response, _TRACE_HEADERS, STORED_SUCCESS_BODY_CHARS_MAX)
    return {"version": STORED_VERSION, **content} if content else None


def strip_batch_response(response: AttemptResult) -> AttemptResult:
    """Reduce the response to a batch to its trace headers.

    The body may repeat any event of the batch, and erasing an event only redacts the stored
    response of that event.
    """
    headers = tuple(pair for pair in response.headers if pair[0].lower() in _TRACE_HEADERS)
    return response._replace(headers=headers, body=b"")


def _stored_content(
    response: AttemptResult, names: frozenset[str], body_chars_max: int
) -> dict[str, Any]:
    stored: dict[str, Any] = {}
    if headers := _select_headers(response.headers, names):
        stored["headers"] = headers
    if response.body:
        stored["body"] = _text(response.body, body_chars_max)
    return stored


@lru_cache(64)
def _select_headers(sent: Headers, names: frozenset[str]) -> dict[str, str]:
    """Select headers; cached, because receivers repeat the same ones for a second or longer."""
    return {
        plain: one_line(value, STORED_HEADER_CHARS_MAX)
        for name, value in sent
        if (plain := name.lower()) in names
    }


def one_line(text: str, chars_max: int = DETAIL_CHARS_MAX) -> str:
    """External text as one bounded line that is safe to store and to display."""
    if not text:
        return text
    # Truncate first: the text may be huge and from an attacker.
    line = _BREAKS.sub(" ", text[: chars_max * 4]).strip()
    line = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", line)
    return line if len(line) <= chars_max else line[: chars_max - 1] + "…"


def _text(body: bytes, chars_max: int) -> str:
    # Truncate bytes first, so that a large body is not decoded completely.  A character has at
    # most four bytes, so a character that is split here is beyond the limit.
    text = body[: chars_max * 4 + 1].decode("utf-8", "replace")
    text = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"
