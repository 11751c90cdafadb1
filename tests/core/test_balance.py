"""The balance of endpoints, by replicas that see the table of ownership at different times."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from outbox.core.cluster.balance import Share, is_balanced, share

if TYPE_CHECKING:
    from random import Random

replica_ids = st.sets(st.integers(1, 2**63 - 1), min_size=1, max_size=8)
counts = st.lists(st.integers(0, 12), min_size=8, max_size=8)
unowned_endpoints = st.lists(st.uuids(), max_size=30, unique=True)


@given(replica_ids, counts, unowned_endpoints, st.randoms(use_true_random=False))
def test_the_shares_of_one_snapshot_are_even_and_claim_each_endpoint_once(
    alive: set[int], owned: list[int], unowned: list[UUID], rng: Random
) -> None:
    before = dict(zip(sorted(alive), owned, strict=False))
    shares = {}
    for me in alive:
        rng.shuffle(unowned)
        shares[me] = share(me, alive, before, unowned)
    targets = [each.endpoints for each in shares.values()]
    assert sum(targets) == sum(before.values()) + len(unowned)
    assert max(targets) - min(targets) <= 1
    claimed = [e for each in shares.values() for e in each.claimable]
    assert len(claimed) == len(set(claimed))
    # What cannot be claimed yet is missing by as much as others have too many.
    surplus = sum(max(before[me] - shares[me].endpoints, 0) for me in alive)
    missing = sum(max(shares[me].endpoints - before[me], 0) for me in alive)
    assert missing == surplus + len(unowned)
    assert set(claimed) == set(unowned)


@given(replica_ids, counts)
def test_an_endpoint_moves_only_to_a_replica_with_fewer_by_two(
    alive: set[int], owned: list[int]
) -> None:
    before = dict(zip(sorted(alive), owned, strict=False))
    even = max(before.values()) - min(before.values()) <= 1
    releasing = [me for me in alive if share(me, alive, before, []).endpoints < before[me]]
    assert bool(releasing) is not even


def test_a_new_endpoint_goes_to_the_replica_with_the_fewest() -> None:
    new, owned = [UUID(int=1)], {1: 3, 2: 2, 3: 3}
    assert {me: share(me, owned, owned, new).claimable for me in owned} == {1: [], 2: new, 3: []}


def test_the_shares_are_the_same_in_every_release() -> None:
    """Otherwise, while relays of two releases run, an endpoint may be in no one's portion."""
    free = [UUID(int=n) for n in range(6)]
    owned = {4: 5, 7: 1, 9: 5}
    assert {me: share(me, owned, owned, free[::-1]) for me in owned} == {
        4: Share(6, free[:1]),
        7: Share(5, free[1:5]),
        9: Share(6, free[5:]),
    }


def test_endpoints_of_a_replica_that_is_not_alive_are_not_shared_out() -> None:
    assert share(1, {1, 2}, {1: 2, 2: 2, 3: 8}, []).endpoints == 2


