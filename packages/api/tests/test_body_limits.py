"""The limit of a body that publishes follows the configured limit of payloads."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from outbox.store.connection.migrate import migrate
from outbox_api import body_limits
from outbox_api.body_limits import EVENT_BYTES_MAX
from outbox_api.problem import Problem
from outbox_api.request_slots import ADDRESS, TOKEN, RequestSlots
from outbox_api.route import PAYLOAD_BODY_BYTES_MAX, REQUEST_BODY_VALUES_MAX
from tests.support.api import make_token, serving
from tests.support.costs import connected_client, only_on_linux
from tests.support.relay import fetchval

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.costs import Costs
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

MIB = 1024 * 1024


async def set_limit(database: Database, payload_bytes_max: int) -> None:
    async with database.at_hand() as connection:
        await migrate(connection, "relay", payload_bytes_max=payload_bytes_max)


def body(payload_bytes: int) -> bytes:
    return b'{"type":"a.b","payload":"' + b"x" * (payload_bytes - 2) + b'"}'


async def test_the_largest_payload_is_published(database: Database, api: Api) -> None:
    await set_limit(database, 3 * MIB)
    assert (await api.post("/v1/events", data=body(3 * MIB))).status == 201
    size = "SELECT max(octet_length(payload::text)) FROM outbox"
    assert await fetchval(database, size) == 3 * MIB
    # The limit of the payload is checked by the database, and is named.
    refused = await api.post("/v1/events", data=body(3 * MIB + 1))
    assert (refused.status, refused.detail) == (
        422, f"payload: {3 * MIB + 1} bytes as JSON, the limit is {3 * MIB}"
    )  # fmt: skip
    binary = b'{"type":"a.b","content_type":"a/b","payload_base64":"' + b"AAAA" * MIB + b'"}'
    assert (await api.post("/v1/events", data=binary)).status == 201
    # In Base64, a payload that is not JSON takes a third more.
    refused = await api.post("/v1/events", data=body(4 * MIB + EVENT_BYTES_MAX))
    assert refused.status == 413
    assert f"larger than {4 * MIB + EVENT_BYTES_MAX} bytes" in refused.detail


async def test_a_body_without_a_length_has_the_same_limit(database: Database, api: Api) -> None:
    await set_limit(database, 2 * MIB)
    headers = {"Authorization": f"Bearer {api.secret}", "Content-Type": "application/json"}

    async def chunks(count: int) -> Any:
        yield b'{"type":"a.b","payload":"'
        for _ in range(count):
            yield b"x" * (MIB // 8)
        yield b'"}'

    for count, status in ((15, 201), (22, 413)):
        async with api.session.post(
            api.url + "/v1/events", data=chunks(count), headers=headers
        ) as response:
            assert response.status == status


async def test_a_lower_limit_of_payloads_does_not_lower_that_of_bodies(
    database: Database, api: Api
) -> None:
    await set_limit(database, 4096)
    escaped = b'{"type":"a.b","payload":"' + b"\\u0061" * 4000 + b'"}'
    assert (await api.post("/v1/events", data=escaped)).status == 201
    assert (await api.post("/v1/events", data=b" " * PAYLOAD_BODY_BYTES_MAX)).status == 400


async def test_the_limit_is_read_again(
    database: Database, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await api.post("/v1/events", data=body(2 * MIB))).status == 413
    monkeypatch.setattr(body_limits, "PAYLOAD_LIMIT_KEEP_S", 0.0)
    await set_limit(database, 2 * MIB)
    assert (await api.post("/v1/events", data=body(2 * MIB))).status == 201


def test_one_body_of_a_token_may_be_larger_than_its_share() -> None:
    slots = RequestSlots()
    with slots.hold(1, "192.0.2.1", ADDRESS.body_bytes + 1):
        with slots.hold(1, "192.0.2.1"):
            pass
        with pytest.raises(Problem), slots.hold(1, "192.0.2.1", 1):
            pass
    with slots.hold(1, "192.0.2.1", TOKEN.body_bytes + 1):
        pass


@pytest.mark.full
@pytest.mark.slow
@only_on_linux
async def test_payloads_of_4_mib_neither_pause_the_relay_nor_fill_its_memory(
    database: Database, costs: Costs
) -> None:
    """Above, both grow with the payload, as docs/reference/http-api.md says."""
    size = 4 * MIB
    await set_limit(database, size)
    token = await make_token(database)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    count = REQUEST_BODY_VALUES_MAX - 100
    text = b'"' + b"a" * (size // count - 4) + b'"'
    payloads = {
        "text": b'"' + b"a" * (size - 20) + b'"',
        "commas": b'"' + b"," * (size - 20) + b'"',
        "wide text": '"\U0001f600'.encode() + b"a" * (size - 20) + b'"',
        "backslashes": b'"' + b"\\\\" * (size // 2 - 20) + b'"',
        "quotes": b'"' + b'\\"' * (size // 2 - 20) + b'"',
        "texts": b"[" + b",".join([text] * count) + b"]",
    }

    events = {
        name: b'{"type":"a.b","payload":' + payload + b"}" for name, payload in payloads.items()
    }

    def send(event: bytes, more: dict[str, str] | None = None) -> None:
        with connected_client(api.url) as client:
            client.request("POST", "/v1/events", event, headers | (more or {}))
            response = client.getresponse()
            assert response.status == 201, response.read()

    async with serving(database) as api:
        for name, event in events.items():
            # The allocator maps large blocks one by one until it has freed one of their size, and
            # then serves them from its heap, which takes more: what every later request takes.
            await asyncio.to_thread(send, event)
            await asyncio.to_thread(costs.measure, name, partial(send, event))
        keys = itertools.count()
        for number in range(2):
            await asyncio.to_thread(
                costs.measure,
                f"wide text with a key {number}",
                lambda: send(events["wide text"], {"Idempotency-Key": f"key-{next(keys)}"}),
            )
    costs.check()
