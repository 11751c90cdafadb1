"""Several deliveries in one request: each processed once, and the answer says how far it came."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import asyncpg
import orjson
import pytest

from outbox.core.delivery.batch import prepare_batch
from outbox.core.delivery.signature import format_secret
from outbox.core.model.headers import pairs
from outbox.devtools.development_receiver import DevelopmentReceiver, Fault, Handled, Outcome
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
from outbox.receiver.proxy import Passed, forwarding
from outbox.receiver.requests import Ended
from outbox.testing import FakeSender
from tests.receiver.deliveries import SECRET, delivery
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from outbox.core.delivery.message import Prepared
    from tests.support.postgres import Database

TEXT = format_secret(SECRET)


def batch(*numbers: int, change: Callable[[Any], Any] | None = None, **headers: str) -> Request:
    """A request with these numbers; `change` makes another body of its elements."""
    prepared = prepare_batch([delivery(n) for n in numbers], numbers[0] - 1)
    if change is not None:
        body = orjson.dumps(change(orjson.loads(prepared.body)))
        prepared = prepared._replace(body=body)
    return sent(prepared, **headers)


def sent(prepared: Prepared, **headers: str) -> Request:
    now = int(time.time())
    said = dict(pairs(prepared.attempt(1, now, [SECRET])))
    return Request("POST", tuple((said | headers).items()), prepared.body)


def accepted(answer: Any) -> str | None:
    return dict(answer.headers).get("X-Accepted-Through")


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[asyncpg.Pool]:
    async with asyncpg.create_pool(database.dsn, min_size=1, max_size=8) as made:
        await made.execute("CREATE TABLE effect (number bigint, tx xid8)")
        yield made


class Shop:
    """A receiver whose effect is a row for each number, and the transaction that made it."""

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


# ------------------------------------------------------------- what is signed


def test_all_deliveries_of_a_batch_are_read() -> None:
    sender = FakeSender()
    apart = [sender.event("order.paid", {"n": n}) for n in range(3)]
    together = sender.batch(*apart)
    verified = verify(together.headers, together.body, sender.secret)
    assert [message.sequence for message in verified.messages] == [1, 2, 3]
    alone = [verify(each.headers, each.body, sender.secret) for each in apart]
    assert [m.delivery_id for m in verified.messages] == [each.message_id for each in alone]
    assert [message.attempt for message in verified.messages] == [1, None, None]
    again = sender.again(together, 2)
    assert (again.body, dict(again.headers)["X-Attempt"]) == (together.body, "2")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda _: [], "an array of nothing"),
        (lambda body: [body[0], 7], "is not an object"),
        (lambda body: [body[0], body[2]], "cannot follow 1"),
        (lambda body: [body[0], body[1] | {"lane": "b"}, body[2]], "cannot follow 1"),
        (lambda body: [body[0], body[1] | {"previous_sequence": 0}, body[2]], "cannot follow 1"),
        (lambda body: [body[0], {**body[1], "delivery": "x"}, body[2]], "is not a UUID"),
        (lambda body: [{k: v for k, v in body[0].items() if k != "delivery"}], '"delivery"'),
        (lambda body: body[:2], "X-Last-Sequence"),
        (lambda body: body[1:], "X-Sequence"),
        (lambda body: body[0], "X-Event"),
    ],
)
def test_a_batch_that_contradicts_itself_is_none(change: Callable[[Any], Any], why: str) -> None:
    bad = batch(1, 2, 3, change=change)
    with pytest.raises(BadMessage, match=why):
        verify(bad.headers, bad.body, TEXT)


def test_who_takes_the_headers_away_makes_no_foreign_request_of_it() -> None:
    good = batch(1, 2)
    bare = [(k, v) for k, v in good.headers if not k.startswith("X-")]
    with pytest.raises(BadMessage):
        verify(bare, good.body, TEXT)


# --------------------------------------------------------------- what is done


@pytest.mark.costly
async def test_a_batch_is_processed_in_one_transaction(pool: asyncpg.Pool) -> None:
    shop = Shop(pool)
    answer = await shop.receiver.handle(batch(1, 2, 3))
    assert (answer.status, answer.ended, accepted(answer)) == (200, Ended.PROCESSED, None)
    assert await shop.effects() == [1, 2, 3]
    assert await pool.fetchval("SELECT count(DISTINCT tx) FROM effect") == 1
    assert await pool.fetchval("SELECT high FROM outbox_lane") == 3
    # A part of it again, in other company, and what is new.
    answer = await shop.receiver.handle(batch(2, 3, 4))
    assert (answer.status, answer.ended) == (200, Ended.PROCESSED)
    assert (await shop.receiver.handle(batch(3, 4))).ended is Ended.DUPLICATE
    assert await shop.effects() == [1, 2, 3, 4]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("error", "status"), [(Refuse("no"), 422), (Busy("later"), 503), (ValueError("x"), 500)]
)
async def test_up_to_the_one_that_fails_all_is_done_and_said(
    pool: asyncpg.Pool, error: Exception, status: int
) -> None:
    shop = Shop(pool)
    shop.fails[3] = error
    answer = await shop.receiver.handle(batch(1, 2, 3, 4))
    assert (answer.status, accepted(answer)) == (status, "2")
    assert await shop.effects() == [1, 2]
    assert 4 not in shop.called
    # The first one: nothing is accepted, and nothing need be said of it.
    answer = await shop.receiver.handle(batch(3, 4))
    assert (answer.status, accepted(answer)) == (status, None)
    del shop.fails[3]
    assert (await shop.receiver.handle(batch(3, 4))).status == 200
    assert await shop.effects() == [1, 2, 3, 4]


@pytest.mark.costly
async def test_a_number_that_another_delivery_took_stops_its_batch(pool: asyncpg.Pool) -> None:
    shop = Shop(pool)
    assert (await shop.receiver.handle(batch(1, 2))).status == 200
    stolen = [
        delivery(1), delivery(2)._replace(event_id=delivery(9).event_id), delivery(3),
    ]  # fmt: skip
    answer = await shop.receiver.handle(sent(prepare_batch(stolen, 0)))
    assert (answer.status, answer.ended, accepted(answer)) == (422, Ended.CONFLICT, "1")
    assert await shop.effects() == [1, 2]


@pytest.mark.costly
async def test_a_batch_waits_for_what_is_before_it(pool: asyncpg.Pool) -> None:
    shop = Shop(pool, gaps=Gaps.HOLD, hold_s=30.0)
    assert (await shop.receiver.handle(batch(1))).status == 200
    async with asyncio.TaskGroup() as group:
        late = group.create_task(shop.receiver.handle(batch(3, 4)))
        await until(lambda: shop.receiver._waiting.held, 10, "the late ones wait")
        first = group.create_task(shop.receiver.handle(batch(2)))
    assert (first.result().status, late.result().status) == (200, 200)
    assert shop.called == [1, 2, 3, 4]


async def test_batches_with_replays_of_each_others_lanes_do_not_wait_for_each_other() -> None:
    receiver = AsyncReceiver(TEXT, MemoryDatabase())
    both = asyncio.Barrier(2)

    @receiver.on("**")
    async def paid(message: Message, _: Any) -> None:
        if message.sequence == 1:
            # Whatever a request holds by now, it holds while the other one goes on.
            async with asyncio.timeout(5):
                await both.wait()

    def crossed(own: str, other: str, place: int) -> Request:
        first = delivery(1 + place, lane=own)._replace(seq=1)
        replay = delivery(11 + place, lane=own)._replace(seq=2, replay_of=(other, 9))
        return sent(prepare_batch([first, replay], 0))

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(receiver.handle(crossed(*names, place)))
            for place, names in enumerate((("a-1-0", "a-1-1"), ("a-1-1", "a-1-0")))
        ]
    assert [task.result().status for task in tasks] == [200, 200]


def test_in_threads_it_is_the_same() -> None:
    done: list[int] = []
    fails: set[int] = {3}
    receiver = Receiver(TEXT, MemoryDatabase())

    @receiver.on("**")
    def paid(message: Message, _: Any) -> None:
        if message.sequence in fails:
            raise ValueError("not this one")
        done.append(message.sequence)

    answer = receiver.handle(batch(1, 2, 3, 4))
    assert (answer.status, accepted(answer)) == (500, "2")
    fails.clear()
    assert receiver.handle(batch(3, 4)).status == 200
    assert receiver.handle(batch(1, 2, 3, 4)).ended is Ended.DUPLICATE
    # Undone with the transaction, and done again by itself.
    assert done == [1, 2, 1, 2, 3, 4]
    assert receiver.handle(batch(5, 6)).status == 200
    assert receiver.totals.gaps == 0


# ------------------------------------------------------------ for development


async def post(url: str, request: Request) -> tuple[int, str | None]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=request.body, headers=dict(request.headers)) as response,
    ):
        return response.status, response.headers.get("X-Accepted-Through")


def outcomes(seen: Sequence[Handled]) -> list[tuple[int, Outcome]]:
    return [(each.message.sequence, each.outcome) for each in seen if each.message]


async def test_the_development_receiver_counts_each_delivery() -> None:
    seen: list[Handled] = []

    def refuse(message: Message) -> str | None:
        return "never" if message.sequence == 3 else None

    receiver = DevelopmentReceiver([SECRET], on_request=seen.append, refuse=refuse)
    async with receiver.serve() as url:
        assert await post(url, batch(1, 2)) == (200, None)
        assert await post(url, batch(2, 3, 4)) == (422, "2")
    assert outcomes(seen) == [
        (1, Outcome.ACCEPTED), (2, Outcome.ACCEPTED), (2, Outcome.DUPLICATE), (3, Outcome.REFUSED),
    ]  # fmt: skip


async def test_it_fails_in_the_middle_of_a_batch_and_says_where() -> None:
    seen: list[Handled] = []
    receiver = DevelopmentReceiver(
        [SECRET], fail_rate=0.5, faults=[Fault.ERROR], on_request=seen.append
    )
    done, answers = 0, set()
    async with receiver.serve() as url:
        while done < 60:
            numbers = range(done + 1, done + 6)
            status, said = await post(url, batch(*numbers))
            answers.add((status, said is None))
            if status == 200:
                done = numbers[-1]
            elif said is not None:
                done = int(said)
    taken = {n for n, outcome in outcomes(seen) if outcome is Outcome.ACCEPTED}
    assert taken == set(range(1, max(taken) + 1))
    assert receiver.totals().good
    assert (500, False) in answers


async def test_what_is_accepted_behind_is_accepted() -> None:
    behind = DevelopmentReceiver([SECRET], refuse=lambda m: "no" if m.sequence == 3 else None)
    async with behind.serve() as its_url, forwarding(its_url, None) as forward:
        before = DevelopmentReceiver([SECRET], forward=forward)
        async with before.serve() as url:
            assert await post(url, batch(1, 2, 3, 4)) == (422, "2")
            assert await post(url, batch(3, 4)) == (422, "2")
    assert behind.totals().accepted == before.totals().accepted == 2


async def test_what_is_not_accepted_behind_is_not_accepted_though_it_is_alone() -> None:
    async def forward(*_: Any) -> Passed:
        return Passed(200, (("X-Accepted-Through", "2"),))

    before = DevelopmentReceiver([SECRET], forward=forward)
    async with before.serve() as url:
        assert await post(url, batch(3)) == (200, "2")
    assert before.totals().accepted == 0