class BalancedCluster(RuleBasedStateMachine):
    """Replicas that join and leave, read, and claim and release later, in any order.

    The rules of `Ownership._balance`: a replica balances if the replicas or the endpoints
    changed, if an endpoint is unowned, until a snapshot is balanced, and once per lease.
    """

    @initialize(replicas=st.integers(1, 4), endpoints=st.integers(0, 12))
    def start(self, replicas: int, endpoints: int) -> None:
        self.owner: dict[UUID, int | None] = {UUID(int=n): None for n in range(endpoints)}
        self.version = 1
        self.last_id = 0
        self.last_endpoint = endpoints
        # By replica: the version and the replicas of its last balance.
        self.balanced: dict[int, tuple[int, frozenset[int]]] = {}
        self.claiming: dict[int, list[UUID]] = {}
        self.releasing: dict[int, set[UUID]] = {}
        self.moved = Counter[UUID]()
        for _ in range(replicas):
            self.join()

    @rule()
    def join(self) -> None:
        self.last_id += 1
        me = self.last_id
        self.balanced[me], self.claiming[me] = (0, frozenset()), []
        self.releasing[me] = set()

    @precondition(lambda self: len(self.balanced) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        me = data.draw(st.sampled_from(sorted(self.balanced)))
        for tables in (self.balanced, self.claiming, self.releasing):
            del tables[me]
        self.owner = {e: None if owner == me else owner for e, owner in self.owner.items()}

    @rule()
    def add_endpoint(self) -> None:
        self.last_endpoint += 1
        self.owner[UUID(int=self.last_endpoint)] = None
        self.version += 1

    @precondition(lambda self: self.owner)
    @rule(data=st.data())
    def remove_endpoint(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.owner)))
        del self.owner[gone]
        for endpoints in self.releasing.values():
            endpoints.discard(gone)
        self.version += 1

    @rule(data=st.data())
    def balance_one(self, data: st.DataObject) -> None:
        self.balance(data.draw(st.sampled_from(sorted(self.balanced))))

    @rule(data=st.data())
    def claim_one(self, data: st.DataObject) -> None:
        self.claim(data.draw(st.sampled_from(sorted(self.balanced))))

    @rule(data=st.data())
    def release_one(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(sorted(self.balanced))))

    def balance(self, me: int) -> bool:
        """Read and decide; whether anything is left to do."""
        alive = frozenset(self.balanced)
        unowned = [e for e, owner in self.owner.items() if owner is None]
        if self.claiming[me] or (not unowned and self.balanced[me] == (self.version, alive)):
            return bool(self.claiming[me])
        owned = Counter(owner for owner in self.owner.values() if owner is not None)
        mine = share(me, alive, owned, unowned)
        kept = [e for e, o in self.owner.items() if o == me and e not in self.releasing[me]]
        self.releasing[me].update(kept[mine.endpoints :])
        self.claiming[me] = mine.claimable
        settled = is_balanced(alive, owned, unowned)
        self.balanced[me] = (self.version, alive) if settled else (0, frozenset())
        return not settled or bool(self.releasing[me])

    def claim(self, me: int) -> None:
        for endpoint in self.claiming[me]:
            if self.owner.get(endpoint, me) is None:
                self.owner[endpoint] = me
                self.moved[endpoint] += 1
        self.claiming[me] = []

    def release(self, me: int) -> None:
        for endpoint in self.releasing[me]:
            self.owner[endpoint] = None
        self.releasing[me] = set()

    def teardown(self) -> None:
        """Without further changes, all replicas get their shares after a few polls each."""
        if not hasattr(self, "owner"):
            return
        for me in self.balanced:
            self.release(me)
            self.claim(me)
        self.balanced = dict.fromkeys(self.balanced, (0, frozenset()))  # A lease has passed.
        self.settle()

    def settle(self) -> None:
        """Poll, and check that the endpoints are balanced and stay where they are."""
        for _ in range(6):
            for me in self.balanced:
                self.release(me)
                self.balance(me)
                self.claim(me)
        owned = Counter(self.owner.values())
        assert None not in owned, self.owner
        assert (
            max(owned[me] for me in self.balanced) - min(owned[me] for me in self.balanced) <= 1
        ), owned
        # Then nothing moves any more.
        before = self.moved.copy()
        for me in [*self.balanced, *self.balanced]:
            assert not self.balance(me)
        assert self.moved == before


TestBalancedCluster = BalancedCluster.TestCase


def test_a_claim_by_an_old_snapshot_is_corrected() -> None:
    """Two replicas claim the one endpoint more; only these two can correct it."""
    cluster = BalancedCluster()
    cluster.start(replicas=3, endpoints=4)
    cluster.balance(1)
    for _ in range(2):
        cluster.balance(3)
        cluster.claim(3)
    cluster.claim(1)
    assert Counter(cluster.owner.values()) == {1: 2, 3: 2}
    cluster.settle()


def test_replicas_that_release_by_different_snapshots_release_enough() -> None:
    """Each takes itself for the one that may keep one more, before the newcomer has claimed."""
    cluster = BalancedCluster()
    cluster.start(replicas=2, endpoints=7)
    cluster.owner = {e: 1 if n < 3 else 2 for n, e in enumerate(cluster.owner)}
    cluster.join()
    for me in (2, 1):
        cluster.balance(me)
        cluster.release(me)
    cluster.balance(3)
    cluster.claim(3)
    assert Counter(cluster.owner.values()) == {1: 3, 2: 3, 3: 1}
    cluster.settle()
