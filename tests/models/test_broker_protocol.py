"""The protocol of brokers' lanes keeps its invariants, and each of its rules is necessary."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import structlog

from outbox.core.brokers import take_over
from outbox.core.brokers.port import Appended, Position, StopKind
from outbox.core.brokers.repair import Abandon, adopt
from outbox.core.delivery.commands import Gate
from outbox.core.delivery.lane import Lane
from outbox.core.model.response import STREAM_HOLD_FAILURES, Failure
from outbox.relay.delivery import broker_attempts
from outbox.relay.delivery.broker_attempts import BrokerAttempts
from tests.core.invariants import Violation
from tests.models.broker_protocol import FAULTS, World, simulate
from tests.support.brokers.model import (
    KeepsFence,
    ModelBroker,
    Pipelined,
    ReadsBeforeFence,
    ReadsFence,
    WithoutCompare,
    WithoutEpochs,
    WithoutOpenings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.core.brokers.port import Standing
    from outbox.core.brokers.repair import RepairDecision
    from outbox.core.brokers.take_over import Decision, LaneBooks
    from outbox.core.delivery.commands import Command

SCHEDULES_MIN, SCHEDULES = 500, 1_500
OUTCOMES = ("exact", "refilled", "adopted", "abandoned", *(each.value for each in (
    Failure.FORGOT, Failure.AHEAD, Failure.FOREIGN, Failure.FENCED)))  # fmt: skip
EVENTS = (
    *(f"adopt: {failure}" for failure in sorted(STREAM_HOLD_FAILURES)),
    "cut",
    "dead letter",
    "fenced by the database",
    "generation",
    "late: refused",
    "late: stored",
    "lost response",
    "preempted",
    "reconfigured",
    "refill",
    "request delayed",
    "skip",
    "take-over",
    "unavailable",
)


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """Without the log, which says for each refill that it happened."""
    with structlog.testing.capture_logs():
        yield


@pytest.mark.slow
def test_the_stream_is_the_lane_without_its_dead_letters_or_it_is_held(seed: int) -> None:
    seen: Counter[str] = Counter()
    kinds = *EVENTS, *FAULTS, *(f"outcome: {outcome}" for outcome in OUTCOMES)
    schedules = 0
    # The rarest kinds are in one of a hundred.
    while schedules < SCHEDULES_MIN or (schedules < SCHEDULES and not seen.keys() >= {*kinds}):
        seen.update(simulate(seed + schedules).seen.keys())
        schedules += 1
    print(schedules, dict(sorted(seen.items())))
    assert [kind for kind in kinds if not seen[kind]] == []
    assert seen["outcome: exact"] > schedules / 3


class EagerDeadLetters(Lane):
    """A mutant: skipped deliveries and cut backlogs do not wait until the lane is open."""

    __slots__ = ()

    def next(self, now: float, gate: Gate = Gate.OPEN) -> Command:
        assert self.stream is not None
        if self.stream.seq is None and self._busy is None:
            if self._pending_cut is not None:
                (through, reason), self._pending_cut = self._pending_cut, None
                if through > self.acked_seq:
                    return self._dead_letter_range(through, reason)
            if self._buffer.queue and self._buffer.queue[0].seq == self._skip_seq:
                return self._dead_letter(self._buffer.queue[0], "skipped", None)
        return super().next(now, gate)


class BlindAttempts(BrokerAttempts):
    """A mutant: after a lost response it appends again, without opening the lane."""

    async def append(self, lane: Any, *args: Any) -> Any:
        position = lane.state.stream.seq
        result = await super().append(lane, *args)
        if result is not None and _is_unknown(result[1]):
            lane.state.stream.seq = position
        return result


class EarlyEnd(Lane):
    """A mutant: the end entry does not wait for deliveries that are not fetched yet."""

    __slots__ = ()

    @property
    def _is_at_end(self) -> bool:
        return self.lacks_end


class UnflushedEnd(BrokerAttempts):
    """A mutant: acknowledgements in memory are not written before the end entry."""

    async def end(self, lane: Any, *args: Any) -> Any:
        recorder = self._recorder
        self._recorder = SimpleNamespace(  # type: ignore[assignment]
            flush=_nothing,
            write_end=recorder.write_end,
            finish_repair=recorder.finish_repair,
        )
        try:
            return await super().end(lane, *args)
        finally:
            self._recorder = recorder


async def _nothing() -> None:
    pass


def _is_unknown(appended: Appended) -> bool:
    return appended.stop is not None and appended.stop.kind is StopKind.UNKNOWN


BOTH = "is dead-lettered, and in the stream"
STORED_LATE = r"dead letter \d+ is stored"
NEVER_STORED = "is acknowledged, and was never stored"
HOLE = "is stored without"


def catches(what: str, **mutant: Any) -> None:
    """Check that a mutant is caught within the schedules; prints how."""

    def run() -> None:
        for each in range(SCHEDULES):
            simulate(each, lambda seed: World(seed, **mutant))

    with pytest.raises(Violation, match=what) as caught:
        run()
    print(*caught.value.__notes__, caught.value)


@pytest.mark.full
@pytest.mark.parametrize(
    ("broker", "what"),
    [
        (WithoutEpochs, f"{BOTH}|{STORED_LATE}"),
        (WithoutOpenings, f"{BOTH}|{STORED_LATE}"),
        (WithoutCompare, f"{HOLE}|{NEVER_STORED}"),
        (Pipelined, HOLE),
        (ReadsFence, f"{BOTH}|{STORED_LATE}"),
        (ReadsBeforeFence, f"{BOTH}|{STORED_LATE}"),
        (KeepsFence, "is held after it was adopted|it does not end"),
    ],
)
def test_a_broker_without_a_rule_is_caught(broker: type[ModelBroker], what: str) -> None:
    catches(what, broker=broker)


def test_dead_letters_in_a_lane_that_is_not_open_are_caught() -> None:
    catches(f"{BOTH}|{STORED_LATE}", lanes=EagerDeadLetters)


def test_appending_blindly_after_a_lost_response_is_caught() -> None:
    catches(f"{BOTH}|{STORED_LATE}", attempts=BlindAttempts)


def test_an_end_before_the_last_delivery_is_caught() -> None:
    catches(HOLE, lanes=EarlyEnd)


@pytest.mark.slow
def test_an_end_before_the_acknowledgements_is_caught() -> None:
    catches(f"held without a cause: ahead|{BOTH}", attempts=UnflushedEnd)


def without_comparison(standing: Standing, books: LaneBooks, expected: str | None) -> Decision:
    """A mutant: the X-Delivery is not compared."""
    if isinstance(standing, Position):
        expected = standing.delivery
    return take_over.decide(standing, books, expected)


def with_acknowledged(standing: Standing, books: LaneBooks, expected: str | None) -> Decision:
    """A mutant: the position is compared with the acknowledged sequence, not the delivered one."""
    return take_over.decide(standing, books._replace(delivered_seq=books.acked_seq), expected)


def forgiving(standing: Standing, books: LaneBooks, expected: str | None) -> Decision:
    """A mutant: the lane goes on after its stream has lost messages."""
    if isinstance(standing, Position) and standing.sequence < books.delivered_seq:
        return take_over.Proceed(standing.sequence)
    return take_over.decide(standing, books, expected)


def foreign_last(standing: Standing, books: LaneBooks, expected: str | None) -> Decision:
    """A mutant: a foreign stream that is behind has lost messages, and is filled again."""
    if isinstance(standing, Position) and standing.sequence < books.delivered_seq:
        expected = standing.delivery
    return take_over.decide(standing, books, expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("decide", "what"),
    [
        (without_comparison, NEVER_STORED),
        (with_acknowledged, "held without a cause: forgot"),
        (forgiving, HOLE),
        (foreign_last, "the stream and the lane differ in .*impostor"),
    ],
)
def test_a_wrong_comparison_is_caught(
    monkeypatch: pytest.MonkeyPatch, decide: Any, what: str
) -> None:
    monkeypatch.setattr(broker_attempts, "decide", decide)
    catches(what)


def adopt_and_go_on(decision: RepairDecision, standing: Standing, *, ended: bool) -> RepairDecision:
    """A mutant: a lane goes on where a stream stands that is not its own."""
    adopted = adopt(decision, standing, ended=ended)
    return take_over.Proceed(adopted.position) if isinstance(adopted, Abandon) else adopted


def adopt_and_acknowledge(
    decision: RepairDecision, standing: Standing, *, ended: bool
) -> RepairDecision:
    """A mutant: what another writer's position covers is acknowledged."""
    adopted = adopt(decision, standing, ended=ended)
    is_foreign = isinstance(decision, take_over.Hold) and decision.reason == "foreign"
    if isinstance(adopted, Abandon) and isinstance(standing, Position) and standing.delivery:
        # Ahead of what was assigned, there would be nothing to acknowledge.
        return take_over.Acknowledge(adopted.position) if is_foreign else adopted
    return adopted


