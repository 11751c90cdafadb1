"""`verify`, called by a receiver that uses nothing else of this package."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from standardwebhooks import Webhook

from outbox.core.messages.signature import format_secret
from outbox.errors import OutboxError, UsageError
from outbox.receiver import (
    BadMessage,
    MissingHeader,
    RepeatedHeader,
    SignatureMismatch,
    TimestampTooOld,
    verify,
)
from tests.receiver.deliveries import OTHER, SECRET, delivery, signed

TEXT, ANOTHER = format_secret(SECRET), format_secret(OTHER)
NOW = 1_770_000_000
# Signed once, so the tests verify at that time.
HEADERS, BODY = signed(delivery(3), previous=1, timestamp=NOW)


def test_a_delivery_of_a_relay_is_read_as_well() -> None:
    verified = verify(HEADERS, BODY, TEXT, now=NOW)
    (message,) = verified.messages
    assert (message.sequence, message.previous_sequence) == (3, 1)
    assert verified.message_id == message.delivery_id
    assert verified.timestamp == NOW


@pytest.mark.parametrize(
    "headers",
    [dict(HEADERS), list(HEADERS.items()), [(k.upper(), v) for k, v in HEADERS.items()]],
    ids=["mapping", "pairs", "upper case"],
)
def test_headers_come_in_many_forms(headers: Any) -> None:
    assert verify(headers, BODY, TEXT, now=NOW).messages


def test_two_secrets_are_accepted_during_a_rotation() -> None:
    assert verify(HEADERS, BODY, [ANOTHER, f" {TEXT}\n"], now=NOW).messages
    with pytest.raises(SignatureMismatch):
        verify(HEADERS, BODY, ANOTHER, now=NOW)


def test_a_foreign_request_is_verified_and_not_parsed() -> None:
    at, body = datetime.now(tz=UTC), "not even JSON"
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": Webhook(TEXT).sign("msg_1", at, body),
    }
    verified = verify(headers, body.encode(), TEXT)
    assert (verified.message_id, verified.messages) == ("msg_1", ())


def test_a_request_with_delivery_headers_must_be_a_delivery() -> None:
    headers = {k: v for k, v in HEADERS.items() if k not in ("X-Lane", "X-Delivery")}
    with pytest.raises(BadMessage, match="X-Delivery"):
        verify(headers, BODY, TEXT, now=NOW)


def test_each_cause_has_its_own_error() -> None:
    def fails(error: type[OutboxError], change: dict[str, str | None], **how: Any) -> None:
        changed = dict(HEADERS)
        for name, value in change.items():
            changed.pop(name, None)
            if value is not None:
                changed[name] = value
        with pytest.raises(error) as caught:
            verify(changed, BODY, TEXT, **{"now": NOW} | how)
        assert type(caught.value) is error

    fails(MissingHeader, {"webhook-id": None})
    fails(TimestampTooOld, {}, now=NOW + 400)
    fails(BadMessage, {"X-Sequence": "4"})
    fails(BadMessage, {"X-Previous-Sequence": None})
    fails(RepeatedHeader, {"x-sequence": "3"})
    fails(SignatureMismatch, {"webhook-id": "another"})
    with pytest.raises(UsageError):
        verify(HEADERS, BODY, [], now=NOW)
    with pytest.raises(UsageError):
        verify(HEADERS, BODY, "secret", now=NOW)
    assert verify(HEADERS, BODY, TEXT, now=NOW + 400, tolerance_s=500).messages
