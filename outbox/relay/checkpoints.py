"""Checkpoints: tells receivers that want it the last number of each of their lanes.

They are not in the way of deliveries and say nothing of an endpoint's health: a checkpoint
that is not taken is logged, and the next one says the same and more.  Whoever lost an
endpoint may still tell what was acknowledged then, which stays true.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING
from uuid import uuid4

import structlog

from outbox.core.checkpoint import prepare
from outbox.core.health import State
from outbox.transport.addressing import addressed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from uuid import UUID

    from outbox.core.checkpoint import Mark
    from outbox.relay.owned import OwnedEndpoint
    from outbox.store.checkpoints import CheckpointStore
    from outbox.store.destinations import Endpoint
    from outbox.transport.port import Request, Transport

log = structlog.get_logger("outbox.checkpoints")

SENDING_MAX = 16
"""At a time, so that a few receivers that never answer leave the others their turn."""
FULL_S = 0.1
"""Until the next look if there was no room for somebody, or he has not answered yet."""
TIMEOUT_S = 10.0


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
        # By endpoint, when the next one is due by the loop's clock, and how often that is.
        self._due: dict[UUID, tuple[float, float]] = {}
        self._sending: set[UUID] = set()
        # Those that did not take the last one.
        self._refusing: set[UUID] = set()
        # Never longer than `_sending`.
        self._queue: asyncio.Queue[tuple[Endpoint, Request]] = asyncio.Queue()
        self.look_at = inf
        """When to call `look`, by the loop's clock, if nothing changes."""

    async def look(self, owned: Collection[OwnedEndpoint]) -> None:
        """Have sent what is due to these endpoints; asyncpg's errors pass through."""
        clock = asyncio.get_running_loop().time()
        known, self._due = self._due, {}
        endpoints = {each.endpoint.id: each.endpoint for each in owned if _may_be_told(each)}
        for endpoint_id, endpoint in endpoints.items():
            every_s = endpoint.checkpoint_every_s
            if every_s is None:
                continue
            # Not all of them at once, when they have just been taken over.
            first = (clock + every_s * (endpoint_id.int % 997) / 997, every_s)
            at, before_s = known.get(endpoint_id, first)
            self._due[endpoint_id] = (at, every_s) if before_s == every_s else first
        self._refusing &= self._due.keys()
        # Who has waited longest comes first; who has not answered yet waits for the next.
        late = sorted((at, i) for i, (at, _) in self._due.items() if at <= clock)
        due = [i for _, i in late if i not in self._sending][: SENDING_MAX - len(self._sending)]
        for endpoint_id in due:
            every_s = self._due[endpoint_id][1]
            self._due[endpoint_id] = (clock + every_s, every_s)
        next_at = min((at for at, _ in self._due.values()), default=inf)
        self.look_at = max(next_at, clock + FULL_S)
        if due:
            self._sending.update(due)
            for endpoint_id, marks in (await self._store.marks(due)).items():
                endpoint = endpoints[endpoint_id]
                if marks:
                    self._queue.put_nowait((endpoint, self._request(endpoint, marks)))
                else:
                    self._sending.discard(endpoint_id)

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                endpoint, request = await self._queue.get()
                tasks.create_task(self._send(endpoint, request))

    async def _send(self, endpoint: Endpoint, request: Request) -> None:
        try:
            answer = await self._transport.send(request)
        finally:
            self._sending.discard(endpoint.id)
        if answer.status is not None and 200 <= answer.status < 300:
            if endpoint.id in self._refusing:
                self._refusing.discard(endpoint.id)
                log.info("checkpoints are taken again", endpoint=endpoint.name)
        elif endpoint.id not in self._refusing:
            self._refusing.add(endpoint.id)
            log.warning(
                "a checkpoint was not taken",
                endpoint=endpoint.name,
                status=answer.status,
                failure=answer.failure,
            )

    def _request(self, endpoint: Endpoint, marks: Sequence[Mark]) -> Request:
        now = self._now()
        prepared = prepare(str(uuid4()), datetime.fromtimestamp(now, UTC), marks, endpoint.headers)
        request = addressed(endpoint, prepared, 1, int(now), endpoint.secrets_at(now))
        return replace(request, total_timeout_s=min(endpoint.total_timeout_s, TIMEOUT_S))


def _may_be_told(owned: OwnedEndpoint) -> bool:
    """Whether it is there, and nobody asked to leave it alone."""
    return (
        owned.endpoint.usable
        and owned.endpoint.state == "active"
        and not owned.stopped
        and owned.health.state is State.HEALTHY
    )
