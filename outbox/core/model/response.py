"""The result of an attempt: a status with the start of its response, or a failure."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple, TypeAlias

Headers: TypeAlias = tuple[tuple[str, str], ...]

RESPONSE_BODY_BYTES_MAX = 16 * 1024
"""Maximum number of bytes that are read from a response's body."""
DETAIL_CHARS_MAX = 300

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

    LOCAL = "local"
    """The relay's process has no descriptors, ports, buffers or memory left: nothing was sent, and
    it is no attempt."""

    # Of brokers, see `outbox.core.brokers`.
    REFUSED = "refused"
    """The broker will never store the message."""
    UNAVAILABLE = "unavailable"
    """The broker stores nothing now."""
    MISCONFIGURED = "misconfigured"
    """The broker stores nothing until a person acts."""
    MOVED = "moved"
    """The lane does not stand in the stream where it stood."""
    UNKNOWN = "unknown"
    """The broker's response was lost."""
    FORGOT = "forgot"
    """The stream has lost messages that it had acknowledged."""
    AHEAD = "ahead"
    """The stream has sequences that the database has not assigned."""
    FOREIGN = "foreign"
    """The stream has messages that are not this relay's."""
    FENCED = "fenced"
    """The stream belongs to a later owner."""

    # Of deliveries.
    MISSING = "missing"
    """The event is gone, and no record says that it was erased; nothing was sent."""


UNREACHABLE_FAILURES = frozenset(
    {Failure.CONNECT, Failure.DNS, Failure.TLS, Failure.EGRESS_REFUSED}
)
"""No request was sent, whatever the delivery is."""
STREAM_HOLD_FAILURES = frozenset({Failure.FORGOT, Failure.AHEAD, Failure.FOREIGN, Failure.FENCED})
"""Failures of a broker's lane that end only when a person acts."""
OWN_FAILURES = frozenset({Failure.INTERNAL, Failure.LOCAL})
"""Failures of the relay itself, which say nothing about a receiver."""
HOLD_FAILURES = STREAM_HOLD_FAILURES | {Failure.MISSING}
"""Failures of a lane that end only when a person acts."""


class AttemptResult(NamedTuple):
    """The result of one attempt: either a status or a failure, never both."""

    status: int | None
    failure: Failure | None
    detail: str
    """One bounded line of text; may be empty."""
    headers: Headers
    body: bytes
    """The first `RESPONSE_BODY_BYTES_MAX` of the body.  Of a compressed one, a decoded start of an
    error, otherwise a note that names the encoding."""
    elapsed_s: float
    resent: bool = False
    """Whether the request was sent twice: the receiver may have processed it the first time."""

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
        return cls(
            status, None, one_line(detail), headers, body[:RESPONSE_BODY_BYTES_MAX], elapsed_s
        )

    @classmethod
    def failed(cls, failure: Failure, detail: str, elapsed_s: float) -> AttemptResult:
        """The result of an attempt without a status line."""
        return cls(None, failure, one_line(detail), (), b"", elapsed_s)


def one_line(text: str, chars_max: int = DETAIL_CHARS_MAX) -> str:
    """External text as one bounded line that is safe to store and to display."""
    if not text:
        return text
    # Truncate first: the text may be huge and from an attacker.
    line = _BREAKS.sub(" ", text[: chars_max * 4]).strip()
    line = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", line)
    return line if len(line) <= chars_max else line[: chars_max - 1] + "…"


def several_lines(body: bytes, chars_max: int) -> str:
    """The start of an external body as bounded text that is safe to store and to display."""
    # Truncate bytes first, so that a large body is not decoded completely.  A character has at
    # most four bytes, so a character that is split here is beyond the limit.
    text = body[: chars_max * 4 + 1].decode("utf-8", "replace")
    text = _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"
