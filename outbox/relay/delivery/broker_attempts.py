"""Attempts of a broker's lane: opening it, and appending deliveries to its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import structlog

from outbox.core.brokers.message import end_message, messages_of
from outbox.core.brokers.port import Appended, Owner, Position, Stop, StopKind
from outbox.core.brokers.repair import Abandon, RepairKind, adopt
from outbox.core.brokers.results import failed_result, stored_result
from outbox.core.brokers.take_over import (
    Acknowledge,
    Ended,
    Hold,
    HoldReason,
    LaneBooks,
    Proceed,
    decide,
)
from outbox.core.model.response import AttemptResult
from outbox.relay.delivery.stream_refill import StreamRefill
from outbox.store.errors import Fenced

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Sequence

    from outbox.core.brokers.port import Message, Standing
    from outbox.core.brokers.repair import Repair, RepairDecision
    from outbox.core.delivery.commands import End, Send
    from outbox.core.delivery.stream_position import StreamPosition
    from outbox.destinations.broker import Broker
    from outbox.relay.delivery.admission import AdmissionQueue
    from outbox.relay.delivery.owned_endpoints import LaneRuntime
    from outbox.relay.delivery.recorder import Recorder
    from outbox.store.delivery.lanes import FoundDelivery, LaneStore


T = TypeVar("T")

log = structlog.get_logger("outbox.dispatcher")


class _Opened(NamedTuple):
    """A lane that was opened, and what that means."""

    decision: RepairDecision
    found: FoundDelivery | None
    """The delivery at the lane's position in the stream, if the stream names one."""
    standing: Standing


REFILL_EVERY_S = 600.0
"""Minimum seconds between two refills of a lane that no operator has requested."""


class BrokerAttempts:
    """Opens lanes and appends to them.

    Args:
        reading: held while the store is used, because it has one connection.
        lease_left_s: remaining lease, in seconds; nothing is appended without it.
        steady: seconds of the clock that measures durations.
        now: epoch seconds.
    """

    def __init__(
        self,
        store: LaneStore,
        reading: asyncio.Lock,
        recorder: Recorder,
        admission: AdmissionQueue,
        lease_left_s: Callable[[], float],
        steady: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._reading = reading
        self._recorder = recorder
        self._admission = admission
        self._lease_left_s = lease_left_s
        self._steady = steady
        self._now = now
        self._stream_refill = StreamRefill(store, self._read, self._append)
        self._identity: str | None = None

    async def open(self, lane: LaneRuntime, broker: Broker) -> AttemptResult | None:
        """Find out where the lane stands in its stream; None: it goes on from there.

        What the stream has and the database does not know is acknowledged first.  A lane that does
        not match is held, unless an operator has decided how it goes on.

        Raises:
            Fenced: this replica is no longer the owner.
        """
        began_at = self._steady()
        owner = await self._owner(lane)
        opened = await self._open(lane, broker, owner)
        if isinstance(opened, _Opened) and isinstance(opened.decision, Hold):
            repair = await self._read(self._store.repair(lane.loaded.id))
            if repair is not None and repair.delivered_seq == lane.state.delivered_seq:
                opened = await self._repair(lane, broker, owner, opened, repair)
            elif lane.runtime.endpoint.on_forgotten == "refill" and _is_forgotten(opened):
                opened = await self._refill_unasked(lane, broker, owner, opened)
        if isinstance(opened, AttemptResult):
            return opened
        decision, found, _ = opened
        if lane.runtime.broker is not broker:
            # The URL has changed meanwhile: the position is another server's.
            lane.repaired = None
            lane.state.cancel_send()
            return None
        if isinstance(decision, Stop | Hold):
            return failed_result(decision, self._steady() - began_at)
        if isinstance(decision, Acknowledge):
            assert found is not None
            await self._acknowledge(lane, broker, decision.through, found.batch)
            return None
        if isinstance(decision, Ended):
            await self._record_end(lane, decision.sequence)
            return None
        lane.state.record_position(decision.position)
        if isinstance(decision, Abandon):
            lane.state.dead_letter_through(lane.state.last_seq, "adopted")
        return None

    async def _open(
        self, lane: LaneRuntime, broker: Broker, owner: Owner, *, force: bool = False
    ) -> _Opened | AttemptResult:
        """Open the lane and compare its position with the database."""
        state, name = lane.state, lane.loaded.name
        receipt = stream_of(lane).release_receipt(state.committed_seq)
        standing = await self._admission.send(
            lane.slot, broker.open(name, owner, state.delivered_seq, receipt, force=force)
        )
        if isinstance(standing, AttemptResult):
            return standing
        books = LaneBooks(name, state.delivered_seq, state.acked_seq, state.last_seq, state.ended)
        found = None
        if isinstance(standing, Position) and standing.delivery is not None:
            # The acknowledgements in memory first: the database must not be behind them.
            await self._recorder.flush()
            found = await self._read(self._store.delivery_at(lane.loaded, standing.sequence))
        decision = decide(standing, books, None if found is None else found.delivery)
        return _Opened(decision, found, standing)

    async def _acknowledge(
        self, lane: LaneRuntime, broker: Broker, through: int, batch: int
    ) -> None:
        """Acknowledge what the stream has."""
        at = self._now()
        await self._recorder.acknowledge_found(lane.state, lane.runtime.epoch, through, batch, at)
        lane.state.record_found(through, batch, at)
        if lane.runtime.broker is not broker:
            lane.state.reopen()
        await self._finish_repair(lane)

    async def _repair(
        self, lane: LaneRuntime, broker: Broker, owner: Owner, opened: _Opened, repair: Repair
    ) -> _Opened | AttemptResult:
        """Do what an operator has requested for a lane that is held."""
        decision, _, standing = opened
        is_forgot = isinstance(decision, Hold) and decision.reason is HoldReason.FORGOT
        if repair.kind is RepairKind.REFILL:
            if not (is_forgot and isinstance(standing, Position)):
                return opened
            stopped = await self._stream_refill.refill(lane, broker, owner, standing.sequence)
            if isinstance(stopped, AttemptResult):
                return stopped
            if stopped is not None:
                return opened._replace(decision=stopped)
            lane.repaired = repair
            await self._finish_repair(lane)
            return opened._replace(decision=Proceed(lane.state.delivered_seq))
        if not isinstance(standing, Position):
            if lane.runtime.broker is not broker:
                return opened
            forced = await self._open(lane, broker, owner, force=True)
            if isinstance(forced, AttemptResult):
                return forced
            opened = forced
        adopted = adopt(opened.decision, opened.standing, ended=lane.state.ended)
        if isinstance(adopted, Stop) or (isinstance(adopted, Hold) and adopted == opened.decision):
            return opened
        # Not deleted before the lane delivers again: until then another owner finds it as it is.
        lane.repaired = repair
        if isinstance(adopted, Hold):
            await self._finish_repair(lane)
        else:
            log.warning(
                "stream adopted", endpoint=lane.runtime.endpoint.name, lane=lane.loaded.name,
                decision=type(adopted).__name__.lower(),
            )  # fmt: skip
        return opened._replace(decision=adopted)

    async def _refill_unasked(
        self, lane: LaneRuntime, broker: Broker, owner: Owner, opened: _Opened
    ) -> _Opened | AttemptResult:
        """Refill a stream as its endpoint's setting says, if all of it can be.

        Not again for a while: a broker that forgets each time needs a person.
        """
        assert isinstance(opened.standing, Position)
        position, through = opened.standing.sequence, lane.state.delivered_seq
        now = self._steady()
        refill = self._stream_refill
        if now < lane.refilled_at + REFILL_EVERY_S or not await refill.is_possible(lane, position):
            return opened
        stopped = await refill.refill(lane, broker, owner, position)
        if isinstance(stopped, AttemptResult):
            return stopped
        if not isinstance(stopped, Stop):  # One that was interrupted goes on at the next opening.
            lane.refilled_at = now
        if stopped is not None:
            return opened._replace(decision=stopped)
        endpoint_id = lane.runtime.endpoint.id
        await self._recorder.journal_refill(lane.state.id, endpoint_id, position + 1, through)
        return opened._replace(decision=Proceed(through))

    async def _finish_repair(self, lane: LaneRuntime) -> None:
        """Delete the request that was carried out, if there is one."""
        repair, lane.repaired = lane.repaired, None
        if repair is not None:
            lane.repair = None
            await self._recorder.finish_repair(lane.state, lane.runtime.epoch, repair)

    async def append(
        self, lane: LaneRuntime, broker: Broker, send: Send
    ) -> tuple[AttemptResult, Appended] | None:
        """Append the deliveries of a Send to the lane's stream; None: nothing was stored, and the
        lane must be opened at once.
        """
        position = stream_of(lane).seq
        assert position is not None
        messages = messages_of(
            lane.runtime.endpoint,
            send.batch or (send.delivery,),
            send.previous_seq,
        )
        return await self._append_at(lane, broker, position, messages)

    async def _append_at(
        self, lane: LaneRuntime, broker: Broker, position: int, messages: Sequence[Message]
    ) -> tuple[AttemptResult, Appended] | None:
        """Append messages after a position; the result is that of `append`."""
        owner = await self._owner(lane)
        began_at = self._steady()
        appended = await self._append(lane, broker, owner, position, messages)
        if isinstance(appended, AttemptResult):
            lane.state.reopen()
            return appended, Appended(position, Stop(StopKind.UNKNOWN, appended.detail))
        elapsed_s = self._steady() - began_at
        if appended.through > position:
            await self._finish_repair(lane)
        if appended.stop is None:
            return stored_result(elapsed_s), appended
        if appended.stop.kind in (StopKind.MOVED, StopKind.CLOSED) and lane.state.reopen():
            return None
        if appended.stop.kind is StopKind.UNKNOWN:
            lane.state.reopen()
        return failed_result(appended.stop, elapsed_s), appended

    async def end(
        self, lane: LaneRuntime, broker: Broker, end: End
    ) -> tuple[AttemptResult, Appended] | None:
        """Append the end entry of a lane, and record it; None: the lane must be opened at once.

        Raises:
            Fenced: this replica is no longer the owner.
        """
        # The acknowledgements in memory first.  The next owner would otherwise find the entry, and
        # pending deliveries before it that it cannot tell from those of a restored database.
        await self._recorder.flush()
        position = stream_of(lane).seq
        if position is None:
            lane.state.cancel_send()
            return None
        # An abandoned lane stands elsewhere than its sequences say.
        seq = max(end.delivery.seq, position + 1)
        loaded = lane.loaded
        assert loaded.lanes is not None
        message = end_message(loaded.name, seq, end.previous_seq, loaded.lanes)
        result = await self._append_at(lane, broker, position, [message])
        if result is None or result[1].stop is not None:
            return result
        if lane.runtime.broker is not broker:
            # The URL has changed meanwhile: whether the other server has the entry is not known.
            lane.state.reopen()
            return None
        await self._record_end(lane, seq)
        return result

    async def _record_end(self, lane: LaneRuntime, seq: int) -> None:
        await self._recorder.write_end(lane.state, lane.runtime.epoch, seq)
        lane.state.record_end()
        await self._finish_repair(lane)

    async def _append(
        self,
        lane: LaneRuntime,
        broker: Broker,
        owner: Owner,
        after: int,
        messages: Sequence[Message],
    ) -> Appended | AttemptResult:
        """Append messages; an AttemptResult: admission control has cancelled the request."""
        if self._lease_left_s() <= 0:
            raise Fenced
        appended = await self._admission.send(
            lane.slot, broker.append(lane.loaded.name, owner, after, messages)
        )
        if isinstance(appended, Appended) and appended.receipt is not None:
            stream_of(lane).record_receipt(appended.through, appended.receipt)
        return appended

    async def _read(self, reading: Coroutine[Any, Any, T]) -> T:
        try:
            async with self._reading:
                return await reading
        finally:
            # It has not begun if the lane's task was cancelled while it waited.
            reading.close()

    async def _owner(self, lane: LaneRuntime) -> Owner:
        if self._identity is None:
            self._identity = await self._read(self._store.identity())
        return Owner(self._identity, lane.runtime.epoch, stream_of(lane).openings)


def stream_of(lane: LaneRuntime) -> StreamPosition:
    """The position of a broker's lane."""
    assert lane.state.stream is not None
    return lane.state.stream


def _is_forgotten(opened: _Opened) -> bool:
    """Whether the stream has certainly lost messages of this lane, and nothing else is wrong: the
    message at which it stands is that of the database, or it is empty.
    """
    decision, found, standing = opened
    if not (isinstance(decision, Hold) and decision.reason is HoldReason.FORGOT):
        return False
    if not isinstance(standing, Position):
        return False
    expected = None if found is None else found.delivery
    return standing.sequence == 0 or (
        standing.delivery is not None and standing.delivery == expected
    )
