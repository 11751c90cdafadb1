"""Sends the conformance cases to a receiver and checks its responses."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from outbox.core.messages.batch import ACCEPTED_THROUGH, accepted_through
from outbox.errors import CannotRun
from outbox.receiver.requests import one_line
from outbox.receiver.verification import pairs_of
from outbox_devtools.conformance.suite import ExpectedResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outbox.receiver.requests import Request
    from outbox_devtools.conformance.suite import CaseStep, ConformanceCase

GRADED_TIMEOUT_S = 15.0
"""The relay's default time-out, in seconds."""
TRIES, GRADED_RETRY_S = 10, 0.5
PROCESSED_BYTES_MAX = 64 * 1024 * 1024

RETRIED = (408, 421, 425, 429)
"""4xx that a relay retries by default."""
LATER = (409, 429)
"""Accepted for concurrent copies: the relay retries them later."""
GONE = 410
"""410 disables the endpoint."""


@dataclass(frozen=True, slots=True)
class CaseGrade:
    """Result of one case."""

    case: str
    reason: str
    """The consequence for a receiver that fails the case."""
    failure: str | None
    """The failed step and its response; None: passed."""

    @property
    def passed(self) -> bool:
        """The receiver passed the case."""
        return self.failure is None


async def grade(
    url: str,
    cases: Sequence[ConformanceCase],
    *,
    processed_url: str | None = None,
    timeout_s: float = GRADED_TIMEOUT_S,
    on_grade: Callable[[CaseGrade], None] = lambda _: None,
) -> list[CaseGrade]:
    """Send all cases to a receiver, one after the other.

    Args:
        url: the receiver's URL.
        cases: what to send.
        processed_url: GET returns a JSON array of the ids of processed events, in order.
        timeout_s: time-out of one request, in seconds.
        on_grade: called with the grade of each case.

    Raises:
        CannotRun: the receiver cannot be reached, rejects the path or the secret, or
            `processed_url` cannot be read.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(
        timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as client:
        receiver = _Receiver(client, url, processed_url)
        await receiver.check_reachable()
        grades: list[CaseGrade] = []
        for case in cases:
            failure = await receiver.failure(case)
            reason = receiver.refusal or _ADVICE.get(receiver.last_status)
            if not grades and reason:
                # All further cases would fail for the same reason.
                raise CannotRun(f"{url} responded {receiver.last_status} to a delivery: {reason}")
            grades.append(CaseGrade(case.name, case.reason, failure))
            on_grade(grades[-1])
    return grades


_REDIRECT = "a relay follows no redirect; check the slash at the end of the path"
_ADVICE = {
    **dict.fromkeys((301, 302, 303, 307, 308), _REDIRECT),
    401: "check the secret",
    403: "check the secret",
    404: "check the path",
    405: "check the path",
}
"""Advice for the response to the first delivery, which is valid."""


class _Receiver:
    def __init__(self, client: aiohttp.ClientSession, url: str, processed_url: str | None) -> None:
        self._client = client
        self._url = url
        self._processed_url = processed_url
        self.last_status = 0
        self.refusal: str | None = None
        """Why the last delivery was refused, if its type has no handler."""

    async def check_reachable(self) -> None:
        """Raise CannotRun if the receiver cannot be reached."""
        try:
            async with self._client.request("OPTIONS", self._url, allow_redirects=False):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise CannotRun(
                f"{self._url} cannot be reached: {error or type(error).__name__}"
            ) from None

    async def failure(self, case: ConformanceCase) -> str | None:
        """Run a case; returns its failure, or None if it passed."""
        before = await self._processed()
        for number, step in enumerate(case.steps, 1):
            if error := await self._step(step):
                which = f"step {number} of {len(case.steps)}: " if len(case.steps) > 1 else ""
                return which + error
        if before is None:
            return None
        after = await self._processed() or []
        return _processing_error(case, after[len(before) :])

    async def _step(self, step: CaseStep) -> str | None:
        responses = await asyncio.gather(*(self._send(step.request) for _ in range(step.at_once)))
        if step.expected is ExpectedResponse.EVENTUALLY:
            return await self._retry_until_success(step.request, responses)
        for response in responses:
            if wrong := _response_error(step.expected, response):
                return wrong
        return None

    async def _retry_until_success(
        self, request: Request, responses: Sequence[int | str]
    ) -> str | None:
        for response in responses:
            if isinstance(response, str) or not (
                response < 300 or response in LATER or response >= 500
            ):
                return f"expected 2xx, 409, 429 or 5xx, got {response}"
        last: int | str = ""
        for _ in range(TRIES):
            last = await self._send(request)
            if isinstance(last, int) and 200 <= last < 300:
                return None
            await asyncio.sleep(GRADED_RETRY_S)
        return f"expected 2xx after some tries, got {last}"

    async def _send(self, request: Request) -> int | str:
        """Send a request; returns the status, or a description of what happened instead."""
        try:
            async with self._client.request(
                request.method,
                self._url,
                data=io.BytesIO(request.body) if request.body else None,
                headers=list(pairs_of(request.headers)),
                allow_redirects=False,
            ) as response:
                self.last_status = response.status
                text = await response.content.read(500) if response.status == 422 else b""
                is_unhandled = text.startswith(b"no handler for")
                self.refusal = one_line(text.decode(errors="replace")) if is_unhandled else None
                return _partial_success_error(request, response) or response.status
        except TimeoutError:
            return "no response in time"
        except (aiohttp.ClientError, OSError) as error:
            return f"a broken connection ({type(error).__name__})"

    async def _processed(self) -> list[str] | None:
        if self._processed_url is None:
            return None
        try:
            async with self._client.get(self._processed_url, allow_redirects=False) as response:
                events: Any = orjson.loads(await _read(response))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise CannotRun(f"{self._processed_url} cannot be read: {error}") from None
        if not isinstance(events, list) or not all(isinstance(each, str) for each in events):
            raise CannotRun(f"{self._processed_url} is not a JSON array of event ids")
        return events


def _partial_success_error(request: Request, response: aiohttp.ClientResponse) -> str | None:
    """Return the error of a 2xx that accepts only a part of a batch; None: it accepts all.

    Partial acceptance is allowed, but no receiver needs it for batches this small.
    """
    described = {name.lower(): value for name, value in pairs_of(request.headers)}
    bounds = [_ending(described, "-sequence"), _ending(described, "-last-sequence")]
    if not all(each.isdigit() for each in bounds) or not 200 <= response.status < 300:
        return None
    first, last = map(int, bounds)
    through = accepted_through(response.headers.items(), first, last)
    if through is None or through == last:
        return None
    return f"{response.status} with {ACCEPTED_THROUGH} {through} to a batch of {first} to {last}"


def _ending(headers: Mapping[str, str], ending: str) -> str:
    """The header with the shortest name of this ending, whatever its prefix is."""
    names = sorted((name for name in headers if name.endswith(ending)), key=len)
    return headers[names[0]] if names else ""


def _response_error(expected: ExpectedResponse, response: int | str) -> str | None:
    """Compare a response with the expected one; returns the error, or None."""
    if isinstance(response, str):
        if expected is ExpectedResponse.CUT and response.startswith("a broken connection"):
            return None
        return f"expected a response, got {response}"
    match expected:
        case ExpectedResponse.STALE if response == HTTPStatus.SERVICE_UNAVAILABLE:
            return None
        case ExpectedResponse.TAKEN if not 200 <= response < 300:
            return f"expected 2xx, got {response}"
        case ExpectedResponse.REFUSED | ExpectedResponse.STALE | ExpectedResponse.CUT:
            if response == GONE:
                return "got 410, which disables the endpoint"
            if response in RETRIED:
                return f"expected another 4xx, got {response}, which the relay retries for hours"
            if not 400 <= response < 500:
                return f"expected 4xx, got {response}"
    return None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, which may arrive in parts.

    Raises:
        ValueError: it is too large.
    """
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > PROCESSED_BYTES_MAX:
            raise ValueError(f"larger than {PROCESSED_BYTES_MAX} bytes")
    return bytes(body)


def _processing_error(case: ConformanceCase, processed: Sequence[str]) -> str | None:
    expected, counted = Counter(case.processed), Counter(processed)
    for event, times in expected.items():
        if counted[event] != times:
            return f"event {event} was processed {counted[event]} times, not {times}"
    if extra := counted - expected:
        return f"event {next(iter(extra))} was processed, but should not have been"
    return None
