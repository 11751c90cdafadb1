"""The web UI: static files, served without authentication.

The files contain no data; the UI reads data from the API with the user's token.  The
Content-Security-Policy forbids other hosts and inline scripts.
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
    # no-cache: browsers revalidate by ETag, so that a new version is used at once.
    "Cache-Control": "no-cache",
}


def add_routes(application: web.Application) -> None:
    """Serve the UI at `/`, and its other files at `/page/`."""
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
