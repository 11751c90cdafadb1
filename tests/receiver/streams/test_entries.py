"""Messages of any broker are parsed, and what is no event is left out."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from outbox.core.brokers.message import end_message, messages_of
from outbox.core.model.headers import EndpointHeaders, valid_headers
from outbox.core.model.message_format import FormatName
from outbox.receiver import BadMessage, read_message
from outbox.receiver.streams.entries import LaneEnd, read_entry
from tests.receiver.deliveries import delivery
from tests.receiver.streams.rigs import Settings, lane

OTHER_PREFIX = EndpointHeaders(prefix="Acme-")


@pytest.mark.parametrize("name", get_args(FormatName))
@pytest.mark.parametrize("headers", [valid_headers({"X-Team": "a"}, "X-"), OTHER_PREFIX])
def test_every_format_is_parsed_from_any_client_library(
    name: FormatName, headers: EndpointHeaders
) -> None:
    given = delivery(7, replay_of=("a-1-0", 3), backfill_id=4, tenant="Zürich")
    (sent,) = messages_of(Settings(name, headers), [given], 5)
    pairs: list[Any] = [
        # Kafka, RabbitMQ and NATS, Redis.
        [(key, value.encode()) for key, value in sent.headers],
        dict(sent.headers),
        {key.lower().encode(): value.encode() for key, value in sent.headers} | {b"body": b"x"},
    ]
    for each in pairs:
        message = read_message(each, sent.body, header_prefix=headers.prefix)
        assert message is not None
        assert (message.delivery_id, message.lane, message.sequence) == (sent.delivery, "a-1-0", 7)
        assert message.previous_sequence == 5
        assert (message.replay_of, message.backfill) == (("a-1-0", 3), 4)
        assert (message.tenant, message.key) == ("Zürich", "order-7")
        assert message.data == (None if name == "thin" else {"n": 7})
        assert message.format == name


def test_binary_payloads_are_bytes() -> None:
    given = delivery(1, payload=b"\xff\0", content_type="image/png")
    (sent,) = messages_of(Settings("raw"), [given], 0)
    message = read_message(dict(sent.headers), sent.body)
    assert message is not None
    assert (message.data, message.content_type) == (b"\xff\0", "image/png")


def test_control_entries_are_no_events() -> None:
    sent = end_message(lane(1), 9, 6, 3)
    assert read_message(dict(sent.headers), sent.body) is None
    end = read_entry(dict(sent.headers), sent.body)
    assert end == LaneEnd(lane(1), 9, 6, 3)
    assert end.siblings == [lane(0), lane(1), lane(2)]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, b"{}"),
        ({b"x-delivery": b"\xff"}, b"{}"),
        ({"outbox-control": "end"}, b""),
        ({"outbox-control": "later"}, b"{}"),
    ],
)
def test_other_messages_are_refused(headers: Any, body: bytes) -> None:
    with pytest.raises(BadMessage):
        read_entry(headers, body)
