"""Ownership: keeps this replica's lease, and takes and hands over endpoints.

Only this module decides what the dispatcher owns.  It also carries the news
of batches that other replicas sequenced, because the two must not overtake
each other: a lane's counter is read either when it is claimed or by a later
piece of news.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

import structlog

from outbox.core.cluster.lease import PeerWatch, Portion, preferred
from outbox.core.sequencing.batch_notifications import News, Teller
from outbox.relay.wake_event import Bell
from outbox.store.records import Fenced

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
    from uuid import UUID

    from outbox.core.cluster.lease import Lease, Peer
    from outbox.relay.delivery.dispatcher import Dispatcher
    from outbox.relay.delivery.owned_endpoints import OwnedEndpoint
    from outbox.relay.delivery.recorder import Recorder
    from outbox.relay.delivery.telemetry import Observer
    from outbox.relay.sequencing.cursor import Sequenced
    from outbox.store.endpoints import Endpoint
    from outbox.store.lanes import LaneStore
    from outbox.store.replicas import ReplicaStore

log = structlog.get_logger("outbox.ownership")

BURIAL_LOCK_TIMEOUT_S = 1.0
ENDPOINTS_AT_ONCE, LANES_AT_ONCE = 500, 4_000
"""So many are read in one go, as far as it can be told how many lanes they have."""


async def keep_lease(
    store: ReplicaStore,
    replica_id: int,
    lease: Lease,
    clock: Callable[[], float],
    on_time: Callable[[float, float, float], None],
) -> None:
    """Renew the lease until cancelled, on a connection used for nothing else.

    The lease is looked at whenever this wakes, and by its own clock.  The loop's
    timers may have stood still with the machine, so no single wait is longer than
    the time between two renewals: what is in flight when the machine wakes is
    closed after that at the latest.

    Args:
        clock: seconds of the steady clock.
        on_time: told what the database's clock said, in epoch seconds; when it was
            asked, and when the answer was there.

    Raises:
        Fenced: it ran out; whatever is in flight must be closed.
    """

    def wait_s() -> float:
        left_s = lease.left_s(clock())
        if left_s <= 0:
            raise Fenced
        return min(left_s, lease.renew_every_s)

    while True:
        await asyncio.sleep(wait_s())
        started_at = clock()
        renewal = asyncio.ensure_future(store.renew(replica_id))
        try:
            # Asked before it begins, too: a lease that has run out is not renewed.
            while not (await asyncio.wait([renewal], timeout=wait_s()))[0]:
                pass
        finally:
            renewal.cancel()
        said = renewal.result()
        if said is None:
            raise Fenced
        lease.renewed(started_at)
        on_time(said, started_at, clock())


class Ownership:
    """Claims, hands over, and keeps the dispatcher informed until cancelled.

    Args:
        tell_others: wakes the other replicas after endpoints were freed.
        tell_news: tells them of new batches.
        clock: seconds of the steady clock.
    """

    def __init__(
        self,
        replicas: ReplicaStore,
        lanes: LaneStore,
        dispatcher: Dispatcher,
        recorder: Recorder,
        replica_id: int,
        lease: Lease,
        tell_others: Callable[[], Awaitable[object]],
        tell_news: Callable[[], Awaitable[object]],
        clock: Callable[[], float],
        observer: Observer,
    ) -> None:
        self._observer = observer
        self._replicas = replicas
        self._lanes = lanes
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._me = replica_id
        self._actor = f"replica {replica_id}"
        self._lease = lease
        self._bell = Bell()
        self._tell_others = tell_others
        self._tell_news = tell_news
        self._clock = clock
        self._watch = PeerWatch()
        # When to look at everything again; news is heard of in between.
        self._look_at = 0.0
        self._version = 0
        self._erasures = 0
        self._stopping = False
        # Stopped, and to be let go as soon as nothing of theirs is in flight.
        self._leaving: set[UUID] = set()
        # The replicas among whom this one's endpoints were last divided.
        self._shared_with: set[int] = set()
        # The newest batch whose lanes were all told to the dispatcher.
        self._known_batch = 0
        # Others may have sequenced something.
        self._has_news = True
        # The backends of others that sequence, as they were when last looked at.
        self._leaders: set[int | None] = set()
        self._teller = Teller()

    async def run(self) -> None:
        """Look after ownership until stopped; asyncpg's errors end it."""
        self._known_batch = await self._lanes.last_batch()
        # A newcomer: whoever has something for it need not wait for its own next look.
        await self._tell_others()
        while not self._stopping:
            if self._clock() >= self._look_at:
                # Whoever asks for a look from now on gets one of its own.
                self._look_at = inf
                look_at = self._clock() + self._lease.renew_every_s
                await self._look()
                self._look_at = min(self._look_at, look_at, self._watch.judge_at(self._me))
                self._has_news = True
            if self._has_news:
                self._has_news = False
                await self._follow()
            if self._clock() >= self._teller.tell_at():
                self._teller.told(self._clock())
                await self._tell_news()
            wake_at = min(self._look_at, self._teller.tell_at())
            await self._bell.wait(max(wake_at - self._clock(), 0.0))

    def stop(self) -> None:
        """Let `run` return after the look that is under way."""
        self._stopping = True
        self._bell.ring()

    def look(self) -> None:
        """Endpoints changed, or are free: look as soon as possible."""
        self._look_at = 0.0
        self._bell.ring()

    def hear(self, text: str, pid: int) -> None:
        """Another session says that there is news.

        Everybody may say so, and only of other replicas is it believed what the news
        is.  What does not follow what is known is read.
        """
        news = News.parse(text) if pid in self._leaders else None
        if news is None or news.first > self._known_batch + 1:
            self._has_news = True
            self._bell.ring()
        elif news.last > self._known_batch:
            self._known_batch = news.last
            self._dispatcher.offer(news.last_seqs)

    def tells(self, batch: int, last_seqs: Mapping[int, int]) -> str | None:
        """What a batch that is about to be written tells the other replicas."""
        return self._teller.text(batch, last_seqs, self._clock())

    def sequenced(self, sequenced: Sequenced) -> None:
        """This replica committed a batch: no need to read it back."""
        if sequenced.batch == self._known_batch + 1:
            self._known_batch = sequenced.batch
        self._observer.meters.events += sequenced.events
        last_seqs = sequenced.deliveries.counters
        tell_at = self._teller.tell_at()
        self._teller.written(sequenced.batch, last_seqs, self._clock(), told=sequenced.told)
        if self._teller.tell_at() < tell_at:
            self._bell.ring()
        self._dispatcher.offer(last_seqs, sequenced.given)

    async def quiet(self) -> None:
        """A clean stop: wait until nothing is in flight."""
        owned = [e.id for e in self._dispatcher.endpoints()]
        self._dispatcher.stop(owned)
        await self._dispatcher.quiet(owned)

    # ------------------------------------------------------------- one look

    async def _look(self) -> None:
        seen = await self._replicas.look()
        alive, dead = self._watch.observe(seen.peers, self._clock())
        alive.add(self._me)
        self._leaders = seen.cursor_pids
        self._teller.alone = alive == {self._me}
        if await self._bury(peer for peer in seen.peers if peer.id in dead - {self._me}):
            seen = await self._replicas.look()
        wanted = [e for e in seen.free if preferred(e, alive) == self._me]
        if wanted:
            await self._claim(wanted)
        if alive != self._shared_with:
            # What was claimed since then was preferred here at that time.
            self._shared_with = alive
            mine = [e.id for e in self._dispatcher.endpoints()]
            self._leave(e for e in mine if preferred(e, alive) != self._me)
        if seen.erasures != self._erasures:
            self._erasures = seen.erasures
            self._dispatcher.reread()
        await self._notice_changes(seen.version)
        await self._let_go()

    async def _bury(self, dead: Iterable[Peer]) -> bool:
        """Free what dead replicas own; whether there were any."""
        buried = False
        for peer in dead:
            # The answer may have come late, and whoever it tells of be alive and well.
            if await self._replicas.bury(
                peer.id, self._actor, BURIAL_LOCK_TIMEOUT_S, peer.renewals
            ):
                log.warning("a replica's lease ran out", replica=peer.id)
                self._observer.meters.losses += 1
                buried = True
        if buried:
            # The others need not wait for their own turn to find it dead.
            await self._tell_others()
        return buried

    async def _claim(self, wanted: list[UUID]) -> None:
        """Take over endpoints, some at a time: what is read of them is taken in at once, and
        the loop does nothing else meanwhile, not even renew the lease.
        """
        portion = Portion(ENDPOINTS_AT_ONCE, LANES_AT_ONCE)
        asked = endpoints = lanes = 0
        while asked < len(wanted) and not self._stopping:
            some = wanted[asked : asked + portion.endpoints]
            asked += len(some)
            got, of_those = await self._claim_some(some)
            portion.took(len(some), of_those)
            endpoints, lanes = endpoints + got, lanes + of_those
        if endpoints:
            log.info("endpoints claimed", endpoints=endpoints, lanes=lanes)

    async def _claim_some(self, wanted: list[UUID]) -> tuple[int, int]:
        """Take over these; returns how many it got, and how many lanes they have."""
        epochs = await self._replicas.claim(self._me, wanted, self._actor)
        if not epochs:
            return 0, 0
        endpoints = {e.id: e for e in await self._endpoints(epochs)}
        # In this order: what is sequenced after the counters were read is news.
        batch = await self._lanes.last_batch()
        loaded = await self._lanes.lanes(epochs)
        self._dispatcher.adopt(loaded, endpoints, epochs, batch)
        for lane in loaded:
            if lane.tail:
                progress = self._dispatcher.lane(lane.id).checkpoint()
                self._recorder.taken(lane.id, epochs[lane.endpoint_id], progress)
        # Batches of our own that were committed while the lanes were read
        # were offered to nobody.
        self._dispatcher.offer(await self._lanes.counters([lane.id for lane in loaded]))
        self._leave(e.id for e in endpoints.values() if e.ends)
        return len(epochs), len(loaded)

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
                self._observer.finished(endpoint, lanes)
        why = "moved to another replica, or ended"
        await self._replicas.release(self._me, [e.id for e in quiet], self._actor, why)
        await self._tell_others()
        log.info("endpoints let go", endpoints=len(quiet))

    async def _notice_changes(self, version: int) -> None:
        if version == self._version:
            return
        self._version = version
        owned = self._dispatcher.owned()
        for first in range(0, len(owned), ENDPOINTS_AT_ONCE):
            await self._notice_changes_of(owned[first : first + ENDPOINTS_AT_ONCE])

    async def _notice_changes_of(self, owned: list[OwnedEndpoint]) -> None:
        """Some of the endpoints are as they are now; others have their turn in between."""
        generations = {home.endpoint.id: home.endpoint.generation for home in owned}
        endpoints = await self._endpoints(generations)
        # Read after the change was committed: the counters of lanes that ended
        # are final, and what is sequenced from now on is news.
        renewed = [e.id for e in endpoints if e.generation != generations[e.id]]
        if renewed:
            loaded = await self._lanes.lanes(renewed)
            self._dispatcher.renew_lanes(loaded)
            # Batches of our own that were committed meanwhile were offered to nobody.
            self._dispatcher.offer(await self._lanes.counters([lane.id for lane in loaded]))
            log.info("lanes changed", endpoints=len(renewed), lanes=len(loaded))
        blocked = [
            lane.machine for home in owned for lane in home.lanes.values() if lane.machine.blocked
        ]
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
        more = True
        while more and (news := await self._lanes.news(self._known_batch)) is not None:
            self._dispatcher.offer(news.last_seqs)
            self._known_batch = max(self._known_batch, news.batch)
            more = news.more
