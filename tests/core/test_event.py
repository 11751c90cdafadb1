"""The validation of events agrees with what the relay can send."""

from __future__ import annotations

from uuid import UUID

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.messages.message import prepare
from outbox.core.model.delivery import Delivery
from outbox.core.model.event import HEADERS_BYTES_MAX, check_type, encode_headers, encode_payload
from outbox.core.model.headers import parse_lines
from outbox.core.model.sql_names import quote_ident, quote_literal, schema_name
from outbox.errors import InvalidEvent, UsageError

DELIVERY = Delivery(
    endpoint_id=UUID(int=1),
    lane="a-1-0",
    seq=1,
    batch=1,
    outbox_id=1,
    event_id=UUID(int=2),
    type="a",
    tenant=None,
    key=None,
    published_at=1_767_225_600.0,
    expires_at=None,
    payload=b"{}",
    headers=None,
)
TRICKY = st.sampled_from(["Host", "X-Lane", "webhook-id", "X-A", "x-a", "traceparent", "Te"])


@given(st.dictionaries(TRICKY | st.text(), st.text(), max_size=4))
def test_a_header_that_may_be_published_is_sent(headers: dict[str, str]) -> None:
    try:
        encoded = encode_headers(headers)
    except InvalidEvent:
        return
    raw = None if encoded is None else encoded.encode()
    sent = dict(parse_lines(prepare(DELIVERY._replace(headers=raw), 0).lines))
    for name, value in headers.items():
        assert sent[name] == value.strip(" \t")


def test_the_size_of_headers_is_that_of_jsonb() -> None:
    room = HEADERS_BYTES_MAX - len('{"X-A": "", "X-B": "\\""}')
    headers = {"X-A": "x" * room, "X-B": '"'}
    encoded = encode_headers(headers)
    assert encoded is not None
    assert len(encoded) == HEADERS_BYTES_MAX
    with pytest.raises(InvalidEvent, match="8193 bytes as JSON, the limit is 8192"):
        encode_headers({**headers, "X-B": '"x'})
    assert encode_headers({}) is None


@given(st.text())
def test_an_escaped_backslash_is_not_a_nul(text: str) -> None:
    literal = text.replace("\0", "") + "\\u0000"
    assert orjson.loads(encode_payload({"a": literal})) == {"a": literal}
    with pytest.raises(InvalidEvent, match="NUL"):
        encode_payload({"a": text + "\0"})
    with pytest.raises(InvalidEvent, match="NUL"):
        encode_payload({text + "\0": 1})


@pytest.mark.parametrize("good", ["a", "A_1.b2", "_", "0.0", "outbox", "outboxes.x", "x" * 255])
def test_event_types_are_validated(good: str) -> None:
    assert check_type(good) == good


def test_errors_quote_header_names() -> None:
    assert quote_ident('a"b') == '"a""b"'
    assert quote_literal("it's") == "'it''s'"
    assert quote_literal("a\\b'c") == " E'a\\\\b''c'"
    assert schema_name("é" * 25) == "é" * 25
    for bad in ("", "é" * 26, "pg_x", "information_schema", "a\0", "a\n", "\ud800"):
        with pytest.raises(UsageError, match="schema"):
            schema_name(bad)


def test_too_many_headers_are_rejected() -> None:
    assert encode_headers({f"X-{n}": "" for n in range(64)}) is not None
    with pytest.raises(InvalidEvent, match="65 headers, the limit is 64"):
        encode_headers({f"X-{n}": "" for n in range(65)})
