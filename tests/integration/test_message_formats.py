"""Each format on a running relay: changed while deliveries are pending, and previewed."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from itertools import cycle
from typing import TYPE_CHECKING, Any, get_args

import orjson
import pytest

from outbox.core.model.message_format import UNBATCHED, FormatName
from outbox.operations.criteria import DeadLetterSelection
from outbox.operations.dead_letters.replay import start_replay
from outbox.operations.endpoints.changes import update_endpoint
from outbox.operations.preview import MASKED, RequestPreview, preview_request
from outbox.receiver import verify
from outbox.store.connection.secrets import CLEAR
from tests.support.relay import (
    BUSY,
    OK,
    QUICK_RETRY,
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
    from outbox.receiver import Message
    from tests.support.postgres import Database
    from tests.support.relay import Sent

pytestmark = pytest.mark.one_major

FORMATS: tuple[FormatName, ...] = get_args(FormatName)


def read(sent: Sent, secret: str) -> Message:
    """The delivery of a request, as the receiver library reads it."""
    (message,) = verify(sent.request.headers, sent.request.body, secret).messages
    return message


async def set_format(database: Database, name: FormatName) -> None:
    async with database.at_hand() as connection:
        await update_endpoint(
            connection, "relay", "shop", lambda s: replace(s, format=name), actor="test"
        )


@pytest.mark.parametrize("name", sampled(FORMATS, 2))
async def test_deliveries_and_retries_have_the_format(database: Database, name: FormatName) -> None:
    made = await add_endpoint(database, format=name, source="/test")
    network = Network(lambda sent: BUSY if sent.seq == 2 and sent.attempt < 3 else OK)
    async with running(database, network):
        await publish(database, *range(1, 41), key="ké y")
        await all_ended(database)
    messages = [read(sent, made.secret) for sent in network.accepted]
    assert [message.sequence for message in messages] == list(range(1, 41))
    assert {message.format for message in messages} == {name}
    assert {message.key for message in messages} == {"ké y"}
    assert [message.data for message in messages] == (
        [None] * 40 if name == "thin" else list(range(1, 41))
    )
    tried = [read(sent, made.secret) for sent in network.sent if sent.seq == 2]
    assert [message.attempt for message in tried] == [1, 2, 3]
    assert len({message.delivery_id for message in tried}) == 1


@pytest.mark.full
async def test_a_format_changes_while_deliveries_are_pending(database: Database) -> None:
    made = await add_endpoint(database, retry=QUICK_RETRY | {"attempts_max": 10_000})
    formats = cycle(FORMATS)
    released: set[int] = set()
    network = Network(lambda sent: OK if sent.seq in released else BUSY)
    expected: list[tuple[int, str]] = []

    def newest() -> str | None:
        return read(network.sent[-1], made.secret).format if network.sent else None

    async with running(database, network):
        await publish(database, *range(1, 8))
        for sequence in range(1, 8):
            name = next(formats)
            await set_format(database, name)
            await until(
                lambda n=name: network.sent and read(network.sent[-1], made.secret).format == n
            )
            released.add(sequence)
            expected.append((sequence, name))
            await until(lambda s=sequence: network.accepted and network.accepted[-1].seq == s)
        await all_ended(database)
    accepted = [read(sent, made.secret) for sent in network.accepted]
    assert [(message.sequence, message.format) for message in accepted] == expected
    by_number: dict[int, set[str]] = {}
    for sent in network.sent:
        message = read(sent, made.secret)
        by_number.setdefault(message.sequence, set()).add(message.delivery_id)
    assert all(len(ids) == 1 for ids in by_number.values()), "the same X-Delivery in each format"


@pytest.mark.parametrize("name", sampled([each for each in FORMATS if each not in UNBATCHED]))
async def test_batches_have_the_format(database: Database, name: FormatName) -> None:
    made = await add_endpoint(database, format=name, batch_max=10)
    await publish(database, *range(1, 26), key="k")
    network = Network()
    async with running(database, network):
        await all_ended(database)
    verified = [
        verify(sent.request.headers, sent.request.body, made.secret) for sent in network.sent
    ]
    messages = [message for each in verified for message in each.messages]
    assert [message.sequence for message in messages] == list(range(1, 26))
    assert {message.format for message in messages} == {name}
    assert len(network.sent) < 25


async def preview(database: Database, event: str) -> RequestPreview:
    async with database.at_hand() as connection:
        return await preview_request(
            connection, "relay", "shop", event, vault=CLEAR, now=time.time()
        )


def comparable(headers: Any) -> list[tuple[str, str]]:
    """Headers without those of the moment and those that are masked."""
    momentary = ("webhook-timestamp", "webhook-signature", "webhook-metadata-signature")
    return [each for each in headers if each[0] not in (*momentary, "X-Team")]


@pytest.mark.parametrize("batch_max", sampled([None, 5]))
@pytest.mark.parametrize("name", sampled(FORMATS, 2))
async def test_a_preview_is_the_request_that_is_sent(
    database: Database, name: FormatName, batch_max: int | None
) -> None:
    if batch_max is not None and name in UNBATCHED:
        return
    headers = {"X-Team": "a secret"}
    await add_endpoint(database, format=name, batch_max=batch_max, headers=headers)
    await publish(database, {"n": 1.50}, key="order-7", headers='{"traceparent": "00-1-2-01"}')
    before = await preview(database, "order-7")
    assert not before.is_sequenced
    network = Network()
    async with running(database, network):
        await all_ended(database)
    (sent,) = network.sent
    after = await preview(database, "order-7")
    assert after.is_sequenced
    assert after.body == sent.request.body.decode()
    assert comparable(after.headers) == comparable(sent.request.headers)
    assert dict(after.headers)["X-Team"] == MASKED
    assert dict(after.headers)["webhook-signature"] == MASKED
    assert "a secret" not in str(after)
    assert orjson.loads(before.body) is not None


@pytest.mark.full
async def test_a_preview_is_of_the_newest_delivery(database: Database) -> None:
    """A replay has another number than the delivery that it replaces."""
    await add_endpoint(database, format="raw")
    await publish(database, 1, 2, key="k", created_at=datetime(2026, 1, 31, tzinfo=UTC))
    network = Network(lambda sent: REFUSED if sent.seq == 1 else OK)
    async with running(database, network):
        await all_ended(database)
        async with database.at_hand() as connection:
            await start_replay(
                connection, "relay", DeadLetterSelection(everything=True), actor="test"
            )
        await until(lambda: len(network.sent) == 3)
        await all_ended(database)
    (found,) = [each for each in (await sent_headers(database)) if each["X-Sequence"] == "3"]
    assert found["X-Replay-Of"].endswith("-1-0/1")
    assert comparable(found.items()) == comparable(network.sent[-1].request.headers)


async def sent_headers(database: Database) -> list[dict[str, str]]:
    """The headers of previews of all events."""
    async with database.at_hand() as connection:
        ids = [row["id"] for row in await connection.fetch("SELECT id FROM outbox ORDER BY id")]
    return [dict((await preview(database, str(each))).headers) for each in ids]
