"""What the URL of a Redis or Valkey stream names."""

from __future__ import annotations

import re
from typing import NamedTuple

from outbox.core.brokers.broker_url import decode_name, parse_broker_url
from outbox.core.model.text import quoted
from outbox.errors import UsageError

REDIS_PORTS = dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), 6379)
STREAM_CHARS_MAX = 200
_SECURE = ("rediss", "valkeys")
_STREAM = re.compile(r"[^\s{}\x00-\x1f\x7f]+")
_DATABASE = re.compile(r"[0-9]{1,5}")
_FORM = "redis://host:6379/orders, or rediss:// for TLS"


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

    @property
    def streams(self) -> tuple[object, ...]:
        """What names the streams."""
        return self.database, self.stream

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


def parse_credentials(text: str | None) -> tuple[str | None, str | None]:
    """User and password of `user:password` or `:password`; a token is a password."""
    user, colon, password = (text or "").partition(":")
    return ((user or None), (password or None)) if colon else (None, user or None)


def parse_url(url: str) -> RedisTarget:
    """Parse `redis://host[:port]/stream[?db=number]`.

    Raises:
        UsageError: one line that begins with "url: ".
    """
    parts = parse_broker_url(url, ports=REDIS_PORTS, path="stream", options=("db",), form=_FORM)
    ((host, port),) = parts.servers
    stream = decode_name(parts.path, "stream")
    if not _STREAM.fullmatch(stream) or len(stream) > STREAM_CHARS_MAX:
        raise UsageError(
            f"url: {quoted(stream)} is no name for streams: 1 to {STREAM_CHARS_MAX} characters "
            "without spaces and braces"
        )
    database = parts.options.get("db", "0")
    if not _DATABASE.fullmatch(database):
        raise UsageError(f"url: {quoted(database)} is not a database; write db=NUMBER")
    return RedisTarget(host, port, parts.scheme in _SECURE, int(database), stream)
