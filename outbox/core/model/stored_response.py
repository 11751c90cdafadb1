"""Responses as they are stored: bounded, safe to display, and reduced for tenants."""

from __future__ import annotations

import math
from functools import lru_cache
from sys import getsizeof
from typing import TYPE_CHECKING, Any

from outbox.core.model.response import HOLD_FAILURES, Failure, one_line, several_lines
from outbox.core.model.text import count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.core.model.response import AttemptResult, Headers

STORED_VERSION = 1
"""Version of the stored form of responses; raised when the meaning of a field changes."""
STORED_BODY_CHARS_MAX = 2048
STORED_SUCCESS_BODY_CHARS_MAX = 256
"""Characters that are stored of a success.  They are fewer, because there are many more
successes."""
STORED_HEADER_CHARS_MAX = 256

STORED_OBJECT_BYTES = 512
"""What a stored response takes besides its text."""

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
STORED_HEADERS = _TRACE_HEADERS | frozenset(
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
    return stored | _stored_content(response, STORED_HEADERS, STORED_BODY_CHARS_MAX)


def without_content(response: AttemptResult) -> AttemptResult:
    """The response without headers and body."""
    return response._replace(headers=(), body=b"")


def missing_response(outbox_id: int) -> dict[str, Any]:
    """What is stored of a delivery that waits for its event, which is gone."""
    return {
        "version": STORED_VERSION,
        "failure": Failure.MISSING.value,
        "detail": f"event with id {outbox_id} is gone, and no record says that it was erased",
    }


_FAILURE_TEXTS = {
    Failure.CONNECT: "no connection",
    Failure.RESET: "the connection was closed before the response",
    Failure.TIMEOUT: "no response in time",
    Failure.DNS: "its name has no address",
    Failure.TLS: "the TLS handshake failed",
    Failure.EGRESS_REFUSED: "its address is not allowed",
    Failure.PROTOCOL: "the response is not HTTP",
    Failure.INTERNAL: "a fault of the relay",
    Failure.LOCAL: "the relay has no resources left for a connection",
    Failure.REFUSED: "the broker refused the message",
    Failure.UNAVAILABLE: "the broker stores nothing now",
    Failure.MISCONFIGURED: "the broker stores nothing until a person acts",
    Failure.MOVED: "the lane does not stand in the stream where it stood",
    Failure.UNKNOWN: "the broker's response was lost",
    Failure.FORGOT: "the stream has lost messages",
    Failure.AHEAD: "the stream is ahead of the database",
    Failure.FOREIGN: "the stream has messages of another writer",
    Failure.FENCED: "the stream belongs to a later owner",
    Failure.MISSING: "its event is gone, and no record says that it was erased",
}


def describe_response(stored: Mapping[str, Any] | None) -> str:
    """Describe a stored response: "it responded with 503", or why there was none."""
    stored = stored or {}
    if (status := stored.get("status")) is not None:
        return f"it responded with {status}"
    failure = stored.get("failure")
    if detail := stored.get("detail"):
        # The guide explains by this word what to do, so it precedes the detail.
        return f"{failure}: {detail}" if failure in HOLD_FAILURES else str(detail)
    return _FAILURE_TEXTS[Failure(failure)] if failure in set(Failure) else "no response"


def describe_attempts(attempts: int, probes: int) -> str:
    """Describe the attempts of a delivery: "3 attempts and 1 probe, which does not count".

    Args:
        attempts: all requests, probes included.
        probes: those that only probed the receiver, and do not count against the retry limit.
    """
    own = attempts - probes
    text = count(own, "attempt")
    if not probes:
        return text
    return f"{text} and {count(probes, 'probe')}, which {'does' if probes == 1 else 'do'} not count"


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


def stored_bytes(stored: Mapping[str, Any] | None) -> int:
    """The bytes that a stored response takes in memory, about."""
    if stored is None:
        return 0
    texts = stored.get("body", ""), stored.get("detail", ""), *stored.get("headers", {}).values()
    return STORED_OBJECT_BYTES + sum(map(getsizeof, texts))


def strip_batch_response(response: AttemptResult) -> AttemptResult:
    """Reduce the response to a batch to its trace headers.

    The body may repeat any event of the batch, and erasing an event redacts the stored response of
    that event, and those that share its run.
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
        stored["body"] = several_lines(response.body, body_chars_max)
    return stored


@lru_cache(64)
def _select_headers(sent: Headers, names: frozenset[str]) -> dict[str, str]:
    """Select headers; cached, because receivers repeat the same ones for a second or longer."""
    return {
        plain: one_line(value, STORED_HEADER_CHARS_MAX)
        for name, value in sent
        if (plain := name.lower()) in names
    }
