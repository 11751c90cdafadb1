"""What the URL of a Redis or Valkey stream names."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from outbox.core.model.text import quoted
from outbox.errors import UsageError

REDIS_PORT = 6379
STREAM_CHARS_MAX = 200
_SECURE = ("rediss", "valkeys")
_STREAM = re.compile(r"[^\s{}\x00-\x1f\x7f]+")
_DATABASE = re.compile(r"[0-9]{1,5}")
_FORM = "use a form such as redis://host:6379/orders, or rediss:// for TLS"


class RedisTarget(NamedTuple):
    """Server, database and the name that begins the keys of an endpoint's streams."""

    host: str
    port: int
    secure: bool
    database: int
    stream: str

    @property
    def servers(self) -> tuple[tuple[str, int], ...]:
        """Host and port."""
        return ((self.host, self.port),)

    def stream_key(self, lane: str) -> str:
        """Key of a lane's stream; the hash tag keeps it in one cluster slot with its fence."""
        return f"{self.stream}:{{{lane}}}"

    def fence_key(self, lane: str) -> str:
        """Key of the hash with a lane's owner."""
        return f"{self.stream}:{{{lane}}}:owner"

    @property
    def lanes_key(self) -> str:
        """Key of the set with the names of the lanes, by which consumers find their streams."""
        return f"{self.stream}:lanes"


def parse_url(url: str) -> RedisTarget:
    """Parse `redis://host[:port]/stream[?db=number]`.

    Raises:
        UsageError: one line that begins with "url: ".
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"url: malformed: {error}") from None
    if "@" in parts.netloc:
        raise UsageError(
            "url: must not contain a user or password; set them with outbox endpoint credentials, "
            "or credentials= of a reader"
        )
    if not host:
        raise UsageError(f"url: has no host; {_FORM}")
    if port == 0:
        raise UsageError("url: port 0 is not valid")
    stream = unquote(parts.path.removeprefix("/"))
    if not _STREAM.fullmatch(stream) or len(stream) > STREAM_CHARS_MAX:
        raise UsageError(
            f"url: {quoted(stream)} is no name for streams: 1 to {STREAM_CHARS_MAX} characters "
            f"without spaces and braces; {_FORM}"
        )
    database = 0
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name != "db" or not _DATABASE.fullmatch(value):
            raise UsageError(f"url: {quoted(f'{name}={value}')} is not known; there is db=NUMBER")
        database = int(value)
    if parts.fragment:
        raise UsageError("url: must not have a fragment (#…)")
    return RedisTarget(host, port or REDIS_PORT, parts.scheme.lower() in _SECURE, database, stream)
