"""The buffer budget: what lanes hold in memory, under any order of reads, ends and releases."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.delivery.buffer_budget import ROW_BYTES, SHARE_FACTOR, BufferBudget, row_bytes
from outbox.core.delivery.commands import (
    ErasedEvent,
    Fetch,
    Gate,
    LaneSnapshot,
    Progress,
    Record,
    Send,
    Wait,
)
from outbox.core.delivery.delivery_buffer import DeliveryBuffer
from outbox.core.delivery.lane import Lane
from outbox.core.model.delivery import Delivery
from tests.core.lane_steps import BUSY, NO, NOW, attempt, lane_with
from tests.core.lane_tables import ENDPOINT, delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGE = 244 << 10
SIZES = (0, 20, 200, 4_000, 60_000, LARGE)


class PendingLane:
    """A lane with an endless backlog, and its reads."""

    def __init__(
        self,
        rng: random.Random,
        budget: BufferBudget,
        tenant: str,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._rng = rng
        self._budget = budget
        self._rows: list[Delivery | ErasedEvent] = []
        self._sizes = sizes or rng.sample(SIZES, 2)
        self._reading: list[Delivery | ErasedEvent] | None = None
        self.tenant = tenant
        self.buffer = DeliveryBuffer(0, 0, rng.choice([None, 100]), budget.share_of(tenant))
        self.largest = 0

    def row(self, seq: int) -> Delivery | ErasedEvent:
        while len(self._rows) < seq:
            made = delivery(len(self._rows) + 1)
            size = self._rng.choice(self._sizes)
            row: Delivery | ErasedEvent = made._replace(payload=bytes(size), headers=b"{}")
            if self._rng.random() < 0.05:
                row = ErasedEvent(ENDPOINT, made.seq, made.batch, made.outbox_id)
            self._rows.append(row)
            self.largest = max(self.largest, held_by(row))
        return self._rows[seq - 1]

    @property
    def held(self) -> int:
        """The bytes of the rows in its buffer."""
        return 0 if self.buffer.stub is not None else sum(map(held_by, self.buffer.queue))

    def refill(self) -> None:
        """Begin a read, as the delivery fetcher does it."""
        if self._reading is not None or (fetch := self.buffer.fetch(10**6)) is None:
            return
        bounds = self.buffer.reserve(self._rng.choice([1, 32, 100]))
        self._reading, content = [], 0
        for seq in range(fetch.after_seq + 1, fetch.after_seq + 1 + bounds.rows_max):
            row = self.row(seq)
            content += 0 if isinstance(row, ErasedEvent) else len(row.payload) + 2
            if self._reading and content > bounds.bytes_max:
                break
            self._reading.append(row)

    def complete(self) -> None:
        """Complete the read."""
        rows, self._reading = self._reading, None
        if rows is not None:
            self.buffer.append_fetched(rows)

    def end_first(self) -> None:
        if self.buffer.queue and self.buffer.stub is None:
            self.buffer.discard_through(self.buffer.queue[0].seq)

    def step(self) -> None:
        """Do anything that may happen to a lane."""
        buffer, rng = self.buffer, self._rng
        acked = buffer.queue[0].seq - 1 if buffer.queue else buffer.fetched_seq
        match rng.randrange(11):
            case 0 | 1 | 2:
                self.refill()
            case 3 | 4 | 5:
                self.complete()
            case 6 | 7:
                self.end_first()
            case 8:
                buffer.release()
            case 9:
                buffer.reset(acked, 0)
            case 10:
                self.tenant = rng.choice("abc")
                buffer.set_share(self._budget.share_of(self.tenant))


def held_by(row: Delivery | ErasedEvent) -> int:
    return row_bytes(row) if isinstance(row, Delivery) else 0


def expect_counted(budget: BufferBudget, lanes: list[PendingLane]) -> None:
    """Check that exactly what the lanes hold is counted, and that the budget bounds it."""
    held = sum(lane.buffer.reserved + lane.held for lane in lanes)
    assert budget.held + budget.beyond == held
    assert budget.held == sum(budget.share_of(name).held for name in "abc")
    assert budget.held <= budget.bytes_max
    assert budget.beyond <= sum(lane.largest for lane in lanes), "more than one row a lane beyond"


@given(seed=st.integers(0, 1 << 32))
def test_lanes_hold_the_budget_and_at_most_one_row_each_beyond(seed: int) -> None:
    rng = random.Random(seed)
    budget = BufferBudget(rng.choice([0, ROW_BYTES, 300_000, 2_000_000, 1 << 24]))
    lanes = [PendingLane(rng, budget, rng.choice("abc")) for _ in range(rng.choice([1, 3, 12]))]
    for _ in range(150):
        rng.choice(lanes).step()
        expect_counted(budget, lanes)
    for lane in lanes:
        # Whatever the others hold, one that has nothing gets its next row.
        lane.complete()
        lane.buffer.reset(lane.buffer.fetched_seq, 0)
        lane.refill()
        lane.complete()
        assert lane.buffer.queue
    for lane in lanes:
        lane.refill()
        lane.buffer.reset(0, 0)
        lane.complete()
    assert budget.held == budget.beyond == 0, "a lane that is owned no more holds something"


def test_a_tenant_with_large_events_leaves_room_for_others() -> None:
    """However many lanes flood, the lanes of another tenant read ahead."""
    rng = random.Random(1)
    budget = BufferBudget(32 << 20)
    lanes = [PendingLane(rng, budget, "a", [60_000]) for _ in range(300)]
    for lane in lanes:
        for _ in range(2):
            lane.refill()
            lane.complete()
    flooding, quiet = budget.share_of("a"), budget.share_of("b")
    assert flooding.held <= budget.bytes_max * SHARE_FACTOR // (SHARE_FACTOR + 1)
    assert min(len(lane.buffer.queue) for lane in lanes) == 1
    other = PendingLane(rng, budget, "b", [200])
    for _ in range(20):
        other.refill()
        other.complete()
    assert len(other.buffer.queue) > 8
    assert quiet.room > budget.bytes_max // 8


def large(*seqs: int, expires_at: float | None = None) -> list[Delivery]:
    return [delivery(n, expires_at=expires_at)._replace(payload=bytes(LARGE)) for n in seqs]


def budgeted(*rows: Delivery, budget: BufferBudget) -> Lane:
    """Return a lane with these deliveries in its buffer."""
    lane = lane_with(*rows)
    lane.set_share(budget.share_of("a"))
    return lane


def test_a_lane_that_waits_releases_its_content_and_reads_it_again() -> None:
    budget = BufferBudget()
    lane = budgeted(*large(1, 2), budget=budget)
    _, record = attempt(lane, BUSY)
    lane.confirm_recorded(record)
    waits = lane.next(NOW)
    assert isinstance(waits, Wait)
    head_since = lane.head_since
    lane.release_content()
    assert budget.held == 0
    assert (lane.head_since, lane.next(NOW)) == (head_since, waits)
    # New deliveries are not read before it sends again.
    lane.extend_to(3, NOW)
    assert lane.fetch() is None
    assert budget.held == 0
    assert lane.next(waits.until) == Fetch(0, 1)
    lane.append_fetched(large(1, 2, 3))
    send = lane.next(waits.until)
    assert isinstance(send, Send)
    assert (send.delivery, send.attempt) == (large(1)[0], 2)


def test_a_lane_with_a_refused_dead_letter_holds_no_content() -> None:
    """It waits for up to ten minutes, and what it had read is stale besides."""
    budget = BufferBudget()
    lane = budgeted(*large(1, 2, 3), budget=budget)
    _, record = attempt(lane, NO)
    lane.confirm_recorded(lane.refuse_dead_letter(record))
    until = NOW + lane.hold_refused(NOW)
    assert lane.next(NOW) == Wait(until)
    assert budget.held == 0
    assert lane.next(until) == Fetch(0, 1)
    lane.append_fetched(large(1, 2, 3))
    assert isinstance(lane.next(until), Record)


def test_a_few_small_rows_do_not_let_a_read_convert_many_large_ones() -> None:
    buffer = DeliveryBuffer(0, 0, 1_000, BufferBudget().share_of("a"))
    reads = []
    for seq in range(0, 20, 4):
        buffer.fetch(10**6)
        reads.append(buffer.reserve(1_000).rows_max)
        size = LARGE if seq == 0 else 20
        rows = [delivery(seq + n)._replace(payload=bytes(size)) for n in range(1, 5)]
        buffer.append_fetched(rows)
        # A read of which nothing is new says nothing.
        buffer.fetch(10**6)
        buffer.reserve(1_000)
        buffer.append_fetched(rows)
        buffer.discard_through(seq + 4)
    assert all(rows <= 4 * before + 1 for before, rows in itertools.pairwise(reads)), reads
    assert reads[-1] > 100 > reads[1]


def test_a_released_delivery_expires_at_its_time_with_its_content() -> None:
    lane = budgeted(*large(1, expires_at=NOW + 9), budget=BufferBudget())
    assert lane.next(NOW, Gate.SHUT) == Wait(NOW + 9)
    lane.release_content()
    assert lane.next(NOW, Gate.SHUT) == Wait(NOW + 9)
    assert lane.next(NOW + 9, Gate.SHUT) == Fetch(0, 0)
    lane.append_fetched(large(1, expires_at=NOW + 9))
    record = lane.next(NOW + 9, Gate.SHUT)
    # The recorder bounds its groups by the content of dead letters.
    assert record.dead.delivery == large(1, expires_at=NOW + 9)[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("end", ["close", "cut", "reread"])
def test_a_lane_gives_everything_back(end: str) -> None:
    budget = BufferBudget()
    lane = budgeted(*large(1, 2, 3), budget=budget)
    assert budget.held > 2 * LARGE
    if end == "cut":
        lane.dead_letter_through(3, "backlog")
        lane.next(NOW)
    elif end == "reread":
        lane.invalidate_buffer()
        assert lane.next(NOW) == Fetch(0, 0)
    else:
        lane.close()
    assert budget.held == 0


def test_a_read_that_a_lost_lane_awaited_is_given_back() -> None:
    budget = BufferBudget()
    lane = Lane(LaneSnapshot(7, 9, Progress()), 0, share=budget.share_of("a"))
    assert lane.next(NOW) == Fetch(0, 0)
    lane.close()
    lane.reserve(32)
    lane.append_fetched(large(1, 2))
    assert (budget.held, lane.is_buffered) == (0, False)


def test_a_full_budget_leaves_one_row_at_a_time() -> None:
    """No read ahead, and no wait for what others hold."""
    budget = BufferBudget(1 << 20)
    others = budget.share_of("b")
    others.take_bytes(1 << 30)
    lane = Lane(LaneSnapshot(7, 9, Progress()), 0, share=budget.share_of("a"))
    for seq in range(1, 4):
        assert lane.next(NOW) == Fetch(seq - 1, int(seq > 1))
        assert lane.reserve(32) == (1, 0)
        lane.append_fetched(large(seq))
        assert budget.beyond == row_bytes(large(seq)[0])
        assert isinstance(lane.next(NOW), Send)
        assert lane.fetch() is None
        lane.cancel_send()
        lane.dead_letter_through(seq, "backlog")
        record = lane.next(NOW)
        lane.confirm_recorded(record)  # type: ignore[arg-type]


def test_a_share_ends_with_the_last_lane_of_its_holder() -> None:
    budget = BufferBudget()
    lane = budgeted(*large(1), budget=budget)
    share = ref(budget.share_of("a"))
    assert share() is budget.share_of("a")
    lane.close()
    del lane
    assert share() is None
