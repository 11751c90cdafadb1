"""What came back from a receiver, and what it means for the delivery.

The status line decides.  Once it is there, the body may be endless, garbled or
cut short: a 2xx is a success, because the receiver said that it has the event,
and asking again would only make a duplicate.

Without a status line nobody refused anything, so every such failure is tried
again.  That includes two that look permanent:

* **TLS**: certificates expire and are renewed, and a wrong one during a
  roll-out is the commonest outage there is.  Giving up at once would
  dead-letter a backlog for a mistake of five minutes.
* **an address that egress rules refuse**: names move, and operators open
  networks.  A retry costs one look-up and never connects.
"""

from __future__ import annotations

import re
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum, StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import quote, quote_plus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Headers: TypeAlias = tuple[tuple[str, str], ...]

BODY_BYTES_MAX = 16 * 1024
"""How much of an answer's body is ever read."""
DETAIL_CHARS_MAX = 300
SECRET_CHARS_MIN = 6
"""A header's value that is shorter is no secret, and stands in answers by chance."""
NOT_KEPT = "(not kept)"
SUMMARY_VERSION = 1
"""Of the form in which answers are stored; raised when the meaning of a field changes."""
SUMMARY_BODY_CHARS_MAX = 2048
RECEIPT_BODY_CHARS_MAX = 256
"""Of a success less is kept: there are many more of them."""
SUMMARY_HEADER_CHARS_MAX = 256
RETRY_AFTER_S_MAX = 3600.0

RETRYABLE = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses worth another try, unless an endpoint has its own list."""

# What helps to find a request in the receiver's logs.
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
# And what tells how it was answered; nothing that could be a credential of theirs
# (set-cookie, www-authenticate).
_SUMMARY_HEADERS = _TRACE_HEADERS | frozenset(
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
_UNSHOWABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_BREAKS = re.compile(r"[\s\x00-\x1f]+")


class Failure(StrEnum):
    """Why there is no status."""

    CONNECT = "connect"
    """Nobody listens there, or there is no way to them."""
    RESET = "reset"
    """The connection ended before an answer."""
    TIMEOUT = "timeout"
    DNS = "dns"
    """The name has no address, or nobody could say."""
    TLS = "tls"
    """No agreement on encryption, or a certificate that is not trusted."""
    EGRESS_REFUSED = "egress_refused"
    """Our own rules forbid the address; nothing was sent."""
    PROTOCOL = "protocol"
    """What came back is not HTTP, or larger than an answer's head may be."""
    INTERNAL = "internal"
    """A fault of the transport itself; the detail names it."""


class Verdict(Enum):
    """What an attempt means for its delivery."""

    DELIVERED = "delivered"
    RETRY = "retry"
    REFUSED = "refused"
    """Asking again would get the same answer."""


# By name, because each delivery asks: Python 3.11 takes far longer to find the member.
_DELIVERED = Verdict.DELIVERED


class Answer(NamedTuple):
    """The outcome of one attempt: either a status or a failure, never both."""

    status: int | None
    failure: Failure | None
    detail: str
    """One bounded line for people; may be empty."""
    headers: Headers
    body: bytes
    """At most `BODY_BYTES_MAX`, as it came over the wire, never decompressed."""
    elapsed_s: float

    @classmethod
    def of(
        cls,
        status: int,
        elapsed_s: float,
        *,
        headers: Headers = (),
        body: bytes = b"",
        detail: str = "",
    ) -> Answer:
        """An answer with a status line; `detail` may say how its body ended."""
        return cls(status, None, one_line(detail), headers, body[:BODY_BYTES_MAX], elapsed_s)

    @classmethod
    def failed(cls, failure: Failure, detail: str, elapsed_s: float) -> Answer:
        """No status line ever came."""
        return cls(None, failure, one_line(detail), (), b"", elapsed_s)


