"""What a reader needs of a broker: the names of the lanes, and the entries of each."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outbox.core.model.destination import broker_of
from outbox.errors import OutboxError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from outbox.receiver.streams.entries import Headers

_CLIENTS = {"redis": ("redis", "RedisSource"), "nats": ("nats", "NatsSource")}
"""Client library and source class by broker; the package's extra has the broker's name."""
_PEM = "-----BEGIN "


class StreamUnavailable(OutboxError):
    """The broker cannot be read now: it is away, silent, or refuses the reader; one line."""


class StoredEntry(NamedTuple):
    """A message as the broker has it."""

    sequence: int | None
    """Its sequence in the lane; None: another writer's message, which has none."""
    headers: Headers
    body: bytes


class StreamSource(Protocol):
    """The streams of an endpoint, over connections of its own.

    A failed call leaves the source unusable: it is closed, and another one opened.  Every call
    ends in bounded time.
    """

    async def lanes(self) -> set[str]:
        """The names of the lanes.

        Raises:
            StreamUnavailable: see there; also from the other methods.
        """
        ...

    async def with_entries(self, lanes: Sequence[str]) -> set[str]:
        """Those of the lanes that have entries now, examined in this order or all at once."""
        ...

    async def read(self, lane: str, after: int, count: int, wait_s: float) -> list[StoredEntry]:
        """The next entries of a lane, in its order.

        Args:
            after: the sequence that they follow.
            count: maximum number of entries.
            wait_s: how long to wait for the first one; 0: not at all.
        """
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How to reach a broker."""

    url: str
    credentials: str | None
    ca: str | Path | None
    timeout_s: float

    @property
    def has_ca_text(self) -> bool:
        """The authority is given as text, not as the path of a file."""
        return isinstance(self.ca, str) and _PEM in self.ca

    def tls_context(self) -> ssl.SSLContext:
        """TLS with the system's authorities, or the given one.

        Raises:
            UsageError: the authority cannot be read.
        """
        if self.ca is None:
            return ssl.create_default_context()
        try:
            if self.has_ca_text:
                return ssl.create_default_context(cadata=str(self.ca))
            return ssl.create_default_context(cafile=str(self.ca))
        except OSError as error:
            raise UsageError(f"ca: must be a PEM file or its content: {error}") from None


def source_factory(options: SourceOptions) -> Callable[[], StreamSource]:
    """Return a function that makes a source, which connects when it is used.

    Raises:
        UsageError: the URL is not valid, its client library is missing, or its broker has no
            reader.
    """
    name = broker_of(options.url)
    if name not in _CLIENTS:
        raise UsageError(
            "url: a reader exists for redis:// and nats://; messages of other brokers are parsed "
            "with outbox.receiver.read_message"
        )
    client, class_name = _CLIENTS[name]
    try:
        import_module(client)
    except ImportError:
        raise UsageError(
            f"url: the client library for {name} is missing; run: pip install "
            f"'outbox-relay[{name}]'"
        ) from None
    kind = getattr(import_module(f"{__package__}.{name}_source"), class_name)
    connect: Callable[[], StreamSource] = kind.factory(options)
    return connect
