"""Good receivers pass, and each mistake that receivers make fails the cases about it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from aiohttp import web

from outbox.core.delivery.signature import SignatureError
from outbox.devtools.conformance import grading
from outbox.devtools.conformance.cases import Case, Verdict, cases, vectors
from outbox.errors import CannotRun
from outbox.receiver import AsyncReceiver, Gaps, MemoryDatabase, Message, Receiver, verify
from outbox.receiver.adapters.aiohttp import handler
from outbox.receiver.requests import Answer, Ended
from outbox.receiver.verification import pairs_of
from outbox.testing.sender import SECRET
from outbox.web.address import Address
from outbox.web.serving import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.receiver.requests import Request

OTHER = "whsec_" + "QSBzZWNyZXQgdGhhdCBub2JvZHkgaGFzLg=="


def all_cases(*, batches: bool = False) -> tuple[Case, ...]:
    return cases(
        SECRET, uuid.uuid4(), time.time, other_secret=OTHER, checkpoints=True, batches=batches
    )


@contextlib.asynccontextmanager
async def shop(answering: Any, processed: list[str]) -> AsyncIterator[str]:
    async def told(_: web.Request) -> web.Response:
        return web.Response(body=orjson.dumps(processed))

    app = web.Application(client_max_size=30 * 1024 * 1024)
    app.router.add_get("/processed", told)
    app.router.add_route("*", "/hooks", answering)
    async with serving(app, Address("127.0.0.1", 0)) as at:
        yield at.url.rstrip("/")


async def grades_of(
    answering: Any, processed: list[str], *, batches: bool = False
) -> dict[str, str | None]:
    told = all_cases(batches=batches)
    async with shop(answering, processed) as url:
        grades = await grading.grade(
            f"{url}/hooks", told, processed_url=f"{url}/processed", timeout_s=5
        )
    return {grade.case: grade.failure for grade in grades}


@pytest.mark.parametrize("gaps", list(Gaps))
async def test_receivers_of_ours_conform(gaps: Gaps) -> None:
    processed: list[str] = []

    if gaps is Gaps.CATCH_UP:
        receiver: Any = Receiver(SECRET, MemoryDatabase())
    else:
        receiver = AsyncReceiver(SECRET, MemoryDatabase(), gaps=gaps, hold_s=0.2)

    @receiver.on("**")
    def take(message: Message, _: Any) -> None:
        processed.append(message.event_id)

    grades = await grades_of(handler(receiver), processed, batches=True)
    assert "in other company" in grades
    assert {k: v for k, v in grades.items() if v} == {}


async def test_who_drops_batches_by_the_id_of_the_first_is_found_and_who_takes_parts() -> None:
    processed: list[str] = []
    receiver = AsyncReceiver(SECRET, MemoryDatabase())

    @receiver.on("**")
    def take(message: Message, _: Any) -> None:
        processed.append(message.event_id)

    seen: set[str] = set()

    async def careless(request: Request) -> Answer:
        """Copies of what it has had are dropped; of a batch, by its first delivery."""
        body = orjson.loads(request.body) if request.body[:1] in b"{[" else None
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, dict) and "id" in first:
            if first["id"] in seen:
                return Answer(Ended.DUPLICATE, 200, "seen")
            answer = await handle(request)
            if answer.status == 200:
                seen.add(first["id"])
            return answer
        return await handle(request)

    handle = receiver.handle
    receiver.handle = careless  # type: ignore[method-assign]
    failed = {
        k for k, v in (await grades_of(handler(receiver), processed, batches=True)).items() if v
    }
    assert "in other company" in failed

    async def partly(request: Request) -> Answer:
        answer = await handle(request)
        first = dict(pairs_of(request.headers)).get("X-Sequence", "1")
        return replace(answer, headers=(("X-Accepted-Through", first),))

    receiver.handle = partly  # type: ignore[method-assign]
    grades = await grades_of(handler(receiver), processed, batches=True)
    assert "X-Accepted-Through 1 to a batch of 1 to 4" in (grades["a batch"] or "")


class Careless:
    """A receiver as many are written, with one mistake after the other to be made."""

    def __init__(
        self,
        *,
        verifies: bool = True,
        dedupes: bool = True,
        tolerance_s: float = 300,
        bad_status: int = 401,
        needs_order: bool = False,
        slow: bool = False,
    ) -> None:
        self.processed: list[str] = []
        self._verifies, self._dedupes, self._tolerance_s = verifies, dedupes, tolerance_s
        self._bad_status, self._needs_order, self._slow = bad_status, needs_order, slow
        self._seen: set[str] = set()
        self._highest: dict[str, int] = {}

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            if self._verifies:
                verify(tuple(request.headers.items()), body, SECRET, tolerance_s=self._tolerance_s)
            content = orjson.loads(body)
            event, delivery = content["id"], request.headers["X-Delivery"]
            lane, sequence = content["lane"], content["sequence"]
        except SignatureError:
            return web.Response(status=self._bad_status)
        except (ValueError, KeyError, TypeError):
            return web.Response(status=400)
        if self._needs_order and sequence != self._highest.get(lane, 0) + 1:
            return web.Response(status=422)
        if self._dedupes and delivery in self._seen:
            return web.Response()
        if self._slow:
            await asyncio.sleep(0.05)
        self._seen.add(delivery)
        self._highest[lane] = sequence
        self.processed.append(event)
        return web.Response()


@pytest.mark.parametrize(
    ("mistake", "caught_by"),
    [
        (
            {"verifies": False},
            {"another secret", "no signature", "a changed body", "X-Lane is another one"},
        ),
        ({"tolerance_s": 1e9}, {"an old request", "a request of the future"}),
        ({"dedupes": False}, {"a copy", "copies at once", "a replay of what it has"}),
        ({"slow": True}, {"copies at once"}),
        ({"bad_status": 500}, {"another secret"}),
        ({"bad_status": 410}, {"another secret"}),
        ({"bad_status": 429}, {"another secret"}),
        ({"bad_status": 200}, {"another secret"}),
        (
            {"needs_order": True},
            {"a copy", "a number that was given up", "a lane joined in its middle"},
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
async def test_each_mistake_is_found(mistake: dict[str, Any], caught_by: set[str]) -> None:
    careless = Careless(**mistake)
    failed = {k for k, v in (await grades_of(careless.answer, careless.processed)).items() if v}
    assert caught_by <= failed


async def test_without_a_mistake_there_is_little_to_complain_of() -> None:
    careless = Careless()
    failed = {k: v for k, v in (await grades_of(careless.answer, careless.processed)).items() if v}
    # It knows no checkpoints, and need not.
    assert set(failed) <= {"far too large", "a checkpoint", "a checkpoint before what it names"}


@pytest.mark.parametrize(("status", "says"), [(404, "is the path right"), (401, "is the secret")])
async def test_who_knows_neither_path_nor_secret_is_not_graded(status: int, says: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status)

    with pytest.raises(CannotRun, match=f"answers {status} to a delivery: {says}"):
        await grades_of(answer, [])


async def test_who_does_not_answer_cannot_be_graded() -> None:
    with pytest.raises(CannotRun, match="nobody answers"):
        await grading.grade("http://127.0.0.1:9/", all_cases())
    careless = Careless()
    async with shop(careless.answer, careless.processed) as url:
        with pytest.raises(CannotRun, match="cannot be read"):
            await grading.grade(f"{url}/hooks", all_cases(), processed_url=f"{url}/hooks")
        careless.processed.append(7)  # type: ignore[arg-type]
        with pytest.raises(CannotRun, match="is not a JSON array"):
            await grading.grade(f"{url}/hooks", all_cases(), processed_url=f"{url}/processed")


def test_vectors_are_the_same_each_time_and_hold() -> None:
    """What another language is tested with is what ours decides."""
    at, endpoint_id = 1_770_000_000, uuid.UUID(int=7)
    made = [cases(SECRET, endpoint_id, lambda: at, other_secret=OTHER) for _ in range(2)]
    assert [*vectors(made[0])] == [*vectors(made[1])]
    for case in made[0]:
        for step in case.steps:
            if step.request.method != "POST" or step.verdict in (Verdict.EITHER, Verdict.CUT):
                continue
            try:
                verified = verify(step.request.headers, step.request.body, SECRET, now=at)
                good = bool(verified.messages)
            except (SignatureError, ValueError):
                good = False
            assert good == (step.verdict is not Verdict.REFUSED), case.name
