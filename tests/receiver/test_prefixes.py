"""A receiver that accepts two header prefixes, while an endpoint's is being changed."""

from __future__ import annotations

from typing import get_args

import pytest

from outbox.core.messages.message import prepare
from outbox.core.messages.signature import format_secret, parse_secret
from outbox.core.model.headers import parse_lines
from outbox.core.model.message_format import FormatName, MessageFormat
from outbox.receiver import Verifier
from tests.core.test_marks import DELIVERY
from tests.receiver.deliveries import SECRET

NOW = 1_700_000_000
OTHERS = ("Event", "Delivery", "Event-Key", "Event-Id", "Event-Time", "Backfill")


@pytest.mark.parametrize("prefixes", [("Acme-", "X-"), ("X-", "Acme-")])
@pytest.mark.parametrize("format_name", get_args(FormatName))
def test_a_header_of_an_event_is_not_taken_for_one_of_the_relay(
    prefixes: tuple[str, str], format_name: FormatName
) -> None:
    """A publisher may write other names of the prefix that this endpoint does not have."""
    headers = b"{%s}" % b",".join(b'"Acme-%s":"1"' % name.encode() for name in OTHERS)
    event = DELIVERY._replace(headers=headers.decode())
    prepared = prepare(event, 4, message_format=MessageFormat(format_name, "/shop"))
    keys = [parse_secret(format_secret(SECRET))]
    received = dict(parse_lines(prepared.attempt(1, NOW, keys)))
    assert received["Acme-Event"] == "1"
    verifier = Verifier(format_secret(SECRET), header_prefix=prefixes, clock=lambda: float(NOW))
    (message,) = verifier.verify(received, prepared.body).messages
    assert (message.sequence, message.type) == (DELIVERY.seq, DELIVERY.type)