def without(answer: Answer, secrets: Iterable[str]) -> Answer:
    """The answer without what we sent and must not keep: some receivers send it back.

    Also as JSON and URLs write it, in whatever case, and where a body was cut off within it.
    """
    known = tuple(secret for secret in secrets if len(secret) >= SECRET_CHARS_MIN)
    if not known:
        return answer
    pattern = _pattern(known)
    body = _clean(answer.body.decode("latin-1"), pattern, known).encode("latin-1", "replace")
    headers = tuple((name, _clean(value, pattern, known)) for name, value in answer.headers)
    detail = _clean(answer.detail, pattern, known)
    if (body, headers, detail) == (answer.body, answer.headers, answer.detail):
        return answer
    return answer._replace(body=body[:BODY_BYTES_MAX], headers=headers, detail=one_line(detail))


@lru_cache(1024)
def _pattern(secrets: tuple[str, ...]) -> re.Pattern[str]:
    forms = {
        form
        for secret in secrets
        for form in (secret, secret.replace("/", "\\/"), quote(secret, ""), quote_plus(secret))
    }
    # The longest first: one may be a part of another.
    longest_first = sorted(forms, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE)


def _clean(text: str, pattern: re.Pattern[str], secrets: tuple[str, ...]) -> str:
    text = pattern.sub(NOT_KEPT, text)
    for secret in secrets:
        for length in range(min(len(secret) - 1, len(text)), SECRET_CHARS_MIN - 1, -1):
            if text.endswith(secret[:length]):
                return text[:-length] + NOT_KEPT
    return text


def classify(
    answer: Answer, *, maybe_sent_before: bool, retryable: frozenset[int] = RETRYABLE
) -> Verdict:
    """What an answer means.

    `maybe_sent_before` says that this number was, or may have been, sent
    earlier: a 409 then means that the receiver has it already.  Redirects are
    never followed (the signature is for one address, and the target may be an
    internal one), so they are refusals like any other status that is neither a
    success nor retryable.  A number that is no status says that the receiver is
    broken, and counts as a 500 (RFC 9110, 15).
    """
    status = answer.status
    if status is None:
        return Verdict.RETRY
    if not 100 <= status <= 599:
        status = 500
    if 200 <= status <= 299:
        return _DELIVERED
    if status == 409 and maybe_sent_before:
        return Verdict.DELIVERED
    if status in retryable:
        return Verdict.RETRY
    return Verdict.REFUSED


def retry_after_s(headers: Iterable[tuple[str, str]], now: float) -> float | None:
    """How long the receiver asks to be left alone, from 0 to an hour.

    Seconds or a date in any of the three forms (RFC 9110, 10.2.3 and 5.6.7);
    None when the header is absent or means nothing.  `now` is in epoch
    seconds.
    """
    for name, value in headers:
        if name.lower() != "retry-after":
            continue
        text = value.strip()
        if text.isascii() and text.isdigit():
            # A number with more digits than this is beyond the bound anyway.
            asked_s = float(text) if len(text) <= 18 else RETRY_AFTER_S_MAX
        else:
            try:
                date = parsedate_to_datetime(text)
                # Without a zone it is UTC, like every date in HTTP.
                date = date if date.tzinfo else date.replace(tzinfo=UTC)
                asked_s = date.timestamp() - now
            except (ValueError, TypeError, IndexError, OverflowError):
                continue
        return min(max(asked_s, 0.0), RETRY_AFTER_S_MAX)
    return None


def summary(answer: Answer) -> dict[str, Any]:
    """The answer as bounded JSON, for storing as the last answer.

    Everything in it is text that jsonb can hold and a terminal can show.
    """
    told: dict[str, Any] = {"version": SUMMARY_VERSION}
    if answer.status is not None:
        told["status"] = answer.status
    if answer.failure is not None:
        told["failure"] = answer.failure.value
    if answer.detail:
        told["detail"] = answer.detail
    told["elapsed_ms"] = round(answer.elapsed_s * 1000, 1)
    return told | _content(answer, _SUMMARY_HEADERS, SUMMARY_BODY_CHARS_MAX)


