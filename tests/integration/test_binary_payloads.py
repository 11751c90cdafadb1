"""Payloads that are not JSON: delivered, dead-lettered, replayed, fetched and erased as bytes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, get_args

import pytest

import outbox
from outbox.core.model.message_format import UNBATCHED, FormatName
from outbox.operations.criteria import Criteria, DeadLetterSelection
from outbox.operations.dead_letters.queries import get_dead_letter
from outbox.operations.dead_letters.replay import start_replay
from outbox.operations.events import erase
from outbox.operations.events.erase import ErasureTarget
from outbox.operations.preview import preview_request
from outbox.operations.replays import backfill
from outbox.receiver import FetchClient, verify
from outbox.store.connection.secrets import CLEAR
from outbox_doctor.trace import queries as trace
from outbox_doctor.verify.audit import run_checks
from tests.support.receivers_listener import listening, token_of
from tests.support.relay import (
    BUSY,
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    publish,
    running,
)
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox.receiver import Message
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

FORMATS: tuple[FormatName, ...] = get_args(FormatName)
EVERY_BYTE = bytes(range(256))
PNG = "image/png"
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
async def db(database: Database) -> Connection[Any]:
    return await database.connect(server_settings={"search_path": "relay"})


async def publish_bytes(database: Database, *payloads: bytes, **options: Any) -> None:
    async with database.at_hand() as connection:
        for payload in payloads:
            options = {"content_type": PNG, "autocommit": True} | options
            await outbox.publish(connection, "a.b", payload, **options)


def read(sent: Sent, secret: str) -> tuple[Message, ...]:
    """The deliveries of a request, as the receiver library reads them."""
    return verify(sent.request.headers, sent.request.body, secret).messages


@pytest.mark.parametrize("batch_max", sampled([None, 5]))
@pytest.mark.parametrize("name", sampled(FORMATS, 2))
async def test_bytes_are_delivered_in_each_format(
    database: Database, name: FormatName, batch_max: int | None
) -> None:
    if batch_max is not None and name in UNBATCHED:
        return
    made = await add_endpoint(database, format=name, batch_max=batch_max)
    network = Network(lambda sent: BUSY if sent.seq == 3 and sent.attempt < 3 else OK)
    # Before the relay starts, and while its lanes wait; a large one, which is compressed or stored
    # outside of its row; and JSON between them.
    large = EVERY_BYTE * 500
    await publish_bytes(database, EVERY_BYTE, b"")
    async with running(database, network):
        await until(lambda: len(network.accepted) > 0)
        await publish_bytes(database, large, large[1:])
        await publish(database, {"n": 1})
        await all_ended(database)
        await publish_bytes(database, EVERY_BYTE[::-1])
        await all_ended(database)
    messages = [message for sent in network.accepted for message in read(sent, made.secret)]
    payloads = [EVERY_BYTE, b"", large, large[1:], {"n": 1}, EVERY_BYTE[::-1]]
    assert [message.sequence for message in messages] == list(range(1, 7))
    assert [m.data for m in messages] == ([None] * 6 if name == "thin" else payloads)
    assert [m.content_type for m in messages] == [PNG] * 4 + [None, PNG]
    if name in UNBATCHED:
        types = [sent.headers["content-type"] for sent in network.accepted]
        assert types == [PNG] * 4 + ["application/json", PNG]
        assert network.accepted[2].request.body == large


@pytest.mark.full
async def test_a_dead_letter_has_the_bytes(database: Database, db: Connection[Any]) -> None:
    made = await add_endpoint(database, format="raw")
    await add_endpoint(database, name="good", format="raw")
    refusing = True
    network = Network(lambda sent: REFUSED if refusing and "shop" in sent.url else OK)
    async with running(database, network):
        await publish_bytes(database, EVERY_BYTE, key="k")
        await all_ended(database)
        event_trace = await trace.read_trace(db, "relay", 1, payload=True)
        event = event_trace.event
        assert (event.payload, event.payload_bytes, event.content_type) == (None, 256, PNG)
        # Retention drops the event; the dead letter keeps its own copy.
        await db.execute("SET LOCAL relay.remove = 'on'; TRUNCATE outbox")
        letter_id = await db.fetchval("SELECT id FROM dead_letter")
        letter = await get_dead_letter(db, "relay", letter_id)
        assert (letter.payload, letter.payload_bytes, letter.content_type) == (None, 256, PNG)
        copied = (await trace.read_trace(db, "relay", 1, payload=True)).event
        assert (copied.payload, copied.payload_bytes, copied.content_type) == (None, 256, PNG)
        refusing = False
        await start_replay(db, "relay", DeadLetterSelection(ids=(letter_id,)), actor="test")
        await until(lambda: len(network.accepted) == 2)
        await all_ended(database)
    first, *_, replayed = [s for s in network.sent if "shop" in s.url]
    assert replayed.request.body == EVERY_BYTE
    assert replayed.delivery == first.delivery
    (message,) = read(replayed, made.secret)
    assert (message.data, message.content_type) == (EVERY_BYTE, PNG)


@pytest.mark.full
async def test_a_backfill_sends_the_bytes_again(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, format="raw")
    network = Network()
    async with running(database, network):
        await publish_bytes(database, EVERY_BYTE)
        await all_ended(database)
        criteria = Criteria("shop", since=LONG_AGO)
        await backfill.request_backfill(db, "relay", criteria, actor="test")
        await until(lambda: len(network.accepted) == 2)
        await all_ended(database)
    assert [sent.request.body for sent in network.accepted] == [EVERY_BYTE] * 2


@pytest.mark.full
async def test_delayed_bytes_are_published_when_they_are_due(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, format="raw")
    await publish_bytes(database, EVERY_BYTE, deliver_at=datetime(2100, 1, 1, tzinfo=UTC))
    await db.execute("UPDATE future_event SET deliver_at = clock_timestamp()")
    network = Network()
    async with running(database, network):
        await until(lambda: network.accepted)
    assert (network.accepted[0].body, network.accepted[0].headers["content-type"]) == (
        EVERY_BYTE,
        PNG,
    )


async def test_erasure_removes_the_bytes_everywhere(
    database: Database, db: Connection[Any]
) -> None:
    await add_endpoint(database, all_tenants=True)
    async with running(database, Network(lambda _: REFUSED)):
        await publish_bytes(database, b"secret", tenant="acme")
        await all_ended(database)
    await publish_bytes(
        database, b"secret", tenant="acme", deliver_at=datetime(2100, 1, 1, tzinfo=UTC)
    )
    would = await erase.count_erasable(db, "relay", ErasureTarget(tenant="acme"))
    done = await erase.erase_events(db, "relay", ErasureTarget(tenant="acme"), actor="test")
    assert (would.events, would.dead_letters, would.future_events) == (1, 1, 1)
    assert (done.events, done.dead_letters, done.future_events) == (1, 1, 1)
    for table in ("outbox", "dead_letter", "future_event"):
        rows = await db.fetch(f"SELECT body, content_type FROM {table}")
        assert [tuple(row) for row in rows] == [(None, None)] * (table != "future_event")
    again = await erase.erase_events(db, "relay", ErasureTarget(tenant="acme"), actor="test")
    assert (again.events, again.dead_letters) == (0, 0)
    # Neither is sent again.
    async with running(database, network := Network()):
        await start_replay(db, "relay", DeadLetterSelection(everything=True), actor="test")
        await publish(database, 1)
        await until(lambda: network.accepted)
        await all_ended(database)
    assert len(network.sent) == 1


@pytest.mark.full
async def test_a_filter_applies_to_json_only(database: Database, db: Connection[Any]) -> None:
    await add_endpoint(database, filter="@.n > 0")
    await add_endpoint(database, name="negated", filter="!(@.n > 0)")
    network = Network()
    async with running(database, network):
        await publish_bytes(database, b'{"n": 1}')
        await publish(database, {"n": 1})
        await until(lambda: network.accepted)
        await all_ended(database)
    assert [(sent.url[-4:], sent.body["data"]) for sent in network.sent] == [("shop", {"n": 1})]
    (group,) = (await trace.read_trace(db, "relay", 1)).missed
    assert (group.reason, group.endpoints) == ("filter", 2)
    assert [check async for check in run_checks(db) if check.violations] == []


@pytest.mark.full
async def test_bytes_are_fetched_and_previewed(database: Database, db: Connection[Any]) -> None:
    made = await add_endpoint(database, format="raw")
    network = Network()
    async with running(database, network):
        await publish_bytes(database, EVERY_BYTE, key="k")
        await publish_bytes(database, b"text", content_type="text/plain")
        await all_ended(database)
    lane = network.accepted[0].lane
    token = await token_of(db)
    async with listening(database, token) as client:
        fetched = await FetchClient(client.url, token).delivery_async(lane, 1)
        page = await client.get(f"lanes/{lane}/deliveries")
    for item in page["items"]:
        assert item.keys() & {"body", "body_base64"} == {"body_base64"}
    assert fetched.request is not None
    assert fetched.request.body == EVERY_BYTE
    (message,) = verify(fetched.request.headers, fetched.request.body, made.secret).messages
    assert (message.data, message.content_type) == (EVERY_BYTE, PNG)
    preview = await preview_request(db, "relay", "shop", "k", vault=CLEAR, now=0.0)
    assert preview.body is None
    assert dict(preview.headers)["Content-Type"] == PNG
