"""Receiver that applies transfers to accounts: aiohttp and a SQLite file.

OUTBOX_SECRET=whsec_… SHOP_FILE=shop.sqlite PORT=9000 python aiohttp_sqlite.py
"""

import contextlib
import os
import sqlite3

from aiohttp import web

from outbox.receiver import Receiver
from outbox.receiver.adapters.aiohttp import handler

FILE = os.environ.get("SHOP_FILE", "shop.sqlite")
with contextlib.closing(sqlite3.connect(FILE)) as db:
    db.executescript("""
        CREATE TABLE IF NOT EXISTS account (id INTEGER PRIMARY KEY, cents INTEGER NOT NULL);
        CREATE TABLE IF NOT EXISTS processed (n INTEGER PRIMARY KEY, event TEXT NOT NULL)
    """)

receiver = Receiver(os.environ["OUTBOX_SECRET"], FILE)


@receiver.on("account.moved")
def apply_transfer(delivery, connection):
    connection.execute(
        "INSERT INTO account VALUES (:account, :cents) "
        "ON CONFLICT (id) DO UPDATE SET cents = cents + excluded.cents",
        delivery.data,
    )


@receiver.on("**")
def record_processed(delivery, connection):
    connection.execute("INSERT INTO processed (event) VALUES (?)", (delivery.event_id,))


async def processed(request):
    with contextlib.closing(sqlite3.connect(FILE)) as db:
        return web.json_response(
            [event for (event,) in db.execute("SELECT event FROM processed ORDER BY n")]
        )


app = web.Application()
app.router.add_route("*", "/hooks", handler(receiver))
app.router.add_get("/processed", processed)

if __name__ == "__main__":
    web.run_app(app, host="127.0.0.1", port=int(os.environ.get("PORT", "9000")), print=None)
