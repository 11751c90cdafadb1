from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outbox.core.sequencing.batch_notifications import (
    NOTIFIED_LANES_MAX,
    NOTIFY_EVERY_S,
    NOTIFY_WITHIN_S,
    READ_BATCHES,
    TEXT_CHARS_MAX,
    BatchNotification,
    NotificationThrottle,
)

numbers = st.integers(0, 2**63 - 1)
given_out = st.dictionaries(numbers, numbers, max_size=400)


@given(numbers, numbers, given_out)
def test_a_payload_parses_to_the_same_notification(
    first: int, last: int, last_seqs: dict[int, int]
) -> None:
    text = BatchNotification(first, last, last_seqs).payload()
    assert len(text.encode()) <= TEXT_CHARS_MAX
    if text != READ_BATCHES:
        assert BatchNotification.parse(text) == BatchNotification(first, last, last_seqs)
    else:
        assert len(last_seqs) > 100


def test_a_notification_with_too_many_lanes_requests_a_read() -> None:
    assert BatchNotification(1, 2, dict.fromkeys(range(100_000), 1)).payload() == READ_BATCHES


@pytest.mark.parametrize(
    "text", [READ_BATCHES, "hello", "1", "1-2 3", "1-2 3:x", "1-2-3", "1-2  3:4"]
)
def test_an_invalid_notification_is_ignored(text: str) -> None:
    assert BatchNotification.parse(text) is None


class ThrottleMachine(RuleBasedStateMachine):
    """A replica that sequences, and another one that knows only its notifications."""

    def __init__(self) -> None:
        super().__init__()
        self.throttle = NotificationThrottle()
        self.now = 100.0
        self.batch = 0
        self.counters: dict[int, int] = {}
        self.sent_at: list[float] = []
        self.known = 0
        self.received: dict[int, int] = {}

    @rule(seconds=st.sampled_from([0.001, 0.004, NOTIFY_EVERY_S, 3 * NOTIFY_EVERY_S, 60]))
    def pass_time(self, seconds: float) -> None:
        self.now = min(self.now + seconds, self.throttle.flush_at())
        if self.now >= self.throttle.flush_at():
            self.throttle.mark_sent(self.now)
            # The notification reports unread deliveries.
            self.listen(
                BatchNotification(self.known + 1, self.batch, dict(self.counters)).payload()
            )

    @rule(lanes=st.sets(st.integers(1, 5)), committed=st.booleans())
    def sequence(self, lanes: set[int], committed: bool) -> None:
        last_seqs = {lane: self.counters.get(lane, 0) + 1 for lane in lanes}
        text = self.throttle.next_payload(self.batch + 1, last_seqs, self.now)
        if not committed:
            return  # Another replica sequenced first.
        self.batch += 1
        self.counters |= last_seqs
        self.throttle.batch_written(self.batch, last_seqs, self.now, notified=text is not None)
        if text is not None and lanes:
            self.listen(text)

    def listen(self, text: str) -> None:
        self.sent_at.append(self.now)
        notification = BatchNotification.parse(text)
        assert notification is not None
        assert notification.first <= self.known + 1, "a batch between them was never notified"
        self.known = notification.last
        self.received |= notification.last_seqs

    @invariant()
    def notifications_are_neither_late_nor_too_frequent(self) -> None:
        if self.received != self.counters:
            assert self.now < self.throttle.flush_at() <= self.now + NOTIFY_WITHIN_S
        else:
            assert self.throttle.flush_at() == inf
        *_, before, last = [-inf, -inf, *self.sent_at]
        assert last - before >= NOTIFY_EVERY_S - 1e-6 or before == -inf


TestThrottle = ThrottleMachine.TestCase


def test_a_single_replica_sends_no_notification() -> None:
    throttle = NotificationThrottle()
    throttle.alone = True
    assert throttle.next_payload(1, {7: 1}, 100.0) is None
    throttle.batch_written(1, {7: 1}, 100.0, notified=False)
    assert throttle.flush_at() == inf
    throttle.alone = False
    assert throttle.flush_at() < inf
    assert throttle.next_payload(2, {8: 1}, 100.0) == "1-2 7:1 8:1"


def test_a_single_replica_remembers_a_bounded_number_of_lanes() -> None:
    throttle = NotificationThrottle()
    throttle.alone = True
    for batch in range(1, 5):
        last_seqs = {batch * NOTIFIED_LANES_MAX + i: 1 for i in range(NOTIFIED_LANES_MAX)}
        throttle.batch_written(batch, last_seqs, 100.0, notified=False)
    throttle.alone = False
    assert throttle.next_payload(5, {1: 1}, 100.0) == READ_BATCHES
    assert len(throttle._unsent) <= 2 * NOTIFIED_LANES_MAX
