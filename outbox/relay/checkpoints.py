"""Checkpoints: tells receivers that want it the last number of each of their lanes.

They are not in the way of deliveries and say nothing of an endpoint's health: a checkpoint
that is not taken is logged, and the next one says the same and more.  Whoever lost an
endpoint may still tell what was acknowledged then, which stays true.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from math import inf
from typing import TYPE_CHECKING
from uuid import uuid4

import structlog

from outbox.core.checkpoint import prepare
from outbox.core.health import State
from outbox.transport.port import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from uuid import UUID

    from outbox.core.checkpoint import Mark
    from outbox.relay.owned import OwnedEndpoint
    from outbox.store.checkpoints import CheckpointStore
    from outbox.store.destinations import Endpoint
    from outbox.transport.port import Transport

log = structlog.get_logger("outbox.checkpoints")

SENDING_MAX = 100


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
        self._queue: asyncio.Queue[tuple[Endpoint, Request]] = asyncio.Queue(SENDING_MAX)

    @property
    def look_at(self) -> float:
        """When to call `look`, by the loop's clock, if nothing changes."""
        return min((at for at, _ in self._due.values()), default=inf)

    async def look(self, owned: Collection[OwnedEndpoint]) -> None:
        """Have sent what is due to these endpoints; asyncpg's errors pass through."""
        clock = asyncio.get_running_loop().time()
        due = []
        wanted = {}
        for each in owned:
            endpoint, every_s = each.endpoint, each.endpoint.checkpoint_every_s
            if every_s is None or not _may_be_told(each):
                continue
            # Not all of them at once, when they have just been taken over.
            first = (clock + every_s * (endpoint.id.int % 997) / 997, every_s)
            known = self._due.get(endpoint.id, first)
            wanted[endpoint.id] = known if known[1] == every_s else first
            if wanted[endpoint.id][0] <= clock:
                wanted[endpoint.id] = (clock + every_s, every_s)
                if endpoint.id not in self._sending and len(self._sending) < SENDING_MAX:
                    due.append(endpoint)
        self._due = wanted
        if due:
            found = await self._store.marks([endpoint.id for endpoint in due])
            for endpoint in due:
                if marks := found[endpoint.id]:
                    self._sending.add(endpoint.id)
                    self._queue.put_nowait((endpoint, self._request(endpoint, marks)))

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
        return Request(
            url=endpoint.url,
            headers=prepared.attempt(1, int(now), endpoint.secrets_at(now)),
            body=prepared.body,
            connect_timeout_s=endpoint.connect_timeout_s,
            total_timeout_s=endpoint.total_timeout_s,
            method=endpoint.method,
        )


def _may_be_told(owned: OwnedEndpoint) -> bool:
    """Whether it is there, and nobody asked to leave it alone."""
    return (
        owned.endpoint.usable
        and owned.endpoint.state == "active"
        and not owned.stopped
        and owned.health.state is State.HEALTHY
    )
