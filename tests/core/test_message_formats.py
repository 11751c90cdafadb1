"""Message formats: what a receiver reads back is what was published, and nothing forged."""

from __future__ import annotations

from datetime import datetime
from typing import Any, get_args
from uuid import UUID

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.messages import signed_metadata
from outbox.core.messages.batch import BATCH_BYTES_MAX, element_bytes, prepare_batch
from outbox.core.messages.message import prepare
from outbox.core.messages.signature import ID_HEADER, SignatureError, parse_secret
from outbox.core.model.delivery import Delivery
from outbox.core.model.headers import EndpointHeaders, parse_lines, valid_headers
from outbox.core.model.message_format import UNBATCHED, FormatName, MessageFormat
from outbox.errors import UsageError
from outbox.receiver.message import BadMessage
from outbox.receiver.verification import verify
from outbox.testing.sender import SECRET

FORMATS: tuple[FormatName, ...] = get_args(FormatName)
BATCHED = [each for each in FORMATS if each not in UNBATCHED]
SOURCE = "https://shop.example/orders?x=1"
NOW = 1_764_000_000
KEY = parse_secret(SECRET)

SIGNATURE_HEADERS = ("webhook-id", "webhook-timestamp", "webhook-signature")
PLAIN = Delivery(
    UUID(int=7), "lane-1-0", 5, 1, 9, UUID(int=8), "a.b", None, None,
    NOW, None, b"1", None,
)  # fmt: skip

# What PostgreSQL's text holds.
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)
odd_texts = st.sampled_from(
    [
        '"',
        "%",
        " ",
        "a b",
        "\x7f",
        "\u0085",
        "\ufffe",
        "\U0001fffe",
        "é\U0001f600",
        "\r\n",
        "x" * 512,
        "\x01" + "\U0001f600" * 63,
    ]
)
payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
content_types = st.sampled_from(
    [
        "image/png",
        "text/plain; charset=utf-8",
        'a/b;c="]\\ ;d=e";f=~',
        "application/cloudevents+json",
        "application/json-seq",
    ]
)
lanes = st.just("0d0a2ee48d4a-1-0")


@st.composite
def deliveries(draw: st.DrawFn) -> Delivery:
    optional_text = st.none() | texts | odd_texts
    tenant = draw(optional_text)
    content_type = draw(st.none() | content_types)
    return Delivery(
        endpoint_id=UUID(int=7),
        lane=draw(lanes),
        seq=draw(st.integers(2, 2**62)),
        batch=1,
        outbox_id=draw(st.integers(1, 2**62)),
        event_id=draw(st.uuids()),
        type=draw(st.from_regex(r"[A-Za-z0-9_]{1,9}(\.[A-Za-z0-9_]{1,9}){0,3}", fullmatch=True)),
        tenant=None if tenant is None else tenant[:255],
        key=draw(optional_text),
        published_at=draw(st.integers(0, 7_000_000_000_000_000)) / 1e6,
        expires_at=None,
        payload=orjson.dumps(draw(payloads))
        if content_type is None
        else draw(st.binary(max_size=40)),
        content_type=content_type,
        headers=draw(
            st.none()
            | st.just(b'{"traceparent": "00-1-2-01", "ce-id": "forged", "X-Replay-Of": "a/1"}')
        ),
        replay_of=draw(st.none() | st.tuples(lanes, st.integers(1, 2**62))),
        backfill_id=draw(st.none() | st.integers(1, 2**62)),
    )


def data_of(delivery: Delivery) -> Any:
    """What a receiver reads as the payload."""
    return orjson.loads(delivery.payload) if delivery.content_type is None else delivery.payload


def sent(
    delivery: Delivery, name: FormatName, *, lane_ends: bool = False, prefix: str = "X-"
) -> tuple[list[tuple[str, str]], bytes]:
    prepared = prepare(
        delivery,
        delivery.seq - 1,
        lane_ends=lane_ends,
        headers=EndpointHeaders((("X-Env", "test"),), prefix),
        message_format=MessageFormat(name, SOURCE),
    )
    return list(parse_lines(prepared.attempt(1, NOW, [KEY]))), prepared.body


@pytest.mark.slow
@given(deliveries(), st.sampled_from(FORMATS), st.booleans(), st.sampled_from(["X-", "Acme-"]))
def test_what_is_read_back_is_what_was_published(
    delivery: Delivery, name: FormatName, lane_ends: bool, prefix: str
) -> None:
    headers, body = sent(delivery, name, lane_ends=lane_ends, prefix=prefix)
    verified = verify(headers, body, SECRET, header_prefix=prefix, now=NOW)
    (message,) = verified.messages
    assert message.delivery_id == verified.message_id == delivery.message_id
    assert message.event_id == str(delivery.event_id)
    assert (message.type, message.tenant, message.key) == (
        delivery.type,
        delivery.tenant,
        delivery.key,
    )
    assert datetime.fromisoformat(message.timestamp).timestamp() == delivery.published_at
    assert (message.lane, message.sequence) == (delivery.lane, delivery.seq)
    assert message.previous_sequence == delivery.seq - 1
    assert (message.replay_of, message.backfill) == (delivery.replay_of, delivery.backfill_id)
    assert message.lane_ends is lane_ends
    assert message.data == (None if name == "thin" else data_of(delivery))
    assert message.content_type == delivery.content_type
    assert message.format == name


