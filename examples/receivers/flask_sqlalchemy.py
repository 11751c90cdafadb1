"""Receiver that applies transfers to accounts: Flask, SQLAlchemy, PostgreSQL or SQLite.

OUTBOX_SECRET=whsec_… DATABASE_URL=postgresql+psycopg://… flask --app flask_sqlalchemy run
"""

import os

from flask import Flask, jsonify
from sqlalchemy import create_engine, text

from outbox.receiver import Receiver
from outbox.receiver.adapters.wsgi import Middleware

engine = create_engine(os.environ["DATABASE_URL"])
with engine.begin() as db:
    db.execute(
        text("CREATE TABLE IF NOT EXISTS account (id bigint PRIMARY KEY, cents bigint NOT NULL)")
    )
    db.execute(
        text("CREATE TABLE IF NOT EXISTS processed (n serial PRIMARY KEY, event text NOT NULL)")
    )

receiver = Receiver(os.environ["OUTBOX_SECRET"], engine)


@receiver.on("account.moved")
def apply_transfer(delivery, connection):
    connection.execute(
        text(
            "INSERT INTO account VALUES (:account, :cents) "
            "ON CONFLICT (id) DO UPDATE SET cents = account.cents + excluded.cents"
        ),
        delivery.data,
    )


@receiver.on("**")
def record_processed(delivery, connection):
    connection.execute(
        text("INSERT INTO processed (event) VALUES (:event)"), {"event": delivery.event_id}
    )


app = Flask(__name__)
app.wsgi_app = Middleware(app.wsgi_app, receiver, "/hooks")


@app.get("/processed")
def processed():
    with engine.begin() as db:
        return jsonify(
            [event for (event,) in db.execute(text("SELECT event FROM processed ORDER BY n"))]
        )
