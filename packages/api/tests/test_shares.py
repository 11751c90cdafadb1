"""Shares of tenants: what is published at once, what it costs, and what is remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.core.sequencing.tenant_pace import HELD_DELIVERIES_MAX
from outbox_api.shares import SHARE, TOGETHER, Shares, build_routes
from outbox_api.token_bucket import Allowance

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_a_tenant_has_its_burst_and_then_its_rate() -> None:
    shares = Shares()
    assert (SHARE.burst, SHARE.per_s, HELD_DELIVERIES_MAX) == (20_000, 5000, 3_000_000)
    assert shares.reserve("acme", 20_000, 10.0)
    assert not shares.reserve("acme", 1, 10.0)
    assert not shares.reserve("acme", 5001, 11.0)
    assert shares.reserve("acme", 5000, 11.0)
    assert shares.reserve("acme", 0, 11.0)


def test_all_tenants_together_have_a_rate() -> None:
    shares = Shares()
    assert (TOGETHER.burst, TOGETHER.per_s) == (20_000, 20_000)
    assert [shares.reserve(name, 8000, 10.0) for name in "abc"] == [True, True, False]
    assert shares.reserve("c", 8000, 10.2)


def test_a_request_above_the_burst_never_passes() -> None:
    shares = Shares()
    assert not shares.reserve("acme", 20_001, 10.0)
    assert shares.reserve("acme", 20_000, 10.0)


def test_what_was_reserved_for_nothing_is_returned_to_both_buckets() -> None:
    shares = Shares()
    assert shares.reserve("acme", 20_000, 10.0)
    shares.release("acme", 20_000, 10.0)
    assert shares.reserve("acme", 10_000, 10.0)
    assert shares.reserve("globex", 10_000, 10.0)


def test_a_held_request_empties_the_bucket_of_its_tenant_only() -> None:
    shares = Shares()
    shares.drain("acme", 10.0)
    assert not shares.reserve("acme", 1, 10.0)
    assert shares.reserve("globex", 20_000, 10.0)
    assert shares.reserve("acme", 5000, 11.0)
    # It was empty already: there is no debt.
    shares.drain("acme", 11.0)
    shares.drain("acme", 11.0)
    assert shares.reserve("acme", 5000, 12.0)


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.floats(0, 0.5),
        st.integers(0, 30),
        st.sampled_from(["published", "held", "refused"]),
    ),
    max_size=60,
)


@given(REQUESTS)
def test_no_interval_has_more_than_the_shares_allow(
    requests: Sequence[tuple[str, float, int, str]],
) -> None:
    share, together = Allowance(per_s=20, burst=20), Allowance(per_s=30, burst=25)
    shares = Shares(share, together)
    now = 1000.0
    published: list[tuple[str, float, int]] = []
    for tenant, gap, deliveries, result in requests:
        now += gap
        if not shares.reserve(tenant, deliveries, now):
            # Neither bucket was charged: it holds whatever the database decides.
            shares.drain(tenant, now)
            assert deliveries == 0 or not shares.reserve(tenant, deliveries, now)
            continue
        if result == "published":
            published.append((tenant, now, deliveries))
        else:
            shares.release(tenant, deliveries, now)
            if result == "held":
                shares.drain(tenant, now)
    for limit, names in ((share, "a"), (share, "b"), (together, "ab")):
        sent = [(at, n) for tenant, at, n in published if tenant in names]
        for first, (since, _) in enumerate(sent):
            total = 0
            for at, n in sent[first:]:
                total += n
                assert total <= limit.burst + (at - since) * limit.per_s + 1e-3


# -------------------------------------------------------------------- costs


def test_the_cost_is_the_number_of_matching_endpoints() -> None:
    shares = Shares()
    assert shares.lacks_routes("acme") == (True, True)
    own = build_routes(7, [["order.*", "order.paid"], ["**"], ["cart.left"]])
    shares.set_routes("acme", own, build_routes(7, [["order.paid"], ["x"]]))
    assert shares.lacks_routes("acme") == (False, False)
    assert shares.lacks_routes("globex") == (True, False)
    assert shares.costs("acme", ["order.paid", "order.sent", "a", "order.paid"]) == [3, 2, 1, 3]


def test_routes_of_another_version_are_read_again() -> None:
    shares = Shares()
    shares.set_routes("acme", build_routes(7, [["**"]]), build_routes(7, []))
    shares.version = 7
    assert shares.lacks_routes("acme") == (False, False)
    shares.version = 8
    assert shares.lacks_routes("acme") == (True, True)
    shares.set_routes("globex", build_routes(8, []), build_routes(8, []))
    assert shares.lacks_routes("acme") == (True, False)
    # Also after a restore of the database, which sets the version back.
    shares.version = 5
    assert shares.lacks_routes("globex") == (True, True)


def test_routes_of_tenants_are_bounded_and_the_least_recently_used_are_dropped() -> None:
    shares = Shares(segments_max=12)
    of_all = build_routes(1, [["**"]])
    for name in ("a", "b", "c"):
        shares.set_routes(name, build_routes(1, [["x.y.z"]]), of_all)
    shares.costs("a", ["x"])
    shares.set_routes("d", build_routes(1, [["x.y.z"]]), None)
    assert [shares.lacks_routes(name)[0] for name in "abcd"] == [False, True, False, False]


def test_a_tenant_with_too_many_patterns_pays_for_each_endpoint() -> None:
    routes = build_routes(1, [["a.b.c"], ["d.e.f"]], segments_max=5)
    assert routes.patterns is None
    assert routes.count("a.b.c") == 2


@pytest.mark.parametrize("type_", ["outbox.probe", "outbox.endpoint.paused"])
def test_operational_types_match_as_in_the_relay(type_: str) -> None:
    assert build_routes(1, [["**"], [type_]]).count(type_) == 1
