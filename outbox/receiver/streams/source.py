"""What a reader needs of a broker: the names of the lanes, and the entries of each."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from outbox.core.model.destination import check_url_text, scheme_of
from outbox.errors import OutboxError, UsageError
from outbox.plugins import STREAMS, PluginUnusable, load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from outbox.receiver.streams.entries import Headers

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


SourceFactory: TypeAlias = "Callable[[SourceOptions], Callable[[], StreamSource]]"
"""A plug-in: it checks the options, and returns a function that makes a source."""


def source_factory(options: SourceOptions) -> Callable[[], StreamSource]:
    """Return a function that makes a source, which connects when it is used.

    Raises:
        UsageError: the URL is not valid, nothing that is installed reads it, or a client library is
            missing.
    """
    check_url_text(options.url)
    try:
        factory: SourceFactory = load(STREAMS, scheme_of(options.url))
    except PluginUnusable as error:
        raise PluginUnusable(
            f"url: no reader: {error}; messages that another client has read are parsed with "
            "outbox.receiver.read_message"
        ) from error
    return factory(options)
