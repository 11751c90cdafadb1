"""c-ares, driven by an asyncio event loop.

c-ares can wait for its sockets in a thread of its own, but that one sleeps for
ever when a look-up follows upon one that timed out and is not answered either
(c-ares issue 1000): after an outage of DNS no name would be found again.  So
the loop watches the sockets, and c-ares is told of the time.  Everything runs
in the loop's thread.
"""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pycares

if TYPE_CHECKING:
    import asyncio

QUERY_S = 1.0
QUERY_TRIES = 3
"""Each server is asked so often, and has twice the time in every round; c-ares takes less
where a server is known to be quick."""
TICK_S = 0.1
"""How exactly that time is kept."""
RESOLV_CONF = Path("/etc/resolv.conf")
_NO_SORT = 1 << 7
"""ARES_AI_NOSORT, which pycares does not name: sorting opens a socket for every address of
an answer, and whoever makes the answer says how many they are."""
_NOBODY = pycares.ARES_SOCKET_BAD


class NotFound(Exception):
    """What c-ares says of a name."""


class Ares:
    """One channel, with the system's settings as they are now.

    Raises:
        pycares.AresError: it cannot start.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, options: dict[str, Any]) -> None:
        self._loop = loop
        self._reads: set[int] = set()
        self._writes: set[int] = set()
        self._asked = 0
        self._tick: asyncio.TimerHandle | None = None
        self._retired = self._closed = False
        self._made_for = _changed_at()
        options = {"timeout": QUERY_S, "tries": QUERY_TRIES, **options}
        self._channel = pycares.Channel(sock_state_cb=self._watch, **options)

    @property
    def outdated(self) -> bool:
        """Whether the system's settings have changed."""
        return self._made_for != _changed_at()

    def ask(self, host: str) -> asyncio.Future[list[str]]:
        """The addresses of a name, or `NotFound`."""
        future: asyncio.Future[list[str]] = self._loop.create_future()
        self._asked += 1
        future.add_done_callback(self._answered)
        try:
            self._channel.getaddrinfo(
                host,
                None,
                type=socket.SOCK_STREAM,
                flags=_NO_SORT,
                callback=partial(_tell, future),
            )
        except (pycares.AresError, UnicodeError) as error:
            if not future.done():
                future.set_exception(NotFound(str(error.args[-1])))
        if self._tick is None:
            self._tick = self._loop.call_later(TICK_S, self._on_tick)
        return future

    def retire(self) -> None:
        """End as soon as everything that was asked is answered."""
        self._retired = True
        if not self._asked:
            self.close()

    def close(self) -> None:
        """End now; what was asked is not found."""
        if self._closed:
            return
        self._channel.cancel()
        # What it still says of its sockets it says in another thread.
        self._closed = True
        for number in self._reads:
            self._loop.remove_reader(number)
        for number in self._writes:
            self._loop.remove_writer(number)
        if self._tick is not None:
            self._tick.cancel()
        self._channel.close()

    def _answered(self, _: object) -> None:
        self._asked -= 1
        if self._retired and not self._asked:
            self.close()

    def _on_tick(self) -> None:
        self._tick = None
        self._channel.process_fd(_NOBODY, _NOBODY)
        if self._asked:
            self._tick = self._loop.call_later(TICK_S, self._on_tick)

    def _watch(self, number: int, readable: bool, writable: bool) -> None:
        if self._closed:
            return
        if readable:
            self._loop.add_reader(number, self._channel.process_fd, number, _NOBODY)
            self._reads.add(number)
        elif number in self._reads:
            self._reads.discard(number)
            self._loop.remove_reader(number)
        if writable:
            self._loop.add_writer(number, self._channel.process_fd, _NOBODY, number)
            self._writes.add(number)
        elif number in self._writes:
            self._writes.discard(number)
            self._loop.remove_writer(number)


def _tell(future: asyncio.Future[list[str]], found: Any, error: int | None) -> None:
    if future.done():
        return
    if error is None:
        addresses = [node.addr[0].decode("ascii") for node in found.nodes]
        future.set_result(list(dict.fromkeys(addresses)))
    else:
        future.set_exception(NotFound(pycares.errno.strerror(error)))


def _changed_at() -> int:
    try:
        return RESOLV_CONF.stat().st_mtime_ns
    except OSError:
        return 0
