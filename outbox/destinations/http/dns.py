"""Names to addresses, without a thread for each.

getaddrinfo of the C library blocks, so asyncio asks it in a few threads that
all look-ups share: half a dozen names whose servers never answer would hold up
every other name.  c-ares asks over sockets, so a look-up that hangs costs
nothing but its own time.  It reads /etc/hosts, resolv.conf and the search
domains as the C library does; a changed resolv.conf is read again.

A look-up is shared by all who ask for the name meanwhile, ends with the time
of whoever waits for it, and goes on without them: what comes late is an answer
for the next one.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import structlog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.destinations.http.dns_cares import Ares

log = structlog.get_logger("outbox.destinations")

CACHE_S = 10.0
NAMES_MAX = 4096
"""So many names are remembered."""
LOOKUPS_MAX = 4096
"""Look-ups under way; names that never led anywhere get three quarters of them."""
ADDRESSES_MAX = 64
"""Of one answer, so many addresses are looked at."""
THREADS = 32
"""Where c-ares cannot start, so many names are looked up at once."""


class Unresolved(Exception):
    """A name leads nowhere, or nobody could say where."""


class Resolver(Protocol):
    """Finds the addresses of names."""

    async def resolve(self, host: str) -> Sequence[str]:
        """Addresses of a name, at least one.

        Raises:
            Unresolved: there are none.
        """
        ...

    async def aclose(self) -> None:
        """Give up what is under way."""
        ...


class Names:
    """A `Resolver` on c-ares, with a memory; use it in the event loop that asks first.

    Args:
        cache_s: an answer is good for so long.
        options: for c-ares, in place of what the system's files say.  Numbers and servers
            alone: pycares lets go of texts before c-ares has read them.
    """

    def __init__(self, *, cache_s: float = CACHE_S, **options: Any) -> None:
        self._cache_s = cache_s
        self._options = options
        self._asking: Ares | _Threads | None = None
        # Names that led somewhere the last time, what asked for longest first:
        # until when that holds, and the addresses.
        self._known: OrderedDict[str, tuple[float, list[str]]] = OrderedDict()
        self._pending: dict[str, asyncio.Future[list[str]]] = {}

    async def resolve(self, host: str) -> Sequence[str]:
        """See `Resolver.resolve`."""
        host = host.lower()
        known = self._known.get(host)
        if known is not None and asyncio.get_running_loop().time() < known[0]:
            # Each address is the first one in its turn.
            addresses = known[1]
            addresses.append(addresses.pop(0))
            return tuple(addresses)
        pending = self._pending.get(host)
        if pending is None:
            pending = self._start(host)
        return tuple(await asyncio.shield(pending))

    async def aclose(self) -> None:
        """See `Resolver.aclose`."""
        if self._asking is not None:
            self._asking.close()

    def _start(self, host: str) -> asyncio.Future[list[str]]:
        most = LOOKUPS_MAX if host in self._known else LOOKUPS_MAX * 3 // 4
        if len(self._pending) >= most:
            raise Unresolved("too many names are being looked up")
        loop = asyncio.get_running_loop()
        if self._asking is not None and self._asking.outdated:
            self._asking.retire()
            self._asking = None
        if self._asking is None:
            self._asking = _asking(loop, self._options)
        found = self._asking.ask(host)
        # Apart from what was asked: that may be cancelled, and this may be unwanted.
        self._pending[host] = told = loop.create_future()
        found.add_done_callback(partial(self._ended, host, told))
        return told

    def _ended(
        self, host: str, told: asyncio.Future[list[str]], found: asyncio.Future[list[str]]
    ) -> None:
        del self._pending[host]
        try:
            addresses = found.result()[:ADDRESSES_MAX]
            if not addresses:
                raise Unresolved("it has no address")
        except (asyncio.CancelledError, Exception) as error:
            self._known.pop(host, None)
            told.set_exception(Unresolved(_why(error)))
            told.exception()  # Perhaps nobody waits for it any more.
            return
        self._known[host] = (told.get_loop().time() + self._cache_s, addresses)
        self._known.move_to_end(host)
        if len(self._known) > NAMES_MAX:
            self._known.popitem(last=False)
        told.set_result(addresses)


class _Threads:
    """getaddrinfo in threads of its own, so that it holds up names alone."""

    outdated = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="names")

    def ask(self, host: str) -> asyncio.Future[list[str]]:
        return self._loop.run_in_executor(self._threads, _addresses, host)

    def retire(self) -> None:
        self.close()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _asking(loop: asyncio.AbstractEventLoop, options: dict[str, Any]) -> Ares | _Threads:
    try:
        # Imported here: it is a library in C, which there may be none of.
        from outbox.destinations.http.dns_cares import Ares

        return Ares(loop, options)
    except Exception as error:
        log.warning(
            "c-ares cannot start: names are looked up in threads, where slow ones hold up others",
            error=str(error),
            threads=THREADS,
        )
        return _Threads(loop)


def _why(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "the look-up was given up"
    said = str(error.args[-1] if error.args else error)
    return said[:1].lower() + said[1:]
