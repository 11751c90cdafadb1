from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outbox.core.sequencing.batch_notifications import (
    LATER,
    TELL_EVERY_S,
    TELL_WITHIN_S,
    TEXT_CHARS_MAX,
    News,
    Teller,
)

numbers = st.integers(0, 2**63 - 1)
given_out = st.dictionaries(numbers, numbers, max_size=400)


@given(numbers, numbers, given_out)
def test_what_is_told_is_what_is_heard(first: int, last: int, last_seqs: dict[int, int]) -> None:
    text = News(first, last, last_seqs).text()
    assert len(text.encode()) <= TEXT_CHARS_MAX
    if text != LATER:
        assert News.parse(text) == News(first, last, last_seqs)
    else:
        assert len(last_seqs) > 100


def test_too_many_lanes_are_left_to_be_read() -> None:
    assert News(1, 2, dict.fromkeys(range(100_000), 1)).text() == LATER


@pytest.mark.parametrize("text", [LATER, "hello", "1", "1-2 3", "1-2 3:x", "1-2-3", "1-2  3:4"])
def test_what_cannot_be_understood_says_nothing(text: str) -> None:
    assert News.parse(text) is None


class TellerMachine(RuleBasedStateMachine):
    """A replica that sequences, and another one that knows only what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.teller = Teller()
        self.now = 100.0
        self.batch = 0
        self.counters: dict[int, int] = {}
        self.told_at: list[float] = []
        self.known = 0
        self.heard: dict[int, int] = {}

    @rule(seconds=st.sampled_from([0.001, 0.004, TELL_EVERY_S, 3 * TELL_EVERY_S, 60]))
    def pass_time(self, seconds: float) -> None:
        self.now = min(self.now + seconds, self.teller.tell_at())
        if self.now >= self.teller.tell_at():
            self.teller.told(self.now)
            # It says that there is something to read.
            self.listen(News(self.known + 1, self.batch, dict(self.counters)).text())

    @rule(lanes=st.sets(st.integers(1, 5)), committed=st.booleans())
    def sequence(self, lanes: set[int], committed: bool) -> None:
        last_seqs = {lane: self.counters.get(lane, 0) + 1 for lane in lanes}
        text = self.teller.text(self.batch + 1, last_seqs, self.now)
        if not committed:
            return  # Another replica was quicker.
        self.batch += 1
        self.counters |= last_seqs
        self.teller.written(self.batch, last_seqs, self.now, told=text is not None)
        if text is not None and lanes:
            self.listen(text)

    def listen(self, text: str) -> None:
        self.told_at.append(self.now)
        news = News.parse(text)
        assert news is not None
        assert news.first <= self.known + 1, "a batch between them was never told"
        self.known = news.last
        self.heard |= news.last_seqs

    @invariant()
    def nothing_is_told_late_or_too_often(self) -> None:
        if self.heard != self.counters:
            assert self.now < self.teller.tell_at() <= self.now + TELL_WITHIN_S
        else:
            assert self.teller.tell_at() == inf
        *_, before, last = [-inf, -inf, *self.told_at]
        assert last - before >= TELL_EVERY_S - 1e-6 or before == -inf


TestTeller = TellerMachine.TestCase


def test_who_is_alone_tells_nobody() -> None:
    teller = Teller()
    teller.alone = True
    teller.written(1, {7: 1}, 100.0, told=False)
    assert teller.tell_at() == inf
    teller.alone = False
    assert teller.tell_at() < inf
