from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from outbox.receiver.message import BadMessage, parse
from tests.receiver.deliveries import delivery, signed

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADERS, BODY = signed(delivery(3, replay_of=("old-1-0", 2)), previous=1)


def test_a_delivery_is_read() -> None:
    (message,) = parse(HEADERS, BODY)
    assert message.delivery_id == HEADERS["webhook-id"]
    assert message.event_id == HEADERS["x-event-id"]
    assert (message.type, message.tenant, message.key) == ("order.paid", "acme", "order-7")
    assert (message.lane, message.sequence, message.previous_sequence) == ("a-1-0", 3, 1)
    assert message.replay_of == ("old-1-0", 2)
    assert message.attempt == 1
    assert message.data == {"n": 3}


def test_absent_values_are_none() -> None:
    headers, body = signed(delivery(1, tenant=None, key=None))
    (message,) = parse(headers, body)
    assert (message.tenant, message.key, message.replay_of) == (None, None, None)


def test_the_last_delivery_of_a_lane_has_lane_ends() -> None:
    assert not parse(HEADERS, BODY)[0].lane_ends
    assert parse(*signed(delivery(3), lane_ends=True))[0].lane_ends


def test_sequences_are_checked_without_a_signature() -> None:
    bare = {name: value for name, value in HEADERS.items() if not name.startswith("webhook-")}
    assert parse(CIMultiDict(bare), BODY)[0].sequence == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"X-Sequence": "4"}, "X-Sequence"),
        ({"X-Sequence": "03"}, "X-Sequence"),
        ({"X-Sequence": None}, "X-Sequence"),
        ({"X-Previous-Sequence": "2"}, "X-Previous-Sequence"),
        ({"X-Previous-Sequence": None}, "X-Previous-Sequence"),
        ({"X-Lane": "b-1-0"}, "X-Lane"),
        ({"X-Event": "another.type"}, "X-Event"),
        ({"X-Event-Id": "0d9ff25f-6f0b-4e0d-9d4b-000000000000"}, "X-Event-Id"),
        ({"X-Delivery": "no uuid"}, "X-Delivery"),
        ({"X-Delivery": None}, "X-Delivery"),
        ({"X-Delivery": "0d9ff25f-6f0b-4e0d-9d4b-000000000000"}, "webhook-id"),
    ],
)
def test_headers_that_differ_from_the_body_are_refused(
    change: dict[str, str | None], says: str
) -> None:
    headers = CIMultiDict(HEADERS)
    for name, value in change.items():
        headers.pop(name)
        if value is not None:
            headers[name] = value
    with pytest.raises(BadMessage, match=says):
        parse(headers, BODY)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": None}, '"id"'),
        ({"id": 7}, '"id"'),
        ({"type": []}, '"type"'),
        ({"timestamp": None}, '"timestamp"'),
        ({"tenant": 1}, '"tenant"'),
        ({"key": None}, '"key"'),
        ({"lane": {}}, '"lane"'),
        ({"sequence": "3"}, '"sequence"'),
        ({"sequence": 3.0}, '"sequence"'),
        ({"sequence": True}, '"sequence"'),
        ({"sequence": 1}, "follow"),
        ({"previous_sequence": -1}, '"previous_sequence" is not between 0 and'),
        ({"sequence": 2**63}, '"sequence" is not between 0 and'),
        ({"backfill": 2**64 - 1}, '"backfill" is not between 0 and'),
        ({"type": "order\0paid"}, '"type" has a NUL character'),
        ({"tenant": "\0"}, '"tenant" has a NUL character'),
        ({"replay_of": {"lane": "x\0", "sequence": 1}}, '"lane" has a NUL character'),
        ({"replay_of": 3}, '"replay_of"'),
        ({"lane_ends": 1}, '"lane_ends" is not true or false'),
        ({"lane_ends": None}, '"lane_ends"'),
        ({"replay_of": {"lane": "x"}}, '"sequence"'),
        ({"content_type": ""}, "the content type is empty"),
    ],
)
def test_bodies_that_are_not_deliveries_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(BadMessage, match=says):
        parse(HEADERS, orjson.dumps(orjson.loads(BODY) | change))


@pytest.mark.parametrize("body", [b"", b"[]", b"7", b"null", b"{", b'"x"', b"\xff", b"{} {}"])
def test_bodies_that_are_not_objects_are_refused(body: bytes) -> None:
    with pytest.raises(BadMessage, match="body"):
        parse(HEADERS, body)


@pytest.mark.parametrize("text", ["", "x", "-1", "٣", "9" * 100])
def test_an_invalid_attempt_header_is_ignored(text: str) -> None:
    headers = CIMultiDict(HEADERS)
    headers["X-Attempt"] = text
    assert parse(headers, BODY)[0].attempt is None


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from([*orjson.loads(BODY), "x"])


@pytest.mark.slow
@given(st.dictionaries(names, anything), st.dictionaries(st.sampled_from([*HEADERS]), st.text()))
def test_any_input_raises_only_bad_message(
    content: dict[str, Any], headers: Mapping[str, str]
) -> None:
    changed = CIMultiDict(HEADERS)
    changed.update(headers)
    with contextlib.suppress(BadMessage):
        (message,) = parse(changed, orjson.dumps(orjson.loads(BODY) | content))
        assert 0 <= message.previous_sequence < message.sequence