@given(deliveries(), st.sampled_from(FORMATS), st.data())
def test_a_forged_byte_of_the_body_is_refused(
    delivery: Delivery, name: FormatName, data: st.DataObject
) -> None:
    headers, body = sent(delivery, name)
    at = data.draw(st.integers(0, len(body)))
    # At its end, a byte is added.
    was = body[at] if at < len(body) else 0
    forged = body[:at] + bytes([was ^ data.draw(st.integers(1, 255))]) + body[at + 1 :]
    with pytest.raises(SignatureError):
        verify(headers, forged, SECRET, now=NOW)


@pytest.mark.slow
@given(deliveries(), st.sampled_from(FORMATS), st.booleans(), st.data())
def test_a_forged_character_of_the_metadata_is_refused(
    delivery: Delivery, name: FormatName, lane_ends: bool, data: st.DataObject
) -> None:
    headers, body = sent(delivery, name, lane_ends=lane_ends)
    described = [
        n
        for n, (header, _) in enumerate(headers)
        if (header.startswith(("X-", "webhook-")) and header not in ("X-Attempt", "X-Env"))
        or (name in UNBATCHED and (header == "Content-Type" or header.startswith("ce-")))
    ]
    n = data.draw(st.sampled_from(described))
    header, value = headers[n]
    at = data.draw(st.integers(0, len(value) - 1))
    other = data.draw(st.characters(min_codepoint=33, max_codepoint=126).filter(value[at].__ne__))
    headers[n] = (header, value[:at] + other + value[at + 1 :])
    with pytest.raises((SignatureError, BadMessage)):
        verify(headers, body, SECRET, now=NOW)


@given(deliveries(), st.sampled_from(UNBATCHED), st.data())
def test_a_header_that_is_removed_or_added_is_refused(
    delivery: Delivery, name: FormatName, data: st.DataObject
) -> None:
    headers, body = sent(delivery, name, lane_ends=True)
    names = [each for each, _ in headers if each.startswith(("X-", "ce-")) and each != "X-Attempt"]
    removed = data.draw(st.sampled_from([each for each in names if each != "X-Env"]))
    with pytest.raises((SignatureError, BadMessage)):
        verify([each for each in headers if each[0] != removed], body, SECRET, now=NOW)
    attributes = {f"ce-{each}" for each in signed_metadata.ATTRIBUTES}
    missing = {"X-Replay-Of", "X-Backfill", "X-Event-Key", "X-Event-Tenant", *attributes}
    missing -= {each for each, _ in headers}
    for added in sorted(missing):
        with pytest.raises((SignatureError, BadMessage)):
            verify([*headers, (added, "1")], body, SECRET, now=NOW)


@given(deliveries(), st.sampled_from(UNBATCHED))
def test_signed_metadata_cannot_be_sent_as_a_body(delivery: Delivery, name: FormatName) -> None:
    headers = dict(sent(delivery, name)[0])
    signature = headers.pop("webhook-metadata-signature")
    prepared = prepare(delivery, delivery.seq - 1, message_format=MessageFormat(name))
    assert prepared.metadata is not None
    for message_id in (headers[ID_HEADER], f"metadata.{headers[ID_HEADER]}", "metadata"):
        forged = headers | {"webhook-signature": signature, ID_HEADER: message_id}
        with pytest.raises(SignatureError):
            verify(forged, prepared.metadata, SECRET, now=NOW)


@pytest.mark.slow
@given(st.lists(deliveries(), min_size=1, max_size=4), st.sampled_from(BATCHED))
def test_a_batch_is_read_back(some: list[Delivery], name: FormatName) -> None:
    batch = [each._replace(seq=n) for n, each in enumerate(some, 2)]
    prepared = prepare_batch(batch, 1, message_format=MessageFormat(name, SOURCE))
    headers = parse_lines(prepared.attempt(1, NOW, [KEY]))
    messages = verify(headers, prepared.body, SECRET, now=NOW).messages
    assert [each.delivery_id for each in messages] == [each.message_id for each in batch]
    assert [(each.key, each.tenant) for each in messages] == [(e.key, e.tenant) for e in batch]
    assert {each.format for each in messages} == {name}
    for each, delivery in zip(messages, batch, strict=True):
        assert each.data == (None if name == "thin" else data_of(delivery))
        assert each.content_type == delivery.content_type
    assert len(prepared.body) <= sum(map(element_bytes, batch)) <= BATCH_BYTES_MAX


@given(deliveries(), st.sampled_from(UNBATCHED), st.booleans())
def test_no_event_or_endpoint_can_set_a_header_of_the_relay(
    delivery: Delivery, name: FormatName, lane_ends: bool
) -> None:
    for header, _ in sent(delivery._replace(headers=None), name, lane_ends=lane_ends)[0]:
        own = valid_headers({header: "forged"})
        assert own.own == () or header == "X-Env"


