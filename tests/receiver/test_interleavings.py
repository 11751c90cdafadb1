"""Every interleaving ends with the result of processing each event once and in order.

A sender with one lane, a network that loses, copies, delays and reorders, and a receiver that
crashes at any step, is restored from a backup, and catches up. The receiver has three effects: the
set of events, the list of events in processing order, and the newest event of each key.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outbox.core.messages.signature import format_secret
from outbox.receiver import Gaps, Inbox, MemoryDatabase, Receiver, Request, pipeline
from outbox.receiver.catch_up import catch_up
from outbox.receiver.fetch import LanePage, LaneProgress, PageItem
from outbox.receiver.inbox.memory import MemoryTransaction
from outbox.receiver.lane_order import LaneState
from tests.receiver.deliveries import SECRET, delivery, signed
from tests.support.tiers import sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.drivers.statement import Call, Rows
    from outbox.receiver import Message

LANE = "a-1-0"
TEXT = format_secret(SECRET)


class Crash(BaseException):
    """The receiver's process crashes."""


class Disk(MemoryDatabase):
    """A database that outlives the process, with the effects in it."""

    def __init__(self) -> None:
        super().__init__(window_s=1e9, clock=lambda: 0.0)
        self.processed: list[int] = []
        self.newest: dict[str, int] = {}
        self.steps_left: int | None = None
        """Number of transaction steps before the process crashes; None: it does not."""

    @contextlib.contextmanager
    def transaction(self) -> Iterator[CrashingTransaction]:  # type: ignore[override]
        with CrashingTransaction(self) as transaction:
            yield transaction
            self.step()
        if transaction.processed is not self.processed:
            self.processed += transaction.processed
        self.newest |= transaction.newest
        # The response may also be lost after the commit.
        self.step()

    def step(self) -> None:
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise Crash

    def backup(self) -> Any:
        kept = (self.seen, self.lanes, self.latest, self.processed, self.newest)
        return copy.deepcopy(kept)

    def restore(self, kept: Any) -> None:
        kept = copy.deepcopy(kept)
        self.seen, self.lanes, self.latest, self.processed, self.newest = kept
        self.locks = {}


class CrashingTransaction(MemoryTransaction):
    def __init__(self, disk: Disk) -> None:
        super().__init__(disk)
        self._disk = disk
        self.processed: list[int] = []
        self.newest: dict[str, int] = {}

    async def execute(self, call: Call) -> Rows:
        self._disk.step()
        return await super().execute(call)


