from __future__ import annotations

from collections import Counter
from math import inf
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outbox.core.cluster.lease import RENEWALS_PER_LEASE, Lease, Peer, PeerWatch, Portion, preferred

LEASE_S = 5.0

endpoint_ids = st.lists(st.uuids(), min_size=1, max_size=20, unique=True)
replica_ids = st.sets(st.integers(1, 2**63 - 1), min_size=1, max_size=8)


# ------------------------------------------------------ who should own what


@given(endpoint_ids, replica_ids, st.randoms(use_true_random=False))
def test_everybody_agrees_in_whatever_order_they_count(endpoints, replicas, rng) -> None:  # type: ignore[no-untyped-def]
    shuffled = sorted(replicas)
    rng.shuffle(shuffled)
    for endpoint in endpoints:
        owner = preferred(endpoint, replicas)
        assert owner in replicas
        assert preferred(endpoint, shuffled) == owner


@given(endpoint_ids, replica_ids, st.integers(1, 2**63 - 1))
def test_whoever_joins_takes_and_nothing_else_moves(
    endpoints: list[UUID], replicas: set[int], newcomer: int
) -> None:
    for endpoint in endpoints:
        before, after = preferred(endpoint, replicas), preferred(endpoint, replicas | {newcomer})
        assert after in (before, newcomer)
        # Seen backwards: when the newcomer leaves, only what it had moves.
        if after != newcomer:
            assert before == after


def test_the_load_is_spread() -> None:
    replicas = [1, 2, 3, 4]
    owners = Counter(preferred(UUID(int=n), replicas) for n in range(4000))
    # A fair share is 1000; five standard deviations are 137.
    assert all(863 < owners[replica] < 1137 for replica in replicas)


def test_it_does_not_change_from_release_to_release() -> None:
    """Replicas of two versions must agree, or they hand over to and fro for ever."""
    assert [preferred(UUID(int=n), [1, 2, 3]) for n in range(12)] == [
        *(1, 3, 2, 3, 2, 1, 3, 2, 3, 2, 2, 3)
    ]


# ------------------------------------------------------------ who is alive


def test_a_lease_counts_from_the_start_of_its_renewal() -> None:
    lease = Lease(LEASE_S)
    assert lease.left_s(0.0) <= 0
    lease.renewed(started_at=100.0)
    # However late the answer came.
    assert lease.left_s(104.0) == 1.0
    assert lease.left_s(105.0) <= 0
    assert lease.renew_every_s * RENEWALS_PER_LEASE == LEASE_S


def test_a_peer_is_dead_after_a_whole_lease_without_news() -> None:
    watch = PeerWatch()

    def look(now: float, *peers: tuple[int, int]) -> tuple[set[int], set[int]]:
        return watch.observe([Peer(id, renewals, LEASE_S) for id, renewals in peers], now)  # noqa: A001

    assert look(0, (1, 7), (2, 3)) == ({1, 2}, set())
    assert look(4, (1, 8), (2, 3)) == ({1, 2}, set())
    assert look(4.9, (1, 8), (2, 3)) == ({1, 2}, set())
    assert look(5, (1, 8), (2, 3)) == ({1}, {2})
    # It was only frozen.
    assert look(6, (1, 8), (2, 4)) == ({1, 2}, set())
    # One whose row is gone is forgotten, and new when it comes back.
    assert look(7, (2, 5)) == ({2}, set())
    assert look(60, (1, 8), (2, 6)) == ({1, 2}, set())


def test_each_peer_is_judged_by_its_own_lease() -> None:
    watch = PeerWatch()
    peers = [Peer(1, 0, 2.0), Peer(2, 0, 20.0)]
    watch.observe(peers, 0)
    assert watch.observe(peers, 3) == ({2}, {1})


