"""The same receiver for servers of ASGI and WSGI, and on aiohttp and Python's http.server."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

IDLE_S = 1


async def asgi(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """Respond to each request, and to the start and the end of the server."""
    if scope["type"] == "lifespan":
        while True:
            event = (await receive())["type"]
            await send({"type": f"{event}.complete"})
            if event == "lifespan.shutdown":
                return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


def wsgi(environ: dict[str, Any], start_response: Callable[..., object]) -> list[bytes]:
    """Respond to each request."""
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    start_response("200 OK", [("Content-Length", "2")])
    return [b"ok"]


class Handler(BaseHTTPRequestHandler):
    """Sends head and body apart, as the standard library does."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


def run_aiohttp(port: int) -> None:
    """Run aiohttp's own server."""
    # The other servers may be installed where aiohttp is not.
    from aiohttp import web

    async def respond(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", respond)
    web.run_app(app, host="127.0.0.1", port=port, keepalive_timeout=IDLE_S, print=None)


if __name__ == "__main__":
    if sys.argv[1] == "aiohttp":
        run_aiohttp(int(sys.argv[2]))
    else:
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
