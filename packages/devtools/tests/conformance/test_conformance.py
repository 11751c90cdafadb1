"""Correct receivers pass, and each mistake of a receiver fails its cases."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import orjson
import pytest
from aiohttp import web

from outbox.core.messages.signature import SignatureError
from outbox.core.model.message_format import UNBATCHED, FormatName
from outbox.errors import CannotRun, UsageError
from outbox.receiver import AsyncReceiver, Gaps, MemoryDatabase, Message, Receiver, verify
from outbox.receiver.adapters.aiohttp import handler
from outbox.receiver.requests import RequestOutcome, Response
from outbox.receiver.verification import pairs_of
from outbox.testing.sender import SECRET
from outbox.web.address import Address
from outbox.web.serving import listen, serving
from outbox_devtools.conformance import grading
from outbox_devtools.conformance.cases import cases
from outbox_devtools.conformance.suite import ConformanceCase, ExpectedResponse, vectors
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Container

    from outbox.receiver.requests import Request

OTHER = "whsec_" + "QSBzZWNyZXQgdGhhdCBub2JvZHkgaGFzLg=="


def all_cases(**which: Any) -> tuple[ConformanceCase, ...]:
    return cases(SECRET, uuid.uuid4(), time.time, other_secret=OTHER, **which)


@contextlib.asynccontextmanager
async def shop(handler: Any, processed: list[str]) -> AsyncIterator[str]:
    async def selected(request: web.Request) -> web.StreamResponse:
        # In parts, as a server of another language may send it.
        body = orjson.dumps(processed)
        response = web.StreamResponse()
        await response.prepare(request)
        for at in range(0, len(body), 1000):
            await response.write(body[at : at + 1000])
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    app = web.Application(client_max_size=30 * 1024 * 1024)
    app.router.add_get("/processed", selected)
    app.router.add_route("*", "/hooks", handler)
    async with serving(app, await listen(Address("127.0.0.1", 0))) as at:
        yield at.url.rstrip("/")


async def grades_of(
    handler: Any, processed: list[str], *, only: Container[str] | None = None, **which: Any
) -> dict[str, str | None]:
    selected = [case for case in all_cases(**which) if only is None or case.name in only]
    async with shop(handler, processed) as url:
        grades = await grading.grade(
            f"{url}/hooks", selected, processed_url=f"{url}/processed", timeout_s=5
        )
    return {grade.case: grade.failure for grade in grades}


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("gaps", sampled(list(Gaps)))
async def test_the_receivers_of_this_library_conform(gaps: Gaps) -> None:
    processed: list[str] = []

    if gaps is Gaps.CATCH_UP:
        receiver: Any = Receiver(SECRET, MemoryDatabase())
    else:
        receiver = AsyncReceiver(SECRET, MemoryDatabase(), gaps=gaps, hold_s=0.2)

    @receiver.on("**")
    def process_event(message: Message, _: Any) -> None:
        processed.append(message.event_id)

    grades = await grades_of(handler(receiver), processed, batches=True)
    assert "a regrouped batch" in grades
    assert {k: v for k, v in grades.items() if v} == {}


@pytest.mark.slow
@pytest.mark.system
async def test_a_receiver_with_another_header_prefix_conforms() -> None:
    processed: list[str] = []
    receiver = AsyncReceiver(SECRET, MemoryDatabase(), header_prefix="Acme-")

    @receiver.on("**")
    def process_event(message: Message, _: Any) -> None:
        processed.append(message.event_id)

    grades = await grades_of(handler(receiver), processed, batches=True, header_prefix="Acme-")
    assert {k: v for k, v in grades.items() if v} == {}
    assert "a different Acme-Last-Sequence" in grades


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("format_name", sampled(get_args(FormatName), 2))
@pytest.mark.parametrize("is_known", sampled([True, False]))
async def test_a_receiver_of_another_format_conforms(
    format_name: FormatName, is_known: bool
) -> None:
    processed: list[str] = []
    formats = [format_name] if is_known else None
    receiver = AsyncReceiver(SECRET, MemoryDatabase(), formats=formats)

    @receiver.on("**")
    def process_event(message: Message, _: Any) -> None:
        processed.append(message.event_id)

    has_batches = format_name not in UNBATCHED
    grades = await grades_of(
        handler(receiver), processed, batches=has_batches, binary=True, format_name=format_name
    )
    assert {k: v for k, v in grades.items() if v} == {}
    assert "payloads that are not JSON" in grades
    assert has_batches or "no metadata signature" in grades


async def test_batches_need_a_format_that_has_them() -> None:
    with pytest.raises(UsageError, match="the format raw has one delivery per request"):
        all_cases(batches=True, format_name="raw")


@pytest.mark.slow
@pytest.mark.system
async def test_wrong_batch_deduplication_and_partial_acceptance_are_found() -> None:
    processed: list[str] = []
    receiver = AsyncReceiver(SECRET, MemoryDatabase())

    @receiver.on("**")
    def process_event(message: Message, _: Any) -> None:
        processed.append(message.event_id)

    seen: set[str] = set()

    async def careless(request: Request) -> Response:
        """Deduplicates deliveries, and batches by their first delivery only."""
        body = orjson.loads(request.body) if request.body[:1] in b"{[" else None
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, dict) and "id" in first:
            if first["id"] in seen:
                return Response(RequestOutcome.DUPLICATE, 200, "seen")
            response = await handle(request)
            if response.status == 200:
                seen.add(first["id"])
            return response
        return await handle(request)

    handle = receiver.handle
    receiver.handle = careless  # type: ignore[method-assign]
    failed = {
        k for k, v in (await grades_of(handler(receiver), processed, batches=True)).items() if v
    }
    assert "a regrouped batch" in failed

    async def partly(request: Request) -> Response:
        response = await handle(request)
        first = dict(pairs_of(request.headers)).get("X-Sequence", "1")
        return replace(response, headers=(("X-Accepted-Through", first),))

    receiver.handle = partly  # type: ignore[method-assign]
    grades = await grades_of(handler(receiver), processed, batches=True)
    assert "X-Accepted-Through 1 to a batch of 1 to 4" in (grades["a batch"] or "")


class Careless:
    """A typical receiver, with one mistake at a time."""

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

    async def response(self, request: web.Request) -> web.Response:
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


@pytest.mark.system
@pytest.mark.parametrize(
    ("mistake", "caught_by"),
    [
        (
            {"verifies": False},
            {"another secret", "no signature", "a changed body", "a different X-Lane"},
        ),
        ({"tolerance_s": 1e9}, {"an old request", "a request of the future"}),
        ({"dedupes": False}, {"a copy", "copies at once", "a replay of a processed event"}),
        ({"slow": True}, {"copies at once"}),
        ({"bad_status": 500}, {"another secret"}),
        ({"bad_status": 410}, {"another secret"}),
        ({"bad_status": 429}, {"another secret"}),
        ({"bad_status": 200}, {"another secret"}),
        (
            {"needs_order": True},
            {"a copy", "a dead-lettered number", "a lane joined in its middle"},
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
async def test_each_mistake_is_found(mistake: dict[str, Any], caught_by: set[str]) -> None:
    careless = Careless(**mistake)
    grades = await grades_of(careless.response, careless.processed, only=caught_by)
    assert {k for k, v in grades.items() if v} == caught_by


@pytest.mark.system
async def test_a_correct_receiver_fails_only_optional_cases() -> None:
    careless = Careless()
    failed = {
        k: v for k, v in (await grades_of(careless.response, careless.processed)).items() if v
    }
    assert set(failed) <= {"far too large"}


@pytest.mark.system
@pytest.mark.parametrize(
    ("status", "says"),
    [
        (404, "check the path"),
        (401, "check the secret"),
        (307, "a relay follows no redirect"),
    ],
)
async def test_a_wrong_path_or_secret_is_not_graded(status: int, says: str) -> None:
    async def response(_: web.Request) -> web.Response:
        return web.Response(status=status)

    with pytest.raises(CannotRun, match=f"responded {status} to a delivery: {says}"):
        await grades_of(response, [])


@pytest.mark.system
async def test_a_receiver_without_a_handler_is_not_graded() -> None:
    receiver = AsyncReceiver(SECRET, MemoryDatabase())
    receiver.on("order.*")(lambda *_: None)
    with pytest.raises(CannotRun, match=r"422 .*no handler for the event type conform\.check; the"):
        await grades_of(handler(receiver), [])


@pytest.mark.system
async def test_an_unreachable_receiver_is_not_graded() -> None:
    with pytest.raises(CannotRun, match="cannot be reached"):
        await grading.grade("http://127.0.0.1:9/", all_cases())
    careless = Careless()
    async with shop(careless.response, careless.processed) as url:
        with pytest.raises(CannotRun, match="cannot be read"):
            await grading.grade(f"{url}/hooks", all_cases(), processed_url=f"{url}/hooks")
        careless.processed.append(7)  # type: ignore[arg-type]
        with pytest.raises(CannotRun, match="is not a JSON array"):
            await grading.grade(f"{url}/hooks", all_cases(), processed_url=f"{url}/processed")


def test_vectors_are_deterministic_and_valid() -> None:
    """The vectors for other languages are verified with our implementation."""
    at, endpoint_id = 1_770_000_000, uuid.UUID(int=7)
    made = [cases(SECRET, endpoint_id, lambda: at, other_secret=OTHER) for _ in range(2)]
    assert [*vectors(made[0])] == [*vectors(made[1])]
    for case in made[0]:
        for step in case.steps:
            if step.request.method != "POST" or step.expected in (
                ExpectedResponse.EITHER,
                ExpectedResponse.CUT,
            ):
                continue
            try:
                verified = verify(step.request.headers, step.request.body, SECRET, now=at)
                good = bool(verified.messages)
            except (SignatureError, ValueError):
                good = False
            refused = step.expected in (ExpectedResponse.REFUSED, ExpectedResponse.STALE)
            assert good != refused, case.name