def test_it_is_known_when_the_next_peer_is_dead() -> None:
    """Who looks then takes over as soon as anybody may, however rarely it looks otherwise."""
    watch = PeerWatch()
    assert watch.judge_at(me=1) == inf
    peers = [Peer(1, 0, 2.0), Peer(2, 7, 5.0), Peer(3, 7, 8.0)]
    watch.observe(peers, 100.0)
    assert watch.judge_at(me=1) == 105.0
    # A sign of life puts it off, by a lease from when it was seen.
    watch.observe([peers[0], Peer(2, 8, 5.0), peers[2]], 104.0)
    assert watch.judge_at(me=1) == 108.0
    assert watch.observe([peers[0], Peer(2, 8, 5.0), peers[2]], 108.0) == ({2}, {1, 3})


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0.1, 10))
def test_nobody_is_judged_later_than_a_lease_after_its_last_sign_was_seen(
    gaps_s: list[float], lease_s: float
) -> None:
    watch, now, renewals = PeerWatch(), 0.0, 0
    for gap_s in gaps_s:
        now += gap_s * lease_s / RENEWALS_PER_LEASE
        renewals += 1
        watch.observe([Peer(2, renewals, lease_s)], now)
    judged_at = watch.judge_at(me=1)
    assert judged_at == now + lease_s
    assert watch.observe([Peer(2, renewals, lease_s)], judged_at) == (set(), {2})


class ReplicaMachine(RuleBasedStateMachine):
    """A replica that renews, is slow, freezes; and another one that watches it.

    Their monotonic clocks have nothing to do with each other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lease = Lease(LEASE_S)
        self.renewals = 0
        self.on_the_way: list[float] = []
        self.committed: list[float] = []
        self.watch = PeerWatch()
        self.news: tuple[int, float] | None = None
        """The counter that the watcher saw last, and when it was new to it."""
        self.judged_dead_at: int | None = None

    def own_clock(self, at: float) -> float:
        return 1000.0 + at

    def watchers_clock(self, at: float) -> float:
        return 3.0 + at

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 4.9, 5.1, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def begin_renewal(self) -> None:
        self.on_the_way.append(self.now)

    @precondition(lambda self: self.on_the_way)
    @rule()
    def commit_renewal(self) -> None:
        self.committed.append(self.on_the_way.pop(0))
        self.renewals += 1

    @precondition(lambda self: self.committed)
    @rule()
    def learn_of_it(self) -> None:
        self.lease.renewed(self.own_clock(self.committed.pop(0)))

    @rule()
    def look(self) -> None:
        if self.news is None or self.news[0] != self.renewals:
            self.news = (self.renewals, self.now)
        alive, dead = self.watch.observe(
            [Peer(1, self.renewals, LEASE_S)], self.watchers_clock(self.now)
        )
        assert alive | dead == {1}
        assert not alive & dead
        self.judged_dead_at = self.renewals if dead else None
        # Whoever does not renew is found out, a lease after it was last news.
        silent_s = self.now - self.news[1]
        if abs(silent_s - LEASE_S) > 1e-6:
            assert bool(dead) == (silent_s > LEASE_S)
        else:
            assert self.watch.judge_at(me=2) - self.watchers_clock(self.now) < 1e-6

    @invariant()
    def the_dead_do_not_believe_in_themselves(self) -> None:
        """Unless a renewal was committed since, which burying them excludes."""
        if self.judged_dead_at == self.renewals:
            assert self.lease.left_s(self.own_clock(self.now)) <= 0


TestReplica = ReplicaMachine.TestCase


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=300))
def test_portions_are_as_large_as_the_last_lanes_allow(lanes: list[int]) -> None:
    portion, taken, was = Portion(100, 2_000), 0, 0
    while taken < len(lanes):
        some = lanes[taken : taken + portion.endpoints]
        assert some
        assert portion.endpoints <= min(max(4 * was, 1), 100)
        taken, was = taken + len(some), portion.endpoints
        portion.took(len(some), sum(some))
        # Were the next ones like these, they would fit, if two of them do at all.
        assert portion.endpoints == 1 or portion.endpoints * sum(some) <= 2_000 * len(some)


def test_ten_thousand_small_ones_take_few_portions() -> None:
    portion, left, portions = Portion(250, 4_000), 10_000, 0
    while left > 0:
        some = min(portion.endpoints, left)
        portion.took(some, some)
        left -= some
        portions += 1
    assert portions == 4 + 40