@pytest.mark.parametrize("payload", [{"a": 1}, {"type": "a.b", "sequence": 9}])
@pytest.mark.parametrize("name", UNBATCHED)
def test_without_its_headers_a_delivery_is_no_request_of_another_sender(
    name: FormatName, payload: object
) -> None:
    headers, body = sent(PLAIN._replace(payload=orjson.dumps(payload)), name)
    stripped = [each for each in headers if each[0] in SIGNATURE_HEADERS]
    for formats in (None, [name], ["envelope"]):
        with pytest.raises(BadMessage, match="headers of the delivery are missing"):
            verify(stripped, body, SECRET, formats=formats, now=NOW)


def test_long_texts_leave_the_headers_within_what_servers_accept() -> None:
    own = {f"X-Own-{n}": "v" * 380 for n in range(20)}
    event = {f"X-E{n}": "v" * 380 for n in range(20)} | {"tracestate": "é" * 2000}
    delivery = PLAIN._replace(
        key="日" * 170, tenant="日" * 85, headers=orjson.dumps(event), replay_of=("l-1-0", 2**62)
    )
    for name in FORMATS:
        prepared = prepare(
            delivery,
            4,
            lane_ends=True,
            headers=valid_headers(own),
            message_format=MessageFormat(name, "/" * 200),
        )
        assert len(prepared.attempt(9, NOW, [KEY, KEY])) < 16 * 1024
        assert "X-Own-19" in prepared.lines


@pytest.mark.parametrize(
    "change",
    [
        {"content_type": None},
        {"content_type": 5},
        {"data_base64": 5},
        {"data_base64": "AA=A"},
        {"data_base64": "A A="},
        {"data_base64": "é"},
    ],
)
def test_a_payload_that_is_not_base64_is_no_delivery(change: dict[str, object]) -> None:
    delivery = PLAIN._replace(payload=b"\0", content_type="a/b")
    prepared = prepare(delivery, 4)
    members = orjson.loads(prepared.body) | change
    body = orjson.dumps({name: value for name, value in members.items() if value is not None})
    headers = parse_lines(prepared._replace(body=body).attempt(1, NOW, [KEY]))
    with pytest.raises(BadMessage, match=f'"{next(iter(change))}" is not'):
        verify(headers, body, SECRET, now=NOW)


@pytest.mark.parametrize("formats", [[], ["xml"]])
def test_formats_are_named(formats: list[Any]) -> None:
    with pytest.raises(UsageError, match="formats: "):
        verify({}, b"", SECRET, formats=formats)


def test_a_payload_has_a_request_of_its_own() -> None:
    for name in UNBATCHED:
        with pytest.raises(ValueError, match="has one delivery per request"):
            prepare_batch([PLAIN], 4, message_format=MessageFormat(name))


def test_an_envelope_as_payload_is_refused_where_the_format_is_known() -> None:
    """Without the metadata's signature, a raw body is taken for what it looks like."""
    inner = prepare(PLAIN._replace(payload=b'"forged"', seq=6), 4)
    headers, body = sent(PLAIN._replace(payload=inner.body), "raw")
    stripped = [each for each in headers if each[0] != "webhook-metadata-signature"]
    changed = dict(stripped) | {"X-Sequence": "6", "X-Previous-Sequence": "4"}
    assert verify(changed, body, SECRET, now=NOW).messages[0].data == "forged"
    with pytest.raises(BadMessage, match="the format is envelope, not raw"):
        verify(changed, body, SECRET, formats=["raw"], now=NOW)


@pytest.mark.parametrize(
    ("key", "attributes"),
    [
        ("order-7", {"subject": "order-7", "partitionkey": "order-7"}),
        ('"é', {"subject": '"é', "partitionkey": '"é'}),
        ("a\nb%", {"encodedkey": "a%0Ab%25"}),
        ("\U0001fffe", {"encodedkey": "%F0%9F%BF%BE"}),
        (None, {}),
    ],
)
def test_the_attributes_of_a_cloud_event(key: str | None, attributes: dict[str, str]) -> None:
    delivery = Delivery(
        UUID(int=7), "lane-1-0", 2**40, 1, 9, UUID(int=8), "order.paid", "acme", key,
        1_769_860_800.0, None, b'{"a": 1}', b'{"traceparent": "00-a-b-01"}',
        replay_of=("lane-1-1", 3), backfill_id=4,
    )  # fmt: skip
    headers, body = sent(delivery, "cloudevents", lane_ends=True)
    assert dict(headers)["Content-Type"] == "application/cloudevents+json; charset=utf-8"
    assert orjson.loads(body) == {
        "specversion": "1.0",
        "id": delivery.message_id,
        "source": SOURCE,
        "type": "order.paid",
        "time": "2026-01-31T12:00:00.000000Z",
        "datacontenttype": "application/json",
        "lane": "lane-1-0",
        "lanesequence": str(2**40),
        "previoussequence": str(2**40 - 1),
        "eventid": str(delivery.event_id),
        "tenant": "acme",
        "traceparent": "00-a-b-01",
        "replayof": "lane-1-1/3",
        "backfill": "4",
        "laneends": True,
        "data": {"a": 1},
        **attributes,
    }
