"""Receiver that applies transfers to accounts: FastAPI, asyncpg, PostgreSQL.

OUTBOX_SECRET=whsec_… DATABASE_URL=postgresql://… uvicorn fastapi_postgres:app
"""

import contextlib
import os

import asyncpg
from fastapi import FastAPI

from outbox.receiver import AsyncReceiver
from outbox.receiver.adapters.asgi import Middleware

# A function, because the pool is created when the application starts.
receiver = AsyncReceiver(os.environ["OUTBOX_SECRET"], lambda: app.state.pool)


@receiver.on("account.moved")
async def apply_transfer(delivery, connection):
    await connection.execute(
        "INSERT INTO account VALUES ($1, $2) "
        "ON CONFLICT (id) DO UPDATE SET cents = account.cents + excluded.cents",
        delivery.data["account"],
        delivery.data["cents"],
    )


@receiver.on("**")
async def record_processed(delivery, connection):
    await connection.execute("INSERT INTO processed (event) VALUES ($1)", delivery.event_id)


@contextlib.asynccontextmanager
async def lifespan(app):
    async with asyncpg.create_pool(os.environ["DATABASE_URL"]) as app.state.pool:
        await app.state.pool.execute("""
            CREATE TABLE IF NOT EXISTS account (id bigint PRIMARY KEY, cents bigint NOT NULL);
            CREATE TABLE IF NOT EXISTS processed (n bigserial PRIMARY KEY, event text NOT NULL)
        """)
        await receiver.start()
        yield


app = FastAPI(lifespan=lifespan)
app.add_middleware(Middleware, receiver=receiver, path="/hooks")


@app.get("/processed")
async def processed():
    rows = await app.state.pool.fetch("SELECT event FROM processed ORDER BY n")
    return [row["event"] for row in rows]
