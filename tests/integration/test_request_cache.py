"""A request that was built ahead is used only if it is the one to be sent now."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox.core.delivery.commands import Send
from outbox.core.delivery.signing_clock import ClockDifference, SigningClock
from outbox.core.model.headers import NO_HEADERS, EndpointHeaders
from outbox.core.model.message_format import ENVELOPE, MessageFormat
from outbox.destinations.interface import Recipient
from outbox.relay.delivery.request_cache import RequestCache
from tests.core.lane_tables import EPOCH_S, delivery

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.messages.signature import SigningKey

OLD, NEW = b"o" * 24, b"n" * 24
NEXT = Send(delivery(2), 1, 1, maybe_sent_before=False)


@dataclass
class Settings:
    """The settings of an endpoint on which its requests depend."""

    headers: EndpointHeaders = NO_HEADERS
    message_format: MessageFormat = ENVELOPE

    def secrets_at(self, now: float) -> list[SigningKey]:
        return [OLD, NEW] if now < EPOCH_S + 1 else [NEW]


class Source:
    """An endpoint, without lanes."""

    def __init__(self) -> None:
        self.endpoint = cast("Endpoint", Settings())
        self.recipient = Recipient("http://shop.test/")
        self.lasting_keys: list[SigningKey] | None = [OLD]
        self.clocks = ClockDifference()
        self.signing = SigningClock(self.clocks)

    def change(self, **settings: Any) -> None:
        self.endpoint = cast("Endpoint", replace(cast("Any", self.endpoint), **settings))
        self.recipient = replace(self.recipient)


def prefetched() -> tuple[Source, RequestCache]:
    """A cache with the request of `NEXT`, built while the one before it was in flight."""
    cache = RequestCache(source := Source())
    cache.build(Send(delivery(1), 0, 1, maybe_sent_before=False), EPOCH_S, keep_alive=True)
    cache.prefetch(NEXT, EPOCH_S, keep_alive=True)
    return source, cache


def test_a_prepared_request_is_sent_once() -> None:
    _, cache = prefetched()
    assert cache.prepared is not None
    ahead = cache.prepared.request
    cache.prefetch(NEXT, EPOCH_S, keep_alive=True)
    assert cache.prepared.request is ahead
    assert cache.build(NEXT, EPOCH_S, keep_alive=True) is ahead
    assert cache.prepared is None
    assert cache.build(NEXT, EPOCH_S, keep_alive=True) is not ahead


def test_an_equal_command_sends_it() -> None:
    _, cache = prefetched()
    assert cache.prepared is not None
    ahead = cache.prepared.request
    assert cache.build(NEXT._replace(), EPOCH_S, keep_alive=True) is ahead


@pytest.mark.parametrize(
    "other",
    [
        NEXT._replace(delivery=delivery(3)),
        NEXT._replace(previous_seq=0),
        NEXT._replace(lane_ends=True),
        NEXT._replace(batch=(delivery(2), delivery(3))),
    ],
    ids=["delivery", "previous_seq", "lane_ends", "batch"],
)
def test_another_command_has_another_request(other: Send) -> None:
    source, cache = prefetched()
    built = cache.build(other, EPOCH_S, keep_alive=True)
    assert built == RequestCache(source).build(other, EPOCH_S, keep_alive=True)
    assert built != RequestCache(source).build(NEXT, EPOCH_S, keep_alive=True)


def rotate(source: Source) -> None:
    source.lasting_keys = None


def drift(source: Source) -> None:
    """The relay's clock signs, an hour ahead."""
    source.clocks.measure(EPOCH_S + 3600, EPOCH_S)
    source.signing._is_local = True


CHANGES: dict[str, Callable[[Source], object]] = {
    "headers": lambda source: source.change(headers=EndpointHeaders((("X-Count", "1"),))),
    "format": lambda source: source.change(message_format=MessageFormat("thin")),
    "keys": rotate,
    "clock": drift,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_applies_to_a_prepared_request(change: str) -> None:
    source, cache = prefetched()
    assert cache.prepared is not None
    ahead = cache.prepared.request
    CHANGES[change](source)
    built = cache.build(NEXT, EPOCH_S, keep_alive=True)
    assert built != ahead
    assert built == RequestCache(source).build(NEXT, EPOCH_S, keep_alive=True)


def test_the_next_request_is_prepared_by_the_clock_of_the_one_in_flight() -> None:
    source, cache = prefetched()
    drift(source)
    cache.build(NEXT, EPOCH_S, keep_alive=True)
    after = NEXT._replace(delivery=delivery(3), previous_seq=2)
    cache.prefetch(after, EPOCH_S, keep_alive=True)
    assert cache.prepared is not None
    ahead = cache.prepared.request
    assert cache.build(after, EPOCH_S, keep_alive=True) is ahead


def test_keys_end_and_seconds_pass_between_preparing_and_sending() -> None:
    source, cache = prefetched()
    for started_at, keep_alive in ((EPOCH_S + 1, True), (EPOCH_S, False)):
        source.lasting_keys = None
        cache.prepared = None
        cache.prefetch(NEXT, EPOCH_S, keep_alive=True)
        built = cache.build(NEXT, started_at, keep_alive=keep_alive)
        assert built == RequestCache(source).build(NEXT, started_at, keep_alive=keep_alive)
