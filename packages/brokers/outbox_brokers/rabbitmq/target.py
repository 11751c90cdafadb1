"""URLs of RabbitMQ streams."""

from __future__ import annotations

from typing import NamedTuple

from outbox.core.brokers.broker_url import decode_name, parse_broker_url
from outbox.core.model.text import quoted
from outbox.errors import UsageError

PLAIN_SCHEME = "rabbitmq-stream"
TLS_SCHEME = "rabbitmq-stream+tls"
RABBITMQ_PORTS = {PLAIN_SCHEME: 5552, TLS_SCHEME: 5551}
STREAM_NAME_BYTES_MAX = 255
"""Limit of a stream's name; the server refuses longer ones."""
LANE_BYTES_MAX = 120
"""Left for `.` and the lane's name."""

_FORM = f"{TLS_SCHEME}://rabbitmq.example/orders"


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

    @property
    def streams(self) -> tuple[object, ...]:
        """What names the streams."""
        return self.vhost, self.stream

    def stream_of(self, lane: str) -> str:
        return f"{self.stream}.{lane}"


def parse_url(url: str) -> StreamTarget:
    """Parse `rabbitmq-stream[+tls]://host[:port]/STREAM[?vhost=V][&create=1]`.

    Raises:
        UsageError: the URL is not usable; one line with the next step.
    """
    parts = parse_broker_url(
        url, ports=RABBITMQ_PORTS, path="stream", options=("vhost", "create"), form=_FORM
    )
    ((host, port),) = parts.servers
    vhost, create = parts.options.get("vhost", "/"), parts.options.get("create", "0")
    if not vhost:
        raise UsageError("url: vhost is empty; leave it out for the default one")
    if create not in ("0", "1"):
        raise UsageError(f"url: create={quoted(create)} is not valid; use create=1 or leave it out")
    return StreamTarget(
        parts.scheme == TLS_SCHEME, host, port, _stream(parts.path), vhost, create == "1"
    )


def _stream(path: str) -> str:
    if "/" in path:
        raise UsageError(f"url: must have one name of a stream as its path, such as {_FORM}")
    name = decode_name(path, "stream")
    bytes_max = STREAM_NAME_BYTES_MAX - LANE_BYTES_MAX
    if len(name.encode()) > bytes_max:
        raise UsageError(f"url: the name of the stream is longer than {bytes_max} bytes")
    return name
