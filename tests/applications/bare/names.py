"""Every public name, what those say that need an extra, and a receiver on SQLite."""

import asyncio
import importlib
import inspect
import pkgutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from posting import post_asgi, post_wsgi

import outbox
import outbox.testing
from outbox.errors import MissingExtra
from outbox.receiver import MemoryDatabase, Receiver, verify
from outbox.receiver.adapters import asgi, wsgi

SIDES = ("drivers", "producers", "receiver", "store.schema", "testing")
"""Packages whose modules need nothing else, but those that are named here."""
OTHERS = {
    "outbox.receiver.adapters.aiohttp": "aiohttp",
    "outbox.receiver.proxy": "aiohttp",
    "outbox.testing.delivery_pass": "the relay",
    "outbox.testing.fixtures": "pytest",
    "outbox.testing.post": "aiohttp",
    "outbox.testing.reset": "the relay",
}
INSTALL_RELAY = "run: pip install 'outbox-relay[relay]'"


def missing(call, *arguments):
    """What a call says that needs an extra."""
    try:
        call(*arguments)
    except MissingExtra as error:
        text = str(error)
    else:
        raise AssertionError(f"{call} needs no extra")
    assert "\n" not in text
    return text


def check_names():
    for module in ("outbox", "outbox.receiver", "outbox.testing", "outbox.sync"):
        loaded = importlib.import_module(module)
        assert set(loaded.__all__) <= set(dir(loaded)), module
        for name in loaded.__all__:
            assert getattr(loaded, name) is not None, name
    # What editors and documentation tools do.
    assert dict(inspect.getmembers(outbox))["Relay"].__name__ == "Relay"
    namespace = {}
    exec("from outbox import *", namespace)  # noqa: S102
    assert namespace["Relay"] is outbox.Relay


def check_modules():
    importlib.import_module("outbox.alembic")
    for side in SIDES:
        package = importlib.import_module(f"outbox.{side}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError:
                assert found.name in OTHERS, found.name
            else:
                assert found.name not in OTHERS, found.name


def check_what_needs_an_extra():
    for name, call in (
        ("outbox.Relay", outbox.Relay),
        ("outbox.fastapi.lifespan", outbox.fastapi.lifespan),
        ("outbox.testing.deliver_now", outbox.testing.deliver_now),
        ("outbox.testing.deliver_now_async", outbox.testing.deliver_now_async),
        ("outbox.testing.reset", outbox.testing.reset),
        ("outbox.testing.send", outbox.testing.send),
    ):
        text = missing(call, "postgresql://localhost/app")
        assert text.startswith(f"{name} needs the package "), text
        assert text.endswith(INSTALL_RELAY), text
    for command in ([], ["relay"]):
        ended = subprocess.run(
            [sys.executable, "-m", "outbox", *command], capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout) == (3, ""), ended
        assert ended.stderr.startswith("outbox: the command line needs the package "), ended
        assert ended.stderr.endswith(f"{INSTALL_RELAY}\n"), ended
        assert ended.stderr.count("\n") == 1
    public_key = "whpk_" + "A" * 43
    for call in (
        lambda: Receiver(public_key, MemoryDatabase()),
        lambda: verify({}, b"", public_key),
        lambda: outbox.testing.sign("whsk_" + "A" * 43, "id", b""),
    ):
        assert missing(call).endswith("run: pip install 'outbox-relay[ed25519]'")


def check_receiver_on_sqlite():
    sender = outbox.testing.FakeSender()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "shop.db")
        receiver = Receiver(sender.secret, str(path))

        @receiver.on("order.paid")
        def paid(delivery, connection):
            connection.execute("CREATE TABLE IF NOT EXISTS paid (n integer)")
            connection.execute("INSERT INTO paid VALUES (?)", (delivery.data["order"],))

        first, second = (sender.event("order.paid", {"order": n}, key="k") for n in (1, 2))
        app = wsgi.WSGI(receiver)
        for _ in range(2):
            assert post_wsgi(app, first) == 200
        assert asyncio.run(post_asgi(asgi.ASGI(receiver), second)) == 200
        connection = sqlite3.connect(path)
        assert connection.execute("SELECT n FROM paid").fetchall() == [(1,), (2,)]
        connection.close()
        assert receiver.totals.requests.total() == 3


if __name__ == "__main__":
    check_names()
    check_modules()
    check_what_needs_an_extra()
    check_receiver_on_sqlite()
