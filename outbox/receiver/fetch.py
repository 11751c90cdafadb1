"""Client for the relay's receiver API: `outbox relay --receivers HOST:PORT`.

It returns complete deliveries with new signatures, so that each is verified and processed
like one that was sent; the API itself need not be trusted.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64decode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from outbox.errors import CannotRun, UsageError
from outbox.receiver.requests import Request, one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

FETCH_TIMEOUT_S = 30.0
PAGE = 100
FETCHED_BYTES_MAX = 256 * 1024 * 1024
TOO_MANY_REQUESTS = 429
WAIT_S_MAX = 60.0
"""Total time spent on Retry-After hold-offs (429) of one request, in seconds."""


class CannotFetch(CannotRun):
    """The relay could not be reached, rejected the request, or sent an invalid response."""


@dataclass(frozen=True, slots=True)
class LaneProgress:
    """Progress of a lane according to its sender."""

    lane: str
    acknowledged: int
    """Everything up to this sequence number was delivered or dead-lettered."""
    generation: int = 1
    """Incremented when the lanes of the endpoint are recreated."""


@dataclass(frozen=True, slots=True)
class PageItem:
    """One sequence number of a lane."""

    sequence: int
    dead_lettered: bool
    request: Request | None
    """The delivery; None if its event was erased, or is missing."""
    missing: bool = False
    """The event is gone, and the sender has no record that it was erased."""


@dataclass(frozen=True, slots=True)
class LanePage:
    """A page of sequence numbers of a lane, in order."""

    kept_from: int
    """Requested numbers below this one are no longer retained."""
    items: tuple[PageItem, ...]
    acknowledged: int
    next: int | None
    """The next page begins after this number; None on the last page."""


class DeliverySource(Protocol):
    """What `fetch=` of a receiver accepts: lists lanes and returns their deliveries."""

    def lanes(self) -> Iterator[LaneProgress]: ...
    def lanes_async(self) -> AsyncIterator[LaneProgress]: ...
    def page(self, lane: str, after: int) -> LanePage: ...
    async def page_async(self, lane: str, after: int) -> LanePage: ...
    def delivery(self, lane: str, sequence: int) -> PageItem: ...
    async def delivery_async(self, lane: str, sequence: int) -> PageItem: ...


class FetchClient:
    """Client of the relay's receiver API, for one endpoint.

    Args:
        url: URL of the relay's `--receivers` listener.
        token: fetch token of the endpoint, from `outbox endpoint fetch-token`.
        timeout_s: time-out of one request, in seconds.

    Raises:
        UsageError: the URL or the token is invalid; the message never shows the token.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = FETCH_TIMEOUT_S) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise UsageError(f"fetch: {url!r} is not an http or https URL")
        token = token.strip() if isinstance(token, str) else ""
        if not (token and token.isascii() and token.isprintable()):
            raise UsageError("fetch: invalid token; create one with outbox endpoint fetch-token")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        self._timeout_s = timeout_s

    def lanes(self) -> Iterator[LaneProgress]:
        """Yield the progress of each lane of the endpoint.

        Raises:
            CannotFetch: the relay cannot be reached, or rejected the request.
        """
        after: str | None = ""
        while after is not None:
            response = self._get("/v1/lanes", {"after": after} if after else {})
            yield from map(_lane_progress, _field(response, "items", list))
            after = _field(response, "next", str, none=True)

    async def lanes_async(self) -> AsyncIterator[LaneProgress]:
        """Like `lanes`, for asyncio."""
        # In a thread: requests are few and rare, not worth an asyncio HTTP client.
        for progress in await asyncio.to_thread(lambda: list(self.lanes())):
            yield progress

    def page(self, lane: str, after: int) -> LanePage:
        """Fetch a page of the deliveries and dead letters of a lane.

        Args:
            lane: the lane's name.
            after: the page begins after this sequence number.

        Raises:
            CannotFetch: the relay cannot be reached, or has no such lane.
        """
        return _page(self._get(_path(lane), {"after": str(after), "limit": str(PAGE)}))

    async def page_async(self, lane: str, after: int) -> LanePage:
        """Like `page`, for asyncio."""
        return await asyncio.to_thread(self.page, lane, after)

    def delivery(self, lane: str, sequence: int) -> PageItem:
        """Fetch one delivery of a lane, which may be pending, with its payload.

        Raises:
            CannotFetch: the relay cannot be reached, or has no such delivery.
        """
        return _item(self._get(f"{_path(lane)}/{sequence}", {}))

    async def delivery_async(self, lane: str, sequence: int) -> PageItem:
        """Like `delivery`, for asyncio."""
        return await asyncio.to_thread(self.delivery, lane, sequence)

    def _get(self, path: str, query: Mapping[str, str]) -> Any:
        url = f"{self._url}{path}?{urllib.parse.urlencode(query)}"
        request = urllib.request.Request(  # noqa: S310 (http or https, see __init__)
            url, headers=self._headers
        )
        deadline = time.monotonic() + WAIT_S_MAX
        while True:
            try:
                with _OPENER.open(request, timeout=self._timeout_s) as response:
                    return orjson.loads(response.read(FETCHED_BYTES_MAX))
            except urllib.error.HTTPError as error:
                with error:
                    wait_s = _retry_after_s(error)
                    if wait_s is None or time.monotonic() + wait_s > deadline:
                        raise CannotFetch(
                            f"the relay at {self._url} responded: {_detail(error)}"
                        ) from None
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = one_line(str(error) or type(error).__name__)
                raise CannotFetch(f"the relay at {self._url} cannot be reached: {reason}") from None
            # With a thousand lanes a catch-up exceeds the rate limit of its token.
            time.sleep(wait_s)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: they would send the token to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


