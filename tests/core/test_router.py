from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.model import pattern
from outbox.core.sequencing import router as sequencing
from outbox.core.sequencing.router import Replay, RoutableEvent, Route, Router, assign_sequences
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SPREAD_MAX = 2**63 - 1
LANES_EACH = 3

tenants = st.sampled_from([None, "acme", "bolt"])
types = st.sampled_from(["order.paid", "order.item.added", "user", "outbox.lane.ended"])
subscriptions = st.lists(
    st.sampled_from(["**", "*", "order.*", "order.**", "user", "outbox.**", "*.paid"]),
    min_size=1,
    max_size=3,
    unique=True,
).map(tuple)


@st.composite
def routes(draw: st.DrawFn) -> list[Route]:
    """Up to five endpoints, each with one to three lanes."""
    made = []
    for n in range(draw(st.integers(0, 5))):
        lanes = draw(st.integers(1, LANES_EACH))
        tenant = draw(tenants)
        made.append(
            Route(
                endpoint_id=UUID(int=n),
                types=draw(subscriptions),
                tenant=tenant,
                all_tenants=tenant is None and draw(st.booleans()),
                lane_ids=tuple(10 * n + slot for slot in range(lanes)),
                filter=draw(st.sampled_from([None, "@.even", "@.third"])),
            )
        )
    return made


@st.composite
def batches(draw: st.DrawFn) -> list[list[RoutableEvent]]:
    """Batches of events with ascending ids, as the cursor reads them."""
    ids = iter(range(1, 1000))
    return [
        [
            RoutableEvent(next(ids), draw(tenants), draw(types), draw(st.integers(0, SPREAD_MAX)))
            for _ in range(size)
        ]
        for size in draw(st.lists(st.integers(0, 8), max_size=5))
    ]


def subscribes(route: Route, event: RoutableEvent) -> bool:
    """The contract: the endpoint's own tenant or all tenants, and a type that it names."""
    if event.tenant is None:
        may_see = route.tenant is None
    else:
        may_see = route.all_tenants or route.tenant == event.tenant
    return may_see and any(pattern.parse(t).fullmatch(event.type) for t in route.types)


def lanes_of(placements: Iterable[tuple[int, int]]) -> set[int]:
    """The lanes that need a counter."""
    return {lane_id for lane_id, _ in placements}


def deliveries_of(router: Router, batch: list[RoutableEvent]) -> Iterator[tuple[int, int]]:
    """Return (lane, event) for each delivery of a batch, numbered from 0."""
    placements = router.placements(batch)
    out = assign_sequences(placements, [], dict.fromkeys(lanes_of(placements), 0))
    return zip(out.lane_ids, out.outbox_ids, strict=True)


