"""Changes by operators, with the real loop that plans, sends and repeats them.

A plan adds steps in place of statements.  The message is one call, which executes all of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

import asyncpg
import orjson

from outbox.store import change as real
from outbox.store.change import WRITE_ENTRIES
from outbox.store.channels import NOTIFY_ALL
from outbox.store.routing_change import BEGIN_CHANGE_OF
from tests.sim.database.engine import EXCLUSIVE, Wait, perform
from tests.sim.stores import channels, routing_change

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Steps, Transaction
    from tests.sim.database.tables import Database

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Change:
    """Stands in for `outbox.store.change.Change`, with steps in place of statements."""

    def __init__(self, change: real.Change) -> None:
        self._change = change
        self.db: Connection = change.db.connection
        self.actor = change.actor
        self.journal = change.journal

    @property
    def routing(self) -> bool:
        return self._change.routing

    @routing.setter
    def routing(self, routing: bool) -> None:
        self._change.routing = routing

    def write(
        self,
        step: Callable[Concatenate[Database, Transaction, P], object],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        statement: Any = partial(step, **kwargs)
        self._change.write(statement, *args)

    def write_early(
        self,
        step: Callable[Concatenate[Database, Transaction, P], object],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        statement: Any = partial(step, **kwargs)
        self._change.write_early(statement, *args)


class Session:
    """A simulated connection with the methods of a real one that the real loop calls."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def fetchrow(self, _statement: str, request: UUID) -> dict[str, int | bool]:
        version, made = await self.connection.call(read_beginning, request)
        return {"version": version, "is_made": made, "has_batch": True}

    async def fetchval(self, _statement: str, request: UUID) -> bool:
        return await self.connection.call(is_made, request)

    async def write_together(self, *calls: Any, lock_timeout_s: float) -> None:
        await self.connection.call(write_message, calls, lock_timeout_s)

    async def reopen(self) -> Session:
        return Session(await self.connection.reopen())

    def terminate(self) -> None:
        self.connection.terminate()


async def make_change(
    connection: Connection,
    schema: str,
    actor: str,
    plan: Callable[[Change], Awaitable[T]],
    *,
    routing: bool = True,
    long: bool = False,
) -> T:
    async def keep(_: Connection, __: UUID, result: T) -> T:
        return result

    return await make_change_and_read(
        connection, schema, actor, plan, keep, routing=routing, long=long
    )


async def make_change_and_read(
    connection: Connection,
    schema: str,
    actor: str,
    plan: Callable[[Change], Awaitable[T]],
    read_back: Callable[[Connection, UUID, T], Awaitable[R]],
    *,
    routing: bool = True,
    long: bool = False,
) -> R:
    async def plan_steps(change: real.Change) -> T:
        return await plan(Change(change))

    async def read(session: Session, request: UUID, result: T) -> R:
        return await read_back(session.connection, request, result)

    session: Any = Session(connection)
    return await real.make_change_and_read(
        session, schema, actor, plan_steps, read, routing=routing, long=long
    )


# ------------------------------------------------------------------------ steps


def is_made(db: Database, tx: Transaction, request: UUID) -> bool:
    return tx.get(db.journalled, request) is not None


def read_beginning(db: Database, tx: Transaction, request: UUID) -> tuple[int, bool]:
    """The routing version, and whether the request is journalled."""
    row = tx.get(db.cursor, 1)
    assert row is not None
    return row["version"], is_made(db, tx, request)


def write_message(
    db: Database, tx: Transaction, calls: Sequence[Any], lock_timeout_s: float
) -> Steps[None]:
    """The statements of one message, each with a snapshot of its own."""
    tx.lock_timeout_s = lock_timeout_s
    steps = {
        BEGIN_CHANGE_OF: routing_change.begin_change_of,
        WRITE_ENTRIES: write_entries,
        NOTIFY_ALL: channels.notify_all,
    }
    for statement, *arguments in calls:
        if db.rng.random() < 0.2:
            yield db.pause_s()
        yield from perform(steps.get(statement, statement)(db, tx, *arguments))


def write_entries(
    db: Database, tx: Transaction, text: str, actor: str, request: UUID
) -> Steps[None]:
    # The index on requests is unique.
    yield Wait(db.journalled, request, EXCLUSIVE)
    if is_made(db, tx, request):
        raise asyncpg.UniqueViolationError("the request is journalled already")
    entries = orjson.loads(text)
    for entry in entries:
        if entry["batch_as"] is not None:
            entry["data"][entry["batch_as"]] = routing_change.next_batch(db)
        if entry["with_job"]:
            entry["data"]["job"] = new_job(db, tx)
        endpoint_id = entry["endpoint_id"] and UUID(entry["endpoint_id"])
        routing_change.add_to_journal(db, tx, entry["kind"], actor, endpoint_id, entry["data"])
    tx.put(db.journalled, request, {"request": request, "data": entries[0]["data"]})


def new_job(db: Database, tx: Transaction) -> int:
    """The replay job that this message has added."""
    job: int = max(tx.writes[db.replay_job])
    return job