def adopt_nothing(decision: RepairDecision, standing: Standing, *, ended: bool) -> RepairDecision:
    """A mutant: a lane whose stream has lost messages stays held."""
    return decision


@pytest.mark.full
@pytest.mark.parametrize(
    ("mutant", "what"),
    [
        (adopt_and_go_on, "is stored after|is stored without|pending|differ"),
        (adopt_and_acknowledge, f"{NEVER_STORED}|differ"),
        (adopt_nothing, "is held after it was adopted"),
    ],
)
def test_a_wrong_adoption_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: Any, what: str
) -> None:
    monkeypatch.setattr(broker_attempts, "adopt", mutant)
    catches(what)


def test_a_stream_is_not_filled_again_without_a_lease() -> None:
    world = World(0)
    world._has_faults = False
    owner = world._own()
    for _ in range(3):
        world.database.assign()
    world._announce()
    while owner.lane.pending or owner.recorder.pending:
        world._step(owner)
        world._write(owner)
    world.broker.put_back(ModelBroker())
    owner.lane.reopen()
    world.database.assign()
    world._announce()
    while world.database.held is not Failure.FORGOT:
        world._step(owner)
    world._refill()
    owner.apply_changes()
    owner.lease_left_s = 0.0
    while owner in world._owners:
        world._step(owner)
    assert world.broker.stored == []


async def test_a_lane_that_is_cancelled_while_it_waits_to_read_leaves_nothing_behind() -> None:
    """A coroutine that never began would warn; warnings are errors here."""
    reading, unused = asyncio.Lock(), cast("Any", None)
    attempts = BrokerAttempts(
        unused, reading, unused, unused, lambda: 1.0, lambda: 0.0, lambda: 0.0
    )
    async with reading:
        task = asyncio.create_task(attempts._read(_nothing()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    gc.collect()
