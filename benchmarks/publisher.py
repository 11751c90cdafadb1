"""A publisher: transactions with one event, or a hundred, through one driver.

Either with the driver's own INSERT, or with `publish` or `publish_many`.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, Any

import orjson

from benchmarks.producer import FILLER
from benchmarks.receiver import new_event_loop, say
from outbox import Event
from outbox.drivers.blocking import resolve
from tests.producers.applications import (
    Application,
    Asyncpg,
    Django,
    Psycopg,
    Psycopg2,
    PsycopgAsync,
    SQLAlchemyAsyncSession,
    SQLAlchemyConnection,
    SQLAlchemySession,
    play,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

DRIVERS: dict[str, type[Application]] = {
    "asyncpg": Asyncpg,
    "psycopg, asyncio": PsycopgAsync,
    "psycopg": Psycopg,
    "psycopg2": Psycopg2,
    "SQLAlchemy AsyncSession": SQLAlchemyAsyncSession,
    "SQLAlchemy Connection": SQLAlchemyConnection,
    "SQLAlchemy Session": SQLAlchemySession,
    "Django": Django,
}
MANY = 100
WARM_UP = 20

INSERT = "INSERT INTO relay.outbox (type, key, payload) VALUES ({})"
NUMBERED = INSERT.format("$1, $2, $3::jsonb")
FORMAT = INSERT.format("%s, %s, %s::jsonb")
NAMED = INSERT.format(":type, :key, CAST(:payload AS jsonb)")


def inserts(application: Application) -> Callable[[str, dict[str, Any]], Any]:
    """The driver's own way to insert an event, as an application would write it."""
    handle = application.handle
    match application:
        case Asyncpg():
            return lambda key, payload: handle.execute(
                NUMBERED, "order.paid", key, orjson.dumps(payload).decode()
            )
        case SQLAlchemyConnection() | SQLAlchemyAsyncSession():
            from sqlalchemy import text

            statement = text(NAMED)
            return lambda key, payload: handle.execute(
                statement,
                {"type": "order.paid", "key": key, "payload": orjson.dumps(payload).decode()},
            )
        case Django() | Psycopg2():

            def insert(key: str, payload: dict[str, Any]) -> None:
                with handle.cursor() as cursor:
                    cursor.execute(FORMAT, ("order.paid", key, orjson.dumps(payload).decode()))

            return insert
        case _:
            return lambda key, payload: handle.execute(
                FORMAT, ("order.paid", key, orjson.dumps(payload).decode())
            )


def transaction(application: Application, what: str) -> Callable[[int], Awaitable[None]]:
    """One transaction of what is measured; it is given the number of its first event."""
    insert = inserts(application)

    async def once(n: int) -> None:
        await application.begin()
        key, payload = f"order-{n}", {"n": n, "filler": FILLER}
        if what == "insert":
            await resolve(insert(key, payload))
        elif what == "publish":
            await application.call("publish", "order.paid", payload, key=key)
        else:
            await application.call(
                "publish_many",
                [
                    Event("order.paid", {"n": each, "filler": FILLER}, key=f"order-{each}")
                    for each in range(n, n + MANY)
                ],
            )
        await application.commit()

    return once


async def measure(given: argparse.Namespace) -> None:
    """Report the events per second."""
    # psycopg prepares a repeated statement by default, which the tests turn off.
    application = DRIVERS[given.driver](given.dsn, prepares=True)
    events = MANY if given.what == "publish_many" else 1

    async def scenario(application: Application) -> None:
        await application.open()
        once = transaction(application, given.what)
        for n in range(WARM_UP):
            await once(n)
        done, started = 0, time.monotonic()
        while time.monotonic() < started + given.seconds:
            await once(done)
            done += events
        say({"per_s": done / (time.monotonic() - started)})

    await play(application, scenario)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dsn")
    parser.add_argument("--driver", choices=DRIVERS, required=True)
    parser.add_argument("--what", choices=("insert", "publish", "publish_many"), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
