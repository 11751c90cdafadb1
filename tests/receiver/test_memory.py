"""An inbox in memory: it forgets after a while, and what it forgot it does not take twice."""

from __future__ import annotations

import contextlib
from typing import Any

from outbox.receiver import Inbox, MemoryDatabase, Outcome
from outbox.receiver.message import Message, parse
from tests.receiver.deliveries import delivery, signed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def message(seq: int, **changes: Any) -> Message:
    return parse(*signed(delivery(seq, **changes)))[0]


def take(database: MemoryDatabase, what: Message) -> Outcome:
    with database.transaction() as transaction:
        return Inbox().take(transaction, what).outcome


def test_after_the_window_only_the_numbers_are_known() -> None:
    clock = Clock()
    database = MemoryDatabase(300, clock=clock)
    assert take(database, message(1)) is Outcome.FRESH
    clock.now = 200.0
    assert take(database, message(2)) is Outcome.FRESH
    clock.now = 301.0
    assert take(database, message(3)) is Outcome.FRESH
    assert [lane for _, lane, _ in database.seen.values()] == ["a-1-0"] * 2
    for number in (1, 2, 3):
        assert take(database, message(number)) is Outcome.DUPLICATE


def test_a_sender_without_numbers_is_known_for_the_window_alone() -> None:
    clock = Clock()
    database = MemoryDatabase(300, clock=clock)

    def foreign() -> Outcome:
        with database.transaction() as transaction:
            return Inbox().take_foreign(transaction, "msg_1").outcome

    assert foreign() is Outcome.FRESH
    clock.now = 299.0
    assert foreign() is Outcome.DUPLICATE
    clock.now = 301.0
    assert foreign() is Outcome.FRESH


def test_a_block_that_fails_leaves_nothing_and_holds_nothing() -> None:
    database = MemoryDatabase()
    with contextlib.suppress(LookupError), database.transaction() as transaction:
        assert Inbox().take(transaction, message(1)).fresh
        raise LookupError
    assert not database.locks
    assert take(database, message(1)) is Outcome.FRESH
