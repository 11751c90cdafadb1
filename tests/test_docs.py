"""The documents are correct: their examples run, their links lead somewhere, and the reference
pages are the generated ones."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from hashlib import sha256
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from uuid import uuid4

import asyncpg
import click
import orjson
import pytest
from alembic import command as alembic
from alembic.config import Config
from sqlalchemy import create_engine

import outbox as package
from docs.tools.generate import PAGES, REFERENCE
from outbox import receiver as receiver_library
from outbox.cli.error_pages import DOCUMENTS_URL
from outbox.cli.error_pages import PAGES as ERROR_PAGES
from outbox.cli.main import COMMANDS, cli
from outbox.core.brokers.message import messages_of
from outbox.core.model.response import AttemptResult
from outbox.errors import UsageError
from outbox.leaves import DOCTOR
from outbox.receiver import AsyncReceiver, MemoryDatabase, Receiver
from outbox.store.connection.current_schema import status
from outbox.testing import FakeSender
from outbox_devtools.embedded.binaries import find_binaries
from tests.receiver.deliveries import delivery
from tests.receiver.streams.rigs import Settings as StreamSettings
from tests.receiver.streams.rigs import lane, streams_of
from tests.support import peers
from tests.support.api import make_token, serving
from tests.support.brokers.nats import nats_server
from tests.support.brokers.valkey import valkey
from tests.support.documents import (
    DOCUMENTS,
    EXECUTED,
    GUIDES,
    ROOT,
    Session,
    blocks,
    examples,
    read,
)
from tests.support.ports import free_port
from tests.support.relay import (
    OK,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    fetchval,
    publish,
    running,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.support.postgres import Database
    from tests.support.relay import Sent

RECEIVER_NAMES = {name: getattr(receiver_library, name) for name in receiver_library.__all__}
DOCS = "docs/"
INDEX = DOCS + "README.md"
NOT_RUN_MAX = 9
"""How many examples may have a reason not to run."""

RECEIVERS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "receivers").glob("**/*.md")
    if "node_modules" not in path.parts
)
"""Documents of the packages in other languages; tests/receivers follows them."""

GENERATED = {f"{DOCS}reference/{name}" for name in PAGES}


# ----------------------------------------------------------------- examples

FOLLOWED_ELSEWHERE = {
    "README.md",
    DOCS + "howto/deploy-on-kubernetes.md",  # tests/deploy/test_kubernetes_guide.py
    DOCS + "howto/publish-from-django.md",  # tests/django/test_guide.py
    *GUIDES.values(),
}
WITH_EXAMPLES = [each for each in DOCUMENTS if each not in FOLLOWED_ELSEWHERE and examples(each)]
SHOWN_FIRST = [
    DOCS + each
    for each in (
        "README.md",
        "concepts/receiving.md",
        "howto/back-up-and-restore.md",
        "howto/manage-endpoints.md",
        "howto/move-in-from-svix.md",
        "howto/publish-once-or-later.md",
        "howto/replay-dead-letters.md",
        "howto/test-an-application.md",
        "howto/webhooks-for-customers.md",
        "reference/http-api.md",
        "tutorial/write-a-receiver.md",
    )
]
"""Documents that the default tier follows; --full follows all."""
STAGES: dict[str, Callable[[Session], AbstractAsyncContextManager[None]]] = {}
"""What a document presumes, by its name: events, endpoints, a relay, variables."""


def stage(
    document: str,
) -> Callable[[Callable[[Session], AsyncIterator[None]]], None]:
    """Register the stage of a document; what follows its `yield` checks the effects."""

    def register(function: Callable[[Session], AsyncIterator[None]]) -> None:
        STAGES[DOCS + document] = asynccontextmanager(function)

    return register


@asynccontextmanager
async def an_endpoint(session: Session) -> AsyncIterator[None]:
    """The stage of a document that has none of its own."""
    await add_endpoint(session.database, "shop")
    yield


@pytest.mark.one_major
@pytest.mark.parametrize("document", sampled(WITH_EXAMPLES, lambda each: each in SHOWN_FIRST))
async def test_the_examples_of_a_document_run(
    document: str, database: Database, tmp_path: Path
) -> None:
    session = Session(database, tmp_path)
    async with STAGES.get(document, an_endpoint)(session):
        await session.follow(examples(document))


def test_every_stage_has_a_document() -> None:
    assert set(STAGES) <= set(WITH_EXAMPLES)


def test_an_example_that_does_not_run_has_a_reason() -> None:
    reasons = []
    for document in set(DOCUMENTS) - GENERATED:
        for block in blocks(read(document)):
            reasons += [block.not_run] if block.not_run else []
            assert block.language in EXECUTED | {"text"}, (document, block.text)
            hidden = block.language == "text" and re.search(r"^\$ ", block.text, re.MULTILINE)
            assert not hidden, (document, block.text)
    assert len(reasons) <= NOT_RUN_MAX
    named = re.findall(r"[\w/]*tests/[\w/]+\.py", " ".join(reasons))
    assert [each for each in named if not (ROOT / each).exists()] == []


@pytest.mark.parametrize("document", sorted(set(DOCUMENTS) - GENERATED))
def test_the_commands_that_a_document_mentions_exist(document: str) -> None:
    for mentioned in re.findall(r"`outbox ([^`]+)`", without_code(read(document))):
        command: click.Command = cli
        context = click.Context(cli)
        words = mentioned.split()
        while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z-]+", words[0]):
            found = command.get_command(context, words.pop(0))
            if found is None:
                # A group with a default, as `outbox replay --endpoint NAME`, has arguments.
                assert command.invoke_without_command, mentioned
                break
            command = found
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= known | {"--help"}, mentioned


def test_a_document_names_what_installs_the_commands_that_it_runs() -> None:
    # Whoever has the command `outbox` has the doctor.
    leaves = {each.name: each.leaf for each in COMMANDS if each.leaf not in (None, DOCTOR)}
    missing = []
    for document in set(DOCUMENTS) - GENERATED:
        text = read(document)
        shown = "".join(block.text for block in blocks(text) if block.language == "console")
        for name in re.findall(r"\boutbox (\w+)", shown):
            leaf = leaves.get(name)
            extras = ",".join(re.findall(r"outbox-relay\[([\w,]+)\]", text)).split(",")
            if leaf and leaf.distribution not in text and leaf.extra not in extras:
                missing.append((document, name))
    assert missing == []


@stage("tutorial/write-a-receiver.md")
async def _receiver(session: Session) -> AsyncIterator[None]:
    sender = FakeSender()
    async with asyncpg.create_pool(session.database.dsn, min_size=1, max_size=2) as pool:
        await pool.execute("CREATE TABLE public.orders AS SELECT 7 AS id, false AS shipped")
        with pytest.MonkeyPatch.context() as environ:
            environ.setenv("OUTBOX_SECRET", sender.secret)
            environ.setenv("DATABASE_URL", session.database.dsn)
            yield
            # As a server imports the module: without an event loop.
            module: dict[str, Any] = {}
            (example, *_) = examples(DOCS + "tutorial/write-a-receiver.md")
            await asyncio.to_thread(exec, example.text, module)
            app = module["app"]
            async with app.router.lifespan_context(app):
                response = await module["receiver"].handle(sender.event("order.paid", {"order": 7}))
        assert response.status == 200
        assert app.user_middleware[0].kwargs["receiver"] is module["receiver"]
        assert await pool.fetchval("SELECT shipped FROM public.orders")


@stage("concepts/receiving.md")
async def _newest(session: Session) -> AsyncIterator[None]:
    sender = FakeSender()
    async with asyncpg.create_pool(session.database.dsn, min_size=1, max_size=2) as pool:
        await pool.execute("CREATE TABLE public.customer AS SELECT '7' AS id, 'old' AS name")
        receiver = AsyncReceiver(sender.secret, pool)
        session.names = {"receiver": receiver}
        yield
        response = await receiver.handle(sender.event("customer.changed", {"name": "new"}, key="7"))
        assert response.status == 200
        assert await pool.fetchval("SELECT name FROM public.customer") == "new"


@stage("reference/receiver-library.md")
async def _inbox(session: Session) -> AsyncIterator[None]:
    sender = FakeSender()
    request = sender.event("order.paid", {"order": 7})
    async with asyncpg.create_pool(session.database.dsn, min_size=1, max_size=2) as pool:
        await pool.execute(receiver_library.Inbox().schema())
        session.names = {
            **RECEIVER_NAMES,
            "app": SimpleNamespace(state=SimpleNamespace(pool=pool)),
            "pool": pool,
            "headers": request.headers,
            "body": request.body,
            "secret": sender.secret,
        }
        yield
        assert session.names["result"].fresh
        assert await pool.fetchval("SELECT high FROM outbox_lane") == 1
        receiver = session.names["receiver"]
        receiver.on("**")(lambda *_: None)
        assert (await receiver.handle(sender.event("order.paid", {"order": 8}))).status == 200


@stage("howto/catch-up-a-receiver.md")
async def _catch_up(session: Session) -> AsyncIterator[None]:
    await add_endpoint(session.database, "shop")
    sender = FakeSender()
    session.rewrites[r"\b8081\b"] = str(free_port())
    warnings: list[object] = []
    async with asyncpg.create_pool(session.database.dsn, min_size=1, max_size=2) as pool:
        session.names = {
            **RECEIVER_NAMES,
            "asyncio": asyncio,
            "secret": sender.secret,
            "pool": pool,
            "log": SimpleNamespace(warning=lambda _, error: warnings.append(error)),
            "token": "obx_" + "A" * 43,
        }
        yield
        assert len(warnings) == 1, "the token is not valid"
        keeping = asyncio.create_task(session.names["keep_caught_up"]())
        await until(lambda: len(warnings) == 2, what="the next catch-up")
        keeping.cancel()


@stage("reference/message-formats.md")
async def _formats(session: Session) -> AsyncIterator[None]:
    await add_endpoint(session.database, "shop", format="thin")
    await publish(session.database, 7, key="order-7")
    sender = FakeSender(format_name="thin")
    session.names = {
        **RECEIVER_NAMES,
        "secret": sender.secret,
        "pool": MemoryDatabase(),
        "token": "obx_" + "A" * 43,
        "FetchClient": lambda *_: sender,
    }
    yield
    response = await session.names["receiver"].handle(sender.event("order.paid", 7))
    assert response.status == 200
    assert session.names["fetched"] == [7]
    assert await fetchval(session.database, "SELECT format FROM endpoint") == "cloudevents"


@stage("howto/deliver-to-a-broker.md")
async def _broker(session: Session) -> AsyncIterator[None]:
    async with (
        valkey(session.directory / "valkey") as server,
        nats_server(session.directory / "nats") as nats,
    ):
        session.rewrites[r"\b6379\b"] = str(server.port)
        session.rewrites[r"\b4222\b"] = str(nats.port)
        yield
        assert (await nats.api("STREAM.INFO.audit"))["config"]["allow_atomic"]
        settings = "SELECT url || ' ' || lanes FROM endpoint"
        assert await fetchval(session.database, settings) == f"{server.url('audit')} 4"


@stage("howto/read-from-a-broker.md")
async def _read_broker(session: Session) -> AsyncIterator[None]:
    name = lane()
    async with (
        streams_of("valkey", session.directory) as streams,
        asyncpg.create_pool(session.database.dsn, min_size=0, max_size=4) as pool,
    ):
        await streams.write(name, payload=b'{"order": 7}')
        (by_hand,) = messages_of(StreamSettings(), [delivery(2, payload=b'{"order": 8}')], 1)
        session.rewrites[r"\b6379/audit\b"] = f"{streams.server.port}/events"
        session.names = {**RECEIVER_NAMES, "pool": pool}
        with pytest.MonkeyPatch.context() as environ:
            environ.setenv("DATABASE_URL", session.database.dsn)
            await pool.execute(
                "CREATE TABLE orders AS SELECT id, false AS paid FROM unnest('{7, 8}'::int[]) AS id"
            )
            yield
            paid = "SELECT paid FROM orders WHERE id = $1"
            reading = asyncio.create_task(session.names["main"]())
            await until(lambda: pool.fetchval(paid, 7), what="the event")
            reading.cancel()
            await asyncio.wait([reading])
            headers = [(key, value.encode()) for key, value in by_hand.headers]
            await session.names["process"](headers, by_hand.body, pool)
            assert await pool.fetchval(paid, 8)


@stage("howto/test-a-receiver.md")
async def _test_receiver(session: Session) -> AsyncIterator[None]:
    (conform, *_) = examples(DOCS + "howto/test-a-receiver.md")
    secret = re.findall(r"whsec_\S+", conform.text)[0]
    handled: list[Any] = []
    receiver = Receiver(secret, MemoryDatabase())
    receiver.on("order.*")(lambda delivery, _: handled.append(delivery.data["order"]))
    session.names = {"secret": secret, "receiver": receiver}
    await session.run_line(f"OUTBOX_SECRET={secret} outbox listen --port 9000", "")
    yield
    assert len(handled) == len(set(handled)) > 80


@stage("howto/test-an-application.md")
async def _test_application(session: Session) -> AsyncIterator[None]:
    database = session.database
    added = await add_endpoint(database, "shop", url="http://shop.test/hooks", types=["order.*"])
    async with database.connection() as connection:
        await connection.execute("CREATE TABLE public.orders AS SELECT 7 AS id, false AS paid")
    session.names = {
        "secret": added.secret,
        "dsn": database.dsn,
        "url": database.dsn.replace("postgresql:", "postgresql+psycopg:"),
        "async_url": database.dsn.replace("postgresql:", "postgresql+asyncpg:"),
    }
    yield
    tests = {name: each for name, each in session.names.items() if name.startswith("test_")}
    assert len(tests) == 4
    for test in tests.values():
        if inspect.iscoroutinefunction(test):
            await test()
        else:
            await asyncio.to_thread(test)
    assert await fetchval(database, "SELECT count(*) FROM outbox") == 0


@stage("howto/migrate-with-alembic.md")
async def _alembic(session: Session) -> AsyncIterator[None]:
    document = read(DOCS + "howto/migrate-with-alembic.md")
    revision, env, *_ = [each for each in blocks(document) if each.language == "python"]
    url = session.database.dsn.replace("postgresql:", "postgresql+psycopg:")
    (session.directory / "versions").mkdir()
    (session.directory / "versions" / "outbox.py").write_text(revision.text)
    (session.directory / "env.py").write_text(env.text)
    config = Config()
    config.set_main_option("script_location", str(session.directory))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    async with session.database.connection() as connection:
        await connection.execute("DROP SCHEMA relay CASCADE")
        await asyncio.to_thread(alembic.upgrade, config, "head")
        assert (await status(connection, "relay")).pending == ()
    with pytest.raises(UsageError, match="no downgrade"):
        await asyncio.to_thread(alembic.downgrade, config, "base")
    session.names = {"url": url}
    yield
    session.names["engine"].dispose()


@stage("howto/publish-once-or-later.md")
async def _publish(session: Session) -> AsyncIterator[None]:
    in_two_weeks = datetime.now(UTC) + timedelta(days=14)
    async with session.database.connection() as connection, connection.transaction():
        session.names = {
            "outbox": package,
            "connection": connection,
            "timedelta": timedelta,
            "invoice": lambda n: {"n": n},
            "in_two_weeks": in_two_weeks,
        }
        yield
        keep_s = (
            "SELECT extract(epoch FROM expires_at - claimed_at)::int FROM relay.idempotency_key"
        )
        assert await connection.fetchval(keep_s) == 90 * 86400
        due = await connection.fetchval("SELECT deliver_at FROM relay.future_event")
        assert due == in_two_weeks


@stage("howto/publish-binary-payloads.md")
async def _binary_payloads(session: Session) -> AsyncIterator[None]:
    await add_endpoint(session.database, "shop")
    async with session.database.connection() as connection:
        session.names = {"outbox": package, "connection": connection, "png": b"\x89PNG"}
        yield
        rows = await connection.fetch("SELECT body, content_type FROM relay.outbox ORDER BY id")
    assert [tuple(row) for row in rows] == [(b"\x89PNG", "image/png")] * 3 + [
        (b"hello", "text/plain")
    ]


@stage("howto/one-message-blocks-a-lane.md")
async def _blocked_lane(session: Session) -> AsyncIterator[None]:
    database = session.database
    poison: list[Sent] = []

    def receive(sent: Sent) -> AttemptResult:
        if sent.body["data"]["order"] != 3:
            return OK
        poison.append(sent)
        return AttemptResult.completed(500, 0.004)

    slot = "SELECT (hashtextextended($1, 0) & 9223372036854775807) % 2"
    async with database.connection() as connection:
        keys = {await connection.fetchval(slot, str(n)): str(n) for n in range(20)}
    # The fifth attempt is made after 2 s, the next one 5 s later.
    retry = {"base_s": 0.02, "factor": 4, "cap_s": 600, "jitter": "none", "attempts_max": 99}
    await add_endpoint(database, "billing", lanes=2, retry=retry)
    network = Network(receive)
    async with running(database, network):
        for order in range(1, 15):
            await publish(database, {"order": order}, key=keys[1])
        for n in range(18):
            # The other lane's successes keep the endpoint's circuit breaker closed.
            attempts = min(5, n)
            await until(lambda attempts=attempts: len(poison) >= attempts, what="an attempt")
            await publish(database, {"order": 100 + n}, key=keys[0])
        await until(lambda: len(network.accepted) == 20 and len(poison) >= 5, what="five failures")
        yield
        await all_ended(database)
    assert await exceptions(database) == {}


@stage("howto/webhooks-for-customers.md")
async def _customers(session: Session) -> AsyncIterator[None]:
    database = session.database

    async def wait_for_deliveries(line: str) -> None:
        if "trace" in line:
            await all_ended(database)

    session.before_line = wait_for_deliveries
    network, sender = Network(), FakeSender()
    receiver = receiver_library.Receiver(sender.secret, create_engine("sqlite://"))
    async with running(database, network), database.connection() as connection:
        session.names = {"outbox": package, "connection": connection, "receiver": receiver}
        yield
        endpoint = {"name": "acme.orders", "contact": "ops@acme.example"}
        failing = sender.event("outbox.endpoint.failing", {"endpoint": endpoint})
        with patch("smtplib.SMTP") as smtp:
            assert receiver.handle(failing).status == 200
        ((message,), _) = smtp.return_value.__enter__.return_value.send_message.call_args
        assert message["To"] == "ops@acme.example"
        assert "acme.orders fails" in message.get_content()
        assert sorted(sent.url for sent in network.accepted) == [
            "https://audit.example.com/",
            "https://hooks.acme.example/orders",
        ]
        assert await fetchval(database, "SELECT payload IS NULL FROM outbox"), "erased"


@stage("howto/move-in-from-svix.md")
async def _from_svix(session: Session) -> AsyncIterator[None]:
    billing, second, third, fourth = (
        {**peers.SVIX_ENDPOINT, "id": f"ep_{n}", "uid": None} for n in range(1, 5)
    )
    hidden = {"headers": {}, "sensitive": ["Authorization"]}
    api = peers.svix_api(
        {
            "acme": [
                {"endpoint": {**billing, "uid": "billing"}},
                {"endpoint": second, "headers": hidden},
            ],
            "globex": [
                {"endpoint": {**third, "disabled": True}},
                {"endpoint": {**fourth, "channels": ["eu"]}},
            ],
        }
    )
    async with peers.serving(api, "sk_123.eu") as port:
        session.rewrites[r"\b8071\b"] = str(port)
        async with session.database.connection() as connection:
            session.names = {
                "outbox": package,
                "connection": connection,
                "switched": True,
                "customer": "acme",
                "invoice": {"total": 5},
            }
            yield
    network = Network()
    async with running(session.database, network):
        await all_ended(session.database)
    (sent,) = network.accepted
    assert sent.url == peers.SVIX_ENDPOINT["url"]
    assert sent.body == {"total": 5}
    assert sent.headers["svix-signature"] == sent.headers["webhook-signature"]
    assert sent.headers["svix-id"] == sent.headers["webhook-id"]


@stage("howto/move-in-from-convoy.md")
async def _from_convoy(session: Session) -> AsyncIterator[None]:
    first, second, third = ({**peers.CONVOY_ENDPOINT, "uid": f"ep_{n}"} for n in range(3))
    subscription = peers.CONVOY_SUBSCRIPTION
    filtered = {**subscription, "uid": "filtered", "filters": [{"body": {"total": 5}}]}
    oauth2 = {**second, "authentication": {"type": "oauth2"}}
    api = peers.convoy_api(
        [
            {"endpoint": first, "subscriptions": [subscription]},
            {"endpoint": oauth2, "subscriptions": [subscription]},
            {"endpoint": third, "subscriptions": [subscription, subscription, filtered]},
        ]
    )
    async with peers.serving(api, "CO.123") as port:
        session.rewrites[r"\b8072\b"] = str(port)
        yield


@stage("howto/move-in-from-outpost.md")
async def _from_outpost(session: Session) -> AsyncIterator[None]:
    first = peers.OUTPOST_DESTINATION
    second = {**first, "id": "des_2", "disabled_at": "2026-01-31T12:00:00Z"}
    third = {**first, "id": "des_3", "tenant_id": "globex", "type": "aws_sqs"}
    api = peers.outpost_api({"acme": [first, second], "globex": [third]})
    async with peers.serving(api, "apikey") as port:
        session.rewrites[r"\b8073\b"] = str(port)
        yield


@stage("howto/move-in-from-your-own-code.md")
async def _from_own_code(session: Session) -> AsyncIterator[None]:
    yield
    network = Network()
    async with running(session.database, network):
        await publish(session.database, {"order": 7}, type="order.paid", tenant="acme")
        await all_ended(session.database)
    (sent,) = network.accepted
    digest = hmac.digest(b"hunter2", sent.request.body, "sha256").hex()
    assert sent.headers["x-shop-signature"] == f"sha256={digest}"


@stage("howto/versions-of-a-type.md")
async def _versions(session: Session) -> AsyncIterator[None]:
    database = session.database
    await add_endpoint(database, "shop", types=["order.*"])
    async with database.connection() as connection:
        await connection.execute("CREATE TABLE public.orders AS SELECT 7 AS id, false AS paid")
        session.names = {"outbox": package, "connection": connection}
        yield
    network = Network()
    async with running(database, network):
        await all_ended(database)
    assert [sent.body["type"] for sent in network.accepted] == ["order.paid.v2"]


@stage("howto/large-payloads.md")
async def _large_payloads(session: Session) -> AsyncIterator[None]:
    database = session.database
    await add_endpoint(database, "shop")
    objects: dict[str, bytes] = {}

    class Store:
        async def upload(self, name: str, body: bytes) -> None:
            objects[name] = body

    async with database.connection() as connection:
        session.names = {"outbox": package, "uuid4": uuid4, "sha256": sha256}
        yield
        await session.names["export_orders"](connection, Store(), b"1,2")
        event = orjson.loads(await connection.fetchval("SELECT payload FROM relay.outbox"))
    assert (event["bytes"], list(objects.values())) == (3, [b"1,2"])
    assert event["sha256"] == sha256(objects[event["object"]]).hexdigest()
    assert await fetchval(database, "SELECT payload_bytes_max()") == 1048576


@stage("howto/replay-dead-letters.md")
async def _dead_letters(session: Session) -> AsyncIterator[None]:
    database = session.database
    repaired = False

    def receive(sent: Sent) -> AttemptResult:
        if sent.url.endswith("billing") and sent.body["data"]["order"] >= 17 and not repaired:
            return AttemptResult.completed(400, 0.004, body=b"order number too long")
        return OK

    async def repair(line: str) -> None:
        # "After the receiver is repaired …"
        nonlocal repaired
        repaired = repaired or ("replay" in line and "--dry-run" not in line)

    session.before_line = repair
    await add_endpoint(database, "billing", types=["order.*"])
    await add_endpoint(database, "audit")
    async with running(database, Network(receive)):
        for n in range(15, 21):
            await publish(database, {"order": n}, type="order.paid", key=f"order-{n}")
        await all_ended(database)
        yield
    assert await exceptions(database) == {}


@stage("howto/erase-a-persons-data.md")
async def _person(session: Session) -> AsyncIterator[None]:
    database = session.database
    network = Network(lambda _: AttemptResult.completed(200, 0.001, body=b"thank you"))
    await add_endpoint(database, "shop")
    async with running(database, network):
        await publish(database, {"name": "Ada"}, {"name": "Ada"}, key="customer-17")
        await all_ended(database)
    yield
    assert await fetchval(database, "SELECT count(*) FROM outbox WHERE payload::text ~ 'Ada'") == 0


@stage("howto/move-in-from-an-outbox-table.md")
async def _move_in(session: Session) -> AsyncIterator[None]:
    yield
    published = "SELECT array_agg(type ORDER BY id) FROM outbox"
    order = "order.created"
    assert await fetchval(session.database, published) == [f"shadow.{order}", *[order] * 7]


@stage("howto/manage-endpoints.md")
async def _endpoints(session: Session) -> AsyncIterator[None]:
    await add_endpoint(session.database, "shop", retry={})
    yield


@stage("howto/add-a-second-relay.md")
async def _second_relay(session: Session) -> AsyncIterator[None]:
    async with running(session.database, Network()):
        yield


@asynccontextmanager
async def roles(session: Session) -> AsyncIterator[None]:
    """Roles with the names of the document, which are made unique: they belong to the server."""
    database = session.database
    option = r"(--(?:producer|relay|operator|reader|revoke) )(\w+)"
    session.rewrites[option] = rf"\1\2_{database.name}"
    session.rewrites[r"\brelay_role IN DATABASE app\b"] = (
        f'"relay_role_{database.name}" IN DATABASE "{database.name}"'
    )
    names = [
        f"{name}_{database.name}"
        for name in ("shop", "outbox_relay", "ops", "grafana", "intern", "relay_role")
    ]
    async with database.connection() as owner:
        for name in names:
            await owner.execute(f"CREATE ROLE {name}")
    database.roles += names
    yield


@stage("howto/grant-database-roles.md")
async def _roles(session: Session) -> AsyncIterator[None]:
    async with roles(session):
        yield


@stage("howto/run-behind-pgbouncer.md")
async def _pooled(session: Session) -> AsyncIterator[None]:
    async with roles(session):
        yield
        settings = "SELECT count(*) FROM pg_db_role_setting WHERE 'jit=off' = ANY (setconfig)"
        assert await fetchval(session.database, settings) == 1


@stage("howto/secure-an-installation.md")
async def _secured(session: Session) -> AsyncIterator[None]:
    async with roles(session), an_endpoint(session):
        yield
        purposes = "SELECT count(*) FROM journal WHERE kind LIKE '%secret%'"
        assert await fetchval(session.database, purposes) > 0


@stage("howto/back-up-and-restore.md")
async def _restore(session: Session) -> AsyncIterator[None]:
    database = session.database
    programs = find_binaries(database.major)
    for program in ("pg_dump", "createdb", "pg_restore", "psql"):
        if shutil.which(programs.path(program)) is None:
            pytest.skip(f"{program} is not installed")
    restored = f"{database.name}_restored"
    server = database.server.embedded
    session.env |= {
        "PATH": f"{programs.bin_dir}:{os.environ['PATH']}",
        "PGHOST": str(server.socket_dir),
        "PGPORT": "5432",
        "PGUSER": "postgres",
    }
    session.rewrites |= {
        "postgresql:///restored": database.server.dsn(restored),
        r"\brestored$": restored,
        r"--dbname restored\b": f"--dbname {restored}",
        r"(?<=app\.dump )app$|(?<=psql -d )app\b": database.name,
    }
    try:
        yield
        identity = "SELECT identity FROM cursor"
        assert await fetchval(database, identity) == "restored"
    finally:
        async with database.connection() as owner:
            await owner.execute(f"DROP DATABASE IF EXISTS {restored} WITH (FORCE)")


@stage("howto/monitor-and-alert.md")
async def _exporter(session: Session) -> AsyncIterator[None]:
    database = session.database
    name = f"exporter_{database.name}"
    session.rewrites[r"\boutbox_exporter\b"] = name
    database.roles.append(name)
    yield


@stage("howto/move-by-logical-replication.md")
async def _logical_replication(session: Session) -> AsyncIterator[None]:
    """The commands; tests/integration/absence/test_sequences_behind.py makes the move."""
    programs = find_binaries(session.database.major)
    for program in ("pg_dump", "psql"):
        if shutil.which(programs.path(program)) is None:
            pytest.skip(f"{program} is not installed")
    async with session.database.server.database(migrated=False) as new:
        session.env |= {
            "PATH": f"{programs.bin_dir}:{os.environ['PATH']}",
            "OLD_DSN": session.database.dsn,
            "NEW_DSN": new.dsn,
        }
        yield
        assert await fetchval(new, "SELECT count(*) FROM relay.cursor") == 0
    published = "SELECT count(*) > 30 FROM pg_publication_tables WHERE tablename <> 'outbox'"
    assert await fetchval(session.database, published)


@stage("reference/http-api.md")
async def _api(session: Session) -> AsyncIterator[None]:
    token = await make_token(session.database, "publisher", scopes=("publish",))
    responses = []
    async with serving(session.database) as api:

        async def curl(words: list[str]) -> None:
            path = words[0].removeprefix("http://127.0.0.1:8080")
            values = list(zip(words[1::2], words[2::2], strict=True))
            given = [value.replace("$TOKEN", token) for flag, value in values if flag == "-H"]
            headers = dict(value.split(": ", 1) for value in given)
            (body,) = [value for flag, value in values if flag == "-d"]
            responses.extend(
                [
                    await api.request("POST", path, headers=headers, data=body.encode())
                    for _ in range(2)
                ]
            )

        session.commands["curl"] = curl
        yield
    assert [each.status for each in responses] == [201, 200]
    assert responses[0].json["id"] == responses[1].json["id"]


# ----------------------------------------------------------------- links


def without_code(text: str) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(document: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(read(document)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, *RECEIVERS])
def test_the_links_of_a_document_lead_somewhere(document: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(read(document))):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.is_file(), f"{link}: the site has no folders"
        if anchor:
            assert anchor in anchors(target.resolve().relative_to(ROOT).as_posix()), link


def test_the_pages_that_errors_name_exist() -> None:
    urls = tomllib.loads(read("pyproject.toml"))["project"].get("urls", {})
    assert urls.get("Documentation", DOCUMENTS_URL).startswith(DOCUMENTS_URL)
    assert (ROOT / DOCS).samefile(ROOT / DOCUMENTS_URL.rpartition("/blob/main/")[2])
    for page in ERROR_PAGES:
        path, _, anchor = page.partition("#")
        assert (ROOT / DOCS / path).is_file(), page
        assert not anchor or anchor in anchors(DOCS + path), page


def test_the_index_has_every_document() -> None:
    links = re.findall(r"\]\(([^)#]+\.md)\)", read(INDEX))
    linked = {each for each in links if not each.startswith("../")}
    assert {DOCS + each for each in linked} == {
        each for each in DOCUMENTS if each.startswith(DOCS) and each != INDEX
    }


# ----------------------------------------------------------------- reference


@pytest.mark.slow
@pytest.mark.system
def test_the_reference_pages_are_the_generated_ones() -> None:
    # In a process of its own: click keeps the first help option that a command was given, and
    # other tests use commands without their group.
    code = (
        "import json; from docs.tools.generate import PAGES;"
        "print(json.dumps({name: page() for name, page in PAGES.items()}))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pages = json.loads(made.stdout)
    assert set(pages) == set(PAGES)
    written = {name: (REFERENCE / name).read_text(encoding="utf-8") for name in PAGES}
    assert [name for name in PAGES if written[name] != pages[name]] == [], (
        "run: python -m docs.tools.generate"
    )


def test_every_command_is_documented() -> None:
    written = "\n".join(read(each) for each in DOCUMENTS if each not in GENERATED)
    assert [c.name for c in COMMANDS if not re.search(rf"outbox {c.name}\b", written)] == []


# ----------------------------------------------------------------- the tree

PLAIN_PARTS = {"__init__", "__main__", "__pycache__"}
"""Entry points, and what is no module."""


def test_the_drawing_of_the_tree_is_that_of_the_import_contracts() -> None:
    (drawing,) = re.findall(r"```text\n(.*?)```", read("CONTRIBUTING.md"), re.DOTALL)
    lines = [re.split(r" {2,}", line)[0].split(" · ") for line in drawing.splitlines()]
    there = sorted(each.parent.name for each in (ROOT / "packages").glob("*/pyproject.toml"))
    pyproject = tomllib.loads(read("pyproject.toml"))
    contracts = {
        each["name"]: [re.split(r" \| ", layer) for layer in each["layers"]]
        for each in pyproject["tool"]["importlinter"]["contracts"]
        if each["type"] == "layers"
    }
    leaves = [
        [each.replace("outbox_", "packages/") for each in layer]
        for layer in contracts["Leaves import the doctor only"]
    ]
    drawn = [[each.replace("outbox.", "") for each in x] for x in contracts["Imports go one way"]]
    assert lines == [*leaves, *drawn]
    assert sorted(each.removeprefix("packages/") for x in leaves for each in x) == there
    parts = {each.stem for each in (ROOT / "outbox").iterdir() if each.suffix in ("", ".py")}
    assert {part for line in drawn for part in line} == parts - PLAIN_PARTS


def test_every_folder_of_modules_says_what_is_there() -> None:
    folders = [each.parent for each in (ROOT / "outbox").rglob("*.py")]
    silent = {
        each.relative_to(ROOT).as_posix()
        for each in folders
        if not (each / "__init__.py").read_text("utf-8").startswith('"""')
    }
    assert silent == set()
