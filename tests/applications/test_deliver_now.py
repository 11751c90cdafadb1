"""`deliver_now` runs a relay's pass in process, with receivers of the test."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI, Request
from flask import Flask

import outbox
from outbox.errors import Conflict, SchemaMissing, UsageError
from outbox.receiver import AsyncReceiver, MemoryDatabase, Receiver, verify
from outbox.receiver.adapters import asgi, wsgi
from outbox.testing import deliver_now, deliver_now_async, delivery_pass
from tests.support.relay import (
    SLOW_RETRY,
    Network,
    add_endpoint,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.receiver import Request as Received
    from outbox.testing import DeliveryReport
    from tests.support.postgres import Database

pytestmark = pytest.mark.system

pytest_plugins = ["outbox.testing.fixtures"]


def data(report: DeliveryReport) -> list[Any]:
    return [message.data for message in report.delivered]


async def test_what_is_committed_is_delivered_in_order_and_recorded(database: Database) -> None:
    await add_endpoint(database, "shop", types=["order.*"])
    await add_endpoint(database, "audit", lanes=3)
    async with database.connection() as connection, database.connection() as other:
        transaction = other.transaction()
        await transaction.start()
        await outbox.publish(other, "order.paid", {"n": 9}, key="a")
        async with connection.transaction():
            for n in range(5):
                await outbox.publish(connection, "order.paid", {"n": n}, key="a")
            await outbox.publish(connection, "user.added", {"n": 5})
        report = await deliver_now_async(database.dsn)
        assert [each.messages[0].data["n"] for each in report.to("shop")] == [0, 1, 2, 3, 4]
        assert {each.messages[0].sequence for each in report.to("shop")} == {1, 2, 3, 4, 5}
        assert len(report.to("audit")) == 6
        assert (report.dead_letters, report.pending) == ((), ())
        assert all(each.delivered and each.status == 204 for each in report.requests)
        # What is committed later is delivered by the next pass, once.
        await transaction.commit()
        report = await deliver_now_async(database.dsn)
    assert data(report) == [{"n": 9}, {"n": 9}]
    assert (await deliver_now_async(database.dsn)).requests == ()
    assert await exceptions(database) == {}
    assert await fetchval(database, "SELECT count(*) FROM replica") == 0


def fastapi_app(receiver: AsyncReceiver) -> FastAPI:
    app = FastAPI()
    app.add_middleware(asgi.Middleware, receiver=receiver, path="/shop")  # type: ignore[arg-type]
    return app


def flask_app(receiver: Receiver) -> Flask:
    app = Flask("shop")
    app.wsgi_app = wsgi.Middleware(app.wsgi_app, receiver, "/shop")  # type: ignore[method-assign]
    return app


@pytest.mark.parametrize(
    ("kind", "application"),
    sampled(
        [
            (AsyncReceiver, lambda receiver: receiver),
            (Receiver, lambda receiver: receiver),
            (AsyncReceiver, fastapi_app),
            (Receiver, flask_app),
        ]
    ),
    ids=["AsyncReceiver", "Receiver", "ASGI", "WSGI"],
)
async def test_receivers_verify_what_the_relay_signed(
    database: Database, kind: type[Any], application: Callable[[Any], Any]
) -> None:
    added = await add_endpoint(database, "shop")
    receiver = kind(added.secret, MemoryDatabase())
    handled: list[int] = []
    receiver.on("a.b")(lambda delivery, _: handled.append(delivery.data))
    await publish(database, 1, 2, 3, key="k")
    report = await deliver_now_async(database.dsn, {"shop": application(receiver)})
    assert handled == [1, 2, 3]
    assert [each.status for each in report.requests] == [200, 200, 200]
    assert report.requests[0].response_body.endswith(b"\n")


async def test_an_application_sees_an_ordinary_request(database: Database) -> None:
    added = await add_endpoint(database, "shop", url="http://receiver.test:8080/h%C3%A9/x?q=%20a")
    app = FastAPI()

    @app.post("/{path:path}")
    async def hook(path: str, q: str, request: Request) -> dict[str, Any]:
        body = await request.body()
        verify(request.headers, body, added.secret)
        return {
            "path": path,
            "q": q,
            "host": request.headers["host"],
            "n": json.loads(body)["data"],
        }

    await publish(database, 7)
    report = await deliver_now_async(database.dsn, app)
    (sent,) = report.requests
    assert json.loads(sent.response_body) == {
        "path": "hé/x", "q": " a", "host": "receiver.test:8080", "n": 7,
    }  # fmt: skip


async def test_failures_are_left_for_a_retry_or_are_dead_letters(database: Database) -> None:
    await add_endpoint(database, "shop", retry=SLOW_RETRY)
    await add_endpoint(database, "billing", retry=SLOW_RETRY)
    await publish(database, 1, 2, key="k")

    async def busy(request: Received) -> int:
        return 503

    report = await deliver_now_async(
        database.dsn, {"shop": busy, "billing": lambda _: (400, {"X-Reason": "no"})}
    )
    assert [each.status for each in report.to("shop")] == [503]
    (left,) = report.pending
    assert (left.endpoint, left.sequence, left.pending, left.attempts, left.reason) == (
        "shop", 1, 2, 1, "retry",
    )  # fmt: skip
    assert left.next_attempt_at is not None
    assert [(each.endpoint, each.reason, each.status) for each in report.dead_letters] == [
        ("billing", "refused", 400),
        ("billing", "refused", 400),
    ]
    assert report.to("billing")[0].response_headers == (("X-Reason", "no"),)
    # A later pass has its own dead letters, and does not retry before the time.
    report = await deliver_now_async(database.dsn)
    assert (report.requests, report.dead_letters) == ((), ())
    assert [each.endpoint for each in report.pending] == ["shop"]


@pytest.mark.full
async def test_a_due_retry_is_sent(database: Database) -> None:
    await add_endpoint(database, "shop", retry=SLOW_RETRY)
    await publish(database, 1)
    await deliver_now_async(database.dsn, lambda _: 503)
    async with database.at_hand() as connection:
        await connection.execute("UPDATE lane_progress SET next_attempt_at = clock_timestamp()")
    report = await deliver_now_async(database.dsn)
    assert [each.headers["x-attempt"] for each in report.requests] == ["2"]
    assert report.pending == ()


@pytest.mark.full
async def test_what_a_receiver_raises_is_raised_after_the_pass(database: Database) -> None:
    await add_endpoint(database, "shop", retry=SLOW_RETRY)
    await publish(database, 1)

    def fails(request: Received) -> None:
        pytest.fail("the body is wrong")

    with pytest.raises(pytest.fail.Exception, match="the body is wrong"):
        await deliver_now_async(database.dsn, fails)
    assert await fetchval(database, "SELECT status FROM attempt") == 500
    await publish(database, 2, type="c.d", key="other")
    async with database.at_hand() as connection:
        await connection.execute("UPDATE lane_progress SET next_attempt_at = clock_timestamp()")
    report = await deliver_now_async(database.dsn, fails, raise_errors=False)
    assert [each.status for each in report.requests] == [500]
    assert isinstance(report.requests[0].error, pytest.fail.Exception)


@pytest.mark.full
async def test_batches_and_paused_endpoints(database: Database) -> None:
    await add_endpoint(database, "shop", batch_max=10)
    await add_endpoint(database, "billing")
    async with database.at_hand() as connection:
        await connection.execute("UPDATE endpoint SET state = 'paused' WHERE name = 'billing'")
        async with connection.transaction():
            for n in range(5):
                await outbox.publish(connection, "a.b", n, key="k")
    report = await deliver_now_async(database.dsn)
    assert data(report) == [0, 1, 2, 3, 4]
    assert len(report.requests) < 5
    assert [(each.endpoint, each.pending, each.reason) for each in report.pending] == [
        ("billing", 5, "paused")
    ]


@pytest.mark.full
async def test_a_delayed_event_is_left(database: Database) -> None:
    await add_endpoint(database, "shop")
    async with database.at_hand() as connection:
        await connection.execute(
            "SELECT publish(type => 'a.b', payload => '1', "
            "deliver_at => clock_timestamp() + interval '1 hour')"
        )
        assert (await deliver_now_async(database.dsn)).requests == ()
        await connection.execute("UPDATE future_event SET deliver_at = clock_timestamp()")
    assert data(await deliver_now_async(database.dsn)) == [1]


# ------------------------------------------------------------------ the blocking form


async def test_receivers_run_in_the_thread_of_the_test(
    database: Database, outbox_deliver_now: Callable[..., DeliveryReport]
) -> None:
    await add_endpoint(database, "shop")
    await publish(database, 1, 2)
    threads: list[int] = []

    def receive(request: Received) -> int:
        # As Django's database layer requires.
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        threads.append(threading.get_ident())
        return 200

    def test() -> int:
        report = deliver_now(database.dsn, receive)
        assert sorted(data(report)) == [1, 2]
        return threading.get_ident()

    thread = await asyncio.to_thread(test)
    assert threads == [thread, thread]
    assert outbox_deliver_now.args == (None,)  # type: ignore[attr-defined]


@pytest.mark.parametrize("blocking", sampled([True, False]))
async def test_a_receiver_may_run_out_of_prepared_responses(
    database: Database, blocking: bool
) -> None:
    await add_endpoint(database, "shop", retry=SLOW_RETRY)
    await publish(database, 1)
    responses: Iterator[int] = iter(())

    def receive(request: Received) -> int:
        return next(responses)

    run = partial(asyncio.to_thread, deliver_now) if blocking else deliver_now_async
    with pytest.raises(RuntimeError, match="the receiver raised StopIteration"):
        await run(database.dsn, receive)


async def test_it_does_not_block_an_event_loop(database: Database) -> None:
    with pytest.raises(UsageError, match="deliver_now_async"):
        deliver_now(database.dsn)


# ------------------------------------------------------------------------- refusals


async def test_a_running_relay_is_named(database: Database) -> None:
    async with running(database, Network()) as relay:
        await relay.started.wait()
        with pytest.raises(Conflict, match=r'the relay ".+" is running on this database'):
            await deliver_now_async(database.dsn)


@pytest.mark.full
async def test_wrong_receivers_are_refused(database: Database) -> None:
    await add_endpoint(database, "shop")
    with pytest.raises(UsageError, match='no endpoint "shopp"; there are: shop'):
        await deliver_now_async(database.dsn, {"shopp": lambda _: 200})
    with pytest.raises(UsageError, match="int is not a receiver"):
        await deliver_now_async(database.dsn, {"shop": 204})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="takes neither a request"):
        await deliver_now_async(database.dsn, {"shop": lambda: 200})
    await publish(database, 1)
    with pytest.raises(UsageError, match="a function returned str"):
        await deliver_now_async(database.dsn, lambda _: "ok")


@pytest.mark.full
async def test_a_pass_ends_although_a_receiver_does_not(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_endpoint(database, "shop")
    await publish(database, 1)
    limits: list[asyncio.Timeout] = []

    def timeout(_: float) -> asyncio.Timeout:
        limits.append(asyncio.timeout(60))
        return limits[-1]

    async def hangs(request: Received) -> None:
        # The time is up when the receiver has the request, however long that took.
        limits[-1].reschedule(0)
        await asyncio.Event().wait()

    monkeypatch.setattr(delivery_pass, "PASS_DRAIN_S", 0.1)
    with monkeypatch.context() as patched:
        patched.setattr(
            delivery_pass, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": timeout})
        )
        with pytest.raises(TimeoutError, match=r"not done after 7 s: deliveries are pending .shop"):
            await deliver_now_async(database.dsn, hangs, timeout_s=7.0)
    assert await fetchval(database, "SELECT count(*) FROM replica") == 0
    # What was in flight is sent again.
    assert data(await deliver_now_async(database.dsn)) == [1]


@pytest.mark.full
async def test_a_receivers_time_out_is_the_endpoints(database: Database) -> None:
    await add_endpoint(database, "shop", timeout_s=0.1, retry=SLOW_RETRY)
    await publish(database, 1)

    async def hangs(request: Received) -> None:
        await asyncio.Event().wait()

    report = await deliver_now_async(database.dsn, hangs)
    assert [each.status for each in report.requests] == [None]
    assert await fetchval(database, "SELECT error FROM attempt") is not None


async def test_without_a_schema_it_says_what_to_run(empty_database: Database) -> None:
    with pytest.raises(SchemaMissing, match="run: outbox migrate"):
        await deliver_now_async(empty_database.dsn)
