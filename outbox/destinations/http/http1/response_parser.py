"""Sans-IO response parser on httptools.

httptools has no limits for interim responses, headers or body framing: they are enforced
here.  A broken body does not invalidate the response: once the head is complete, its status
counts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from outbox.core.model.response import RESPONSE_BODY_BYTES_MAX
from outbox.destinations.http.attempt_results import kept_headers
from outbox.destinations.http.encoded_body import readable_body
from outbox.destinations.http.limits import (
    BODY_RAW_BYTES_MAX,
    HEADER_COUNT_MAX,
    INTERIM_MAX,
    RESPONSE_HEAD_BYTES_MAX,
    TOO_LARGE_HEAD,
    TOO_LARGE_WRAPPING,
    TOO_MANY_INTERIMS,
    is_interim,
)

if TYPE_CHECKING:
    from outbox.core.model.response import Headers

_HTTP = b"HTTP/"
# llhttp also accepts other protocols, such as "RTSP/1.0 200 OK".
_VERSIONS = frozenset({"1.0", "1.1"})
_NOT_HTTP = "not an HTTP response"
_SETTINGS = b"\x04"
"""Type of the frame with which an HTTP/2 server begins (RFC 9113, 3.4 and 4.1)."""
_SWITCHING = 101
_LINE_ENDS = b"\r\n"
_KEEP_ALIVE = re.compile(rb"(?:^|[,;\s])timeout *= *(\d{1,6})(?![\w.])", re.IGNORECASE)
PIECE_BYTES = 4096
"""Bytes after which the limits are checked: the parser itself does not stop at them."""
CACHED_RESPONSES_MAX, CACHED_BYTES_MAX = 256, 1024
"""Limits of the response cache: entries, and bytes of a response."""

CachedResponse: TypeAlias = tuple[int, "Headers", bytes, float | None]
"""Status, headers, body and `keep_alive_s` of a response that allows reuse of the connection."""


class ResponseReader:
    """Parses the responses of one connection, one at a time.

    Call `begin`, then `feed` until it returns True; the result is valid until the next `begin`.

    Args:
        cached_responses: complete responses by their bytes, shared by all readers.  Receivers
            repeat the same response, except for its Date header.
    """

    __slots__ = (
        "_cached",
        "_count",
        "_head",
        "_headers",
        "_interims",
        "_left",
        "_parser",
        "_raw",
        "_start",
        "_whole",
        "body",
        "broken",
        "keep_alive_s",
        "reusable",
        "status",
        "surplus",
    )

    def __init__(self, cached_responses: dict[bytes, CachedResponse]) -> None:
        self._cached = cached_responses
        parser = HttpResponseParser(self)
        # Only leniencies that other clients have as well; none of them affects where a response
        # ends.
        parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )
        self._parser: HttpResponseParser | None = parser
        self.begin()

    def begin(self) -> None:
        """Start a new response."""
        self._raw: list[tuple[bytes, bytes]] = []
        self._headers: Headers | None = None
        self._count = 0
        self._left = RESPONSE_HEAD_BYTES_MAX
        self._interims = 0
        self._start = b""
        self._head = self._whole = False
        self.status: int | None = None
        """Status; None: the head is incomplete."""
        self.body: bytes | bytearray = b""
        """Body bytes received, up to `RESPONSE_BODY_BYTES_MAX`."""
        self.broken: str | None = None
        """Protocol error of head or body; None: no error."""
        self.reusable = False
        """Whether the connection can be reused after this response."""
        self.keep_alive_s: float | None = None
        """Seconds of idleness after which the receiver closes the connection; None: not said."""
        self.surplus = False
        """Whether data was received after the complete response."""

    def feed(self, data: bytes) -> bool:
        """Parse received bytes; returns whether the response is complete, broken or long enough."""
        if self._whole:
            self._mark_surplus()
            return True
        if self._start or len(data) > CACHED_BYTES_MAX:
            return self._feed(data)
        cached = self._cached.get(data)
        if cached is not None:
            self.status, self._headers, self.body, self.keep_alive_s = cached
            self._head = self._whole = self.reusable = True
            return True
        over = self._feed(data)
        if self.reusable and self.status is not None:
            if len(self._cached) >= CACHED_RESPONSES_MAX:
                self._cached.clear()
            body = bytes(self.content())
            self._cached[data] = self.status, self.headers(), body, self.keep_alive_s
        return over

    def _feed(self, data: bytes) -> bool:
        if not self._head and len(self._start) < len(_HTTP):
            # Compare the protocol name once enough bytes have arrived.
            data = self._start + data
            self._start = data[: len(_HTTP)]
            if not _HTTP.startswith(self._start):
                is_http2 = data[3:4] == _SETTINGS and data[5:9] == bytes(4)
                self.broken = "an HTTP/2 frame: it needs HTTP/1.1" if is_http2 else _NOT_HTTP
                return True
            if len(self._start) < len(_HTTP):
                return False
        while data and not self.over:
            # The parser ignores line ends after a response: feed one at the end by itself.
            has_end = data[-1] in _LINE_ENDS and len(data) > 1
            size = min(self._left, PIECE_BYTES, len(data) - has_end)
            piece, data = data[:size], data[size:]
            had_head = self._head
            self._parse(piece)
            if had_head is self._head:
                self._left -= len(piece)
                if self._left <= 0:
                    self._fail_too_large()
            else:
                self._left = BODY_RAW_BYTES_MAX
        if data and self._whole:
            self._mark_surplus()
        return self.over

    def end(self) -> bool:
        """Handle the end of the connection; returns whether it completes the response."""
        if self._head and not self._whole and self.broken is None and self._ends_with_connection():
            self._whole = True
        return self._whole

    def headers(self) -> Headers:
        """Return the response headers up to `HEADER_BYTES_MAX`."""
        if self._headers is not None:
            return self._headers
        return kept_headers(self._raw)

    def content(self) -> bytes | bytearray:
        """Return what is kept of the body: see `readable_body`."""
        if not self.body or self._headers is not None:  # Cached: it was readable.
            return self.body
        encodings = [
            value
            for name, value in self._raw
            # The length first: most headers have another one.
            if len(name) == len(b"content-encoding") and name.lower() == b"content-encoding"
        ]
        if not encodings:
            return self.body
        is_error = self.status is None or not 200 <= self.status < 300
        return readable_body(self.body, encodings, is_error=is_error)

    def close(self) -> None:
        self._parser = None  # Breaks the reference cycle with the parser.

    # --------------------------------------------------- parser callbacks

    def on_message_begin(self) -> None:
        if self._whole:
            self._mark_surplus()
        elif not self._head:
            self._raw = []
            self._count = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head:
            return  # A trailer.
        self._count += 1
        if self._count > HEADER_COUNT_MAX:
            self.broken = f"more than {HEADER_COUNT_MAX} headers"
        elif b"\0" in value:
            self.broken = "a header contains NUL"
        else:
            self._raw.append((name, value))
            # The length first: most headers have another one.
            if len(name) == len(b"keep-alive") and name.lower() == b"keep-alive":
                found = _KEEP_ALIVE.search(value)
                self.keep_alive_s = None if found is None else float(found[1])

    def on_headers_complete(self) -> None:
        if self._head or self.broken is not None:
            return
        parser = self._parser
        assert parser is not None
        status = parser.get_status_code()
        if parser.get_http_version() not in _VERSIONS:
            self.broken = "unsupported HTTP version"
        elif not is_interim(status):
            self.status = status
            self._head = True
        elif self._interims < INTERIM_MAX:
            self._interims += 1
        else:
            self.broken = TOO_MANY_INTERIMS

    def on_body(self, data: bytes) -> None:
        # Interim responses may have a body as well.
        if self._head and not self._whole and len(self.body) < RESPONSE_BODY_BYTES_MAX:
            if not self.body:
                self.body = bytearray()
            self.body += data[: RESPONSE_BODY_BYTES_MAX - len(self.body)]

    def on_message_complete(self) -> None:
        if not self._head or self._whole:
            return
        self._whole = True
        assert self._parser is not None
        self.reusable = self.status != _SWITCHING and self._parser.should_keep_alive()

    @property
    def untouched(self) -> bool:
        """Whether no byte of the response was received."""
        return not self._start and not self._whole

    # ---------------------------------------------------------------- internals

    @property
    def over(self) -> bool:
        """Whether the response is complete, broken, or has `RESPONSE_BODY_BYTES_MAX` of body."""
        return self._whole or self.broken is not None or len(self.body) >= RESPONSE_BODY_BYTES_MAX

    def _parse(self, data: bytes) -> None:
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self.reusable = False
        except HttpParserError as error:
            self.reusable = False
            if self._whole:
                self._mark_surplus()
            elif self.broken is None:
                # The rest of the message quotes received bytes, which may contain the request.
                self.broken = str(error).partition(":")[0]

    def _mark_surplus(self) -> None:
        self.surplus = True
        self.reusable = False

    def _fail_too_large(self) -> None:
        if not self.over:
            self.broken = TOO_LARGE_WRAPPING if self._head else TOO_LARGE_HEAD

    def _ends_with_connection(self) -> bool:
        """Whether the connection's end delimits the body (RFC 9112, 6.3)."""
        for name, value in self._raw:
            lowered = name.lower()
            if lowered == b"content-length":
                return False
            if lowered == b"transfer-encoding" and b"chunked" in value.lower():
                return False
        return True
