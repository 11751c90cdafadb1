"""Finds the leader of a stream, and keeps the connections to the nodes.

A publisher must be on the leader's own node.  There, the end of the stream's writer reaches the
connection before any later frame does, and all later frames are refused: an append is stored as
a prefix.  On another node, frames travel over Erlang's distribution, which may lose one and
deliver the next.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from rstream import schema

from outbox.core.brokers.port import StopKind
from outbox_brokers.rabbitmq.connection import Rejected
from outbox_brokers.rabbitmq.stops import EXISTS, NO_STREAM, Stopped, code_name, rejected

if TYPE_CHECKING:
    from outbox_brokers.rabbitmq.connection import StreamConnection
    from outbox_brokers.rabbitmq.dial import Dialer
    from outbox_brokers.rabbitmq.target import StreamTarget

Node: TypeAlias = tuple[str, int]
"""Host and port."""
NO_LEADER = 0xFFFF
HOST_CHARS_MAX = 253
"""Longest name of a host (RFC 1035)."""


class Placement(NamedTuple):
    """Where a stream is."""

    leader: Node
    replicas: int
    """The replicas besides the leader."""


class Nodes:
    """The connections of one endpoint, by node."""

    def __init__(self, target: StreamTarget, dialer: Dialer) -> None:
        self._target = target
        self._dialer = dialer
        self._locator: Node = (target.host, target.port)
        self._connections: dict[Node, list[StreamConnection]] = defaultdict(list)
        self._dialing: dict[Node, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._closed = False

    async def locator(self) -> StreamConnection:
        """A connection to the endpoint's own host.

        Raises:
            Stopped: there is none.
        """
        return await self._get(self._locator, with_slot=False)

    async def leader(self, placement: Placement) -> StreamConnection:
        """A connection to a stream's leader with a free slot.

        Raises:
            Stopped: there is none.
        """
        locator = await self.locator()
        at_locator = self._locator == placement.leader or (
            locator.advertised is not None and is_node(locator, placement.leader)
        )
        connection = await self._get(
            self._locator if at_locator else placement.leader, with_slot=True
        )
        require_leader(connection, placement)
        return connection

    async def _get(self, node: Node, *, with_slot: bool) -> StreamConnection:
        async with self._dialing[node]:
            alive = [each for each in self._connections[node] if each.lost is None]
            self._connections[node] = alive
            for connection in alive:
                if connection.is_usable and not (with_slot and connection.is_full):
                    return connection
            if self._closed:
                raise Stopped(StopKind.UNAVAILABLE, "the destination was closed")
            try:
                connection = await self._dialer.connect(*node)
            except BaseException:
                # The server names the nodes: what it names without an end is not kept.
                if not self._connections[node]:
                    del self._connections[node]
                    self._dialing.pop(node, None)
                raise
            if self._closed:
                connection.abort("the destination was closed")
                raise Stopped(StopKind.UNAVAILABLE, "the destination was closed")
            self._connections[node].append(connection)
            return connection

    def close(self) -> None:
        self._closed = True
        for connections in self._connections.values():
            for connection in connections:
                connection.abort("the destination was closed")
        self._connections.clear()
        self._dialer.close()


async def find(connection: StreamConnection, stream: str) -> Placement | None:
    """Ask where a stream is; None: it does not exist.

    Raises:
        Stopped: it has no leader now, or the user has no right.
    """
    response = await connection.exchange(schema.Metadata, schema.MetadataResponse, streams=[stream])
    return placement_of(response, stream)


def placement_of(response: schema.MetadataResponse, stream: str) -> Placement | None:
    found = next((each for each in response.metadata if each.name == stream), None)
    if found is None or found.response_code == NO_STREAM:
        return None
    if found.response_code > 1:
        stop = rejected(found.response_code, f"stream {stream}")
        raise Stopped(stop.kind, stop.detail)
    brokers = {each.reference: (each.host, each.port) for each in response.brokers}
    if any(len(host) > HOST_CHARS_MAX or not 0 < port < 65536 for host, port in brokers.values()):
        raise Stopped(StopKind.MISCONFIGURED, f"stream {stream}: a node's address is not valid")
    if found.leader_ref == NO_LEADER or found.leader_ref not in brokers:
        raise Stopped(StopKind.UNAVAILABLE, f"stream {stream} has no leader now")
    return Placement(brokers[found.leader_ref], len(found.replicas_refs))


def is_node(connection: StreamConnection, node: Node) -> bool:
    """Whether a connection is to a node, as far as the server says it.

    Over TLS, RabbitMQ 3.10 names the node's port without TLS: there, hosts are compared.
    """
    advertised = connection.advertised
    if advertised is None:
        return True
    return advertised[0] == node[0] if connection.secure else advertised == node


def require_leader(connection: StreamConnection, placement: Placement) -> None:
    """Raise `Stopped` unless the connection is to the leader's node."""
    reached, leader = connection.advertised, placement.leader
    if reached is not None and not is_node(connection, leader):
        raise Stopped(
            StopKind.UNAVAILABLE,
            f"connected to node {reached[0]}:{reached[1]} instead of the leader "
            f"{leader[0]}:{leader[1]}: it moved, or its advertised address is a load balancer's",
        )


async def create(connection: StreamConnection, stream: str) -> None:
    """Create a stream with the server's default settings.

    Raises:
        Stopped: the server refused it.
    """
    try:
        await connection.exchange(schema.Create, schema.CreateResponse, stream=stream, arguments=[])
    except Rejected as error:
        if error.code != EXISTS:
            raise Stopped(
                StopKind.MISCONFIGURED, f"creating stream {stream}: {code_name(error.code)}"
            ) from None
