from __future__ import annotations

from dataclasses import dataclass

import pytest

from outbox.core.brokers.message import messages_of
from outbox.core.model.headers import EndpointHeaders
from outbox.core.model.message_format import ENVELOPE, MessageFormat
from tests.core.test_message import DELIVERY


@dataclass(frozen=True)
class Settings:
    headers: EndpointHeaders
    message_format: MessageFormat = ENVELOPE


@pytest.mark.parametrize("prefix", ["X-", "Acme-"])
@pytest.mark.parametrize("own", [(), (("Team", "a"), ("X-Delivery", "not this"))])
@pytest.mark.parametrize("headers", [None, DELIVERY.headers, b'{"X-Sequence": "99"}'])
def test_a_message_shows_its_position_whatever_the_prefix_is(
    prefix: str, own: tuple[tuple[str, str], ...], headers: bytes | None
) -> None:
    """Brokers read the position of a lane from these headers."""
    if prefix == "X-":
        # `valid_headers` leaves out those that the relay sets.
        own = tuple(each for each in own if each[0] != "X-Delivery")
    settings = Settings(EndpointHeaders(own, prefix))
    (message,) = messages_of(settings, [DELIVERY._replace(headers=headers)], 6)
    names = [name.lower() for name, _ in message.headers]
    assert len(set(names)) == len(names)
    found = {name.lower(): value for name, value in message.headers}
    assert found["x-delivery"] == message.delivery == DELIVERY.message_id
    assert found["x-sequence"] == "8"
    assert found["x-lane"] == DELIVERY.lane
    assert found[f"{prefix.lower()}previous-sequence"] == "6"
