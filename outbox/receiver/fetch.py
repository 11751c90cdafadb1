"""Asking a relay for what a lane delivered: `outbox relay --receivers HOST:PORT`.

What comes back are whole deliveries, signed afresh, so that nothing here need be
believed: each goes the way of one that was sent.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from outbox.errors import CannotRun, UsageError
from outbox.receiver.requests import Request, one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

TIMEOUT_S = 30.0
PAGE = 100
ANSWER_BYTES_MAX = 256 * 1024 * 1024
CONFLICT, TOO_MANY_REQUESTS = 409, 429
WAIT_S_MAX = 60.0
"""For a relay that asks to be asked less often."""


class CannotFetch(CannotRun):
    """The relay could not be asked, or did not answer as it should."""


class AlreadyAsked(CannotFetch):
    """The lane is being sent again already, or its endpoint is disabled."""


@dataclass(frozen=True, slots=True)
class LaneStanding:
    """How far a lane is, as its sender has it."""

    lane: str
    acknowledged: int
    """Up to here everything was delivered or given up."""
    generation: int = 1
    """It rises when the lanes of an endpoint are made anew."""


@dataclass(frozen=True, slots=True)
class Item:
    """One number of a lane."""

    sequence: int
    given_up: bool
    request: Request | None
    """The delivery; None: its event was erased."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some numbers of a lane, in order."""

    kept_from: int
    """What is below, and was asked for, is not kept any more."""
    items: tuple[Item, ...]
    acknowledged: int
    next: int | None
    """Behind which number the next page begins; None: this is the last one."""


@dataclass(frozen=True, slots=True)
class Resending:
    """What a relay sends again."""

    lane: str
    job: int | None
    """The relay's replay job; None: there is nothing behind the number."""
    from_sequence: int | None
    to_sequence: int | None
    acknowledged: int
    """Up to here the lane's numbers were delivered or given up."""


class Source(Protocol):
    """What a receiver fetches from."""

    def lanes(self) -> Iterator[LaneStanding]: ...
    def lanes_async(self) -> AsyncIterator[LaneStanding]: ...
    def page(self, lane: str, after: int) -> Page: ...
    async def page_async(self, lane: str, after: int) -> Page: ...