# Ignores proxies of the environment, which would receive the token.
_OPENER = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))


def _path(lane: str) -> str:
    return f"/v1/lanes/{urllib.parse.quote(lane, safe='')}/deliveries"


def _lane_progress(item: Any) -> LaneProgress:
    acknowledged = _field(item, "acknowledged", int)
    return LaneProgress(_field(item, "lane", str), acknowledged, _field(item, "generation", int))


def _page(response: Any) -> LanePage:
    items = tuple(map(_item, _field(response, "items", list)))
    kept_from, acknowledged = (
        _field(response, name, int) for name in ("kept_from", "acknowledged")
    )
    return LanePage(kept_from, items, acknowledged, _field(response, "next", int, none=True))


def _item(item: Any) -> PageItem:
    sequence, request = _field(item, "sequence", int), None
    if item.keys() & {"headers", "body", "body_base64"}:
        headers = _field(item, "headers", dict)
        if not all(isinstance(value, str) for value in headers.values()):
            raise CannotFetch('invalid response, not from a relay: a value of "headers" is no text')
        request = Request("POST", headers, _body(item))
    return PageItem(sequence, "dead_lettered" in item, request, "missing" in item)


def _body(item: Any) -> bytes:
    if "body" in item:
        return str(_field(item, "body", str)).encode()
    try:
        return b64decode(_field(item, "body_base64", str), validate=True)
    except ValueError:
        raise CannotFetch(
            'invalid response, not from a relay: the field "body_base64" is not Base64'
        ) from None


def _field(response: Any, name: str, kind: type, *, none: bool = False) -> Any:
    """Return a field of a response, which may come from any HTTP server.

    Raises:
        CannotFetch: the field is absent or has another type.
    """
    value = response.get(name) if isinstance(response, dict) else None
    # In Python a bool is an int.
    if type(value) is not kind and not (none and value is None):
        raise CannotFetch(
            f'invalid response, not from a relay: the field "{name}" is absent or has a wrong type'
        )
    return value


def _retry_after_s(error: urllib.error.HTTPError) -> float | None:
    """Return the Retry-After of a 429 in seconds; None for other responses."""
    seconds = error.headers.get("Retry-After", "")
    if error.code != TOO_MANY_REQUESTS or not (seconds.isascii() and seconds.isdigit()):
        return None
    return float(seconds)


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        problem = json.loads(error.read(10_000))
        return f"{error.code}, {one_line(str(problem['detail']))}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException):
        return str(error.code)
