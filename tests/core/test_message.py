from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from math import nextafter
from typing import Any
from uuid import UUID

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

from outbox.core.messages.envelope import datetime_rfc3339, rfc3339
from outbox.core.messages.message import build, prepare
from outbox.core.messages.signature import format_secret, verify
from outbox.core.model.delivery import Delivery, earliest_commit
from outbox.core.model.headers import EndpointHeaders, parse_lines
from outbox.core.model.headers import valid_headers as carried
from outbox.core.model.ids import delivery_id, lane_name

ENDPOINT = UUID("6f1c2a34-9d55-4f0e-8a55-2f6a1b0c9d3e")
EVENT = UUID("0d9ff25f-6f0b-4e0d-9d4b-07a1dbb3d1f4")
SECRET = bytes(range(32))
OTHER = bytes(range(1, 33))
NOW = 1_770_000_000

DELIVERY = Delivery(
    endpoint_id=ENDPOINT,
    lane=lane_name(ENDPOINT, 1, 0),
    seq=8,
    batch=3,
    outbox_id=42,
    event_id=EVENT,
    type="order.paid",
    tenant="acme",
    key="order-7",
    published_at=datetime(2026, 1, 31, 12, 0, 0, 1, tzinfo=UTC).timestamp(),
    expires_at=None,
    payload=b'{"total": 12.50}',
    headers=b'{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}',
)

json_text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | json_text,
    lambda inner: st.lists(inner) | st.dictionaries(json_text, inner),
    max_leaves=10,
)


def attempt(delivery: Delivery = DELIVERY, **changes: Any) -> tuple[dict[str, str], bytes]:
    arguments = {"previous_seq": 6, "attempt": 1, "timestamp": NOW, "keys": [SECRET]}
    headers, body = build(delivery, **(arguments | changes))
    names = [name.lower() for name, _ in headers]
    assert len(set(names)) == len(names), "a header twice"
    return dict(zip(names, (value for _, value in headers), strict=True)), body