@given(routes(), batches())
def test_every_event_is_routed_once_to_every_matching_endpoint(
    made: list[Route], read: list[list[RoutableEvent]]
) -> None:
    router = Router(made)
    for batch in read:
        got = sorted((event, lane // 10) for lane, event in deliveries_of(router, batch))
        assert got == sorted(
            (event.id, route.endpoint_id.int)
            for event in batch
            for route in made
            if subscribes(route, event)
        )


@given(routes(), batches())
def test_sequence_numbers_are_contiguous_across_batches_in_id_order(
    made: list[Route], read: list[list[RoutableEvent]]
) -> None:
    router = Router(made)
    table: dict[int, int] = {}
    lanes: dict[int, list[tuple[int, int]]] = {}
    for batch in read:
        placements = router.placements(batch)
        known = {lane: table.get(lane, 0) for lane in lanes_of(placements)}
        out = assign_sequences(placements, [], known)
        assert len(out) == len(out.lane_ids) == len(out.outbox_ids)
        assert out.counters.keys() == known.keys()
        assert out.repeats == ()
        for lane, seq, event in zip(out.lane_ids, out.seqs, out.outbox_ids, strict=True):
            lanes.setdefault(lane, []).append((seq, event))
        table |= out.counters
    for lane, given_out in lanes.items():
        seqs, events = zip(*given_out, strict=True)
        assert seqs == tuple(range(1, table[lane] + 1))
        assert list(events) == sorted(set(events))


@given(routes(), st.integers(0, SPREAD_MAX), tenants, types)
def test_a_key_maps_to_one_lane_per_endpoint(
    made: list[Route], spread: int, tenant: str | None, event_type: str
) -> None:
    router = Router(made)
    for route in router.match(tenant, event_type):
        one = lanes_of(router.placements([RoutableEvent(1, tenant, event_type, spread)]))
        other = lanes_of(router.placements([RoutableEvent(99, tenant, event_type, spread)]))
        assert one == other
        assert route.lane_ids[spread % len(route.lane_ids)] in one


def test_keys_are_spread_over_all_lanes() -> None:
    router = Router([Route(UUID(int=1), ("**",), None, False, (5, 6, 7))])
    events = [RoutableEvent(spread, None, "a", spread) for spread in range(6)]
    assert router.placements(events) == [(5, 0), (6, 1), (7, 2), (5, 3), (6, 4), (7, 5)]
    assert router.placements([RoutableEvent(1, None, "a", SPREAD_MAX)]) == [(5 + SPREAD_MAX % 3, 1)]


@pytest.mark.parametrize(
    ("tenant", "all_tenants", "sees"),
    [
        (None, False, {None}),
        (None, True, {None, "acme", "bolt"}),
        ("acme", False, {"acme"}),
        ("bolt", False, {"bolt"}),
    ],
)
def test_an_endpoint_gets_only_events_of_its_tenant(
    tenant: str | None, all_tenants: bool, sees: set[str | None]
) -> None:
    router = Router([Route(UUID(int=1), ("**",), tenant, all_tenants, (1,))])
    assert {t for t in (None, "acme", "bolt") if router.match(t, "order.paid")} == sees


def test_operational_events_only_reach_endpoints_that_name_them() -> None:
    everything = Route(UUID(int=1), ("**", "*.**", "*"), None, True, (1,))
    named = Route(UUID(int=2), ("outbox.**",), None, True, (2,))
    router = Router([everything, named])
    assert router.match(None, "outbox.lane.ended") == (named,)
    assert router.match("acme", "outbox.ended") == (named,)
    assert router.match(None, "outbox") == (everything,)
    assert router.match(None, "outboxes.full") == (everything,)


def test_an_endpoint_gets_an_event_once_when_two_patterns_match() -> None:
    router = Router([Route(UUID(int=1), ("order.*", "order.paid", "**"), None, False, (1,))])
    assert router.placements([RoutableEvent(1, None, "order.paid", 0)]) == [(1, 1)]


def test_an_invalid_subscription_is_rejected() -> None:
    with pytest.raises(UsageError, match="type pattern"):
        Router([Route(UUID(int=1), ("order.paid", "a..b"), None, False, (1,))])


@given(routes(), batches(), st.integers(1, 6))
def test_evicting_cached_matches_does_not_change_routing(
    made: list[Route], read: list[list[RoutableEvent]], matches_max: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequencing, "MATCHES_MAX", matches_max)
        router = Router(made)
        for event in (event for batch in read for event in batch):
            assert router.match(event.tenant, event.type) == tuple(
                route for route in made if subscribes(route, event)
            )
            assert len(router._matches) <= matches_max


@given(routes(), batches(), st.integers(1, 6))
def test_the_match_cache_is_also_bounded_by_endpoints(
    made: list[Route], read: list[list[RoutableEvent]], matched_max: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequencing, "MATCHED_MAX", matched_max)
        router = Router(made)
        for event in (event for batch in read for event in batch):
            assert router.match(event.tenant, event.type) == tuple(
                route for route in made if subscribes(route, event)
            )
            assert sum(map(len, router._matches.values())) <= matched_max


@pytest.mark.slow
@pytest.mark.parametrize("others", [10, 1000])
def test_endpoints_without_the_event_are_not_visited(others: int) -> None:
    """Counts the visited pattern segments and routes."""
    visits = Counter[str]()

    class Counted(dict[str, pattern._Node]):
        def get(self, key: str, default: Any = None) -> Any:
            found = super().get(key, default)
            visits["steps"] += found is not None
            return found

    class Routes(list[Route]):
        def __getitem__(self, n: Any) -> Any:
            visits["routes"] += 1
            return super().__getitem__(n)

        def __iter__(self) -> Iterator[Route]:
            for route in super().__iter__():
                visits["routes"] += 1
                yield route

    def count(node: pattern._Node) -> None:
        for each in node.nodes.values():
            count(each)
        node.nodes = Counted(node.nodes)

    made = [
        Route(
            UUID(int=n),
            (f"t{n}.made", f"t{n}.*"),
            f"tenant-{n % 7}" if n % 2 else None,
            False,
            (n,),
        )
        for n in range(others)
    ]
    wanted = Route(UUID(int=others), ("order.paid", "user.**"), "acme", False, (others,))
    router = Router([*made, wanted])
    for patterns in (router._of_all, *router._of_tenant.values()):
        count(patterns._root)
    router._routes = Routes(router._routes)
    for event_type in ("order.paid", "user.gone", "t3.made"):
        router.match("acme", event_type)
        router.match("tenant-3", event_type)
    assert router.match("acme", "order.paid") == (wanted,)
    assert router.match("tenant-3", "t3.made") == (made[3],)
    # order, paid; user, and the "**" behind it; t3, made and *.
    assert visits == {"steps": 2 + 1 + 3, "routes": 1 + 1 + 1}


# ------------------------------------------------------------------ filters

MEETS = {None: lambda _: True, "@.even": lambda n: n % 2 == 0, "@.third": lambda n: n % 3 == 0}


@pytest.mark.slow
@given(routes(), batches(), st.sets(st.sampled_from(["@.even", "@.third"])))
def test_a_filter_is_evaluated_only_for_matching_events_and_then_decides(
    made: list[Route], read: list[list[RoutableEvent]], failing_filters: set[str]
) -> None:
    router = Router(made)
    for batch in read:
        wanted = {
            (event.id, route) for event in batch for route in made if subscribes(route, event)
        }
        questions = router.filters_to_evaluate(batch)
        # Once per tenant.
        assert {(asked, event) for asked, ids in questions.items() for event in ids} == {
            ((route.tenant, route.filter), event)
            for event, route in wanted
            if route.filter is not None
        }
        assert all(ids == sorted(set(ids)) for ids in questions.values())
        refused = {
            asked: {event for event in ids if not MEETS[asked[1]](event)}
            for asked, ids in questions.items()
            if asked[1] not in failing_filters
        }
        placements = router.placements(batch, refused)
        lanes = lanes_of(placements)
        out = assign_sequences(placements, [], dict.fromkeys(lanes, 0))
        assert lanes == set(out.lane_ids)
        got = {(e, lane // 10) for lane, e in zip(out.lane_ids, out.outbox_ids, strict=True)}
        # An event that was not evaluated counts as a match.
        assert got == {
            (event, route.endpoint_id.int)
            for event, route in wanted
            if route.filter in failing_filters or MEETS[route.filter](event)
        }


# ------------------------------------------------------------------ cutting


@given(routes(), batches(), st.integers(1, 20))
def test_a_cut_batch_is_as_large_as_allowed_and_never_empty(
    made: list[Route], read: list[list[RoutableEvent]], deliveries_max: int
) -> None:
    router = Router(made)
    for batch in read:
        fits = router.count_fitting_events(batch, deliveries_max)
        totals = [*accumulate(len(router.placements([event])) for event in batch)]
        assert fits >= min(1, len(batch))
        assert fits <= 1 or totals[fits - 1] <= deliveries_max
        assert fits == len(batch) or totals[fits] > deliveries_max


def test_an_event_that_exceeds_the_limit_is_sequenced_alone() -> None:
    router = Router([Route(UUID(int=n), ("**",), None, True, (n,)) for n in range(9)])
    batch = [RoutableEvent(n, None, "a", 0) for n in range(3)]
    assert router.count_fitting_events(batch, 5) == 1
    assert router.count_fitting_events(batch, 9) == 1
    assert router.count_fitting_events(batch, 18) == 2
    assert router.count_fitting_events(batch, 27) == 3
    assert router.count_fitting_events([], 5) == 0
    none = Router([])
    assert none.count_fitting_events(batch, 1) == 3


# ------------------------------------------------------------------ replays


@given(routes(), batches(), st.lists(st.integers(0, 4), max_size=6))
def test_replays_are_appended_to_their_lane(
    made: list[Route], read: list[list[RoutableEvent]], slots: list[int]
) -> None:
    router = Router(made)
    batch = [event for part in read for event in part]
    replays = [
        Replay(
            id=500 + n,
            lane_id=10 * slot,
            outbox_id=n,
            seq=70 + n,
            copy_id=n % 2 or None,
        )
        for n, slot in enumerate(slots)
    ]
    placements = router.placements(batch)
    counters = dict.fromkeys(lanes_of(placements) | {r.lane_id for r in replays}, 7)
    out = assign_sequences(placements, replays, counters)
    fresh = len(out) - len(replays)
    assert out.repeats == tuple(replays)
    assert out.lane_ids[fresh:] == [r.lane_id for r in replays]
    assert out.outbox_ids[fresh:] == [r.outbox_id for r in replays]
    for lane in counters:
        seqs = [s for of, s in zip(out.lane_ids, out.seqs, strict=True) if of == lane]
        assert seqs == list(range(8, 8 + len(seqs)))
        assert out.counters[lane] == 7 + len(seqs)


def test_a_lane_without_a_counter_is_an_error() -> None:
    router = Router([Route(UUID(int=1), ("**",), None, False, (1,))])
    with pytest.raises(KeyError):
        assign_sequences(router.placements([RoutableEvent(1, None, "a", 0)]), [], {})
