"""Batches: each delivery is processed once, and the response reports the accepted sequence."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import asyncpg
import orjson
import pytest
from aiohttp import web

from outbox.core.messages.batch import prepare_batch
from outbox.core.messages.signature import format_secret
from outbox.core.model.headers import parse_lines
from outbox.receiver import (
    AsyncReceiver,
    BadMessage,
    Busy,
    Gaps,
    MemoryDatabase,
    Message,
    Receiver,
    Refuse,
    Request,
    verify,
)
from outbox.receiver.adapters.aiohttp import handler
from outbox.receiver.proxy import ProxiedResponse, open_proxy
from outbox.receiver.requests import RequestOutcome
from outbox.testing import FakeSender
from outbox.web.address import Address
from outbox.web.serving import listen, serving
from outbox_devtools.development_receiver import (
    DevelopmentReceiver,
    HandledOutcome,
    HandledRequest,
    ReceiverFault,
)
from tests.receiver.deliveries import SECRET, delivery
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from outbox.core.messages.message import Prepared
    from tests.support.postgres import Database

TEXT = format_secret(SECRET)


def batch(*numbers: int, change: Callable[[Any], Any] | None = None, **headers: str) -> Request:
    """Return a request with these numbers; `change` replaces its elements."""
    prepared = prepare_batch([delivery(n) for n in numbers], numbers[0] - 1)
    if change is not None:
        body = orjson.dumps(change(orjson.loads(prepared.body)))
        prepared = prepared._replace(body=body)
    return sent(prepared, **headers)


def sent(prepared: Prepared, **headers: str) -> Request:
    now = int(time.time())
    output = dict(parse_lines(prepared.attempt(1, now, [SECRET])))
    return Request("POST", tuple((output | headers).items()), prepared.body)


def accepted(response: Any) -> str | None:
    return dict(response.headers).get("X-Accepted-Through")


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[asyncpg.Pool]:
    async with asyncpg.create_pool(database.dsn, min_size=1, max_size=8) as made:
        await made.execute("CREATE TABLE effect (number bigint, tx xid8)")
        yield made


class Shop:
    """A receiver whose effect is one row per number, with the transaction that wrote it."""

    def __init__(self, pool: asyncpg.Pool, **options: Any) -> None:
        self.pool = pool
        self.receiver = AsyncReceiver(TEXT, pool, **options)
        self.receiver.on("order.*")(self.paid)
        self.fails: dict[int, Exception] = {}
        self.called: list[int] = []

    async def paid(self, message: Message, connection: Any) -> None:
        self.called.append(message.sequence)
        await connection.execute(
            "INSERT INTO effect VALUES ($1, pg_current_xact_id())", message.sequence
        )
        if message.sequence in self.fails:
            raise self.fails[message.sequence]

    async def effects(self) -> list[int]:
        rows = await self.pool.fetch("SELECT number FROM effect ORDER BY number")
        return [row["number"] for row in rows]


# ----------------------------------------------------------------- signatures


def test_all_deliveries_of_a_batch_are_parsed() -> None:
    sender = FakeSender()
    apart = [sender.event("order.paid", {"n": n}) for n in range(3)]
    together = sender.batch(*apart)
    verified = verify(together.headers, together.body, sender.secret)
    assert [message.sequence for message in verified.messages] == [1, 2, 3]
    alone = [verify(each.headers, each.body, sender.secret) for each in apart]
    assert [m.delivery_id for m in verified.messages] == [each.message_id for each in alone]
    assert [message.attempt for message in verified.messages] == [1, None, None]
    again = sender.resend(together, 2)
    assert (again.body, dict(again.headers)["X-Attempt"]) == (together.body, "2")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: [], "an empty array"),
        (lambda body: [body[0], 7], "is not an object"),
        (lambda body: [body[0], body[2]], "cannot follow 1"),
        (lambda body: [body[0], body[1] | {"lane": "b"}, body[2]], "cannot follow 1"),
        (lambda body: [body[0], body[1] | {"previous_sequence": 0}, body[2]], "cannot follow 1"),
        (lambda body: [body[0], {**body[1], "delivery": "x"}, body[2]], "is not a UUID"),
        (lambda body: [{k: v for k, v in body[0].items() if k != "delivery"}], "is not a UUID"),
        (lambda body: body[:2], "X-Last-Sequence"),
        (lambda body: body[1:], "X-Sequence"),
        (lambda body: body[0], "X-Event"),
    ],
)
def test_an_inconsistent_batch_is_refused(change: Callable[[Any], Any], reason: str) -> None:
    bad = batch(1, 2, 3, change=change)
    with pytest.raises(BadMessage, match=reason):
        verify(bad.headers, bad.body, TEXT)


def test_removing_the_headers_does_not_make_a_foreign_request() -> None:
    good = batch(1, 2)
    bare = [(k, v) for k, v in good.headers if not k.startswith("X-")]
    with pytest.raises(BadMessage):
        verify(bare, good.body, TEXT)


# ----------------------------------------------------------------- processing


@pytest.mark.costly
async def test_a_batch_is_processed_in_one_transaction(pool: asyncpg.Pool) -> None:
    shop = Shop(pool)
    response = await shop.receiver.handle(batch(1, 2, 3))
    assert (response.status, response.outcome, accepted(response)) == (
        200,
        RequestOutcome.PROCESSED,
        None,
    )
    assert await shop.effects() == [1, 2, 3]
    assert await pool.fetchval("SELECT count(DISTINCT tx) FROM effect") == 1
    assert await pool.fetchval("SELECT high FROM outbox_lane") == 3
    # A part of it again, in another batch, and new deliveries.
    response = await shop.receiver.handle(batch(2, 3, 4))
    assert (response.status, response.outcome) == (200, RequestOutcome.PROCESSED)
    assert (await shop.receiver.handle(batch(3, 4))).outcome is RequestOutcome.DUPLICATE
    assert await shop.effects() == [1, 2, 3, 4]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("error", "status"), [(Refuse("no"), 422), (Busy("later"), 503), (ValueError("x"), 500)]
)
async def test_deliveries_before_the_failing_one_are_processed_and_acknowledged(
    pool: asyncpg.Pool, error: Exception, status: int
) -> None:
    shop = Shop(pool)
    shop.fails[3] = error
    response = await shop.receiver.handle(batch(1, 2, 3, 4))
    assert (response.status, accepted(response)) == (status, "2")
    assert await shop.effects() == [1, 2]
    assert 4 not in shop.called
    # The first delivery fails: nothing is accepted, so the header is not required.
    response = await shop.receiver.handle(batch(3, 4))
    assert (response.status, accepted(response)) == (status, None)
    del shop.fails[3]
    assert (await shop.receiver.handle(batch(3, 4))).status == 200
    assert await shop.effects() == [1, 2, 3, 4]


@pytest.mark.costly
async def test_a_conflicting_sequence_stops_its_batch(pool: asyncpg.Pool) -> None:
    shop = Shop(pool)
    assert (await shop.receiver.handle(batch(1, 2))).status == 200
    stolen = [
        delivery(1), delivery(2)._replace(event_id=delivery(9).event_id), delivery(3),
    ]  # fmt: skip
    response = await shop.receiver.handle(sent(prepare_batch(stolen, 0)))
    assert (response.status, response.outcome, accepted(response)) == (
        422,
        RequestOutcome.CONFLICT,
        "1",
    )
    assert await shop.effects() == [1, 2]


@pytest.mark.costly
async def test_a_batch_is_held_for_missing_deliveries_before_it(pool: asyncpg.Pool) -> None:
    shop = Shop(pool, gaps=Gaps.HOLD, hold_s=30.0)
    assert (await shop.receiver.handle(batch(1))).status == 200
    async with asyncio.TaskGroup() as group:
        late = group.create_task(shop.receiver.handle(batch(3, 4)))
        await until(lambda: shop.receiver._reorder_buffer.held, what="the late ones wait")
        first = group.create_task(shop.receiver.handle(batch(2)))
    assert (first.result().status, late.result().status) == (200, 200)
    assert shop.called == [1, 2, 3, 4]


async def test_batches_with_replays_of_each_others_lanes_do_not_deadlock() -> None:
    receiver = AsyncReceiver(TEXT, MemoryDatabase())
    both = asyncio.Barrier(2)

    @receiver.on("**")
    async def paid(message: Message, _: Any) -> None:
        if message.sequence == 1:
            # Each request keeps its locks while the other one continues.
            async with asyncio.timeout(20):
                await both.wait()

    def crossed(own: str, other: str, place: int) -> Request:
        first = delivery(1 + place, lane=own)._replace(seq=1)
        replay = delivery(11 + place, lane=own)._replace(seq=2, replay_of=(other, 9))
        return sent(prepare_batch([first, replay], 0))

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(receiver.handle(crossed(*names, place)))
            for place, names in enumerate((("a-1-0", "a-1-1"), ("a-1-1", "a-1-0")))
        ]
    assert [task.result().status for task in tasks] == [200, 200]


def test_the_threaded_receiver_handles_batches_alike() -> None:
    done: list[int] = []
    fails: set[int] = {3}
    receiver = Receiver(TEXT, MemoryDatabase())

    @receiver.on("**")
    def paid(message: Message, _: Any) -> None:
        if message.sequence in fails:
            raise ValueError("not this one")
        done.append(message.sequence)

    response = receiver.handle(batch(1, 2, 3, 4))
    assert (response.status, accepted(response)) == (500, "2")
    fails.clear()
    assert receiver.handle(batch(3, 4)).status == 200
    assert receiver.handle(batch(1, 2, 3, 4)).outcome is RequestOutcome.DUPLICATE
    # Undone with the transaction, and processed again by itself.
    assert done == [1, 2, 1, 2, 3, 4]
    assert receiver.handle(batch(5, 6)).status == 200
    assert receiver.totals.gaps == 0


# ------------------------------------------------------- development receiver


async def post(url: str, request: Request) -> tuple[int, str | None]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=request.body, headers=dict(request.headers)) as response,
    ):
        return response.status, response.headers.get("X-Accepted-Through")


def outcomes(seen: Sequence[HandledRequest]) -> list[tuple[int, HandledOutcome]]:
    return [(each.message.sequence, each.outcome) for each in seen if each.message]


@pytest.mark.system
async def test_the_development_receiver_counts_each_delivery() -> None:
    seen: list[HandledRequest] = []
    receiver = DevelopmentReceiver([SECRET], on_request=seen.append)
    async with receiver.serve() as url:
        assert await post(url, batch(1, 2)) == (200, None)
        assert await post(url, batch(2, 3)) == (200, None)
    assert outcomes(seen) == [
        (1, HandledOutcome.ACCEPTED),
        (2, HandledOutcome.ACCEPTED),
        (2, HandledOutcome.DUPLICATE),
        (3, HandledOutcome.ACCEPTED),
    ]


@pytest.mark.system
async def test_a_fault_within_a_batch_reports_partial_success() -> None:
    seen: list[HandledRequest] = []
    receiver = DevelopmentReceiver(
        [SECRET],
        fail_rate=0.5,
        faults=[ReceiverFault.ERROR],
        # Other numbers might have no fault within a batch.
        rng=random.Random(1),
        on_request=seen.append,
    )
    done, responses = 0, set()
    async with receiver.serve() as url:
        while done < 60:
            numbers = range(done + 1, done + 6)
            status, output = await post(url, batch(*numbers))
            responses.add((status, output is None))
            if status == 200:
                done = numbers[-1]
            elif output is not None:
                done = int(output)
    taken = {n for n, outcome in outcomes(seen) if outcome is HandledOutcome.ACCEPTED}
    assert taken == set(range(1, max(taken) + 1))
    assert receiver.totals().good
    assert (500, False) in responses


@pytest.mark.system
async def test_deliveries_accepted_upstream_are_accepted() -> None:
    upstream = AsyncReceiver(TEXT, MemoryDatabase())
    seen: list[HandledRequest] = []

    @upstream.on("**")
    async def refuse_the_third(message: Message, _: Any) -> None:
        if message.sequence == 3:
            raise Refuse("no")

    application = web.Application()
    application.router.add_post("/", handler(upstream))
    async with (
        serving(application, await listen(Address("127.0.0.1", 0))) as address,
        open_proxy(address.url, None) as forward,
    ):
        before = DevelopmentReceiver([SECRET], forward=forward, on_request=seen.append)
        async with before.serve() as url:
            assert await post(url, batch(1, 2, 3, 4)) == (422, "2")
            assert await post(url, batch(3, 4)) == (422, "2")
    assert outcomes(seen) == [
        (1, HandledOutcome.ACCEPTED),
        (2, HandledOutcome.ACCEPTED),
        (3, HandledOutcome.FAILED),
        (3, HandledOutcome.FAILED),
    ]


@pytest.mark.system
async def test_a_single_delivery_refused_upstream_is_not_accepted() -> None:
    async def forward(*_: Any) -> ProxiedResponse:
        return ProxiedResponse(200, (("X-Accepted-Through", "2"),))

    before = DevelopmentReceiver([SECRET], forward=forward)
    async with before.serve() as url:
        assert await post(url, batch(3)) == (200, "2")
    assert before.totals().accepted == 0
