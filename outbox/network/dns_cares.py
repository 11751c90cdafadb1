"""c-ares on an asyncio event loop.

c-ares has an event thread of its own, but it hangs when a lookup follows one that timed out
and also gets no response (c-ares issue 1000): no name would resolve after a DNS outage.
Therefore the event loop watches the sockets and drives the time-outs.  Everything runs in
the loop's thread.
"""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pycares

if TYPE_CHECKING:
    import asyncio

QUERY_S = 1.0
QUERY_TRIES = 3
"""Attempts per server; the time-out doubles in each round.  c-ares uses a shorter one for a
server with known latency."""
TICK_S = 0.1
"""Interval at which c-ares processes time-outs."""
RESOLV_CONF = Path("/etc/resolv.conf")
_NO_SORT = 1 << 7
"""ARES_AI_NOSORT, which pycares does not export: sorting opens a socket for every address, and
the DNS server controls their number."""
_NO_SOCKET = pycares.ARES_SOCKET_BAD

Found: TypeAlias = tuple[list[str], float]
"""Addresses of a name, and seconds for which they are valid (TTL); 0: unknown."""


class LookupFailed(Exception):
    """c-ares could not resolve a name."""


class CaresChannel:
    """A c-ares channel with the current system configuration.

    Raises:
        pycares.AresError: the channel cannot start.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, options: dict[str, Any]) -> None:
        self._loop = loop
        self._reads: set[int] = set()
        self._writes: set[int] = set()
        self._pending = 0
        self._tick: asyncio.TimerHandle | None = None
        self._retired = self._closed = False
        self._config_mtime = _config_mtime_ns()
        options = {"timeout": QUERY_S, "tries": QUERY_TRIES, **options}
        self._channel = pycares.Channel(sock_state_cb=self._watch, **options)

    @property
    def outdated(self) -> bool:
        """Whether resolv.conf has changed since."""
        return self._config_mtime != _config_mtime_ns()

    def query(self, host: str) -> asyncio.Future[Found]:
        """The addresses of a name, or `LookupFailed`."""
        future: asyncio.Future[Found] = self._loop.create_future()
        self._pending += 1
        future.add_done_callback(self._on_done)
        try:
            self._channel.getaddrinfo(
                host,
                None,
                type=socket.SOCK_STREAM,
                flags=_NO_SORT,
                callback=partial(_set_result, future),
            )
        except (pycares.AresError, UnicodeError) as error:
            if not future.done():
                future.set_exception(LookupFailed(str(error.args[-1])))
        if self._tick is None:
            self._tick = self._loop.call_later(TICK_S, self._on_tick)
        return future

    def retire(self) -> None:
        """Close when all pending lookups are complete."""
        self._retired = True
        if not self._pending:
            self.close()

    def close(self) -> None:
        """Close now; pending lookups fail."""
        if self._closed:
            return
        self._channel.cancel()
        # Later socket callbacks come from another thread and are ignored.
        self._closed = True
        for number in self._reads:
            self._loop.remove_reader(number)
        for number in self._writes:
            self._loop.remove_writer(number)
        if self._tick is not None:
            self._tick.cancel()
        self._channel.close()

    def _on_done(self, _: object) -> None:
        self._pending -= 1
        if self._retired and not self._pending:
            self.close()

    def _on_tick(self) -> None:
        self._tick = None
        self._channel.process_fd(_NO_SOCKET, _NO_SOCKET)
        if self._pending:
            self._tick = self._loop.call_later(TICK_S, self._on_tick)

    def _watch(self, number: int, readable: bool, writable: bool) -> None:
        if self._closed:
            return
        if readable:
            self._loop.add_reader(number, self._channel.process_fd, number, _NO_SOCKET)
            self._reads.add(number)
        elif number in self._reads:
            self._reads.discard(number)
            self._loop.remove_reader(number)
        if writable:
            self._loop.add_writer(number, self._channel.process_fd, _NO_SOCKET, number)
            self._writes.add(number)
        elif number in self._writes:
            self._writes.discard(number)
            self._loop.remove_writer(number)


def _set_result(future: asyncio.Future[Found], found: Any, error: int | None) -> None:
    if future.done():
        return
    if error is None:
        addresses = [node.addr[0].decode("ascii") for node in found.nodes]
        ttl_s = float(min((node.ttl for node in found.nodes), default=0))
        future.set_result((list(dict.fromkeys(addresses)), ttl_s))
    else:
        future.set_exception(LookupFailed(pycares.errno.strerror(error)))


def _config_mtime_ns() -> int:
    try:
        return RESOLV_CONF.stat().st_mtime_ns
    except OSError:
        return 0
