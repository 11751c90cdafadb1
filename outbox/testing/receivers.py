"""Receivers of a test, called in process: the transport of a relay without a network.

A receiver is one of

    AsyncReceiver, Receiver     of outbox.receiver
    an ASGI application         FastAPI, Starlette, Django: called with scope, receive and send
    a WSGI application          Flask, Django: called with environ and start_response
    a function                  called with the `Request`; may be a coroutine function

A function returns a status, or a status and headers; None is 204.  An application's lifespan is
not run, as it is not by httpx's transports for tests.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.core.model.response import AttemptResult, Failure
from outbox.destinations.http.attempt_results import timeout_detail
from outbox.errors import UsageError
from outbox.receiver.asynchronous import AsyncReceiver
from outbox.receiver.message import has_signed_metadata, parse
from outbox.receiver.requests import Request
from outbox.receiver.synchronous import Receiver

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.core.model.response import Headers
    from outbox.destinations.interface import Following
    from outbox.destinations.interface import Request as Outgoing
    from outbox.receiver.message import Message

Reply: TypeAlias = "tuple[int, Headers, bytes]"
"""Status, headers and body of a response."""
RunBlocking: TypeAlias = "Callable[[Callable[[], Any]], Awaitable[Any]]"
"""Runs a blocking function in another thread than the event loop's."""
ReceiverLike: TypeAlias = "AsyncReceiver | Receiver | Callable[..., Any]"
_Handler: TypeAlias = "Callable[[Request, str], Awaitable[Reply]]"

_ENDS_THE_TEST = (asyncio.CancelledError, KeyboardInterrupt, SystemExit)


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request that was sent to an endpoint, and its response."""

    endpoint: str
    url: str
    request: Request
    """The request as the receiver got it, with headers as pairs."""
    status: int | None
    """The response's status; None: no response, because the receiver took longer than the
    endpoint's time-out."""
    response_headers: Headers = ()
    response_body: bytes = b""
    error: BaseException | None = None
    """What the receiver raised; its response is 500 then."""
    header_prefix: str = DEFAULT_PREFIX

    @property
    def delivered(self) -> bool:
        """Whether the response was a success."""
        return self.status is not None and 200 <= self.status <= 299

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the request, by lower-case name."""
        return {name.lower(): value for name, value in _pairs(self.request)}

    @property
    def messages(self) -> tuple[Message, ...]:
        """The delivery in the request, or those of a batch."""
        headers = self.headers
        in_headers = has_signed_metadata(headers)
        return parse(headers, self.request.body, self.header_prefix, in_headers=in_headers)


@dataclass(frozen=True, slots=True)
class LocalEndpoint:
    """An endpoint whose requests a receiver of the test gets."""

    name: str
    header_prefix: str


class InProcessTransport:
    """A relay's transport that calls receivers instead of opening connections.

    Args:
        endpoints: the endpoints by id.
        receivers: one for all endpoints, or by endpoint name; endpoints without one respond with
            204, and their requests are recorded like all others.
        run_blocking: runs receivers that are not coroutines.

    Raises:
        UsageError: a receiver is not of a kind that is listed above, or its endpoint is unknown.
    """

    def __init__(
        self,
        endpoints: Mapping[UUID, LocalEndpoint],
        receivers: ReceiverLike | Mapping[str, ReceiverLike] | None,
        run_blocking: RunBlocking,
    ) -> None:
        self._endpoints = endpoints
        self._run_blocking = run_blocking
        names = sorted(endpoint.name for endpoint in endpoints.values())
        by_name = receivers
        if not isinstance(by_name, Mapping):
            by_name = {} if receivers is None else dict.fromkeys(names, cast("Any", receivers))
        for name in by_name:
            if name not in names:
                known = ", ".join(names) or "none; add one with outbox endpoint add"
                raise UsageError(f'receivers: there is no endpoint "{name}"; there are: {known}')
        self._handlers = {name: self._handler(each) for name, each in by_name.items()}
        self.sent: list[SentRequest] = []

    async def send(
        self,
        request: Outgoing,
        following: Following | None = None,
        before_write: Callable[[], object] | None = None,
    ) -> AttemptResult:
        """Call the endpoint's receiver; see `outbox.destinations.interface.Transport`."""
        if before_write is not None:
            before_write()
        recipient = request.recipient
        endpoint = self._endpoints.get(cast("UUID", recipient.endpoint))
        handler = self._handlers.get(endpoint.name) if endpoint else None
        parts = urlsplit(recipient.url)
        framing = (("Host", parts.netloc), ("Content-Length", str(len(request.body))))
        received = Request(recipient.method, (*framing, *request.headers), request.body)
        started_at = time.monotonic()
        status: int | None = 204
        headers: Headers = ()
        body, result = b"", None
        error: BaseException | None = None
        try:
            async with asyncio.timeout(recipient.timeout_s):
                if handler is not None:
                    status, headers, body = await handler(received, recipient.url)
        except _ENDS_THE_TEST:
            raise
        except TimeoutError as late:
            elapsed_s = time.monotonic() - started_at
            if elapsed_s < recipient.timeout_s:  # The receiver's own.
                status, error = 500, late
            else:
                status, detail = None, timeout_detail(recipient.timeout_s)
                result = AttemptResult.failed(Failure.TIMEOUT, detail, elapsed_s)
        except BaseException as raised:  # pytest.fail is not an Exception.
            status, error = 500, raised
        if status is not None:
            elapsed_s = time.monotonic() - started_at
            result = AttemptResult.completed(status, elapsed_s, headers=headers, body=body)
        name, prefix = (endpoint.name, endpoint.header_prefix) if endpoint else ("", DEFAULT_PREFIX)
        self.sent.append(
            SentRequest(name, recipient.url, received, status, tuple(headers), body, error, prefix)
        )
        assert result is not None
        return result

    async def aclose(self) -> None:
        """There are no connections."""

    async def _run(self, function: Callable[[], Any]) -> Any:
        """Run a blocking receiver."""

        def call() -> Any:
            try:
                return function()
            except StopIteration as error:
                # As in a coroutine: a future rejects StopIteration, and would never be done.
                raise RuntimeError("the receiver raised StopIteration") from error

        return await self._run_blocking(call)

    # ------------------------------------------------------------- kinds of receivers

    def _handler(self, receiver: Any) -> _Handler:
        if isinstance(receiver, AsyncReceiver | Receiver):
            return self._library_handler(receiver)
        if not callable(receiver):
            raise UsageError(
                f"receivers: {type(receiver).__name__} is not a receiver: use AsyncReceiver, "
                "Receiver, an ASGI or WSGI application, or a function"
            )
        match _parameters(receiver):
            case 3:
                return lambda request, url: _call_asgi(receiver, request, url)
            case 2:
                return self._wsgi_handler(receiver)
            case 1:
                return self._function_handler(receiver)
        raise UsageError(
            f"receivers: {receiver!r} takes neither a request nor the arguments of an ASGI or "
            "WSGI application"
        )

    def _library_handler(self, receiver: AsyncReceiver | Receiver) -> _Handler:
        async def handle(request: Request, _: str) -> Reply:
            if isinstance(receiver, AsyncReceiver):
                response = await receiver.handle(request)
            else:
                response = await self._run(lambda: receiver.handle(request))
            return response.status, response.all_headers, response.body

        return handle

    def _wsgi_handler(self, app: Callable[..., Any]) -> _Handler:
        async def handle(request: Request, url: str) -> Reply:
            reply: Reply = await self._run(lambda: _call_wsgi(app, request, url))
            return reply

        return handle

    def _function_handler(self, function: Callable[..., Any]) -> _Handler:
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (the method, not whether there is one)
        )

        async def handle(request: Request, _: str) -> Reply:
            if is_async:
                return _reply_of(await function(request))
            returned = await self._run(lambda: function(request))
            return _reply_of(await returned if inspect.isawaitable(returned) else returned)

        return handle


