"""A FastAPI application that publishes with SQLAlchemy and runs a relay, started by the tests."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

import outbox
import outbox.fastapi

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

engine = create_async_engine(os.environ["DATABASE_URL"])
sessions = async_sessionmaker(engine)


@asynccontextmanager
async def own(_: FastAPI) -> AsyncIterator[dict[str, Any]]:
    """The application's own lifespan."""
    print("own lifespan begins", flush=True)
    yield {"shop": "a shop"}
    print("own lifespan ends", flush=True)
    await engine.dispose()


app = FastAPI(
    lifespan=outbox.fastapi.lifespan(
        engine.url, around=own, allow_networks="127.0.0.0/8", lease_s=2
    )
)


@app.post("/orders/{order}")
async def pay(order: int, request: Request) -> dict[str, Any]:
    async with sessions.begin() as session:
        await outbox.publish(session, "order.paid", {"order": order})
    return {"shop": request.state.shop, "pid": os.getpid()}


@app.get("/readyz")
async def readyz(request: Request) -> dict[str, Any]:
    return {"relay": request.app.state.outbox_relay.unready_reason}
