"""An in-memory inbox forgets deliveries after its window, and processes none of them twice."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from outbox.receiver import DeliveryOutcome, Inbox, MemoryDatabase
from outbox.receiver.inbox import memory
from outbox.receiver.message import Message, parse
from tests.receiver.deliveries import delivery, signed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def message(seq: int, **changes: Any) -> Message:
    return parse(*signed(delivery(seq, **changes)))[0]


def handle(database: MemoryDatabase, what: Message) -> DeliveryOutcome:
    with database.transaction() as transaction:
        return Inbox().receive(transaction, what).outcome


@pytest.mark.parametrize("published_at", [1_769_817_600.0, time.time()], ids=["past", "now"])
def test_after_the_window_only_the_sequences_are_known(published_at: float) -> None:
    clock = Clock()
    database = MemoryDatabase(300, clock=clock)
    assert handle(database, message(1, published_at=published_at)) is DeliveryOutcome.FRESH
    clock.now = 200.0
    assert handle(database, message(2, published_at=published_at)) is DeliveryOutcome.FRESH
    clock.now = 301.0
    assert handle(database, message(3, published_at=published_at)) is DeliveryOutcome.FRESH
    assert [lane for _, lane, _ in database.seen.values()] == ["a-1-0"] * 2
    for number in (1, 2, 3):
        again = message(number, published_at=published_at)
        assert handle(database, again) is DeliveryOutcome.DUPLICATE


def test_foreign_requests_are_deduplicated_within_the_window_only() -> None:
    clock = Clock()
    database = MemoryDatabase(300, clock=clock)

    def foreign() -> DeliveryOutcome:
        with database.transaction() as transaction:
            return Inbox().receive_foreign(transaction, "msg_1").outcome

    assert foreign() is DeliveryOutcome.FRESH
    clock.now = 299.0
    assert foreign() is DeliveryOutcome.DUPLICATE
    clock.now = 301.0
    assert foreign() is DeliveryOutcome.FRESH


def test_a_failed_transaction_leaves_no_changes_and_no_locks() -> None:
    database = MemoryDatabase()
    with contextlib.suppress(LookupError), database.transaction() as transaction:
        assert Inbox().receive(transaction, message(1)).fresh
        raise LookupError
    assert not database.locks
    assert handle(database, message(1)) is DeliveryOutcome.FRESH


def test_the_least_recently_used_lane_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "REMEMBERED_LANES_MAX", 2)
    database = MemoryDatabase()
    for number, lane in ((1, "a"), (2, "b"), (3, "a"), (4, "c")):
        assert handle(database, message(number, lane=lane)) is DeliveryOutcome.FRESH
    assert list(database.lanes) == ["a", "c"]
