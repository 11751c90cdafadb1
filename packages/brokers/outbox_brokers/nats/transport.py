"""The transport of a connection to NATS that must be encrypted, or must not be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nats.aio.transport import TcpTransport

if TYPE_CHECKING:
    import ssl
    from urllib.parse import ParseResult


class GuardedTransport(TcpTransport):
    """nats-py's transport, which writes nothing without TLS if TLS is required.

    The server's INFO, which is not encrypted, decides whether the library starts TLS.
    """

    def __init__(self, *, secure: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._secure = secure
        self._encrypted = False

    def __bool__(self) -> bool:
        # The library replaces a falsy transport; a TcpTransport is falsy before `connect`.
        return True

    async def connect_tls(
        self,
        uri: str | ParseResult,
        ssl_context: ssl.SSLContext,
        buffer_size: int,
        connect_timeout: int,
    ) -> None:
        if not self._secure:
            raise self._refusal("the server requires TLS; use nats+tls:// in the URL")
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        self._encrypted = True

    def write(self, payload: bytes) -> None:
        self._check()
        super().write(payload)  # type: ignore[no-untyped-call]

    def writelines(self, payload: list[bytes]) -> None:
        self._check()
        super().writelines(payload)  # type: ignore[no-untyped-call]

    def _refusal(self, text: str) -> Exception:
        """The error of a connection that has TLS against its URL, or has none."""
        return ConnectionError(text)

    def _check(self) -> None:
        if self._secure and not self._encrypted:
            raise self._refusal("the server does not offer TLS; nats+tls:// requires it")
