"""Ownership: claims and releases endpoints, and expires dead replicas.

Only this module decides what the dispatcher owns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from outbox.core.cluster.balance import is_balanced, share
from outbox.core.cluster.lease import ClaimBatchSize, PeerWatch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable
    from uuid import UUID

    from outbox.core.cluster.lease import Lease, Peer
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.relay.delivery.batch_feed import BatchFeed
    from outbox.relay.delivery.dispatcher import Dispatcher
    from outbox.relay.delivery.owned_endpoints import EndpointRuntime
    from outbox.relay.delivery.recorder import Recorder
    from outbox.relay.delivery.telemetry import DeliveryTelemetry
    from outbox.relay.wake_event import Wakeups
    from outbox.store.cluster.replicas import ReplicaStore
    from outbox.store.delivery.lanes import LaneStore

log = structlog.get_logger("outbox.ownership")

RELEASE_LOCK_TIMEOUT_S = 1.0
SEARCHES_PER_LEASE = 3
"""How often a replica searches for sessions that hang; each must be found twice."""
FINISH_RETRY_S = 60.0
"""Delay before an endpoint that ends, and whose dead letters the database refuses, is finished."""
CLAIMED_ENDPOINTS_MAX, CLAIMED_LANES_MAX = 500, 4_000
"""Claimed in one step, as far as the number of lanes can be estimated."""


class Ownership:
    """Claims and releases endpoints; in between, the batch feed reads and notifies.

    Args:
        journal_altered_secrets: journals, by an actor, endpoints with an altered secret at a
            routing version.
        poll_s: polling interval of changes and of other replicas' batches.
        clock: seconds of the steady clock.
    """

    def __init__(
        self,
        replicas: ReplicaStore,
        lanes: LaneStore,
        dispatcher: Dispatcher,
        recorder: Recorder,
        feed: BatchFeed,
        wakeups: Wakeups,
        replica_id: int,
        lease: Lease,
        journal_altered_secrets: Callable[[list[Endpoint], str, int], Awaitable[object]],
        poll_s: float,
        clock: Callable[[], float],
        telemetry: DeliveryTelemetry,
    ) -> None:
        self._telemetry = telemetry
        self._replicas = replicas
        self._lanes = lanes
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._feed = feed
        self._wakeups = wakeups
        self._me = replica_id
        self._actor = f"replica {replica_id}"
        self._lease = lease
        self._journal_altered_secrets = journal_altered_secrets
        self._poll_s = poll_s
        self._clock = clock
        self._watch = PeerWatch()
        # When to poll the cluster again.
        self._poll_at = 0.0
        self._version = 0
        self._erasures = 0
        self._stopping = False
        # Stopped endpoints, released as soon as none of their requests is in flight.
        self._stopped: set[UUID] = set()
        # When to finish endpoints whose rows the database refused.
        self._refused: dict[UUID, float] = {}
        # The replicas among which the endpoints were last balanced, and when to do it again.
        self._balanced_among: set[int] = set()
        self._balance_at = 0.0
        # When to search for sessions that hang.
        self._search_at = 0.0

    async def run(self) -> None:
        """Poll the cluster until stopped; asyncpg's errors end it."""
        await self._feed.start()
        # Replicas that have endpoints for this new one release them without waiting for a poll.
        await self._replicas.wake_all()
        while not self._stopping:
            # What changes from here on causes another poll.
            changed = self._wakeups.pop_cluster_changed()
            if changed or self._clock() >= self._poll_at or self._drained():
                next_poll_at = self._clock() + self._poll_s
                await self._poll()
                self._poll_at = min(next_poll_at, self._watch.next_expiry_at(self._me))
            await self._feed.run_due()
            wake_at = min(self._poll_at, self._feed.due_at())
            await self._wakeups.ownership.wait(max(wake_at - self._clock(), 0.0))

    def stop(self) -> None:
        """Let `run` return after the current poll."""
        self._stopping = True
        self._wakeups.ownership.set()

    async def drain(self) -> None:
        """Stop all endpoints and wait until no request is in flight."""
        owned = [e.id for e in self._dispatcher.endpoints()]
        self._dispatcher.stop(owned)
        await self._dispatcher.drain(owned)

    # ------------------------------------------------------------- one poll

    async def _poll(self) -> None:
        cluster = await self._replicas.read_cluster()
        await self._terminate_stuck_sessions()
        alive, dead = self._watch.observe(cluster.peers, self._clock())
        alive.add(self._me)
        self._feed.cluster_polled(cluster.sequencer_pids, alone=alive == {self._me})
        if await self._expire_replicas(
            peer for peer in cluster.peers if peer.id in dead - {self._me}
        ):
            cluster = await self._replicas.read_cluster()
        if cluster.erasures != self._erasures:
            self._erasures = cluster.erasures
            self._dispatcher.reread(cluster.erasures)
        changed = cluster.version != self._version
        await self._apply_changes(cluster.version)
        if (
            changed
            or cluster.unowned
            or alive != self._balanced_among
            or self._clock() >= self._balance_at
        ):
            await self._balance(alive)
        await self._release_stopped()

    async def _balance(self, alive: set[int]) -> None:
        """Claim the endpoints that this replica lacks, and stop those that it has too many."""
        current = await self._replicas.read_ownership(self._me)
        mine = share(self._me, alive, current.owned, current.unowned)
        # Stopped endpoints are on their way to another replica already, or end.  Of the others,
        # those that were claimed last move.
        kept = [
            e.id
            for e in self._dispatcher.endpoints()
            if e.id in current.mine and e.id not in self._stopped
        ]
        self._stop_endpoints(kept[mine.endpoints :])
        if mine.claimable:
            await self._claim(mine.claimable)
        # What others did meanwhile, by other snapshots, may have left this replica with too many.
        self._balanced_among = alive
        settled = is_balanced(alive, current.owned, current.unowned)
        self._balance_at = self._clock() + self._lease.lease_s if settled else 0.0

    async def _terminate_stuck_sessions(self) -> None:
        """End what hangs: also sessions that are in no replica's way yet, or have no replica."""
        if self._clock() < self._search_at:
            return
        self._search_at = self._clock() + self._lease.lease_s / SEARCHES_PER_LEASE
        for each in await self._replicas.terminate_stuck_sessions(self._lease.lease_s):
            log.warning(
                "a session that hung was terminated",
                pid=each.pid,
                label=each.label,
                state=each.state,
                waiting_s=round(each.waiting_s, 1),
            )

    async def _expire_replicas(self, dead: Iterable[Peer]) -> bool:
        """Expire dead replicas, which releases their endpoints; whether there were any."""
        expired = False
        for peer in dead:
            # Optimistic concurrency on the renewal counter: the poll's response may have been
            # late, and the peer alive.
            if await self._replicas.expire_replica(
                peer.id, self._actor, RELEASE_LOCK_TIMEOUT_S, peer.renewals
            ):
                log.warning("a replica's lease ran out", replica=peer.id)
                self._telemetry.meters.losses += 1
                expired = True
        if expired:
            # Other replicas claim the endpoints without waiting for their own poll.
            await self._replicas.wake_all()
        return expired

    async def _claim(self, claimable: list[UUID]) -> None:
        """Claim endpoints in chunks, because loading one blocks the renewal of the lease."""
        portion = ClaimBatchSize(CLAIMED_ENDPOINTS_MAX, CLAIMED_LANES_MAX)
        requested = endpoints = lanes = 0
        while requested < len(claimable) and not self._stopping:
            some = claimable[requested : requested + portion.endpoints]
            requested += len(some)
            got, of_those = await self._claim_chunk(some)
            portion.record_claim(len(some), of_those)
            endpoints, lanes = endpoints + got, lanes + of_those
        if endpoints:
            log.info("endpoints claimed", endpoints=endpoints, lanes=lanes)

    async def _claim_chunk(self, claimable: list[UUID]) -> tuple[int, int]:
        """Claim these endpoints; return how many were claimed, and how many lanes they have."""
        epochs = await self._replicas.claim(self._me, claimable, self._actor)
        if not epochs:
            return 0, 0
        endpoints = {e.id: e for e in await self._endpoints(epochs)}
        # In this order: later batches than these counters arrive as notifications.
        batch = await self._lanes.last_batch()
        loaded = await self._lanes.lanes(epochs)
        self._dispatcher.add_endpoints(loaded, endpoints, epochs, batch)
        for lane in loaded:
            if lane.tail:
                progress = self._dispatcher.lane(lane.id).checkpoint()
                self._recorder.mark_dirty(lane.id, epochs[lane.endpoint_id], progress)
        # This replica's own batches that were committed while the lanes were read had no
        # owned lane yet.
        self._dispatcher.notify_new_deliveries(
            await self._lanes.counters([lane.id for lane in loaded])
        )
        self._stop_endpoints(e.id for e in endpoints.values() if e.ends)
        return len(epochs), len(loaded)

    def _stop_endpoints(self, endpoint_ids: Iterable[UUID]) -> None:
        """Stop endpoints that this replica must release."""
        leaving = set(endpoint_ids)
        self._dispatcher.stop(leaving)
        self._stopped |= leaving

    async def _release_stopped(self) -> None:
        """Release, or finish, the stopped endpoints without requests in flight.

        This does not wait for receivers: a slow one delays only its own endpoint.
        """
        drained = self._drained()
        if not drained:
            return
        await self._recorder.flush()
        await self._recorder.checkpoint()
        drained = [e for e in drained if not e.ends or await self._finish(e)]
        for endpoint in drained:
            lanes = self._dispatcher.drop([endpoint.id])
            self._stopped.discard(endpoint.id)
            if endpoint.ends:
                self._telemetry.endpoint_ended(endpoint, lanes)
        if not drained:
            return
        reason = "moved to another replica, or ended"
        await self._replicas.release(self._me, [e.id for e in drained], self._actor, reason)
        await self._replicas.wake_all()
        log.info("endpoints released", endpoints=len(drained))

    def _drained(self) -> list[Endpoint]:
        """The stopped endpoints without requests in flight that may be released now."""
        now = self._clock()
        drained = self._dispatcher.drained_endpoints(self._stopped)
        return [each for each in drained if not each.ends or self._refused.get(each.id, 0) <= now]

    async def _finish(self, endpoint: Endpoint) -> bool:
        """Dead-letter what is pending at an endpoint that ends; False: it is tried again later."""
        (runtime,) = [each for each in self._dispatcher.owned() if each.endpoint.id == endpoint.id]
        lanes = [(lane.loaded.id, lane.state.acked_seq) for lane in runtime.lanes.values()]
        reason = await self._recorder.finish_endpoint(endpoint.id, lanes)
        if reason is None:
            self._refused.pop(endpoint.id, None)
            return True
        self._refused[endpoint.id] = self._clock() + FINISH_RETRY_S
        log.error(
            "the database refuses the dead letters of an endpoint that ends",
            endpoint=endpoint.name, reason=reason, retry_s=FINISH_RETRY_S,
        )  # fmt: skip
        return False

    async def _apply_changes(self, version: int) -> None:
        if version == self._version:
            return
        self._version = version
        owned = self._dispatcher.owned()
        for first in range(0, len(owned), CLAIMED_ENDPOINTS_MAX):
            await self._apply_changes_to(owned[first : first + CLAIMED_ENDPOINTS_MAX])

    async def _apply_changes_to(self, owned: list[EndpointRuntime]) -> None:
        """Apply the current settings of some endpoints; the loop runs between chunks."""
        generations = {runtime.endpoint.id: runtime.endpoint.generation for runtime in owned}
        endpoints = await self._endpoints(generations)
        # Read after the change was committed: the counters of ended lanes are final, and
        # later batches arrive as notifications.
        renewed = [e.id for e in endpoints if e.generation != generations[e.id]]
        loaded = await self._lanes.lanes(renewed) if renewed else []
        blocked = [
            lane.state for runtime in owned for lane in runtime.lanes.values() if lane.state.blocked
        ]
        if any(lane.in_flight for lane in blocked):
            # Its block is being written, so the table cannot show whether an operator
            # has lifted it: the next poll reads it again.
            self._version = 0
        written = {lane.id for lane in blocked if not lane.in_flight}
        lifted = written - await self._lanes.blocked(written) if written else set()
        skipped = await self._lanes.skipped(generations)
        repairs = await self._lanes.repairs(generations)
        # Before lanes are added: a pause or an end of the same transaction applies to them.
        self._dispatcher.update_endpoints(endpoints, lifted, skipped, repairs)
        self._stop_endpoints(e.id for e in endpoints if e.ends)
        if renewed:
            self._dispatcher.replace_lanes(loaded)
            # This replica's own batches that were committed meanwhile had no owned lane yet.
            self._dispatcher.notify_new_deliveries(
                await self._lanes.counters([lane.id for lane in loaded])
            )
            log.info("lanes changed", endpoints=len(renewed), lanes=len(loaded))

    async def _endpoints(self, endpoint_ids: Collection[UUID]) -> list[Endpoint]:
        """The current settings of endpoints; logs those that cannot be used."""
        endpoints = await self._lanes.endpoints(endpoint_ids)
        for endpoint in endpoints:
            # An endpoint that ends needs none: its secrets are deleted when it is removed.
            if endpoint.problem is not None and not endpoint.ends:
                log.error(
                    "an endpoint cannot be used; nothing is sent to it",
                    endpoint=endpoint.name,
                    reason=endpoint.problem,
                )
        if altered := [e for e in endpoints if e.secret_altered]:
            # If an operator changed something meanwhile, the next poll reads them again.
            await self._journal_altered_secrets(altered, self._actor, self._version)
        return endpoints
