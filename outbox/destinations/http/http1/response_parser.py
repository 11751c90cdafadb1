"""Answers out of bytes, on httptools' parser; no connection is known here.

The parser bounds nothing: neither how many heads come before the answer, nor how many headers
there are, nor what a body is wrapped in.  That is done here, and so is the difference between
an answer that is broken and one whose body is: as soon as the head is there, its status counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from outbox.core.model.response import BODY_BYTES_MAX
from outbox.destinations.http.limits import (
    BODY_RAW_BYTES_MAX,
    HEAD_BYTES_MAX,
    HEADER_COUNT_MAX,
    INTERIM_MAX,
    TOO_LARGE_HEAD,
    TOO_LARGE_WRAPPING,
    TOO_MANY_INTERIMS,
    is_interim,
)
from outbox.destinations.http.responses import kept

if TYPE_CHECKING:
    from outbox.core.model.response import Headers

_HTTP = b"HTTP/"
# llhttp takes these for answers, too: "RTSP/1.0 200 OK".
_VERSIONS = frozenset({"1.0", "1.1"})
_SWITCHING = 101
KNOWN_MAX, KNOWN_BYTES_MAX = 256, 1024
"""So many answers are remembered that are no longer than that."""

Known: TypeAlias = tuple[int, "Headers", bytes]
"""Status, headers and body of an answer after which the connection can be used again."""


class AnswerReader:
    """Reads the answers that come over one connection, one after the other.

    `begin`, then `feed` until it is over; what it found then stays until the next `begin`.

    Args:
        known: answers that came whole in one piece, by their bytes, shared by many readers.
            Receivers give the same answer again and again, but for its date.
    """

    __slots__ = (
        "_count",
        "_head",
        "_headers",
        "_interims",
        "_known",
        "_left",
        "_parser",
        "_raw",
        "_start",
        "_whole",
        "body",
        "broken",
        "reusable",
        "status",
    )

    def __init__(self, known: dict[bytes, Known]) -> None:
        self._known = known
        parser = HttpResponseParser(self)
        # What other clients forgive their servers, and no more: it changes nothing about where
        # an answer ends.
        parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )
        self._parser: HttpResponseParser | None = parser
        self.begin()

    def begin(self) -> None:
        """An answer is expected now, to a request that is sent on this connection."""
        self._raw: list[tuple[bytes, bytes]] = []
        self._headers: Headers | None = None
        self._count = 0
        self._left = HEAD_BYTES_MAX
        self._interims = 0
        self._start = b""
        self._head = self._whole = False
        self.status: int | None = None
        """Of the answer; None: its head is not there."""
        self.body: bytes | bytearray = b""
        """As far as it has come, and is kept."""
        self.broken: str | None = None
        """What is wrong with it, or with its body; None: nothing so far."""
        self.reusable = False
        """Whether it has ended so that another request may follow it."""

    def feed(self, data: bytes) -> bool:
        """More has come; returns whether the answer is over, in whatever way."""
        if self._whole:
            self.reusable = False  # Nobody asked for what came behind it.
            return True
        if self._start or len(data) > KNOWN_BYTES_MAX:
            return self._feed(data)
        known = self._known.get(data)
        if known is not None:
            self.status, self._headers, self.body = known
            self._head = self._whole = self.reusable = True
            return True
        over = self._feed(data)
        if self.reusable and self.status is not None:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[data] = self.status, self.headers(), bytes(self.body)
        return over

    def _feed(self, data: bytes) -> bool:
        if not self._head and len(self._start) < len(_HTTP):
            # So few bytes are hardly ever all that has come.
            data = self._start + data
            self._start = data[: len(_HTTP)]
            if not _HTTP.startswith(self._start):
                self.broken = "it does not begin like an answer"
                return True
            if len(self._start) < len(_HTTP):
                return False
        while data and not self.over:
            piece, data = data[: self._left], data[self._left :]
            had_head = self._head
            self._parse(piece)
            if had_head is self._head:
                self._left -= len(piece)
                if self._left <= 0:
                    self._enough()
            else:
                self._left = BODY_RAW_BYTES_MAX
        if data:
            self.reusable = False  # Nobody asked for what came behind it.
        return self.over

    def end(self) -> bool:
        """The receiver closed the connection; returns whether that ended the answer as it may."""
        if self._head and not self._whole and self.broken is None and self._ends_with_connection():
            self._whole = True
        return self._whole

    def headers(self) -> Headers:
        """Those of the answer, as far as they are kept."""
        if self._headers is not None:
            return self._headers
        return kept(self._raw)

    def close(self) -> None:
        """No more is read."""
        self._parser = None  # It knows this reader.

    # --------------------------------------------------- what the parser calls

    def on_message_begin(self) -> None:
        if self._whole:
            self.reusable = False
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
            self.broken = "a NUL in a header"
        else:
            self._raw.append((name, value))

    def on_headers_complete(self) -> None:
        if self._head or self.broken is not None:
            return
        parser = self._parser
        assert parser is not None
        status = parser.get_status_code()
        if parser.get_http_version() not in _VERSIONS:
            self.broken = "of another version of HTTP"
        elif not is_interim(status):
            self.status = status
            self._head = True
        elif self._interims < INTERIM_MAX:
            self._interims += 1
        else:
            self.broken = TOO_MANY_INTERIMS

    def on_body(self, data: bytes) -> None:
        # Some before the answer may have one, too.
        if self._head and not self._whole and len(self.body) < BODY_BYTES_MAX:
            if not self.body:
                self.body = bytearray()
            self.body += data[: BODY_BYTES_MAX - len(self.body)]

    def on_message_complete(self) -> None:
        if not self._head or self._whole:
            return
        self._whole = True
        assert self._parser is not None
        self.reusable = self.status != _SWITCHING and self._parser.should_keep_alive()

    # ---------------------------------------------------------------- inside

    @property
    def over(self) -> bool:
        """Whether it has ended, or as much of it as is wanted is there."""
        return self._whole or self.broken is not None or len(self.body) >= BODY_BYTES_MAX

    def _parse(self, data: bytes) -> None:
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self.reusable = False
        except HttpParserError as error:
            self.reusable = False
            if not self._whole and self.broken is None:
                # What follows quotes what was received, and that may be what we sent.
                self.broken = str(error).partition(":")[0]

    def _enough(self) -> None:
        if not self.over:
            self.broken = TOO_LARGE_WRAPPING if self._head else TOO_LARGE_HEAD

    def _ends_with_connection(self) -> bool:
        """Whether its body has no other end (RFC 9112, 6.3)."""
        for name, value in self._raw:
            which = name.lower()
            if which == b"content-length":
                return False
            if which == b"transfer-encoding" and b"chunked" in value.lower():
                return False
        return True
