"""Errors of connections."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.core.model.response import Failure

TRANSPORT_CLOSED = "the transport is closed"


OWN_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def is_own_failure(error: BaseException, addresses: Sequence[str] = ()) -> bool:
    """Whether this process lacks resources for a connection, whatever the peer is.

    Args:
        addresses: what it was to be connected to.  EADDRNOTAVAIL means that no local port is left;
            but for an IPv6 address, also that this host has none.
    """
    if isinstance(error, MemoryError):
        return True
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRNOTAVAIL:
        return any(":" not in address for address in addresses)
    return number in OWN_ERRORS


def lacks_descriptors() -> bool:
    """Whether this process can open no socket now."""
    try:
        socket.socket().close()
    except OSError as error:
        return is_own_failure(error)
    return False


class NotConnected(Exception):
    """No connection could be established; nothing was sent."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail
