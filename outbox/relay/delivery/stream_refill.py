"""The refill of a broker's stream: appends again what the stream has lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from outbox.core.brokers.message import messages_of
from outbox.core.brokers.port import APPEND_MAX, Stop, StopKind
from outbox.core.brokers.take_over import Hold, HoldReason
from outbox.core.delivery.buffer_budget import COPIES, row_bytes
from outbox.core.messages.batch import BATCH_BYTES_MAX
from outbox.core.model.response import AttemptResult

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.core.brokers.port import Appended, Owner
    from outbox.destinations.broker import Broker
    from outbox.relay.delivery.owned_endpoints import LaneRuntime
    from outbox.store.delivery.lanes import LaneStore, LostDeliveries

log = structlog.get_logger("outbox.dispatcher")

LOST_ROWS_MIN, LOST_ROWS_GROWTH = 8, 4
"""Rows of the first read of a refill, and how many times more the next one may return than the last
did: the server converts all of them, and large events leave room for few."""


class StreamRefill:
    """Refills streams, from the deliveries that are kept.

    Args:
        read, append: those of `BrokerAttempts`.
    """

    def __init__(
        self,
        store: LaneStore,
        read: Callable[..., Awaitable[LostDeliveries | None]],
        append: Callable[..., Awaitable[Appended | AttemptResult]],
    ) -> None:
        self._store = store
        self._read = read
        self._append = append

    async def refill(
        self, lane: LaneRuntime, broker: Broker, owner: Owner, position: int
    ) -> AttemptResult | Stop | Hold | None:
        """Append what the stream has lost again, with its own sequences; None: all of it.

        The lane's progress does not change.  Erased events are left out.
        """
        loaded, through, share = lane.loaded, lane.state.delivered_seq, lane.runtime.share
        at = previous_seq = position
        rows_max = LOST_ROWS_MIN
        while at < through:
            lost = await self._read(self._lost(lane, at, rows_max))
            if lost is None:
                return Hold(
                    HoldReason.FORGOT,
                    f"lane {loaded.name} cannot be filled again: of sequences {at + 1} to "
                    f"{through}, not all are kept any more",
                )
            if lost.deliveries:
                if lane.runtime.broker is not broker:
                    return Stop(StopKind.MOVED, "the endpoint's address was changed")
                messages = messages_of(lane.runtime.endpoint, lost.deliveries, previous_seq)
                with share.holding(sum(map(row_bytes, lost.deliveries))):
                    appended = await self._append(lane, broker, owner, previous_seq, messages)
                if isinstance(appended, AttemptResult):
                    return appended
                if appended.stop is not None and appended.stop.kind is StopKind.REFUSED:
                    # Delivered once, so it is no dead letter; nor is the endpoint at fault.
                    first = min(m.sequence for m in messages if m.sequence > appended.through)
                    return Hold(
                        HoldReason.FORGOT,
                        f"lane {loaded.name} cannot be filled again: sequence {first} is refused: "
                        f"{appended.stop.detail}",
                    )
                if appended.stop is not None:
                    return appended.stop
                previous_seq = lost.deliveries[-1].seq
                del messages
            rows_max = LOST_ROWS_GROWTH * (lost.through_seq - at)
            at = lost.through_seq
            del lost  # It is not counted any more.
        if previous_seq != through:
            return Hold(
                HoldReason.FORGOT,
                f"lane {loaded.name} cannot be filled again to its end: the event of sequence "
                f"{through} was erased",
            )
        log.info(
            "stream refilled", endpoint=lane.runtime.endpoint.name, lane=loaded.name,
            sequence=position + 1, to_sequence=through,
        )  # fmt: skip
        return None

    async def is_possible(self, lane: LaneRuntime, position: int) -> bool:
        """Whether everything that the stream has lost is kept, and its last message not erased."""
        at, last_seq, through = position, position, lane.state.delivered_seq
        rows_max = LOST_ROWS_MIN
        while at < through:
            lost = await self._read(self._lost(lane, at, rows_max))
            if lost is None:
                return False
            rows_max = LOST_ROWS_GROWTH * (lost.through_seq - at)
            at = lost.through_seq
            last_seq = lost.deliveries[-1].seq if lost.deliveries else last_seq
            del lost  # The next read may wait for those of many lanes.
        return last_seq == through

    async def _lost(
        self, lane: LaneRuntime, after_seq: int, rows_max: int
    ) -> LostDeliveries | None:
        """Read the next deliveries that the stream has lost.

        A broker that has lost its data makes all lanes read at once, so the room is that of the
        moment at which the read begins.
        """
        bytes_max = min(max(lane.runtime.share.room, 0) // COPIES, BATCH_BYTES_MAX)
        return await self._store.lost_deliveries(
            lane.loaded,
            after_seq,
            lane.state.delivered_seq,
            min(rows_max, APPEND_MAX),
            bytes_max,
        )
