"""aiohttp's pool of connections, and ours in it.

A connector of aiohttp's does not know for whom it connects, so how a connection comes about
is `transport.connecting`'s.  A kept connection is one of the `Target` that it was made for,
and of no other: what is open for one endpoint, or trusted by it, or says who we are, is
nothing to its neighbour with the same URL.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import aiohttp

from outbox.core.model.response import Failure
from outbox.destinations.http.aiohttp.protocol import Protocol
from outbox.destinations.http.responses import CLOSED
from outbox.destinations.interface import POOLS_MAX, NotConnected

if TYPE_CHECKING:
    from aiohttp.connector import Connection

    from outbox.destinations.http.connector import Connecting, Target


class Connector(aiohttp.BaseConnector):
    """Pools of connections.

    Args:
        keep_alive_s: an unused connection is kept so long; None: not at all.
    """

    def __init__(self, connecting: Connecting, *, keep_alive_s: float | None) -> None:
        if keep_alive_s is None:
            super().__init__(limit=0, force_close=True)
        else:
            super().__init__(limit=0, keepalive_timeout=keep_alive_s)
        self._connecting = connecting
        self._factory: Any = functools.partial(Protocol, self._loop)

    async def open(self, target: Target, timeout_s: float) -> Connection:
        """A kept connection on which it is quiet, or a new one.

        Raises:
            NotConnected: there is none.
        """
        if self.closed:
            raise NotConnected(Failure.RESET, CLOSED)
        timeout = _timeout(timeout_s)
        while True:
            connection = await self.connect(cast("Any", target), [], timeout)
            protocol = cast("Protocol | None", connection.protocol)
            if protocol is None or not protocol.used or not protocol.should_close:
                return connection
            connection.close()

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        super()._release(key, protocol, should_close=should_close)
        if len(self._conns) > POOLS_MAX:
            # A pool goes when its last connection is taken and comes back
            # with it, so the first one is that which was used longest ago.
            for kept, _ in self._conns.pop(next(iter(self._conns))):
                kept.close()

    async def _create_connection(
        self,
        req: Any,
        traces: Any,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 (aiohttp calls it)
    ) -> Protocol:
        assert timeout.sock_connect is not None
        protocol: Protocol = await self._connecting.open(req, self._factory, timeout.sock_connect)
        return protocol


@functools.lru_cache(1024)
def _timeout(connect_s: float) -> aiohttp.ClientTimeout:
    # Not aiohttp's own for connecting, which it rounds to whole seconds.
    return aiohttp.ClientTimeout(connect=None, sock_connect=connect_s)
