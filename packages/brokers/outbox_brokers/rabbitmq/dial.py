"""Establishes connections: egress policy, TLS, authentication."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

from rstream import schema
from rstream.encoding import encode_frame

from outbox.core.brokers.port import StopKind
from outbox.destinations.broker_connection import BrokerOpener
from outbox.network.errors import NotConnected
from outbox.version import __version__
from outbox_brokers.rabbitmq.connection import Lost, Rejected, StreamConnection
from outbox_brokers.rabbitmq.stops import Stopped, code_name, not_connected, rejected

if TYPE_CHECKING:
    from outbox.destinations.broker import BrokerAddress
    from outbox.network.dns import Resolver
    from outbox.network.egress import EgressPolicy
    from outbox_brokers.rabbitmq.target import StreamTarget

BROKER_HEARTBEAT_S = 20
"""Longest interval of heartbeats; the server's limit is 60 s by default."""
PORT_DIGITS_MAX = 5
UNLIMITED_BYTES = 2**31 - 1
"""Longest frame for a server without a limit."""


class Dialer:
    """Opens authenticated connections to the nodes of one endpoint's cluster."""

    def __init__(
        self,
        address: BrokerAddress,
        target: StreamTarget,
        policy: EgressPolicy,
        resolver: Resolver,
    ) -> None:
        self._address = address
        self._target = target
        # Brokers are reached directly: the proxy for webhooks connects to https ports only.
        self._opener = BrokerOpener(address, policy, resolver, secure=target.secure)

    async def connect(self, host: str, port: int) -> StreamConnection:
        """Open a connection; the egress policy checks the address of this host too.

        Raises:
            Stopped: there is no connection, and nothing was sent but credentials.
        """
        connection: StreamConnection | None = None
        try:
            async with asyncio.timeout(self._address.connect_timeout_s):
                connection = await self._opener.open(
                    host, port, StreamConnection, secure=self._target.secure
                )
                await self._authenticate(connection)
                connection.limits = self._opener.limits(host)
        except BaseException as error:
            if connection is not None:
                connection.abort("the connection was not established")
            stopped = self._stopped(error, f"{host}:{port}")
            if stopped is None:
                raise
            raise stopped from error
        return connection

    def close(self) -> None:
        """Release what connections shared."""
        self._opener.close()

    def _stopped(self, error: BaseException, where: str) -> Stopped | None:
        """What an error means for the call; None: raise the error itself."""
        if isinstance(error, NotConnected):
            stop = not_connected(error)
            return Stopped(stop.kind, stop.detail)
        if isinstance(error, Rejected):
            stop = rejected(error.code, f"{where} refused {error.request}")
            return Stopped(stop.kind, stop.detail)
        if isinstance(error, TimeoutError):
            return Stopped(
                StopKind.UNAVAILABLE,
                f"no connection to {where} within {self._address.connect_timeout_s:g} s",
            )
        if isinstance(error, Lost):
            # With TLS 1.3, a server refuses the client's certificate after the handshake.
            person = isinstance(error.error, ssl.SSLError)
            return Stopped(
                StopKind.MISCONFIGURED if person else StopKind.UNAVAILABLE,
                f"{where}: {error.detail}" + (f": {error.error}" if person else ""),
            )
        return None

    async def _authenticate(self, connection: StreamConnection) -> None:
        await connection.exchange(
            schema.PeerProperties,
            schema.PeerPropertiesResponse,
            properties=[
                schema.Property("product", "outbox"),
                schema.Property("version", __version__),
                schema.Property("connection_name", "outbox"),
            ],
        )
        await connection.exchange(schema.SaslHandshake, schema.SaslHandshakeResponse)
        await connection.exchange(
            schema.SaslAuthenticate,
            schema.SaslAuthenticateResponse,
            mechanism="PLAIN",
            data=self._plain(),
        )
        limits = await connection.tuned()
        connection.secure = self._target.secure
        connection.frame_bytes_max = limits.frame_max or UNLIMITED_BYTES
        # 0 is the server's way to switch heartbeats off.
        heartbeat_s = min(limits.heartbeat, BROKER_HEARTBEAT_S)
        connection.send(
            encode_frame(schema.Tune(frame_max=limits.frame_max, heartbeat=heartbeat_s))
        )
        connection.start_heartbeats(heartbeat_s)
        try:
            opened = await connection.exchange(
                schema.Open, schema.OpenResponse, virtual_host=self._target.vhost
            )
        except Rejected as error:
            raise Stopped(
                StopKind.MISCONFIGURED,
                f"virtual host {self._target.vhost}: {code_name(error.code)}",
            ) from None
        properties = {each.key: each.value for each in opened.properties}
        port = properties.get("advertised_port", "")
        if "advertised_host" in properties and port.isdecimal() and len(port) <= PORT_DIGITS_MAX:
            connection.advertised = (properties["advertised_host"], int(port))

    def _plain(self) -> bytes:
        # A client certificate is in addition to this: RabbitMQ 3.10 fails at the mechanism
        # EXTERNAL of stream connections.
        user, _, password = (self._address.credentials or "").partition(":")
        if not user:
            raise Stopped(
                StopKind.MISCONFIGURED,
                "no user and password: set them with `outbox endpoint credentials`",
            )
        return b"\0".join((b"", user.encode(), password.encode()))
