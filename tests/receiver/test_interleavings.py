"""Whatever happens on the way, the end is what processing in order, each once, gives.

A sender with one lane, a network that loses, copies, delays and reorders, and a receiver
that dies at any step, comes back from a backup, and catches up.  The receiver's effects
are three: the set of events, a list of them in the order in which they were processed,
and of each key the newest one.
"""

from __future__ import annotations

import contextlib
import copy
import time
from datetime import UTC, datetime
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

from outbox.core.delivery.receiver_checkpoint import Mark, prepare
from outbox.core.delivery.signature import format_secret
from outbox.core.model.headers import pairs
from outbox.receiver import Gaps, Inbox, MemoryDatabase, Receiver, Request, synchronous
from outbox.receiver.catch_up import catch_up
from outbox.receiver.fetch import Item, LaneStanding, Page
from outbox.receiver.inbox import memory
from outbox.receiver.inbox.memory import MemoryTransaction
from outbox.receiver.lane_order import LaneState
from tests.receiver.deliveries import SECRET, delivery, signed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.receiver import Message
    from outbox.receiver.inbox.process import Call, Rows

LANE = "a-1-0"
TEXT = format_secret(SECRET)


class Crash(BaseException):
    """The receiver's process dies."""


class Disk(MemoryDatabase):
    """A database that outlives the process, with the effects in it."""

    def __init__(self) -> None:
        super().__init__(window_s=1e9, clock=lambda: 0.0)
        self.processed: list[int] = []
        self.newest: dict[str, int] = {}
        self.steps_left: int | None = None
        """After so many steps of a transaction the process dies; None: it does not."""

    @contextlib.contextmanager
    def transaction(self) -> Iterator[MemoryTransaction]:
        transaction = Mortal(self)
        try:
            yield transaction
            self.step()
            transaction.commit()
            if transaction.processed is not self.processed:
                self.processed += transaction.processed
            self.newest |= transaction.newest
            # The answer may be lost after the commit, too.
            self.step()
        finally:
            transaction.release()

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


class Mortal(MemoryTransaction):
    def __init__(self, disk: Disk) -> None:
        super().__init__(disk)
        self._disk = disk
        self.processed: list[int] = []
        self.newest: dict[str, int] = {}

    def execute(self, call: Call) -> Rows:
        self._disk.step()
        return super().execute(call)