class Fetch:
    """Where to fetch, and as whom.

    Args:
        url: of the relay's listener for receivers.
        token: of the endpoint, from `outbox endpoint fetch-token`.
        timeout_s: for a page, in seconds.

    Raises:
        UsageError: the URL or the token is none; the message never shows the token.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = TIMEOUT_S) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise UsageError(f"fetch: {url!r} is no http or https URL")
        token = token.strip() if isinstance(token, str) else ""
        if not (token and token.isascii() and token.isprintable()):
            raise UsageError("fetch: the token is none; see outbox endpoint fetch-token")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        self._timeout_s = timeout_s

    def lanes(self) -> Iterator[LaneStanding]:
        """How far each lane of the endpoint is.

        Raises:
            CannotFetch: the relay does not answer.
        """
        after: str | None = ""
        while after is not None:
            answer = self._get("/v1/lanes", {"after": after} if after else {})
            yield from map(_standing, _take(answer, "items", list))
            after = _take(answer, "next", str, none=True)

    async def lanes_async(self) -> AsyncIterator[LaneStanding]:
        """The same for asyncio."""
        after: str | None = ""
        while after is not None:
            answer = await self._get_async("/v1/lanes", {"after": after} if after else {})
            for item in _take(answer, "items", list):
                yield _standing(item)
            after = _take(answer, "next", str, none=True)

    def page(self, lane: str, after: int) -> Page:
        """What was delivered or given up behind a number.

        Raises:
            CannotFetch: the relay does not answer, or has no such lane.
        """
        return _page(self._get(_path(lane), {"after": str(after), "limit": str(PAGE)}))

    async def page_async(self, lane: str, after: int) -> Page:
        """The same for asyncio."""
        query = {"after": str(after), "limit": str(PAGE)}
        return _page(await self._get_async(_path(lane), query))

    def replay(self, lane: str, after: int, to: int | None = None) -> Resending:
        """Have what was delivered behind a number, up to another, sent again.

        A receiver with an inbox processes of it what it has lost.  What was given up is
        an operator's to send again.

        Raises:
            AlreadyAsked: it is about it already, or the endpoint is disabled.
            CannotFetch: the relay does not answer, or has no such lane.
        """
        path = f"/v1/lanes/{urllib.parse.quote(lane, safe='')}/replay"
        query = {"after": str(after)} | ({} if to is None else {"to": str(to)})
        answer = self._ask("POST", path, query)
        job, first, last = (_take(answer, name, int, none=True) for name in ("job", "from", "to"))
        acknowledged = _take(answer, "acknowledged", int)
        return Resending(_take(answer, "lane", str), job, first, last, acknowledged)

    async def replay_async(self, lane: str, after: int, to: int | None = None) -> Resending:
        """The same for asyncio."""
        return await asyncio.to_thread(self.replay, lane, after, to)

    async def _get_async(self, path: str, query: Mapping[str, str]) -> Any:
        # In a thread: few are asked, seldom, and no client need be kept for it.
        return await asyncio.to_thread(self._get, path, query)

    def _get(self, path: str, query: Mapping[str, str]) -> Any:
        return self._ask("GET", path, query)

    def _ask(self, method: str, path: str, query: Mapping[str, str]) -> Any:
        url = f"{self._url}{path}?{urllib.parse.urlencode(query)}"
        asked = urllib.request.Request(  # noqa: S310 (http or https, see __init__)
            url, headers=self._headers, method=method
        )
        give_up_at = time.monotonic() + WAIT_S_MAX
        while True:
            try:
                with _OPENER.open(asked, timeout=self._timeout_s) as answer:
                    return orjson.loads(answer.read(ANSWER_BYTES_MAX))
            except urllib.error.HTTPError as error:
                with error:
                    wait_s = _asked_to_wait_s(error)
                    if wait_s is None or time.monotonic() + wait_s > give_up_at:
                        kind = AlreadyAsked if error.code == CONFLICT else CannotFetch
                        told = f"the relay at {self._url} answers: {_detail(error)}"
                        raise kind(told) from None
            except (OSError, ValueError, http.client.HTTPException) as error:
                why = one_line(str(error) or type(error).__name__)
                raise CannotFetch(f"the relay at {self._url} cannot be asked: {why}") from None
            # Whoever has a thousand lanes asks more often than a token may.
            time.sleep(wait_s)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to whoever is named there."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


# No proxy of the environment's: the relay is named, and the token is for it.
_OPENER = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))


def _path(lane: str) -> str:
    return f"/v1/lanes/{urllib.parse.quote(lane, safe='')}/deliveries"


def _standing(item: Any) -> LaneStanding:
    acknowledged = _take(item, "acknowledged", int)
    return LaneStanding(_take(item, "lane", str), acknowledged, _take(item, "generation", int))


def _page(answer: Any) -> Page:
    items = tuple(map(_item, _take(answer, "items", list)))
    kept_from, acknowledged = _take(answer, "kept_from", int), _take(answer, "acknowledged", int)
    return Page(kept_from, items, acknowledged, _take(answer, "next", int, none=True))


def _item(item: Any) -> Item:
    sequence, request = _take(item, "sequence", int), None
    if "body" in item:
        headers = _take(item, "headers", dict)
        if not all(isinstance(value, str) for value in headers.values()):
            raise CannotFetch('what answers is no relay: a header of "headers" is no text')
        request = Request("POST", headers, _take(item, "body", str).encode())
    return Item(sequence, "given_up" in item, request)


def _take(answer: Any, name: str, kind: type, *, none: bool = False) -> Any:
    """A value of an answer, which may come from anything that listens there.

    Raises:
        CannotFetch: it is not there, or of another kind.
    """
    value = answer.get(name) if isinstance(answer, dict) else None
    # In Python a bool is an int.
    if type(value) is not kind and not (none and value is None):
        raise CannotFetch(f'what answers is no relay: its answer has no "{name}" as a relay\'s has')
    return value


def _asked_to_wait_s(error: urllib.error.HTTPError) -> float | None:
    """How long the relay asks to be left alone; None: it does not."""
    seconds = error.headers.get("Retry-After", "")
    if error.code != TOO_MANY_REQUESTS or not (seconds.isascii() and seconds.isdigit()):
        return None
    return float(seconds)


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        told = json.loads(error.read(10_000))
        return f"{error.code}, {one_line(str(told['detail']))}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException):
        return str(error.code)
