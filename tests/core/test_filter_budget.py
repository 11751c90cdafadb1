"""Filters pay for their evaluation time: none exceeds its share, and none pays for another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outbox.core.sequencing.filter_budget import (
    FILTER_S,
    FILTER_SHARE,
    LIMIT_MIN_S,
    STOP_MIN_S,
    TENANT_S,
    TENANT_SHARE,
    FilterBudget,
    statement_limit_s,
)

A = ("t", "@.a == 1")


def test_a_filter_over_its_budget_is_stopped() -> None:
    time = FilterBudget()
    now = 0.0
    for _ in range(1000):
        now += 1.0
        time.charge((None, "fine"), FILTER_SHARE * 0.9, 0.0, now)
        assert time.exhausted(now) == []
    time.charge((None, "dear"), FILTER_S + 0.01, 0.0, now)
    assert time.exhausted(now) == [(None, "dear")]
    assert time.exhausted(now) == []


def test_a_tenants_filters_share_a_budget_and_the_most_expensive_is_stopped() -> None:
    time = FilterBudget()
    for n in range(5):
        time.charge(("t", f"{n}"), 0.1 + n / 20, 0.0, 0.0)
    time.charge(("u", "other"), 0.4, 0.0, 0.0)
    assert time.exhausted(0.0) == []
    time.charge(("t", "cheap"), 0.001, 0.0, 0.0)
    assert time.exhausted(0.0) == [("t", "4")]


def test_changing_filters_does_not_reset_a_tenants_usage() -> None:
    time = FilterBudget()
    for n in range(3):
        time.charge(("t", f"{n}"), 0.4, 0.0, 0.0)
    assert time.exhausted(0.0) == [("t", "0")]
    time.retain_filters([("t", "new"), ("u", "new")])
    assert time.limit_s(("t", "new"), 10, 0.0) == LIMIT_MIN_S
    assert time.limit_s(("u", "new"), 10, 0.0) == statement_limit_s(10)
    assert time.limit_s(("t", "new"), 10, TENANT_S / TENANT_SHARE) == statement_limit_s(10)


def test_database_latency_is_not_charged() -> None:
    time = FilterBudget()
    for _ in range(100):
        time.charge(A, 1.0, 0.6, 0.0)
    assert time.exhausted(0.0) == []


def test_a_cheap_filter_is_never_stopped_because_of_others() -> None:
    time = FilterBudget()
    for n in range(1000):
        time.charge((None, f"{n}"), STOP_MIN_S / 2, 0.0, 0.0)
    assert time.exhausted(0.0) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "t", "u"]),
            st.integers(0, 3),
            st.floats(0.0, 0.3),
            st.floats(0.0, 2.0),
        ),
        max_size=200,
    )
)
def test_no_filter_exceeds_its_share(
    charges: list[tuple[str | None, int, float, float]],
) -> None:
    time = FilterBudget()
    now = 0.0
    stopped: set[tuple[str | None, str]] = set()
    took: dict[tuple[str | None, str], float] = {}
    for tenant, n, took_s, passes_s in charges:
        now += passes_s
        tenant_filter = (tenant, str(n))
        if tenant_filter in stopped:
            continue
        took_s = min(took_s, time.limit_s(tenant_filter, 10, now))
        time.charge(tenant_filter, took_s, 0.0, now)
        took[tenant_filter] = took.get(tenant_filter, 0.0) + took_s
        stopped.update(time.exhausted(now))
    for total_s in took.values():
        assert total_s <= FILTER_S + FILTER_SHARE * now + LIMIT_MIN_S + 1e-9
    for name in ("t", "u"):
        tenant_total_s = sum(total_s for (tenant, _), total_s in took.items() if tenant == name)
        # Plus LIMIT_MIN_S for each evaluation although no budget was left.
        assert tenant_total_s <= TENANT_S + TENANT_SHARE * now + len(charges) * LIMIT_MIN_S + 1e-9
