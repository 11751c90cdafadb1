"""The web UI: static files, served without authentication.

The files contain no data; the UI reads data from the API with the user's token.  The
Content-Security-Policy forbids other hosts and inline scripts.

They are compressed once.  Comments of scripts stay behind; lines keep their numbers.
"""

from __future__ import annotations

import gzip
import mimetypes
import re
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
    "Vary": "Accept-Encoding",
}
ACCEPTS_GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:$|,|;(?!\s*q=0(?:\.0*)?\s*(?:$|,)))", re.IGNORECASE)
COMMENT_LINE = re.compile(rb"^[ \t]*//.*$", re.MULTILINE)


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
    suffix = name[name.rfind(".") :]
    kind = {".js": "text/javascript"}.get(suffix) or mimetypes.guess_type(name)[0]
    if suffix == ".js":
        content = COMMENT_LINE.sub(b"", content)
    plain = _Version(content, {"Content-Type": f"{kind}; charset=utf-8"})
    compressed = _Version(
        gzip.compress(content, mtime=0), {**plain.headers, "Content-Encoding": "gzip"}
    )

    async def handle(request: web.Request) -> web.StreamResponse:
        accepted = request.headers.get("Accept-Encoding", "")
        return (compressed if ACCEPTS_GZIP.search(accepted) else plain).response(request)

    return handle


class _Version:
    """A file as it is sent."""

    def __init__(self, body: bytes, headers: dict[str, str]) -> None:
        self._body = body
        self._etag = f'"{sha256(body).hexdigest()[:32]}"'
        self.headers = {**HEADERS, **headers, "ETag": self._etag}

    def response(self, request: web.Request) -> web.Response:
        if request.headers.get("If-None-Match") == self._etag:
            return web.Response(status=304, headers=self.headers)
        return web.Response(body=self._body, headers=self.headers)
