"""Requests that are not HTTP by a usual mistake, with secrets where a client has them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def broken_requests(token: str, payload: str, path: str = "/v1/events") -> dict[str, bytes]:
    """Requests with a token and a body, by their mistake."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sized, chunked = f"Content-Length: {len(payload)}\r\n", "Transfer-Encoding: chunked\r\n"
    bearer = f"Authorization: Bearer {token}"
    good = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    texts = {
        "a token with CR": f"{head}{sized}{bearer}\r\r\n\r\n{payload}",
        "a token with NUL": f"{head}{sized}{bearer}\0\r\n\r\n{payload}",
        "a token with ^Z": f"{head}{sized}{bearer}\x1a\r\n\r\n{payload}",
        "a token with DEL": f"{head}{sized}{bearer}\x7f\r\n\r\n{payload}",
        "a space before the colon": f"{head}{sized}Authorization : Bearer {token}\r\n\r\n{payload}",
        "a folded line": f"{head}{sized}Authorization:\r\n Bearer {token}\r\n\r\n{payload}",
        "no colon": f"{head}{sized}Bearer {token}\r\n\r\n{payload}",
        "LF line ends": f"{head}{sized}{bearer}\r\n\r\n{payload}".replace("\r\n", "\n"),
        "a body that is longer": f"{head}Content-Length: 1\r\n{bearer}\r\n\r\n{payload}",
        "a size that is no number": f"{head}Content-Length: {token}\r\n{bearer}\r\n\r\n{payload}",
        "two sizes": f"{head}{sized}Content-Length: 1\r\n{bearer}\r\n\r\n{payload}",
        "chunks without a size": f"{head}{chunked}{bearer}\r\n\r\n{payload}\r\n0\r\n\r\n",
        "a chunk that is longer": f"{head}{chunked}{bearer}\r\n\r\n1\r\n{payload}\r\n0\r\n\r\n",
        "a coding that does not exist": (
            f"{head}Transfer-Encoding: {token}\r\n{bearer}\r\n\r\n{payload}"
        ),
        "a bad trailer": f"{head}{chunked}{bearer}\r\n\r\n0\r\n{payload}\r\n\r\n",
        "no method": f"{token} {payload}\r\n\r\n",
        "no version": f"GET /{token}\r\n{bearer}\r\n\r\n{payload}",
        "another version": f"GET /{token} HTTP/9.9{payload}\r\n{bearer}\r\n\r\n",
        "a space in the path": f"GET /{token} {payload} HTTP/1.1\r\n{bearer}\r\n\r\n",
        "NUL in the path": f"GET /{token}\0 HTTP/1.1\r\nHost: localhost\r\n{bearer}\r\n\r\n",
        "a URL with a bad port": f"GET http://{token}:x/ HTTP/1.1\r\n{bearer}\r\n\r\n",
        "a URL with a bad host": f"GET http://[{token}/ HTTP/1.1\r\n{bearer}\r\n\r\n",
        "CONNECT without a port": f"CONNECT {token} HTTP/1.1\r\n{bearer}\r\n\r\n{payload}",
        "a long header": f"{head}{bearer}\r\nX-Long: {token * 400}\r\n\r\n",
        "a bad header name": f"{head}{bearer}\r\nX\x01{token}: x\r\n\r\n",
        "a bad escape": f"GET /%zz%00{token}%ff?%zz={payload}%ff HTTP/1.1\r\n{bearer}\r\n\r\n",
        "two requests at once": f"{good}\r\n{token} {payload}",
        "an upgrade": (f"{good}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n{token} {payload}"),
        "TLS": f"\x16\x03\x01\x02\x00\x01{token}",
    }
    return {name: text.encode("latin-1") for name, text in texts.items()}


async def send_each(host: str, port: int, requests: Iterable[bytes]) -> list[bytes]:
    """Send each request on a connection of its own; return the responses."""

    async def send(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        received = b""
        try:
            writer.write(data)
            async with asyncio.timeout(20):
                with suppress(ConnectionError):
                    received = await reader.read(65536)
        finally:
            writer.close()
        return received

    return [await send(each) for each in requests]
