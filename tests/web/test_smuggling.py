"""Request smuggling: what one client sends in a body is no request, whatever its framing says.

A proxy in front of a listener may read the framing otherwise.  `outbox.web.serving` makes all
listeners of the program, so one application stands for each of them.
"""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from outbox.web.address import Address
from outbox.web.serving import listen, serving

pytestmark = pytest.mark.system

SMUGGLED = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKS = f"0\r\n\r\n{SMUGGLED}"
POST = "POST /echo HTTP/1.1\r\nHost: a\r\n"
TE = "Transfer-Encoding: chunked\r\n"
CL = f"Content-Length: {len(CHUNKS)}\r\n"

FRAMES = {
    "a size and chunks": f"{POST}{CL}{TE}\r\n{CHUNKS}",
    "chunks and a size": f"{POST}{TE}{CL}\r\n{CHUNKS}",
    "an unknown coding": f"{POST}Transfer-Encoding: xchunked\r\n\r\n{CHUNKS}",
    "a coding after chunked": f"{POST}Transfer-Encoding: chunked, identity\r\n\r\n{CHUNKS}",
    "chunked twice": f"{POST}Transfer-Encoding: chunked, chunked\r\n\r\n{CHUNKS}",
    "two codings": f"{POST}{TE}Transfer-Encoding: identity\r\n\r\n{CHUNKS}",
    "a coding with VT": f"{POST}Transfer-Encoding: \x0bchunked\r\n{CL}\r\n{CHUNKS}",
    "a quoted coding": f'{POST}Transfer-Encoding: "chunked"\r\n\r\n{CHUNKS}',
    "a folded coding": f"{POST}Transfer-Encoding:\r\n chunked\r\n{CL}\r\n{CHUNKS}",
    "a space before the colon": f"{POST}Transfer-Encoding : chunked\r\n{CL}\r\n{CHUNKS}",
    "a space before the name": f"{POST} Transfer-Encoding: chunked\r\n{CL}\r\n{CHUNKS}",
    "NUL in the name": f"{POST}Transfer-Encoding\0: chunked\r\n{CL}\r\n{CHUNKS}",
    "a line with LF": f"{POST}X: a\nTransfer-Encoding: chunked\r\n{CL}\r\n{CHUNKS}",
    "a line with CR": f"{POST}X: a\rTransfer-Encoding: chunked\r\n{CL}\r\n{CHUNKS}",
    "HTTP/1.0 and chunks": f"POST /echo HTTP/1.0\r\n{TE}{CL}\r\n{CHUNKS}",
    "two sizes": f"{POST}{CL}Content-Length: 0\r\n\r\n{CHUNKS}",
    "two sizes in a line": f"{POST}Content-Length: 0, {len(CHUNKS)}\r\n\r\n{CHUNKS}",
    "a size with a sign": f"{POST}Content-Length: +0\r\n\r\n{SMUGGLED}",
    "a negative size": f"{POST}Content-Length: -1\r\n\r\n{SMUGGLED}",
    "a hexadecimal size": f"{POST}Content-Length: 0x0\r\n\r\n{SMUGGLED}",
    "a size with a space": f"{POST}Content-Length: 0 {len(SMUGGLED)}\r\n\r\n{SMUGGLED}",
    "a huge size": f"{POST}Content-Length: {2**64}\r\n\r\n{SMUGGLED}",
    "an empty size": f"{POST}Content-Length: \r\n\r\n{SMUGGLED}",
    "a hexadecimal chunk": f"{POST}{TE}\r\n0x0\r\n\r\n{SMUGGLED}",
    "a chunk with an underscore": f"{POST}{TE}\r\n0_0\r\n\r\n{SMUGGLED}",
    "a chunk with a sign": f"{POST}{TE}\r\n+0\r\n\r\n{SMUGGLED}",
    "a huge chunk": f"{POST}{TE}\r\n{'f' * 17}0\r\n\r\n{SMUGGLED}",
    "an extension with LF": f"{POST}{TE}\r\n0;a\nb\r\n\r\n{SMUGGLED}",
    "a chunk that ends with LF": f"{POST}{TE}\r\n1\r\na\n0\r\n\r\n{SMUGGLED}",
    "chunks that end with LF": f"{POST}{TE}\r\n0\n\n{SMUGGLED}",
    "no line end after a chunk": f"{POST}{TE}\r\n1\r\na0\r\n\r\n{SMUGGLED}",
    "no host": f"POST /echo HTTP/1.1\r\n{CL}{TE}\r\n{CHUNKS}",
    "two hosts": f"{POST}Host: b\r\n{CL}{TE}\r\n{CHUNKS}",
    "the preface of HTTP/2": f"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{SMUGGLED}",
    "HTTP/0.9": f"GET /echo\r\n{SMUGGLED}",
    "another version": f"POST /echo HTTP/1.2\r\n{CL}{TE}\r\n{CHUNKS}",
}
PIPELINED = f"{POST}Content-Length: 1\r\n\r\na{SMUGGLED}"


async def test_the_framing_of_a_body_makes_no_second_request(subtests: pytest.Subtests) -> None:
    smuggled = 0

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def count(_: web.Request) -> web.Response:
        nonlocal smuggled
        smuggled += 1
        return web.Response()

    application = web.Application()
    application.router.add_route("*", "/echo", echo)
    application.router.add_get("/smuggled", count)
    async with serving(application, await listen(Address("127.0.0.1", 0))) as at:

        async def send(text: str) -> bytes:
            reader, writer = await asyncio.open_connection(at.host, at.port)
            try:
                writer.write(text.encode("latin-1"))
                async with asyncio.timeout(20):
                    received = await reader.read(65536)
                    # A second request would be handled before the end of the data is seen.
                    writer.write_eof()
                    return received + await reader.read()
            finally:
                writer.close()

        for name, text in FRAMES.items():
            with subtests.test(name):
                received = await send(text)
                assert received.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")), received
                assert received.count(b"X-Frame-Options: ") == 1
                assert b"access-control" not in received.lower()
                assert smuggled == 0
        await send(PIPELINED)
        assert smuggled == 1
