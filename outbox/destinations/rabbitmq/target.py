"""URLs of RabbitMQ streams."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from outbox.core.model.text import quoted
from outbox.errors import UsageError

PLAIN_SCHEME = "rabbitmq-stream"
TLS_SCHEME = "rabbitmq-stream+tls"
RABBITMQ_PORT = 5552
RABBITMQ_TLS_PORT = 5551
STREAM_NAME_BYTES_MAX = 255
"""Limit of a stream's name; the server refuses longer ones."""
LANE_BYTES_MAX = 120
"""Left for `.` and the lane's name."""

_EXAMPLE = f"{TLS_SCHEME}://rabbitmq.example/orders"
_SENDABLE = re.compile(r"[\x21-\x7e]+")
_PARAMETERS = frozenset({"vhost", "create"})


class StreamTarget(NamedTuple):
    """Where the streams of an endpoint are."""

    secure: bool
    host: str
    port: int
    stream: str
    """Prefix of the lanes' streams."""
    vhost: str = "/"
    create: bool = False
    """Whether a lane's stream is created when the lane has never been delivered to."""

    @property
    def servers(self) -> tuple[tuple[str, int], ...]:
        """Host and port."""
        return ((self.host, self.port),)

    def stream_of(self, lane: str) -> str:
        return f"{self.stream}.{lane}"


def parse_url(url: str) -> StreamTarget:
    """Parse `rabbitmq-stream[+tls]://host[:port]/STREAM[?vhost=V][&create=1]`.

    Raises:
        UsageError: the URL is not usable; one line with the next step.
    """
    if not _SENDABLE.fullmatch(url):
        raise UsageError(
            "url: must contain visible ASCII only; encode host names as xn--… and other characters "
            "as %XX"
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"url: malformed: {error}") from None
    if parts.scheme not in (PLAIN_SCHEME, TLS_SCHEME):
        raise UsageError(f"url: must start with {PLAIN_SCHEME}:// or {TLS_SCHEME}://")
    if "@" in parts.netloc:
        raise UsageError(
            "url: must not contain a user or password; set them with `outbox endpoint credentials`"
        )
    if not host:
        raise UsageError(f"url: has no host; use a form such as {_EXAMPLE}")
    if "%" in host:
        raise UsageError("url: the host must not contain %")
    if "#" in url:
        raise UsageError("url: must not have a fragment (#…)")
    if port == 0:
        raise UsageError("url: port 0 is not valid")
    secure = parts.scheme == TLS_SCHEME
    parameters = _parameters(parts.query)
    return StreamTarget(
        secure,
        host,
        port or (RABBITMQ_TLS_PORT if secure else RABBITMQ_PORT),
        _stream(parts.path),
        _vhost(parameters.get("vhost", "/")),
        _flag("create", parameters.get("create", "0")),
    )


def _stream(path: str) -> str:
    name = _decoded(path.removeprefix("/"), "the name of the stream")
    if not name or "/" in path.removeprefix("/"):
        raise UsageError(f"url: must have one name of a stream as its path, such as {_EXAMPLE}")
    bytes_max = STREAM_NAME_BYTES_MAX - LANE_BYTES_MAX
    if len(name.encode()) > bytes_max:
        raise UsageError(f"url: the name of the stream is longer than {bytes_max} bytes")
    return name


def _vhost(name: str) -> str:
    if not name:
        raise UsageError("url: vhost is empty; leave it out for the default one")
    return name


def _flag(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise UsageError(f"url: {name}={quoted(value)} is not valid; use {name}=1 or leave it out")
    return value == "1"


def _parameters(query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    if not query:
        return found
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, errors="strict")
    except ValueError as error:
        raise UsageError(f"url: malformed parameters: {error}") from None
    for name, value in pairs:
        if name not in _PARAMETERS:
            raise UsageError(f"url: has no parameter {quoted(name)}; use vhost or create")
        if name in found:
            raise UsageError(f"url: {name} appears more than once")
        if not value.isprintable():
            raise UsageError(f"url: {name} has characters that cannot be printed")
        found[name] = value
    return found


def _decoded(text: str, what: str) -> str:
    try:
        decoded = unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise UsageError(f"url: {what} is not UTF-8") from None
    if not decoded.isprintable():
        raise UsageError(f"url: {what} has characters that cannot be printed")
    return decoded
