from __future__ import annotations

from math import inf

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outbox.core.cluster.lease import (
    RENEWALS_PER_LEASE,
    ClaimBatchSize,
    Lease,
    Peer,
    PeerWatch,
)

LEASE_S = 5.0

# ------------------------------------------------------- liveness of peers


def test_a_lease_counts_from_the_start_of_its_renewal() -> None:
    lease = Lease(LEASE_S)
    assert lease.left_s(0.0) <= 0
    lease.renewed(started_at=100.0)
    # Regardless of when the response arrived.
    assert lease.left_s(104.0) == 1.0
    assert lease.left_s(105.0) <= 0
    assert lease.renew_every_s * RENEWALS_PER_LEASE == LEASE_S


def test_a_peer_is_expired_after_a_full_lease_without_renewal() -> None:
    watch = PeerWatch()

    def poll(now: float, *peers: tuple[int, int]) -> tuple[set[int], set[int]]:
        return watch.observe([Peer(id, renewals, LEASE_S) for id, renewals in peers], now)  # noqa: A001

    assert poll(0, (1, 7), (2, 3)) == ({1, 2}, set())
    assert poll(4, (1, 8), (2, 3)) == ({1, 2}, set())
    assert poll(4.9, (1, 8), (2, 3)) == ({1, 2}, set())
    assert poll(5, (1, 8), (2, 3)) == ({1}, {2})
    # The peer was only frozen.
    assert poll(6, (1, 8), (2, 4)) == ({1, 2}, set())
    # A peer without a row is forgotten, and is new when it returns.
    assert poll(7, (2, 5)) == ({2}, set())
    assert poll(60, (1, 8), (2, 6)) == ({1, 2}, set())


def test_each_peer_is_expired_by_its_own_lease() -> None:
    watch = PeerWatch()
    peers = [Peer(1, 0, 2.0), Peer(2, 0, 20.0)]
    watch.observe(peers, 0)
    assert watch.observe(peers, 3) == ({2}, {1})


def test_the_next_expiry_time_is_known() -> None:
    """A poll at that time takes over as early as possible, however rare polls are otherwise."""
    watch = PeerWatch()
    assert watch.next_expiry_at(me=1) == inf
    peers = [Peer(1, 0, 2.0), Peer(2, 7, 5.0), Peer(3, 7, 8.0)]
    watch.observe(peers, 100.0)
    assert watch.next_expiry_at(me=1) == 105.0
    # A renewal delays it, by one lease from when it was seen.
    watch.observe([peers[0], Peer(2, 8, 5.0), peers[2]], 104.0)
    assert watch.next_expiry_at(me=1) == 108.0
    assert watch.observe([peers[0], Peer(2, 8, 5.0), peers[2]], 108.0) == ({2}, {1, 3})


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0.1, 10))
def test_a_dead_peer_is_detected_within_a_lease_of_its_last_seen_renewal(
    gaps_s: list[float], lease_s: float
) -> None:
    watch, now, renewals = PeerWatch(), 0.0, 0
    for gap_s in gaps_s:
        now += gap_s * lease_s / RENEWALS_PER_LEASE
        renewals += 1
        watch.observe([Peer(2, renewals, lease_s)], now)
    expires_at = watch.next_expiry_at(me=1)
    assert expires_at == now + lease_s
    assert watch.observe([Peer(2, renewals, lease_s)], expires_at) == (set(), {2})


class ReplicaMachine(RuleBasedStateMachine):
    """A replica that renews, stalls and freezes, and another one that observes it.

    Their monotonic clocks are independent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lease = Lease(LEASE_S)
        self.renewals = 0
        self.in_transit: list[float] = []
        self.committed: list[float] = []
        self.watch = PeerWatch()
        self.renewal: tuple[int, float] | None = None
        """The renewal counter that the observer saw last, and when it first saw it."""
        self.expired_at_renewal: int | None = None

    def own_clock(self, at: float) -> float:
        return 1000.0 + at

    def observer_clock(self, at: float) -> float:
        return 3.0 + at

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 4.9, 5.1, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def begin_renewal(self) -> None:
        self.in_transit.append(self.now)

    @precondition(lambda self: self.in_transit)
    @rule()
    def commit_renewal(self) -> None:
        self.committed.append(self.in_transit.pop(0))
        self.renewals += 1

    @precondition(lambda self: self.committed)
    @rule()
    def observe_renewal(self) -> None:
        self.lease.renewed(self.own_clock(self.committed.pop(0)))

    @rule()
    def poll(self) -> None:
        if self.renewal is None or self.renewal[0] != self.renewals:
            self.renewal = (self.renewals, self.now)
        alive, dead = self.watch.observe(
            [Peer(1, self.renewals, LEASE_S)], self.observer_clock(self.now)
        )
        assert alive | dead == {1}
        assert not alive & dead
        self.expired_at_renewal = self.renewals if dead else None
        # A replica that does not renew is detected one lease after its last seen renewal.
        silent_s = self.now - self.renewal[1]
        if abs(silent_s - LEASE_S) > 1e-6:
            assert bool(dead) == (silent_s > LEASE_S)
        else:
            assert self.watch.next_expiry_at(me=2) - self.observer_clock(self.now) < 1e-6

    @invariant()
    def an_expired_replica_does_not_hold_its_lease(self) -> None:
        """Unless a renewal was committed since, which expiring the replica excludes."""
        if self.expired_at_renewal == self.renewals:
            assert self.lease.left_s(self.own_clock(self.now)) <= 0


TestReplica = ReplicaMachine.TestCase


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=300))
def test_portions_are_sized_by_the_last_lanes(lanes: list[int]) -> None:
    portion, taken, was = ClaimBatchSize(100, 2_000), 0, 0
    while taken < len(lanes):
        some = lanes[taken : taken + portion.endpoints]
        assert some
        assert portion.endpoints <= min(max(4 * was, 1), 100)
        taken, was = taken + len(some), portion.endpoints
        portion.record_claim(len(some), sum(some))
        # If the next lanes are like these, they fit, provided that two of them do.
        assert portion.endpoints == 1 or portion.endpoints * sum(some) <= 2_000 * len(some)


def test_ten_thousand_small_lanes_need_few_portions() -> None:
    portion, left, portions = ClaimBatchSize(250, 4_000), 10_000, 0
    while left > 0:
        some = min(portion.endpoints, left)
        portion.record_claim(some, some)
        left -= some
        portions += 1
    assert portions == 4 + 40
