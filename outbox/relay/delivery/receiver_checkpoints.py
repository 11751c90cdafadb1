"""Receiver checkpoints: send subscribed receivers the last sequence number of each lane.

They do not delay deliveries and do not affect the circuit breaker: a rejected checkpoint
is logged, and the next one supersedes it.  A former owner may still send an older
checkpoint, which remains true.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING
from uuid import uuid4

import structlog

from outbox.core.admission.endpoint_queue import Slot
from outbox.core.admission.request_scheduler import RequestScheduler
from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.delivery.receiver_checkpoint import prepare
from outbox.destinations.http.request import recipient_of, signed_request
from outbox.relay.delivery.admission import AdmissionQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from uuid import UUID

    from outbox.core.delivery.receiver_checkpoint import LaneMark
    from outbox.core.model.response import AttemptResult
    from outbox.destinations.interface import Recipient, Request, Transport
    from outbox.relay.delivery.owned_endpoints import EndpointRuntime
    from outbox.store.delivery.endpoints import Endpoint
    from outbox.store.delivery.receiver_checkpoints import CheckpointStore

log = structlog.get_logger("outbox.checkpoints")

SENDING_MAX = 64
"""Requests at a time.  Admission control applies as for deliveries, so that receivers that
never respond do not take all slots."""
READ_MAX = 32
"""Endpoints whose marks are read at a time."""
MARKS_MAX = 50_000
"""Marks in memory of waiting subscribers, shared evenly by the tenants that have some and one
more; endpoints without a tenant count as one."""
FULL_S = 0.1
"""Delay before the next read after a full one."""
BUSY_S = 1.0
"""Delay if a subscriber has not responded yet, or its tenant's share of marks is used up."""
TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class _Subscriber:
    """An endpoint that receives checkpoints."""

    endpoint: Endpoint
    recipient: Recipient
    slot: Slot
    every_s: float = inf
    due_at: float = inf
    """By the loop's clock."""
    marks: Sequence[LaneMark] | None = None
    """The marks being sent; None: no request is queued."""
    is_rejecting: bool = False
    """It rejected the last checkpoint."""


