"""Checkpoints: tells receivers that want it the last number of each of their lanes.

They are not in the way of deliveries and say nothing of an endpoint's health: a checkpoint
that is not taken is logged, and the next one says the same and more.  Whoever lost an
endpoint may still tell what was acknowledged then, which stays true.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING
from uuid import uuid4

import structlog

from outbox.core.admission.endpoint_queue import Turn
from outbox.core.admission.request_scheduler import Turns
from outbox.core.delivery.circuit_breaker import State
from outbox.core.delivery.receiver_checkpoint import prepare
from outbox.destinations.http.request import addressed
from outbox.relay.delivery.admission import Queueing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from uuid import UUID

    from outbox.core.delivery.receiver_checkpoint import Mark
    from outbox.core.model.response import Answer
    from outbox.destinations.interface import Request, Transport
    from outbox.relay.delivery.owned_endpoints import OwnedEndpoint
    from outbox.store.endpoints import Endpoint
    from outbox.store.receiver_checkpoints import CheckpointStore

log = structlog.get_logger("outbox.checkpoints")

SENDING_MAX = 64
"""At a time.  They have their turns as deliveries have, so that receivers that never answer
leave the others theirs."""
READ_MAX = 32
"""So many endpoints' marks are read at a time."""
MARKS_MAX = 50_000
"""So many are shared by those who wait for their turns, since each has its marks in memory: by
tenants that have some there, and one more; those without a tenant are one."""
FULL_S = 0.1
"""Until the next look if so many were read."""
BUSY_S = 1.0
"""And if somebody has not answered yet, or has too much company that waits."""
TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class _Subscriber:
    """An endpoint that wants checkpoints."""

    endpoint: Endpoint
    turn: Turn
    every_s: float = inf
    due_at: float = inf
    """By the loop's clock."""
    marks: Sequence[Mark] | None = None
    """What it is being told; None: nothing."""
    refuses: bool = False
    """It did not take the last one."""


class Checkpoints:
    """Sends what is due.

    Args:
        store: on the connection of whoever calls `look`.
        now: epoch seconds.
    """

    def __init__(
        self, store: CheckpointStore, transport: Transport, now: Callable[[], float]
    ) -> None:
        self._store = store
        self._transport = transport
        self._now = now
        self._queueing = Queueing(Turns(SENDING_MAX))
        self._subscribers: dict[UUID, _Subscriber] = {}
        # Those whose marks were read.
        self._read: asyncio.Queue[_Subscriber] = asyncio.Queue()
        self.look_at = inf
        """When to call `look`, by the loop's clock, if nothing changes."""

    async def look(self, owned: Collection[OwnedEndpoint]) -> None:
        """Have sent what is due to these endpoints; asyncpg's errors pass through."""
        clock = asyncio.get_running_loop().time()
        told = self._hold_to(owned, clock)
        # Who has waited longest comes first; who has not answered yet waits for the next.
        late = sorted((each for each in told if each.due_at <= clock), key=lambda e: e.due_at)
        due = self._room_for(late)
        for each in due:
            each.due_at = clock + each.every_s
        next_at = min((each.due_at for each in told if each.due_at > clock), default=inf)
        if len(due) < len(late):
            next_at = clock if len(due) == READ_MAX else min(next_at, clock + BUSY_S)
        self.look_at = max(next_at, clock + FULL_S)
        if due:
            marks = await self._store.marks([each.endpoint.id for each in due])
            for each in due:
                if found := marks[each.endpoint.id]:
                    each.marks = found
                    self._read.put_nowait(each)

    def _hold_to(self, owned: Collection[OwnedEndpoint], clock: float) -> list[_Subscriber]:
        """Know those that want checkpoints, as they are now; returns those to be told."""
        known, self._subscribers = self._subscribers, {}
        told = []
        for each in owned:
            endpoint = each.endpoint
            if endpoint.checkpoint_every_s is None:
                continue
            subscriber = known.pop(endpoint.id, None)
            if subscriber is None:
                line = self._queueing.turns.join(endpoint.tenant, None, None)
                subscriber = _Subscriber(endpoint, Turn(line))
            self._change(subscriber, endpoint, clock)
            self._subscribers[endpoint.id] = subscriber
            if _may_be_told(each):
                told.append(subscriber)
            else:
                self._queueing.dismiss([subscriber.turn])
        for subscriber in known.values():
            self._queueing.dismiss([subscriber.turn])
            if subscriber.marks is None:
                self._queueing.turns.leave(subscriber.turn.line)
        return told

    def _change(self, subscriber: _Subscriber, endpoint: Endpoint, clock: float) -> None:
        subscriber.endpoint = endpoint
        every_s, queueing = endpoint.checkpoint_every_s or inf, self._queueing
        if subscriber.every_s != every_s:
            # Not all of them at once, when they have just been taken over.
            subscriber.every_s = every_s
            subscriber.due_at = clock + every_s * (endpoint.id.int % 997) / 997
        line = subscriber.turn.line
        if line.tenant.name != endpoint.tenant:
            queueing.tell(queueing.turns.change(line, endpoint.tenant, None, None, clock))

    def _room_for(self, late: Sequence[_Subscriber]) -> list[_Subscriber]:
        """Those of them whose marks to read now."""
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
                    tasks.create_task(self._tell(await self._read.get()))
        finally:
            self._queueing.close()

    async def _tell(self, subscriber: _Subscriber) -> None:
        turn, queueing = subscriber.turn, self._queueing
        try:
            if queueing.begin(turn) or await queueing.wait(turn):
                answered = False
                try:
                    sending = self._transport.send(self._request(subscriber))
                    answer = await queueing.send(turn, sending)
                    answered = queueing.in_time(turn, answer)
                finally:
                    queueing.end(turn, answered=answered)
                self._heed(subscriber, answer)
        finally:
            subscriber.marks = None
            if self._subscribers.get(subscriber.endpoint.id) is not subscriber:
                queueing.turns.leave(turn.line)

    def _heed(self, subscriber: _Subscriber, answer: Answer) -> None:
        if answer.status is not None and 200 <= answer.status < 300:
            if subscriber.refuses:
                subscriber.refuses = False
                log.info("checkpoints are taken again", endpoint=subscriber.endpoint.name)
        elif not subscriber.refuses:
            subscriber.refuses = True
            log.warning(
                "a checkpoint was not taken",
                endpoint=subscriber.endpoint.name,
                status=answer.status,
                failure=answer.failure,
            )

    def _request(self, subscriber: _Subscriber) -> Request:
        endpoint, marks = subscriber.endpoint, subscriber.marks or ()
        now = self._now()
        prepared = prepare(str(uuid4()), datetime.fromtimestamp(now, UTC), marks, endpoint.headers)
        request = addressed(endpoint, prepared, 1, int(now), endpoint.secrets_at(now))
        return request._replace(total_timeout_s=min(endpoint.total_timeout_s, TIMEOUT_S))


def _may_be_told(owned: OwnedEndpoint) -> bool:
    """Whether it is there, and nobody asked to leave it alone."""
    return (
        owned.endpoint.usable
        and owned.endpoint.state == "active"
        and not owned.stopped
        and owned.health.state is State.HEALTHY
    )
