"""Two receivers to measure, as `uvicorn benchmarks.shops:ours` and `:bare`.

`bare` is a minimal receiver: FastAPI, a pool, one INSERT per request; it verifies nothing, and
stores duplicates twice. `ours` is the same effect behind the adapter, with the inbox in the same
database.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson
from fastapi import FastAPI, Request, Response

from outbox.receiver import AsyncReceiver, Message
from outbox.receiver.adapters.asgi import Middleware

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

INSERT = "INSERT INTO public.paid (event, n) VALUES ($1, $2)"
POOL = 8

_pool: list[asyncpg.Pool] = []


@contextlib.asynccontextmanager
async def _lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with asyncpg.create_pool(
        os.environ["DATABASE_URL"], min_size=POOL, max_size=POOL
    ) as made:
        _pool.append(made)
        yield


@contextlib.asynccontextmanager
async def _transaction() -> AsyncIterator[Any]:
    async with _pool[0].acquire() as connection, connection.transaction():
        yield connection


bare = FastAPI(lifespan=_lifespan)


@bare.post("/hooks")
async def receive(request: Request) -> Response:
    event = orjson.loads(await request.body())
    await _pool[0].execute(INSERT, event["id"], event["data"]["n"])
    return Response()


receiver = AsyncReceiver(os.environ["OUTBOX_SECRET"], _transaction)


@receiver.on("order.paid")
async def paid(delivery: Message, connection: Any) -> None:
    await connection.execute(INSERT, delivery.event_id, delivery.data["n"])


ours = FastAPI(lifespan=_lifespan)
ours.add_middleware(Middleware, receiver=receiver, path="/hooks")
