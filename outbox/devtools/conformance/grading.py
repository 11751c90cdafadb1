"""Sends the cases to a receiver, and tells which of them it passes."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from outbox.core.delivery.batch import ACCEPTED_THROUGH, LAST_SEQUENCE, accepted_through
from outbox.devtools.conformance.cases import Verdict
from outbox.errors import CannotRun
from outbox.receiver.verification import pairs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox.devtools.conformance.cases import Case, Step
    from outbox.receiver.requests import Request

TIMEOUT_S = 15.0
"""As long as a relay waits, unless its endpoint says otherwise."""
TRIES, RETRY_S = 10, 0.5
PROCESSED_BYTES_MAX = 64 * 1024 * 1024

RETRIED = (408, 425, 429)
"""4xx that a relay tries again, unless its endpoint says otherwise."""
LATER = (409, 429)
"""Told to one of several copies at once, it is as good as a wait."""
GONE = 410
"""It disables the endpoint."""


@dataclass(frozen=True, slots=True)
class Grade:
    """How a receiver did in one case."""

    case: str
    why: str
    """What goes wrong with a receiver that fails it."""
    failure: str | None
    """The step that was not good; None: it passed."""

    @property
    def passed(self) -> bool:
        """Whether it is good."""
        return self.failure is None


async def grade(
    url: str,
    cases: Sequence[Case],
    *,
    processed_url: str | None = None,
    timeout_s: float = TIMEOUT_S,
    told: Callable[[Grade], None] = lambda _: None,
) -> list[Grade]:
    """Send each case, one after the other.

    Args:
        processed_url: answers a GET with a JSON array of the ids of the events that were
            processed, in the order in which they were.
        told: called with each grade as soon as it is known.

    Raises:
        CannotRun: nobody listens there, it knows neither path nor secret, or what was
            processed cannot be read.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(
        timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as client:
        receiver = _Receiver(client, url, processed_url)
        await receiver.look()
        grades: list[Grade] = []
        for case in cases:
            failure = await receiver.failure(case)
            if not grades and (why := _NOT_FOUND.get(receiver.last_status)):
                # Everything else would fail because of that, and say nothing.
                raise CannotRun(f"{url} answers {receiver.last_status} to a delivery: {why}")
            grades.append(Grade(case.name, case.why, failure))
            told(grades[-1])
    return grades


_NOT_FOUND = {
    401: "is the secret the one that it knows?",
    403: "is the secret the one that it knows?",
    404: "is the path right?",
    405: "is the path right?",
}
"""To the very first delivery, which is as good as any."""


class _Receiver:
    def __init__(self, client: aiohttp.ClientSession, url: str, processed_url: str | None) -> None:
        self._client = client
        self._url = url
        self._processed_url = processed_url
        self.last_status = 0

    async def look(self) -> None:
        """Whether there is somebody to be graded."""
        try:
            async with self._client.request("OPTIONS", self._url, allow_redirects=False):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise CannotRun(
                f"nobody answers at {self._url}: {error or type(error).__name__}"
            ) from None

    async def failure(self, case: Case) -> str | None:
        """What is wrong in this case; None: nothing."""
        before = await self._processed()
        for number, step in enumerate(case.steps, 1):
            if wrong := await self._step(step):
                which = f"step {number} of {len(case.steps)}: " if len(case.steps) > 1 else ""
                return which + wrong
        if before is None:
            return None
        after = await self._processed() or []
        return _miscounted(case, after[len(before) :])

    async def _step(self, step: Step) -> str | None:
        answers = await asyncio.gather(*(self._send(step.request) for _ in range(step.at_once)))
        if step.verdict is Verdict.EVENTUALLY:
            return await self._in_the_end(step.request, answers)
        for answer in answers:
            if wrong := _judge(step.verdict, answer):
                return wrong
        return None

    async def _in_the_end(self, request: Request, answers: Sequence[int | str]) -> str | None:
        for answer in answers:
            if isinstance(answer, str) or not (answer < 300 or answer in LATER or answer >= 500):
                return f"expected 2xx, 409, 429 or 5xx, got {answer}"
        last: int | str = ""
        for _ in range(TRIES):
            last = await self._send(request)
            if isinstance(last, int) and 200 <= last < 300:
                return None
            await asyncio.sleep(RETRY_S)
        return f"expected 2xx after some tries, got {last}"

    async def _send(self, request: Request) -> int | str:
        """The status, or what happened instead."""
        try:
            async with self._client.request(
                request.method,
                self._url,
                data=io.BytesIO(request.body) if request.body else None,
                headers=list(pairs_of(request.headers)),
                allow_redirects=False,
            ) as response:
                self.last_status = response.status
                return _of_batch(request, response) or response.status
        except TimeoutError:
            return "no answer in time"
        except (aiohttp.ClientError, OSError) as error:
            return f"a broken connection ({type(error).__name__})"

    async def _processed(self) -> list[str] | None:
        if self._processed_url is None:
            return None
        try:
            async with self._client.get(self._processed_url, allow_redirects=False) as response:
                told: Any = orjson.loads(await response.content.read(PROCESSED_BYTES_MAX))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise CannotRun(f"{self._processed_url} cannot be read: {error}") from None
        if not isinstance(told, list) or not all(isinstance(each, str) for each in told):
            raise CannotRun(f"{self._processed_url} is not a JSON array of event ids")
        return told


def _of_batch(request: Request, response: aiohttp.ClientResponse) -> str | None:
    """What is wrong with a success that takes a part only; None: it does not.

    A receiver may take the first ones of a batch, but hardly of one so small.
    """
    last = dict(pairs_of(request.headers)).get(LAST_SEQUENCE)
    if last is None or not 200 <= response.status < 300:
        return None
    first, headers = int(dict(pairs_of(request.headers))["X-Sequence"]), response.headers.items()
    through = accepted_through(headers, first, int(last))
    if through is None or through == int(last):
        return None
    return f"{response.status} with {ACCEPTED_THROUGH} {through} to a batch of {first} to {last}"


def _judge(verdict: Verdict, answer: int | str) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if isinstance(answer, str):
        if verdict is Verdict.CUT and answer.startswith("a broken connection"):
            return None
        return f"expected an answer, got {answer}"
    match verdict:
        case Verdict.TAKEN if not 200 <= answer < 300:
            return f"expected 2xx, got {answer}"
        case Verdict.REFUSED | Verdict.CUT:
            if answer == GONE:
                return "got 410, by which the relay disables the endpoint"
            if answer in RETRIED:
                return f"expected another 4xx, got {answer}, which the relay tries again for hours"
            if not 400 <= answer < 500:
                return f"expected 4xx, got {answer}"
    return None


def _miscounted(case: Case, processed: Sequence[str]) -> str | None:
    wanted, counted = Counter(case.processed), Counter(processed)
    for event, times in wanted.items():
        if counted[event] != times:
            return f"event {event} was processed {counted[event]} times, not {times}"
    if more := counted - wanted:
        return f"event {next(iter(more))} was processed, and should not have been"
    return None
