"""Deliveries arrive at the path of the middleware, however the application is mounted."""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from werkzeug.middleware.dispatcher import DispatcherMiddleware

from outbox.core.messages.signature import format_secret
from outbox.errors import UsageError
from outbox.receiver import AsyncReceiver, MemoryDatabase, Receiver
from outbox.receiver.adapters import asgi, wsgi
from outbox.receiver.adapters.path import ReceiverPath
from tests.receiver.deliveries import SECRET, delivery, signed

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = format_secret(SECRET)

PATHS: list[tuple[str, str, str, bool]] = [
    # The middleware's path, the application's prefix, the request's path, whether it is a delivery.
    ("/hooks", "", "/hooks", True),
    ("/hooks", "", "/hooks/", True),
    ("/hooks/", "", "/hooks", True),
    ("/hooks/", "", "/hooks/", True),
    ("/hooks", "", "/", False),
    ("/hooks", "", "/hooks/7", False),
    ("/hooks", "", "/webhooks", False),
    ("/hooks", "", "/a/hooks", False),
    ("/a/hooks", "", "/a/hooks", True),
    ("/hooks", "/api", "/api/hooks", True),
    ("/hooks", "/api", "/api/hooks/", True),
    ("/api/hooks", "/api", "/api/hooks", True),
    ("/hooks", "/api/", "/api/hooks", True),
    # A server that leaves out the prefix.
    ("/hooks", "/api", "/hooks", True),
    ("/api/hooks", "/api", "/hooks", True),
    ("/hooks", "/api", "/api/other", False),
    ("/hooks", "/api", "/apihooks", False),
    ("/hooks", "/ap", "/api/hooks", False),
    ("/", "", "/", True),
    ("/", "", "", True),
    ("/", "/api", "/api", True),
    ("/", "/api", "/api/hooks", False),
]


def test_a_path_matches_below_a_prefix_and_with_a_slash() -> None:
    wrong = [row for row in PATHS if ReceiverPath(row[0]).matches(row[1], row[2]) is not row[3]]
    assert wrong == []


@pytest.mark.parametrize(
    "path", ["hooks", "", "https://shop.example/hooks", "/hooks?x=1", "/a b", None, ["/hooks"]]
)
@pytest.mark.parametrize("adapter", [asgi, wsgi])
def test_what_is_no_path_is_refused(adapter: Any, path: Any) -> None:
    receiver = Receiver(TEXT, MemoryDatabase())
    with pytest.raises(UsageError, match='must begin with "/", such as "/hooks"'):
        adapter.Middleware(None, receiver, path)


def shop(scope: Any, _receive: Any, _send: Any) -> Any:
    return PlainTextResponse("the shop", 418)(scope, _receive, _send)


def receiver_of(kind: Any) -> Any:
    receiver = kind(TEXT, MemoryDatabase())
    receiver.on("**")(lambda *_: None)
    return receiver


def middleware(path: str) -> Any:
    app = Starlette(routes=[Mount("/", app=shop)])
    app.add_middleware(asgi.Middleware, receiver=receiver_of(AsyncReceiver), path=path)
    return app


ASGI_STACKS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "behind a proxy that strips a prefix": (
        lambda: middleware("/hooks"), {"/api/hooks": 200, "/api/hooks/": 200, "/api/x": 418},
    ),
    "with the whole path": (lambda: middleware("/api/hooks"), {"/api/hooks": 200}),
    "mounted": (
        lambda: Starlette(routes=[Mount("/shop", app=middleware("/hooks"))]),
        {"/api/shop/hooks": 200, "/api/shop/hooks/": 200, "/api/shop/x": 418},
    ),
    "a route": (
        lambda: Starlette(routes=[Route("/hooks", asgi.ASGI(receiver_of(AsyncReceiver)))]),
        {"/api/hooks": 200},
    ),
    "ASGI in a mount, as its documentation says": (
        lambda: Starlette(routes=[Mount("/hooks", asgi.ASGI(receiver_of(AsyncReceiver)))]),
        {"/api/hooks/": 200, "/api/hooks": 307},
    ),
    "around an application": (
        lambda: asgi.Middleware(shop, receiver_of(AsyncReceiver), "/hooks"),
        {"/api/hooks": 200, "/api/x": 418},
    ),
}  # fmt: skip
"""Applications of ASGI that a server has below `/api`: the status of a delivery by its path."""


async def post_asgi(app: Any, path: str) -> int:
    headers, body = signed(delivery(1))
    scope = {
        "type": "http",
        "method": "POST",
        "root_path": "/api",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "scheme": "http",
        "server": ("127.0.0.1", 80),
    }
    statuses: list[int] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    return statuses[0]


def post_wsgi(app: Any, path: str) -> int:
    headers, body = signed(delivery(1))
    statuses: list[int] = []
    environ = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
    environ |= {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "",
        "PATH_INFO": path,
        "CONTENT_LENGTH": str(len(body)),
        "CONTENT_TYPE": environ.pop("HTTP_CONTENT_TYPE"),
        "wsgi.input": io.BytesIO(body),
    }
    list(app(environ, lambda status, *_: statuses.append(int(status[:3]))))
    return statuses[0]


def test_an_asgi_application_receives_below_a_prefix() -> None:
    found = {
        name: {path: asyncio.run(post_asgi(make(), path)) for path in paths}
        for name, (make, paths) in ASGI_STACKS.items()
    }
    assert found == {name: paths for name, (_, paths) in ASGI_STACKS.items()}


def test_a_wsgi_application_receives_below_a_prefix() -> None:
    def plain(_: Any, start_response: Any) -> Any:
        start_response("418 I'm a teapot", [])
        return []

    found = {}
    for path in ("/hooks", "/hooks/", "/api/hooks"):
        app = wsgi.Middleware(plain, receiver_of(Receiver), path)
        mounted = DispatcherMiddleware(plain, {"/api": app})
        found[path] = [post_wsgi(mounted, each) for each in ("/api/hooks", "/api/hooks/", "/api/x")]
    assert all(statuses == [200, 200, 418] for statuses in found.values()), found