def test_a_whole_request_as_the_contract_shows_it() -> None:
    headers, body = attempt(DELIVERY._replace(replay_of=("a-1-0", 7)), attempt=2)
    assert body == (
        b'{"id":"0d9ff25f-6f0b-4e0d-9d4b-07a1dbb3d1f4","type":"order.paid",'
        b'"timestamp":"2026-01-31T12:00:00.000001Z","tenant":"acme","key":"order-7",'
        b'"lane":"6f1c2a349d55-1-0","sequence":8,"previous_sequence":6,'
        b'"replay_of":{"lane":"a-1-0","sequence":7},"data":{"total": 12.50}}'
    )
    signature = headers.pop("webhook-signature")
    assert headers == {
        "content-type": "application/json",
        "user-agent": "outbox-relay",
        "webhook-id": "a635b22d-2f2b-854d-b0be-4ae9f4fa1dbe",
        "webhook-timestamp": "1770000000",
        "x-delivery": "a635b22d-2f2b-854d-b0be-4ae9f4fa1dbe",
        "x-event": "order.paid",
        "x-event-id": "0d9ff25f-6f0b-4e0d-9d4b-07a1dbb3d1f4",
        "x-lane": "6f1c2a349d55-1-0",
        "x-sequence": "8",
        "x-previous-sequence": "6",
        "x-attempt": "2",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    verify(headers | {"webhook-signature": signature}, body, [SECRET], NOW)


def test_absent_values_are_left_out() -> None:
    _, body = attempt(DELIVERY._replace(tenant=None, key=None, headers=None), previous_seq=0)
    assert list(orjson.loads(body)) == [
        "id", "type", "timestamp", "lane", "sequence", "previous_sequence", "data",
    ]  # fmt: skip
    assert orjson.loads(body)["previous_sequence"] == 0


@given(json_text, json_text, json_values, st.integers(1, 2**63 - 1), st.data())
def test_body_and_headers_carry_the_same_values(
    tenant: str, key: str, payload: Any, seq: int, data: st.DataObject
) -> None:
    previous = data.draw(st.integers(0, seq - 1))
    delivery = DELIVERY._replace(tenant=tenant, key=key, payload=orjson.dumps(payload), seq=seq)
    headers, body = attempt(delivery, previous_seq=previous)
    assert orjson.loads(body) == {
        "id": str(EVENT),
        "type": "order.paid",
        "timestamp": "2026-01-31T12:00:00.000001Z",
        "tenant": tenant,
        "key": key,
        "lane": delivery.lane,
        "sequence": seq,
        "previous_sequence": previous,
        "data": payload,
    }
    assert headers["x-sequence"] == str(seq)
    assert headers["x-previous-sequence"] == str(previous)
    assert headers["x-lane"] == delivery.lane
    verify(headers, body, [SECRET], NOW)


def test_payload_bytes_are_not_changed() -> None:
    payload = b'{"n": 1.10, "big": 123456789012345678901234567890, "n": 2}'
    _, body = attempt(DELIVERY._replace(payload=payload))
    assert body.endswith(b'"data":' + payload + b"}")


def test_an_independent_library_verifies_the_signature_also_during_rotation() -> None:
    timestamp = int(datetime.now(tz=UTC).timestamp())
    headers, body = attempt(timestamp=timestamp, keys=[OTHER, SECRET])
    assert len(headers["webhook-signature"].split(" ")) == 2
    for secret in (SECRET, OTHER):
        assert Webhook(format_secret(secret)).verify(body, headers)["data"] == {"total": 12.5}


def test_the_lane_end_is_marked_in_the_signed_body() -> None:
    prepared = prepare(DELIVERY, 6, lane_ends=True)
    headers = dict(parse_lines(prepared.attempt(1, NOW, [SECRET])))
    assert orjson.loads(prepared.body)["lane_ends"] is True
    assert b"lane_ends" not in prepare(DELIVERY, 6).body
    assert not any("end" in name.lower() for name in headers)
    verify({k.lower(): v for k, v in headers.items()}, prepared.body, [SECRET], NOW)


def test_endpoint_headers_do_not_override_relay_headers() -> None:
    ours = dict(parse_lines(prepare(DELIVERY._replace(headers=None), 6).lines))
    prepared = prepare(DELIVERY, 6, headers=carried({"X-Env": "a", "Host": "else"}))
    assert dict(parse_lines(prepared.lines)) == ours | {"X-Env": "a"} | orjson.loads(
        DELIVERY.headers or ""
    )


def test_the_prefix_of_header_names_is_the_endpoints() -> None:
    ours = dict(parse_lines(prepare(DELIVERY, 6).attempt(3, NOW, [SECRET])))
    prepared = prepare(DELIVERY, 6, headers=EndpointHeaders(prefix="Acme-"))
    headers = dict(parse_lines(prepared.attempt(3, NOW, [SECRET])))
    described = {
        "Attempt",
        "Delivery",
        "Event",
        "Event-Id",
        "Lane",
        "Previous-Sequence",
        "Sequence",
    }
    for name in described:
        assert headers.pop(f"Acme-{name}") == ours.pop(f"X-{name}")
    assert headers == ours


def test_an_events_header_does_not_take_the_place_of_a_prefixed_one() -> None:
    forged = orjson.dumps({"acme_SEQUENCE": "9", "Acme-Lane": "x", "Acme-Other": "kept"})
    prepared = prepare(
        DELIVERY._replace(headers=forged), 6, headers=EndpointHeaders(prefix="Acme-")
    )
    names = [name for name, _ in parse_lines(prepared.lines)]
    assert [name for name in names if "SEQUENCE" in name] == []
    assert names.count("Acme-Lane") == 1
    assert names[-1] == "Acme-Other"


def test_attempts_differ_in_number_time_and_signature_only() -> None:
    prepared = prepare(DELIVERY, 6)
    first = dict(parse_lines(prepared.attempt(1, NOW, [SECRET])))
    second = dict(parse_lines(prepared.attempt(2, NOW + 5, [SECRET])))
    changed = {name for name in first if first[name] != second[name]}
    assert changed == {"X-Attempt", "webhook-timestamp", "webhook-signature"}
    assert first["X-Delivery"] == str(delivery_id(ENDPOINT, 42, DELIVERY.event_id))
    verify(second, prepared.body, [SECRET], NOW + 5)


# ------------------------------------------------------ the event's own headers


def send_headers(headers: dict[str, Any]) -> dict[str, str]:
    ours, _ = attempt(DELIVERY._replace(headers=None))
    all_of_them, _ = attempt(DELIVERY._replace(headers=orjson.dumps(headers)))
    for name, value in ours.items():
        assert all_of_them.pop(name) == value
    return all_of_them


def test_event_headers_are_sent() -> None:
    assert send_headers(
        {"X-Tenant-Region": "eu", "tracestate": "a=b", "empty": "", "pad": " x\t"}
    ) == {
        "x-tenant-region": "eu",
        "tracestate": "a=b",
        "empty": "",
        "pad": "x",
    }


@pytest.mark.parametrize(
    "name",
    [
        "Host",
        "Content-Length",
        "Transfer-Encoding",
        "content-type",
        "Content-Encoding",
        "CONNECTION",
        "Keep-Alive",
        "TE",
        "Trailer",
        "Upgrade",
        "Expect",
        "Proxy-Authorization",
        "Proxy-Connection",
        "User-Agent",
        "webhook-id",
        "Webhook-Signature",
        "webhook-anything",
        "X-Delivery",
        "x-sequence",
        "X-Previous-Sequence",
        "X-LANE",
        "X-Event",
        "X-Event-Id",
        "X-Attempt",
    ],
)
def test_reserved_and_framing_headers_are_dropped(name: str) -> None:
    assert send_headers({name: "evil", "kept": "1"}) == {"kept": "1"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("a", "x\r\nX-Sequence: 99"),
        ("a", "x\n"),
        ("a", "x\x00y"),
        ("a", "x\x7f"),
        ("a", "é"),
        ("a", "日本"),
        ("a", 7),
        ("", "x"),
        ("a b", "x"),
        ("a:", "x"),
        ("a\r\nb", "x"),
        ("a\n", "x"),
        ("ä", "x"),
        (" host", "x"),
        ("Kelvin-\u212a", "x"),
    ],
)
def test_headers_invalid_in_http_are_dropped(name: str, value: Any) -> None:
    assert send_headers({name: value, "kept": "1"}) == {"kept": "1"}


