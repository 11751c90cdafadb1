"""WSGI adapter: Flask, Django, or a standalone server.

app.wsgi_app = Middleware(app.wsgi_app, receiver, "/hooks")                   Flask
application = Middleware(get_wsgi_application(), receiver, "/hooks")          Django
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from outbox.errors import UsageError
from outbox.receiver.adapters.path import ReceiverPath
from outbox.receiver.requests import Request, Response, not_post, rejected, too_large
from outbox.receiver.synchronous import Receiver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeAlias

    Environ: TypeAlias = Mapping[str, Any]
    StartResponse: TypeAlias = Callable[..., Any]
    App: TypeAlias = Callable[[Any, Any], Iterable[bytes]]


class WSGI:
    """WSGI application that receives deliveries at every path.

    Raises:
        UsageError: the receiver is an `AsyncReceiver`.
    """

    def __init__(self, receiver: Receiver) -> None:
        if not isinstance(receiver, Receiver):
            raise UsageError("receiver: WSGI needs threads; use Receiver, not AsyncReceiver")
        self._receiver = receiver

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Handle one request."""
        response = self._respond(environ)
        phrase = HTTPStatus(response.status).phrase
        start_response(f"{response.status} {phrase}", list(response.all_headers))
        return [response.body]

    def _respond(self, environ: Environ) -> Response:
        if environ["REQUEST_METHOD"] != "POST":
            return not_post()
        bytes_max = self._receiver.body_bytes_max
        length = environ.get("CONTENT_LENGTH") or ""
        if length.isascii() and length.isdigit():
            if int(length) > bytes_max:
                return too_large(bytes_max)
            body = environ["wsgi.input"].read(int(length))
        elif environ.get("wsgi.input_terminated"):
            body = environ["wsgi.input"].read(bytes_max + 1)
        else:
            return rejected(411, "the header Content-Length is missing")
        # Servers decode header bytes as Latin-1 (PEP 3333).
        headers = [
            (name[5:].replace("_", "-"), value.encode("latin-1").decode("utf-8", "surrogateescape"))
            for name, value in environ.items()
            if name.startswith("HTTP_")
        ]
        if content_type := environ.get("CONTENT_TYPE"):
            headers.append(("content-type", content_type))
        return self._receiver.handle(Request("POST", headers, body))


class Middleware:
    """Middleware that receives deliveries at one path and passes on all other requests.

    Args:
        path: the path, with or without the prefix below which the application is mounted.  A slash
            at the end makes no difference, here and in requests.

    Raises:
        UsageError: the path is none, or the receiver is an `AsyncReceiver`.
    """

    def __init__(self, app: App, receiver: Receiver, path: str) -> None:
        self._app = app
        self._receiver_app = WSGI(receiver)
        self._path = ReceiverPath(path)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Handle a delivery at the path, or pass the request on."""
        prefix, path = environ.get("SCRIPT_NAME", ""), environ.get("PATH_INFO", "")
        is_delivery = self._path.matches(prefix, prefix + path)
        return (self._receiver_app if is_delivery else self._app)(environ, start_response)
