"""Ownership: keeps this replica's lease, and takes and hands over endpoints.

Only this module decides what the dispatcher owns.  It also carries the news
of batches that other replicas sequenced, because the two must not overtake
each other: a lane's counter is read either when it is claimed or by a later
piece of news.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from outbox.core.ownership import PeerWatch, preferred
from outbox.store.records import Fenced

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable
    from uuid import UUID

    from outbox.core.ownership import Lease
    from outbox.relay.bell import Bell
    from outbox.relay.cursor import Sequenced
    from outbox.relay.dispatcher import Dispatcher
    from outbox.relay.recorder import Recorder
    from outbox.store.destinations import Endpoint
    from outbox.store.lanes import LaneStore
    from outbox.store.replicas import ReplicaStore

log = structlog.get_logger("outbox.ownership")

BURIAL_LOCK_TIMEOUT_S = 1.0


async def keep_lease(store: ReplicaStore, replica_id: int, lease: Lease) -> None:
    """Renew the lease until cancelled, on a connection used for nothing else.

    Raises:
        Fenced: it ran out; whatever is in flight must be closed.
    """
    clock = asyncio.get_running_loop().time
    while True:
        left_s = lease.left_s(clock())
        if left_s <= 0:
            raise Fenced
        await asyncio.sleep(min(lease.renew_every_s, left_s))
        started_at = clock()
        try:
            async with asyncio.timeout(max(lease.left_s(started_at), 0)):
                renewed = await store.renew(replica_id)
        except TimeoutError:
            raise Fenced from None
        if not renewed:
            raise Fenced
        lease.renewed(started_at)


class Ownership:
    """Claims, hands over, and keeps the dispatcher informed until cancelled.

    Args:
        bell: rung when endpoints changed or other replicas have news.
        tell_others: wakes the other replicas after endpoints were freed.
    """

    def __init__(
        self,
        replicas: ReplicaStore,
        lanes: LaneStore,
        dispatcher: Dispatcher,
        recorder: Recorder,
        replica_id: int,
        lease: Lease,
        bell: Bell,
        tell_others: Callable[[], Awaitable[None]],
    ) -> None:
        self._replicas = replicas
        self._lanes = lanes
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._me = replica_id
        self._actor = f"replica {replica_id}"
        self._lease = lease
        self._bell = bell
        self._tell_others = tell_others
        self._watch = PeerWatch()
        self._version = 0
        self._stopping = False
        # Stopped, and to be let go as soon as nothing of theirs is in flight.
        self._leaving: set[UUID] = set()
        # The replicas among whom this one's endpoints were last divided.
        self._shared_with: set[int] = set()
        # The newest batch whose lanes were all told to the dispatcher.
        self._known_batch = 0

    async def run(self) -> None:
        """Look after ownership until stopped; asyncpg's errors end it."""
        self._known_batch = await self._lanes.last_batch()
        while not self._stopping:
            await self._look()
            await self._bell.wait(self._lease.renew_every_s)

    def stop(self) -> None:
        """Let `run` return after the look that is under way."""
        self._stopping = True
        self._bell.ring()

    def sequenced(self, sequenced: Sequenced) -> None:
        """This replica committed a batch: no need to read it back."""
        if sequenced.batch == self._known_batch + 1:
            self._known_batch = sequenced.batch
        self._dispatcher.offer(sequenced.deliveries.counters, sequenced.given)

    async def quiet(self) -> None:
        """A clean stop: wait until nothing is in flight."""
        owned = [e.id for e in self._dispatcher.endpoints()]
        self._dispatcher.stop(owned)
        await self._dispatcher.quiet(owned)

    # ------------------------------------------------------------- one look

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        peers = await self._replicas.peers()
        alive, dead = self._watch.observe(peers, clock())
        alive.add(self._me)
        counters = {peer.id: peer.renewals for peer in peers}
        for replica_id in dead - {self._me}:
            # This answer may have come late, and whoever it tells of be alive and well.
            if await self._replicas.bury(
                replica_id, self._actor, BURIAL_LOCK_TIMEOUT_S, counters[replica_id]
            ):
                log.warning("a replica's lease ran out", replica=replica_id)
        wanted = [e for e in await self._replicas.free() if preferred(e, alive) == self._me]
        if wanted:
            await self._claim(wanted)
        if alive != self._shared_with:
            # What was claimed since then was preferred here at that time.
            self._shared_with = alive
            mine = [e.id for e in self._dispatcher.endpoints()]
            self._leave(e for e in mine if preferred(e, alive) != self._me)
        await self._notice_changes()
        await self._let_go()
        await self._follow()

    async def _claim(self, wanted: list[UUID]) -> None:
        epochs = await self._replicas.claim(self._me, wanted, self._actor)
        if not epochs:
            return
        endpoints = {e.id: e for e in await self._endpoints(epochs)}
        # In this order: what is sequenced after the counters were read is news.
        batch = await self._lanes.last_batch()
        loaded = await self._lanes.lanes(epochs)
        self._dispatcher.adopt(loaded, endpoints, epochs, batch)
        # Batches of our own that were committed while the lanes were read
        # were offered to nobody.
        self._dispatcher.offer(await self._lanes.counters([lane.id for lane in loaded]))
        log.info("endpoints claimed", endpoints=len(epochs), lanes=len(loaded))
        self._leave(e.id for e in endpoints.values() if e.ends)

    def _leave(self, endpoint_ids: Iterable[UUID]) -> None:
        """Stop endpoints that are not for this replica any more."""
        leaving = set(endpoint_ids)
        self._dispatcher.stop(leaving)
        self._leaving |= leaving

    async def _let_go(self) -> None:
        """Hand over, or finish, the stopped endpoints that have become quiet.

        Nothing here waits for a receiver: a slow one holds up only itself.
        """
        quiet = self._dispatcher.quiet_ones(self._leaving)
        if not quiet:
            return
        await self._recorder.flushed()
        await self._recorder.checkpoint()
        for endpoint in quiet:
            lanes = self._dispatcher.drop([endpoint.id])
            self._leaving.discard(endpoint.id)
            if endpoint.ends:
                await self._recorder.finish(
                    endpoint.id, [(lane.id, lane.acked_seq) for lane in lanes]
                )
                log.info("endpoint ended", endpoint=endpoint.name, was=endpoint.state)
        why = "moved to another replica, or ended"
        await self._replicas.release(self._me, [e.id for e in quiet], self._actor, why)
        await self._tell_others()
        log.info("endpoints let go", endpoints=len(quiet))

    async def _notice_changes(self) -> None:
        version = await self._lanes.version()
        if version == self._version:
            return
        self._version = version
        owned = {e.id: e for e in self._dispatcher.endpoints()}
        endpoints = await self._endpoints(owned)
        # Read after the change was committed: the counters of lanes that ended
        # are final, and what is sequenced from now on is news.
        renewed = [e.id for e in endpoints if e.generation != owned[e.id].generation]
        if renewed:
            loaded = await self._lanes.lanes(renewed)
            self._dispatcher.renew_lanes(loaded)
            # Batches of our own that were committed meanwhile were offered to nobody.
            self._dispatcher.offer(await self._lanes.counters([lane.id for lane in loaded]))
            log.info("lanes changed", endpoints=len(renewed), lanes=len(loaded))
        blocked = [lane for lane, _ in self._dispatcher.lanes() if lane.blocked]
        if any(lane.in_flight for lane in blocked):
            # Its block is just being written, and could be missed in the table
            # as well as taken for lifted: the next look tells.
            self._version = 0
        written = {lane.id for lane in blocked if not lane.in_flight}
        lifted = written - await self._lanes.blocked(written) if written else set()
        self._dispatcher.update(endpoints, lifted)
        self._leave(e.id for e in endpoints if e.ends)

    async def _endpoints(self, endpoint_ids: Collection[UUID]) -> list[Endpoint]:
        """The endpoints as they are set up now; says which ones cannot be used."""
        endpoints = await self._lanes.endpoints(endpoint_ids)
        for endpoint in endpoints:
            if endpoint.problem is not None:
                log.error(
                    "an endpoint cannot be used; nothing is sent to it",
                    endpoint=endpoint.name,
                    reason=endpoint.problem,
                )
        return endpoints

    async def _follow(self) -> None:
        """Tell the dispatcher of batches that other replicas sequenced."""
        while news := await self._lanes.news(self._known_batch):
            lanes = {lane for batch, batch_lanes in news for lane in batch_lanes}
            mine = self._dispatcher.owned_lanes(lanes)
            if mine:
                self._dispatcher.offer(await self._lanes.counters(mine))
            self._known_batch = max(self._known_batch, news[-1][0])