class CheckpointSender:
    """Sends due checkpoints.

    Args:
        store: used by `send_due` only, so on its caller's connection.
        now: epoch seconds.
    """

    def __init__(
        self, store: CheckpointStore, transport: Transport, now: Callable[[], float]
    ) -> None:
        self._store = store
        self._transport = transport
        self._now = now
        self._admission = AdmissionQueue(RequestScheduler(SENDING_MAX))
        self._subscribers: dict[UUID, _Subscriber] = {}
        # Subscribers whose marks were read.
        self._read: asyncio.Queue[_Subscriber] = asyncio.Queue()
        self.next_due_at = inf
        """When to call `send_due` if nothing changes, by the loop's clock."""

    async def send_due(self, owned: Collection[EndpointRuntime]) -> None:
        """Queue the due checkpoints of these endpoints; asyncpg's errors pass through."""
        clock = asyncio.get_running_loop().time()
        deliverable = self._update_subscribers(owned, clock)
        # The longest overdue first; a subscriber with a request in flight skips this round.
        late = sorted(
            (each for each in deliverable if each.due_at <= clock), key=lambda e: e.due_at
        )
        due = self._within_marks_limit(late)
        for each in due:
            each.due_at = clock + each.every_s
        next_at = min((each.due_at for each in deliverable if each.due_at > clock), default=inf)
        if len(due) < len(late):
            next_at = clock if len(due) == READ_MAX else min(next_at, clock + BUSY_S)
        self.next_due_at = max(next_at, clock + FULL_S)
        if due:
            marks = await self._store.marks([each.endpoint.id for each in due])
            for each in due:
                if lane_marks := marks[each.endpoint.id]:
                    each.marks = lane_marks
                    self._read.put_nowait(each)

    def _update_subscribers(
        self, owned: Collection[EndpointRuntime], clock: float
    ) -> list[_Subscriber]:
        """Update the subscribers from the endpoints' settings; return the deliverable ones."""
        known, self._subscribers = self._subscribers, {}
        deliverable = []
        for each in owned:
            endpoint = each.endpoint
            if endpoint.checkpoint_every_s is None:
                continue
            subscriber = known.pop(endpoint.id, None)
            if subscriber is None:
                queue = self._admission.scheduler.add_endpoint(endpoint.tenant, None, None)
                subscriber = _Subscriber(endpoint, _recipient(endpoint), Slot(queue))
            self._change(subscriber, endpoint, clock)
            self._subscribers[endpoint.id] = subscriber
            if _is_deliverable(each):
                deliverable.append(subscriber)
            else:
                self._admission.cancel_waiting([subscriber.slot])
        for subscriber in known.values():
            self._admission.cancel_waiting([subscriber.slot])
            if subscriber.marks is None:
                self._admission.scheduler.remove_endpoint(subscriber.slot.queue)
        return deliverable

    def _change(self, subscriber: _Subscriber, endpoint: Endpoint, clock: float) -> None:
        if subscriber.endpoint is not endpoint:
            subscriber.endpoint, subscriber.recipient = endpoint, _recipient(endpoint)
        every_s, admission = endpoint.checkpoint_every_s or inf, self._admission
        if subscriber.every_s != every_s:
            # Spread over the interval, or all newly claimed endpoints are due at once.
            subscriber.every_s = every_s
            subscriber.due_at = clock + every_s * (endpoint.id.int % 997) / 997
        queue = subscriber.slot.queue
        if queue.tenant.name != endpoint.tenant:
            admission.start_granted(
                admission.scheduler.change_endpoint(queue, endpoint.tenant, None, None, clock)
            )

    def _within_marks_limit(self, late: Sequence[_Subscriber]) -> list[_Subscriber]:
        """The subscribers whose marks may be read now."""
        if not late:
            return []
        held = Counter[str | None]()
        for each in self._subscribers.values():
            if each.marks is not None:
                held[each.endpoint.tenant] += len(each.marks)
        share = MARKS_MAX // (len(held) + 1)
        full = {tenant for tenant, marks in held.items() if marks >= share}
        return [each for each in late if each.marks is None and each.endpoint.tenant not in full][
            :READ_MAX
        ]

    async def run(self) -> None:
        """Send until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    tasks.create_task(self._send(await self._read.get()))
        finally:
            self._admission.close()

    async def _send(self, subscriber: _Subscriber) -> None:
        slot, admission = subscriber.slot, self._admission
        try:
            if admission.begin(slot) or await admission.wait(slot):
                responded = False
                try:
                    sending = self._transport.send(self._request(subscriber))
                    response = await admission.send(slot, sending)
                    responded = admission.has_response(slot, response)
                finally:
                    admission.end(slot, responded=responded)
                self._log_result(subscriber, response)
        finally:
            subscriber.marks = None
            if self._subscribers.get(subscriber.endpoint.id) is not subscriber:
                admission.scheduler.remove_endpoint(slot.queue)

    def _log_result(self, subscriber: _Subscriber, response: AttemptResult) -> None:
        if response.status is not None and 200 <= response.status < 300:
            if subscriber.is_rejecting:
                subscriber.is_rejecting = False
                log.info("receiver accepts checkpoints again", endpoint=subscriber.endpoint.name)
        elif not subscriber.is_rejecting:
            subscriber.is_rejecting = True
            log.warning(
                "receiver rejected a checkpoint",
                endpoint=subscriber.endpoint.name,
                status=response.status,
                failure=response.failure,
            )

    def _request(self, subscriber: _Subscriber) -> Request:
        endpoint, marks = subscriber.endpoint, subscriber.marks or ()
        now = self._now()
        prepared = prepare(str(uuid4()), now, marks, endpoint.headers)
        keys = endpoint.secrets_at(now)
        return signed_request(subscriber.recipient, prepared, 1, int(now), keys)


def _recipient(endpoint: Endpoint) -> Recipient:
    """The recipient of an endpoint's checkpoints."""
    recipient = recipient_of(endpoint)
    return replace(recipient, timeout_s=min(recipient.timeout_s, TIMEOUT_S))


def _is_deliverable(owned: EndpointRuntime) -> bool:
    """Whether the endpoint is active, healthy and not being released."""
    return (
        owned.endpoint.usable
        and owned.endpoint.state == "active"
        and not owned.stopped
        and owned.breaker.state is BreakerState.HEALTHY
    )