def test_the_first_of_several_header_spellings_is_sent() -> None:
    assert send_headers({"A-b": "1", "a-B": "2"}) == {"a-b": "1"}


@given(st.dictionaries(json_text, json_text))
def test_the_request_is_well_formed_with_any_headers(headers: dict[str, str]) -> None:
    for name, value in send_headers(headers).items():
        assert re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name)
        assert value.isascii()
        assert value == "" or value.isprintable() or "\t" in value
        assert not set(value) & {"\r", "\n", "\0"}


# ------------------------------------------------------------------ the time


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (datetime(2026, 1, 31, 12, 0, tzinfo=UTC), "2026-01-31T12:00:00.000000Z"),
        (
            datetime(2026, 1, 1, 0, 30, tzinfo=timezone(timedelta(hours=2))),
            "2025-12-31T22:30:00.000000Z",
        ),
        (datetime(33, 4, 3, tzinfo=UTC), "0033-04-03T00:00:00.000000Z"),
    ],
)
def test_times_are_utc_with_microseconds(at: datetime, text: str) -> None:
    assert rfc3339(at.timestamp()) == datetime_rfc3339(at) == text


def test_a_time_is_rounded_to_the_next_second() -> None:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()
    assert rfc3339(nextafter(at, 0)) == rfc3339(at) == "2026-01-31T12:00:00.000000Z"


@given(st.datetimes(datetime(1800, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)))
def test_epoch_seconds_are_exact_for_centuries(at: datetime) -> None:
    assert datetime.fromisoformat(rfc3339(at.timestamp())) == at


@given(st.datetimes(timezones=st.just(UTC)))
def test_times_round_trip(at: datetime) -> None:
    assert datetime.fromisoformat(datetime_rfc3339(at)) == at


@pytest.mark.parametrize(("committed_after", "since"), [(None, 5.0), (4.0, 5.0), (6.0, 6.0)])
def test_an_event_waits_since_its_commit(committed_after: float | None, since: float) -> None:
    assert earliest_commit(5.0, committed_after) == since
