"""A receiver checkpoint records lane positions, and is read back only if it is authentic."""

from __future__ import annotations

import orjson
import pytest

from outbox.core.delivery.receiver_checkpoint import LANES_MAX, TYPE, LaneMark, parse, prepare
from outbox.core.delivery.signature import verify
from outbox.core.model.headers import EndpointHeaders, parse_lines

SECRET = bytes(32)
OWN_HEADERS = EndpointHeaders((("X-Own", "1"),))
MARKS = (LaneMark("6f1c2a349d55-1-0", 1, 41), LaneMark("6f1c2a349d55-2-0", 2, 7))


def test_a_checkpoint_is_signed_and_read_back() -> None:
    prepared = prepare("msg-1", 1_769_817_600.0, MARKS, OWN_HEADERS)
    headers = {
        name.lower(): value for name, value in parse_lines(prepared.attempt(1, 1_000, [SECRET]))
    }
    assert verify(headers, prepared.body, [SECRET], 1_000).message_id == "msg-1"
    assert headers["x-own"] == "1"
    assert not headers.keys() & {"x-lane", "x-sequence", "x-delivery"}
    body = orjson.loads(prepared.body)
    assert (body["id"], body["type"]) == ("msg-1", TYPE)
    assert body["timestamp"] == "2026-01-31T00:00:00.000000Z"
    assert parse(prepared.body) == MARKS


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"outbox.checkpoint",
        b'["outbox.checkpoint"]',
        b'{"type": "a.b", "data": "outbox.checkpoint"}',
        # A delivered event has a lane, whatever its type.
        b'{"type": "outbox.checkpoint", "lane": "a-1-0", "lanes": []}',
    ],
)
def test_another_payload_is_not_a_checkpoint(body: bytes) -> None:
    assert parse(body) is None


@pytest.mark.parametrize(
    "lanes",
    [
        None,
        {},
        [1],
        [{"lane": "a", "generation": 1}],
        [{"lane": 7, "generation": 1, "sequence": 1}],
        [{"lane": "a", "generation": 1, "sequence": True}],
        [{"lane": "a", "generation": 1, "sequence": -1}],
        [{"lane": "a", "generation": 1.0, "sequence": 1}],
        [{"lane": "a", "generation": 1, "sequence": 1}] * (LANES_MAX + 1),
    ],
)
def test_an_unreadable_checkpoint_is_an_error(lanes: object) -> None:
    with pytest.raises(ValueError, match="lane"):
        parse(orjson.dumps({"type": TYPE, "lanes": lanes}))