_WITHOUT = {
    Failure.CONNECT: "no connection",
    Failure.RESET: "the connection ended before an answer",
    Failure.TIMEOUT: "no answer in time",
    Failure.DNS: "its name has no address",
    Failure.TLS: "no agreement on TLS",
    Failure.EGRESS_REFUSED: "its address is not allowed",
    Failure.PROTOCOL: "what came back is not HTTP",
    Failure.INTERNAL: "a fault of the relay's",
}


def in_words(told: Mapping[str, Any] | None) -> str:
    """What an attempt came to, of its summary: "it answered 503", or why nothing did."""
    told = told or {}
    if (status := told.get("status")) is not None:
        return f"it answered {status}"
    if detail := told.get("detail"):
        return str(detail)
    failure = told.get("failure")
    return _WITHOUT[Failure(failure)] if failure in set(Failure) else "no answer"


_OUTCOME = ("version", "status", "failure", "elapsed_ms")


def outcome(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary has that is not of the receiver's own words: a status, or a kind of
    failure, and how long it took.  Its body, its headers and what was wrong with either
    may hold anything that is reachable from here, and go to operators alone.
    """
    return {name: told[name] for name in _OUTCOME if name in told}


_OF_THE_WAY = (Failure.CONNECT, Failure.DNS, Failure.EGRESS_REFUSED)


def veiled(failure: str | None) -> str | None:
    """A kind of failure as customers are told it.

    Who sees which names lead to addresses that are refused, and which nowhere, can look
    around in a network that he cannot reach.  Of a proxy that is for its answer to tell, and
    one that says neither is no connection: so all three are that.
    """
    return Failure.CONNECT if failure in _OF_THE_WAY else failure


def receipt(answer: Answer) -> dict[str, Any] | None:
    """What is kept of a success: what finds the request in the receiver's logs, and the
    beginning of what it said.  None when it said nothing of the kind.
    """
    content = _content(answer, _TRACE_HEADERS, RECEIPT_BODY_CHARS_MAX)
    return {"version": SUMMARY_VERSION, **content} if content else None


def of_several(answer: Answer) -> Answer:
    """What may be kept of an answer to several deliveries: not its words.

    Those may repeat what any of them said.  When the event of one is erased, only what is
    kept of that one is looked at.
    """
    headers = tuple(pair for pair in answer.headers if pair[0].lower() in _TRACE_HEADERS)
    return answer._replace(headers=headers, body=b"")


def _content(answer: Answer, wanted: frozenset[str], body_chars_max: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if headers := _those(answer.headers, wanted):
        told["headers"] = headers
    if answer.body:
        told["body"] = _text(answer.body, body_chars_max)
    return told


@lru_cache(64)
def _those(sent: Headers, wanted: frozenset[str]) -> dict[str, str]:
    """Remembered, because receivers send the same ones for a second or longer."""
    return {
        plain: one_line(value, SUMMARY_HEADER_CHARS_MAX)
        for name, value in sent
        if (plain := name.lower()) in wanted
    }


def one_line(text: str, chars_max: int = DETAIL_CHARS_MAX) -> str:
    """Text from elsewhere as one line that is safe to store and to show."""
    if not text:
        return text
    # Cut before the work as well: the text may be an attacker's and huge.
    line = _BREAKS.sub(" ", text[: chars_max * 4]).strip()
    line = _UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", line)
    return line if len(line) <= chars_max else line[: chars_max - 1] + "…"


def _text(body: bytes, chars_max: int) -> str:
    # Bytes first, so that a large body is not decoded whole.  No character
    # takes more than four: what this cuts in two lies beyond the bound.
    text = body[: chars_max * 4 + 1].decode("utf-8", "replace")
    text = _UNSHOWABLE.sub("\N{REPLACEMENT CHARACTER}", text)
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"
