"""The page: files that are served as they are, to anybody.

There is nothing in them that is anybody's.  What the page shows it asks of the API, with
the token that its user gave it.  No file comes from another host, and nothing that the
API tells is ever read as a program: the policy below forbids both.
"""

from __future__ import annotations

import mimetypes
from hashlib import sha256
from importlib import resources
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from importlib.abc import Traversable

FOLDER = "ui"
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    # It may be kept, and is asked for each time: a new version is seen at once.
    "Cache-Control": "no-cache",
}


def add_routes(application: web.Application) -> None:
    """Serve the page at `/`, and what it is made of at `/page/`."""
    files = dict(_files(resources.files(__package__) / FOLDER, ""))
    index = files.pop("index.html")
    application.router.add_get("/", _handler("index.html", index))
    for name, content in files.items():
        application.router.add_get(f"/page/{name}", _handler(name, content))


def _files(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for each in folder.iterdir():
        if each.is_dir():
            found += _files(each, f"{prefix}{each.name}/")
        else:
            found.append((prefix + each.name, each.read_bytes()))
    return found


def _handler(name: str, content: bytes) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    kind = {".js": "text/javascript"}.get(name[name.rfind(".") :]) or mimetypes.guess_type(name)[0]
    etag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": etag, "Content-Type": f"{kind}; charset=utf-8"}

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, headers=headers)

    return handle