class World(RuleBasedStateMachine):
    """A sender that keeps the relay's guarantees; all other components may do anything."""

    gaps = Gaps.REPORT
    copies = Bundle("copies")
    backups = Bundle("backups")

    @initialize()
    def begin(self) -> None:
        self.disk = Disk()
        self.events: list[dict[str, Any]] = []
        """The sequenced deliveries in order: `event`, `replay_of` and `state`."""
        self.published = 0
        self.dead_lettered: set[int] = set()
        """Events that were dead-lettered, and whose replay was not requested."""
        self.may_have_lost = False
        self.receiver = self._started()

    def _started(self) -> Receiver:
        options: dict[str, Any] = {"fetch": self, "gaps": self.gaps}
        receiver = Receiver(TEXT, self.disk, inbox=Inbox(from_start=True), **options)
        receiver.on("**")(self._process)
        return receiver

    def _process(self, message: Message, transaction: Any) -> None:
        event = message.data["n"]
        transaction.processed.append(event)
        key = f"k{event % 3}"
        if self.receiver.inbox.is_newest(transaction, key, message):
            transaction.newest[key] = event

    # ---------------------------------------------------------------- the sender

    @rule()
    def publish(self) -> None:
        self.published += 1
        self.events.append({"event": self.published, "replay_of": None, "state": "pending"})

    @property
    def head(self) -> int | None:
        """Return the only number that may be sent."""
        for seq, each in enumerate(self.events, 1):
            if each["state"] == "pending":
                return seq
        return None

    @precondition(lambda self: self.head is not None)
    @rule(target=copies)
    def send(self) -> Request:
        assert self.head is not None
        return self._request(self.head)

    @precondition(lambda self: self.head is not None)
    @rule()
    def dead_letter(self) -> None:
        assert self.head is not None
        self.events[self.head - 1]["state"] = "given up"

    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        dead = [
            seq
            for seq, each in enumerate(self.events, 1)
            if each["state"] == "given up"
            and not any(other["replay_of"] == seq for other in self.events)
        ]
        if dead:
            seq = data.draw(st.sampled_from(dead))
            event = self.events[seq - 1]["event"]
            self.events.append({"event": event, "replay_of": seq, "state": "pending"})

    @precondition(lambda self: self.head is not None)
    @rule()
    def acknowledge_elsewhere(self) -> None:
        """A proxy, or a receiver instance with another database, acknowledges the delivery."""
        assert self.head is not None
        self.events[self.head - 1]["state"] = "delivered"

    def _previous(self, seq: int) -> int:
        before = range(1, seq)
        return max((n for n in before if self.events[n - 1]["state"] != "given up"), default=0)

    def _request(self, seq: int) -> Request:
        each = self.events[seq - 1]
        stands_for = each["replay_of"]
        which = delivery(
            seq,
            outbox_id=each["event"],
            event_id=delivery(each["event"]).event_id,
            replay_of=None if stands_for is None else (LANE, stands_for),
            payload=b'{"n": %d}' % each["event"],
            published_at=delivery(1).published_at + each["event"] / 1e6,
        )
        headers, body = signed(which, previous=self._previous(seq))
        return Request("POST", headers, body)

    # --------------------------------------------------------- network and receiver

    @rule(request=copies, dies_after=st.none() | st.integers(0, 12), is_responded=st.booleans())
    def deliver(self, request: Request, dies_after: int | None, is_responded: bool) -> None:
        """Deliver one of all copies, at any time and any number of times."""
        self.disk.steps_left = dies_after
        try:
            response = self.receiver.handle(request)
        except Crash:
            self._restart()
            return
        finally:
            self.disk.steps_left = None
        seq = int(dict(request.headers)["X-Sequence"])
        each = self.events[seq - 1]
        if response.status == 200 and is_responded and seq == self.head:
            each["state"] = "delivered"

    @rule(dies_after=st.none() | st.integers(0, 40))
    def catch_up(self, dies_after: int | None) -> None:
        self.disk.steps_left = dies_after
        try:
            self.receiver.catch_up()
        except Crash:
            self._restart()
        finally:
            self.disk.steps_left = None

    @rule(target=backups)
    def back_up(self) -> Any:
        return self.disk.backup()

    @rule(backup=backups)
    def restore(self, backup: Any) -> None:
        self.disk.restore(backup)
        self._restart()

    def _restart(self) -> None:
        self.disk.locks = {}
        self.receiver = self._started()

    # ------------------------------------------------------------ the relay's listener

    def lanes(self) -> Iterator[LaneProgress]:
        yield LaneProgress(LANE, self._acknowledged())

    def page(self, lane: str, after: int) -> LanePage:
        assert lane == LANE
        through = min(after + 3, self._acknowledged())
        items = tuple(
            PageItem(seq, self.events[seq - 1]["state"] == "given up", self._request(seq))
            for seq in range(after + 1, through + 1)
        )
        more = through < self._acknowledged()
        return LanePage(after + 1, items, self._acknowledged(), through if more else None)

    def _acknowledged(self) -> int:
        head = self.head
        return len(self.events) if head is None else head - 1

    # ------------------------------------------------------------------- invariants

    @invariant()
    def nothing_is_processed_twice(self) -> None:
        if hasattr(self, "disk"):
            assert len(set(self.disk.processed)) == len(self.disk.processed), self.disk.processed

    @invariant()
    def numbers_are_in_order_if_required(self) -> None:
        if not hasattr(self, "disk") or self.gaps is not Gaps.CATCH_UP:
            return
        # The first number under which each was sent; replays are not ordered.
        live = [
            n for n in self.disk.processed if self.events[self._first(n) - 1]["state"] != "given up"
        ]
        assert live == sorted(live), self.disk.processed

    def _first(self, event: int) -> int:
        return next(seq for seq, each in enumerate(self.events, 1) if each["event"] == event)

    def teardown(self) -> None:
        """Check that everything is delivered in the end, and that lost deliveries are fetched."""
        if not hasattr(self, "disk"):
            return
        while (head := self.head) is not None:
            response = self.receiver.handle(self._request(head))
            assert response.status == 200, response
            self.events[head - 1]["state"] = "delivered"
        self.receiver.catch_up()
        wanted = {each["event"] for each in self.events if each["state"] == "delivered"}
        # A dead-lettered delivery may have been processed, with its response lost.
        assert wanted <= set(self.disk.processed) <= set(range(1, self.published + 1))
        self.nothing_is_processed_twice()
        for key, event in self.disk.newest.items():
            processed = [n for n in self.disk.processed if f"k{n % 3}" == key]
            assert event == max(processed)
        kept = self.receiver.inbox.lanes
        with self.disk.transaction() as transaction:
            lanes = kept(transaction)
        if self.events:
            # Also what is missing or dead-lettered at the end of the lane is recorded.
            assert not lanes[LANE].state.missing
            assert lanes[LANE].state.high >= self._acknowledged()
            assert self.receiver.catch_up() == []


class InOrder(World):
    """The same for a receiver that waits for missing deliveries before later ones."""

    gaps = Gaps.CATCH_UP


@pytest.mark.slow
@pytest.mark.parametrize("world", sampled([World, InOrder]))
def test_every_interleaving_gives_the_result_of_processing_in_order(world: type[World]) -> None:
    run_state_machine_as_test(world, settings=settings(stateful_step_count=60))


class EffectsBeforeCommit(CrashingTransaction):
    """A faulty receiver whose effects survive a rolled-back transaction."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk)
        self.processed = disk.processed


def forgetful(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryTransaction, "claim", lambda *_, **__: [(1,)])
    patch.setattr(MemoryTransaction, "keep_lane", lambda *_, **__: [])


def effects_before_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.CrashingTransaction", EffectsBeforeCommit)


def content(patch: pytest.MonkeyPatch) -> None:
    """Catch up with later deliveries, but not with the missing ones before them."""
    patch.setattr(
        pipeline, "catch_up", lambda lane, state, *io: catch_up(lane, LaneState(state.high), *io)
    )


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [forgetful, effects_before_commit, content])
def test_the_interleavings_find_a_faulty_receiver(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    # One of 70 examples, on average, shows that effects come before the commit.
    hunt = settings(max_examples=5_000, report_multiple_bugs=False, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(World, settings=hunt)
