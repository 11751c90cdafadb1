"""A checkpoint says how far lanes are, and is read back only if that is what it is."""

from __future__ import annotations

from datetime import UTC, datetime

import orjson
import pytest

from outbox.core.delivery.receiver_checkpoint import LANES_MAX, TYPE, Mark, parse, prepare
from outbox.core.delivery.signature import verify
from outbox.core.model.headers import pairs

SECRET = bytes(32)
MARKS = (Mark("6f1c2a349d55-1-0", 1, 41), Mark("6f1c2a349d55-2-0", 2, 7))


def test_it_is_signed_and_read_back() -> None:
    prepared = prepare("msg-1", datetime(2026, 1, 31, tzinfo=UTC), MARKS, (("X-Own", "1"),))
    headers = {name.lower(): value for name, value in pairs(prepared.attempt(1, 1_000, [SECRET]))}
    assert verify(headers, prepared.body, [SECRET], 1_000).message_id == "msg-1"
    assert headers["x-own"] == "1"
    assert not headers.keys() & {"x-lane", "x-sequence", "x-delivery"}
    told = orjson.loads(prepared.body)
    assert (told["id"], told["type"]) == ("msg-1", TYPE)
    assert told["timestamp"] == "2026-01-31T00:00:00.000000Z"
    assert parse(prepared.body) == MARKS


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"outbox.checkpoint",
        b'["outbox.checkpoint"]',
        b'{"type": "a.b", "data": "outbox.checkpoint"}',
        # An event that a relay delivers has a lane, whatever its type.
        b'{"type": "outbox.checkpoint", "lane": "a-1-0", "lanes": []}',
    ],
)
def test_something_else_is_none(body: bytes) -> None:
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
def test_one_that_cannot_be_read_is_an_error(lanes: object) -> None:
    with pytest.raises(ValueError, match="lane"):
        parse(orjson.dumps({"type": TYPE, "lanes": lanes}))
