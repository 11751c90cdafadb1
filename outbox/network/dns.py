"""Asynchronous name resolution with a cache.

getaddrinfo of the C library blocks; asyncio runs it in a few shared threads, so half a
dozen names with unresponsive servers would block all other names.  c-ares uses non-blocking
sockets: a hanging lookup delays only itself.  It reads /etc/hosts, resolv.conf and search
domains like the C library; a changed resolv.conf is reloaded.

Concurrent requests for a name share one lookup.  The time-out of a waiting request does not
cancel the lookup: its late result is cached for the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import structlog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox.network.dns_cares import CaresChannel, Found

log = structlog.get_logger("outbox.destinations")

CACHE_S = 8.0
"""Lifetime of a cached result with a shorter TTL, or without one.  A connection is checked each
second, so that a stream of requests follows a changed name within its TTL and 10 s."""
CACHE_MAX_S = 60.0
"""Maximum lifetime of a cached result."""
CACHED_NAMES_MAX = 16_384
"""Maximum number of cached names, about half a kilobyte each."""
LOOKUPS_MAX = 4096
"""Maximum number of concurrent lookups; names without an earlier success get three quarters."""
RESOLVED_ADDRESSES_MAX = 64
"""Maximum number of addresses used from one response."""
RESOLVER_THREADS = 32
"""Threads of the fallback when c-ares cannot start."""


class Unresolved(Exception):
    """A name has no address, or the lookup failed."""


class Resolver(Protocol):
    """Resolves host names."""

    async def resolve(self, host: str) -> Sequence[str]:
        """Return the addresses of a name, at least one.

        Raises:
            Unresolved: the name has no address, or the lookup failed.
        """
        ...

    def current(self, host: str) -> Sequence[str] | None:
        """Return the addresses of a name as of now, without waiting.

        None: they are not known at the moment; a lookup is in progress or failed.
        """
        ...

    async def aclose(self) -> None:
        """Cancel pending lookups."""
        ...


class CachingResolver:
    """A caching `Resolver` on c-ares, bound to the event loop of its first lookup.

    Args:
        cache_s: minimum lifetime of a cached result.
        options: c-ares options that override the system configuration.  Numbers and servers
            only: pycares frees strings before c-ares has read them.
    """

    def __init__(self, *, cache_s: float = CACHE_S, **options: Any) -> None:
        self._cache_s = cache_s
        self._options = options
        self._backend: CaresChannel | _Threads | None = None
        # Expiry and addresses of resolved names, least recently resolved first.
        self._cache: OrderedDict[str, tuple[float, list[str]]] = OrderedDict()
        self._pending: dict[str, asyncio.Future[Found]] = {}

    async def resolve(self, host: str) -> Sequence[str]:
        host = host.lower()
        addresses = self._fresh(host)
        if addresses is not None:
            # Round robin: rotate the addresses.
            addresses.append(addresses.pop(0))
            return tuple(addresses)
        pending = self._pending.get(host)
        if pending is None:
            pending = self._start(host)
        return tuple((await asyncio.shield(pending))[0])

    def current(self, host: str) -> Sequence[str] | None:
        host = host.lower()
        addresses = self._fresh(host)
        if addresses is None and host not in self._pending:
            with contextlib.suppress(Unresolved):  # Too many lookups: asked again later.
                self._start(host)
        return addresses

    async def aclose(self) -> None:
        if self._backend is not None:
            self._backend.close()

    def _fresh(self, host: str) -> list[str] | None:
        cached = self._cache.get(host)
        if cached is None or asyncio.get_running_loop().time() >= cached[0]:
            return None
        return cached[1]

    def _start(self, host: str) -> asyncio.Future[Found]:
        lookups_max = LOOKUPS_MAX if host in self._cache else LOOKUPS_MAX * 3 // 4
        if len(self._pending) >= lookups_max:
            raise Unresolved("too many concurrent lookups")
        loop = asyncio.get_running_loop()
        if self._backend is not None and self._backend.outdated:
            self._backend.retire()
            self._backend = None
        if self._backend is None:
            self._backend = _start_backend(loop, self._options)
        query = self._backend.query(host)
        # A separate future: the lookup may be cancelled, and this one may have no waiters.
        self._pending[host] = result = loop.create_future()
        query.add_done_callback(partial(self._ended, host, result))
        return result

    def _ended(
        self, host: str, result: asyncio.Future[Found], found: asyncio.Future[Found]
    ) -> None:
        del self._pending[host]
        try:
            addresses, ttl_s = found.result()
            addresses = addresses[:RESOLVED_ADDRESSES_MAX]
            if not addresses:
                raise Unresolved("it has no address")
        except (asyncio.CancelledError, Exception) as error:
            self._cache.pop(host, None)
            result.set_exception(Unresolved(_describe_error(error)))
            result.exception()  # Mark as retrieved: there may be no waiter.
            return
        lifetime_s = min(max(ttl_s, self._cache_s), CACHE_MAX_S)
        self._cache[host] = (result.get_loop().time() + lifetime_s, addresses)
        self._cache.move_to_end(host)
        if len(self._cache) > CACHED_NAMES_MAX:
            self._cache.popitem(last=False)
        result.set_result((addresses, ttl_s))


class _Threads:
    """Fallback: getaddrinfo in a separate thread pool, so that it blocks only other lookups."""

    outdated = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="names")

    def query(self, host: str) -> asyncio.Future[Found]:
        return self._loop.run_in_executor(self._threads, _addresses, host)

    def retire(self) -> None:
        self.close()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _addresses(host: str) -> Found:
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in infos)), 0.0


def _start_backend(
    loop: asyncio.AbstractEventLoop, options: dict[str, Any]
) -> CaresChannel | _Threads:
    try:
        # Imported here: the C library may be missing.
        from outbox.network.dns_cares import CaresChannel

        return CaresChannel(loop, options)
    except Exception as error:
        log.warning(
            "c-ares is unavailable: using getaddrinfo in threads, where slow lookups delay others",
            error=str(error),
            threads=RESOLVER_THREADS,
        )
        return _Threads(loop)


def _describe_error(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "the lookup was cancelled"
    message = str(error.args[-1] if error.args else error)
    return message[:1].lower() + message[1:]