def _parameters(receiver: Callable[..., Any]) -> int | None:
    """Number of the positional arguments that a callable requires."""
    try:
        parameters = inspect.signature(receiver).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in positional and each.default is each.empty for each in parameters)


def _reply_of(returned: Any) -> Reply:
    match returned:
        case None:
            return 204, (), b""
        case int() if not isinstance(returned, bool):
            return returned, (), b""
        case (int(status), Mapping() as headers):
            return status, tuple((str(k), str(v)) for k, v in headers.items()), b""
    raise UsageError(
        f"receivers: a function returned {type(returned).__name__}; return a status such as 200, "
        "(status, headers), or None"
    )


def _pairs(request: Request) -> list[tuple[str, str]]:
    headers = request.headers
    return list(headers.items()) if isinstance(headers, Mapping) else list(headers)


async def _call_asgi(app: Callable[..., Any], request: Request, url: str) -> Reply:
    parts = urlsplit(url)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": parts.scheme,
        "path": unquote(parts.path) or "/",
        "raw_path": (parts.path or "/").encode(),
        "query_string": parts.query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in _pairs(request)],
        "client": ("127.0.0.1", 0),
        "server": (parts.hostname or "", parts.port or 0),
    }
    status, body = 0, bytearray()
    headers: Headers = ()
    ended, received = asyncio.Event(), False

    async def receive() -> dict[str, Any]:
        nonlocal received
        if received:
            await ended.wait()
            return {"type": "http.disconnect"}
        received = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = tuple(
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in message.get("headers", ())
            )
        elif message["type"] == "http.response.body":
            body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                ended.set()

    await app(scope, receive, send)
    if not status:
        raise UsageError("receivers: the ASGI application sent no response")
    return status, headers, bytes(body)


def _call_wsgi(app: Callable[..., Any], request: Request, url: str) -> Reply:
    parts = urlsplit(url)
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": "",
        # Servers decode the path's bytes as Latin-1 (PEP 3333).
        "PATH_INFO": unquote(parts.path, "latin-1") or "/",
        "QUERY_STRING": parts.query,
        "SERVER_NAME": parts.hostname or "",
        "SERVER_PORT": str(parts.port or (443 if parts.scheme == "https" else 80)),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": "127.0.0.1",
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": parts.scheme,
        "wsgi.input": io.BytesIO(request.body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    for name, value in _pairs(request):
        variable = name.upper().replace("-", "_")
        if variable not in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            variable = f"HTTP_{variable}"
        environ[variable] = value.encode().decode("latin-1")
    started: list[tuple[str, list[tuple[str, str]]]] = []
    written: list[bytes] = []

    def start_response(
        status: str, headers: list[tuple[str, str]], exc_info: object = None
    ) -> Callable[[bytes], None]:
        started.append((status, headers))
        return written.append

    chunks = app(environ, start_response)
    try:
        written.extend(chunks)
    finally:
        if hasattr(chunks, "close"):
            chunks.close()
    if not started:
        raise UsageError("receivers: the WSGI application sent no response")
    status, headers = started[-1]
    return int(status.split(" ", 1)[0]), tuple(headers), b"".join(written)
