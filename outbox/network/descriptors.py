"""Descriptors: what the process may open, and how many of them connections to receivers take."""

from __future__ import annotations

import errno
import os
import socket
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

RESERVED_MAX = 256
"""Descriptors that connections to receivers leave free, or an eighth of the limit if that is less:
for the database, brokers, files, and those who connect to this process."""


def socket_factory() -> Callable[[tuple[Any, ...]], socket.socket]:
    """Return a function that opens a socket for an address, unless few descriptors are left.

    The system assigns the lowest free descriptor, so its number says how many are open at
    least, whatever they were opened for.
    """
    limit = _descriptors_max()
    end = limit - min(RESERVED_MAX, limit / 8)

    def open_socket(address_info: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, *_ = address_info
        opened = socket.socket(family, kind, protocol)
        if opened.fileno() >= end:
            opened.close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened

    return open_socket


def _descriptors_max() -> float:
    """How many descriptors this process may have."""
    try:
        import resource
    except ImportError:  # Not available on Windows.
        return inf
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return inf if limit == resource.RLIM_INFINITY else limit