class World(RuleBasedStateMachine):
    """The sender keeps to what a relay promises; everybody else does what he likes."""

    gaps = Gaps.TELL
    copies = Bundle("copies")
    backups = Bundle("backups")

    @initialize()
    def begin(self) -> None:
        self.disk = Disk()
        self.events: list[dict[str, Any]] = []
        """What was numbered, in order: `event`, `replay_of`, `state`, and perhaps `job`."""
        self.published = self.jobs = 0
        self.given_up: set[int] = set()
        """Events that the sender gave up, and nobody asked for again."""
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
        if self.receiver.inbox.newest(transaction, key, message):
            transaction.newest[key] = event

    # ---------------------------------------------------------------- the sender

    @rule()
    def publish(self) -> None:
        self.published += 1
        self.events.append({"event": self.published, "replay_of": None, "state": "owed"})

    @property
    def head(self) -> int | None:
        """The only number that may be sent."""
        for seq, each in enumerate(self.events, 1):
            if each["state"] == "owed":
                return seq
        return None

    @precondition(lambda self: self.head is not None)
    @rule(target=copies)
    def send(self) -> Request:
        assert self.head is not None
        return self._request(self.head)

    @precondition(lambda self: self.head is not None)
    @rule()
    def give_up(self) -> None:
        assert self.head is not None
        self.events[self.head - 1]["state"] = "given up"

    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        dead = [
            seq
            for seq, each in enumerate(self.events, 1)
            if each["state"] == "given up"
            and "job" not in each
            and not any(other["replay_of"] == seq for other in self.events)
        ]
        if dead:
            seq = data.draw(st.sampled_from(dead))
            event = self.events[seq - 1]["event"]
            self.events.append({"event": event, "replay_of": seq, "state": "owed"})

    @rule(data=st.data())
    def send_again(self, data: st.DataObject) -> None:
        """The receiver asks for what was delivered behind a number."""
        after = data.draw(st.integers(0, self._acknowledged()))
        self.jobs += 1
        for seq in range(after + 1, self._acknowledged() + 1):
            each = self.events[seq - 1]
            if each["state"] == "delivered" and "job" not in each:
                again = {"replay_of": seq, "state": "owed", "job": self.jobs}
                self.events.append({"event": each["event"], **again})

    @precondition(lambda self: self.head is not None)
    @rule()
    def somebody_else_acknowledges(self) -> None:
        """A proxy, or an instance of the receiver on another disk."""
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
            backfill_id=each.get("job"),
            is_copy="job" in each,
            payload=b'{"n": %d}' % each["event"],
            published_at=delivery(1).published_at.replace(microsecond=each["event"]),
        )
        headers, body = signed(which, previous=self._previous(seq))
        return Request("POST", headers, body)

    # ------------------------------------------------- the network and the receiver

    @rule(request=copies, dies_after=st.none() | st.integers(0, 12), is_answered=st.booleans())
    def deliver(self, request: Request, dies_after: int | None, is_answered: bool) -> None:
        """One of all the copies arrives, at any time and any number of times."""
        self.disk.steps_left = dies_after
        try:
            answer = self.receiver.handle(request)
        except Crash:
            self._restart()
            return
        finally:
            self.disk.steps_left = None
        seq = int(dict(request.headers)["X-Sequence"])
        each = self.events[seq - 1]
        if answer.status == 200 and is_answered and seq == self.head:
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

    @rule(dies_after=st.none() | st.integers(0, 40))
    def checkpoint(self, dies_after: int | None) -> None:
        self.disk.steps_left = dies_after
        try:
            assert self.receiver.handle(self._checkpoint()).status == 200
        except Crash:
            self._restart()
        finally:
            self.disk.steps_left = None

    def _checkpoint(self) -> Request:
        last = self._previous(self._acknowledged() + 1)
        told = prepare("checkpoint", datetime.now(tz=UTC), [Mark(LANE, 1, last)] if last else [])
        return Request("POST", pairs(told.attempt(1, int(time.time()), [SECRET])), told.body)

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

    def lanes(self) -> Iterator[LaneStanding]:
        yield LaneStanding(LANE, self._acknowledged())

    def page(self, lane: str, after: int) -> Page:
        assert lane == LANE
        through = min(after + 3, self._acknowledged())
        items = tuple(
            Item(seq, self.events[seq - 1]["state"] == "given up", self._request(seq))
            for seq in range(after + 1, through + 1)
        )
        more = through < self._acknowledged()
        return Page(after + 1, items, self._acknowledged(), through if more else None)

    def _acknowledged(self) -> int:
        head = self.head
        return len(self.events) if head is None else head - 1

    # --------------------------------------------------------------------- promises

    @invariant()
    def nothing_is_processed_twice(self) -> None:
        if hasattr(self, "disk"):
            assert len(set(self.disk.processed)) == len(self.disk.processed), self.disk.processed

    @invariant()
    def numbers_come_in_order_if_that_is_wanted(self) -> None:
        if not hasattr(self, "disk") or self.gaps is not Gaps.CATCH_UP:
            return
        # The first number under which each was sent; replays are outside of the order.
        live = [
            n for n in self.disk.processed if self.events[self._first(n) - 1]["state"] != "given up"
        ]
        assert live == sorted(live), self.disk.processed

    def _first(self, event: int) -> int:
        return next(seq for seq, each in enumerate(self.events, 1) if each["event"] == event)

    def teardown(self) -> None:
        """Everything is delivered in the end, and what was lost is fetched."""
        if not hasattr(self, "disk"):
            return
        while (head := self.head) is not None:
            answer = self.receiver.handle(self._request(head))
            assert answer.status == 200, answer
            self.events[head - 1]["state"] = "delivered"
        self._end()
        wanted = {each["event"] for each in self.events if each["state"] == "delivered"}
        # One that was given up may have been processed before, its answer lost.
        assert wanted <= set(self.disk.processed) <= set(range(1, self.published + 1))
        self.nothing_is_processed_twice()
        for key, event in self.disk.newest.items():
            processed = [n for n in self.disk.processed if f"k{n % 3}" == key]
            assert event == max(processed)
        kept = self.receiver.inbox.lanes
        with self.disk.transaction() as transaction:
            lanes = kept(transaction)
        if LANE in lanes:
            assert not lanes[LANE].state.missing

    def _end(self) -> None:
        self.receiver.catch_up(LANE)


class InOrder(World):
    """The same when a receiver wants what is missing before what comes next.

    What is missing behind that it learns from a checkpoint.
    """

    gaps = Gaps.CATCH_UP

    def _end(self) -> None:
        assert self.receiver.handle(self._checkpoint()).status == 200


@pytest.mark.parametrize("world", [World, InOrder])
def test_any_interleaving_ends_as_processing_in_order_would(world: type[World]) -> None:
    run_state_machine_as_test(world, settings=settings(stateful_step_count=60))


class Hasty(Mortal):
    """Its effects are there at once, whatever becomes of the transaction."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk)
        self.processed = disk.processed


def forgetful(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(memory._STATEMENTS, "claim", lambda *_, **__: [(1,)])
    patch.setitem(memory._STATEMENTS, "keep_lane", lambda *_, **__: [])


def hasty(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.Mortal", Hasty)


def content(patch: pytest.MonkeyPatch) -> None:
    """Catches up with what follows, and not with what is missing before it."""
    patch.setattr(
        synchronous, "catch_up", lambda lane, state: catch_up(lane, LaneState(state.high))
    )


@pytest.mark.parametrize("mistake", [forgetful, hasty, content])
def test_the_same_hunt_finds_a_receiver_that_makes_a_mistake(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    hunt = settings(max_examples=500, report_multiple_bugs=False, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(World, settings=hunt)
