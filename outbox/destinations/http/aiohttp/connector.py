"""aiohttp connector that pools connections by `Target`.

`outbox.destinations.http.connector` opens the connections.  The pool key includes open
networks and TLS settings, so that endpoints with the same URL do not share a connection with
other egress rules, trust or client certificate.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, cast

import aiohttp

from outbox.core.model.response import Failure
from outbox.destinations.http.aiohttp.protocol import Protocol
from outbox.destinations.http.responses import TRANSPORT_CLOSED
from outbox.destinations.interface import POOLS_MAX, NotConnected

if TYPE_CHECKING:
    from aiohttp.connector import Connection

    from outbox.destinations.http.connector import ConnectionOpener, Target


class Connector(aiohttp.BaseConnector):
    """Connection pools by target.

    Args:
        keep_alive_s: idle time-out; None: no pooling.
    """

    def __init__(self, opener: ConnectionOpener, *, keep_alive_s: float | None) -> None:
        if keep_alive_s is None:
            super().__init__(limit=0, force_close=True)
        else:
            super().__init__(limit=0, keepalive_timeout=keep_alive_s)
        self._opener = opener
        self._factory: Any = functools.partial(Protocol, self._loop)

    async def open(
        self, target: Target, timeout_s: float, *, keep_alive: bool = True
    ) -> Connection:
        """Return a pooled connection without unsolicited data, or a new one.

        Args:
            keep_alive: False: close the pooled ones.

        Raises:
            NotConnected: no connection could be established.
        """
        if self.closed:
            raise NotConnected(Failure.RESET, TRANSPORT_CLOSED)
        timeout = _timeout(timeout_s)
        while True:
            connection = await self.connect(cast("Any", target), [], timeout)
            protocol = cast("Protocol | None", connection.protocol)
            if protocol is None or not protocol.used:
                return connection
            if keep_alive and protocol.is_open and protocol.readable:
                # The loop reads it in its next iteration, after the tasks that are ready.
                try:
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                except BaseException:
                    connection.close()
                    raise
            if keep_alive and protocol.is_open and not protocol.readable:
                return connection
            connection.close()

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        super()._release(key, protocol, should_close=should_close)
        if len(self._conns) > POOLS_MAX:
            # A pool is removed with its last connection and added again on release, so the
            # first pool is the least recently used one.
            for kept, _ in self._conns.pop(next(iter(self._conns))):
                kept.close()

    async def _create_connection(
        self,
        req: Any,
        traces: Any,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 (aiohttp calls it)
    ) -> Protocol:
        assert timeout.sock_connect is not None
        protocol: Protocol = await self._opener.open(req, self._factory, timeout.sock_connect)
        return protocol


@functools.lru_cache(1024)
def _timeout(connect_s: float) -> aiohttp.ClientTimeout:
    # sock_connect only: aiohttp rounds `connect` to whole seconds.
    return aiohttp.ClientTimeout(connect=None, sock_connect=connect_s)
