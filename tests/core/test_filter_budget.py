"""Filters pay for the time that they take: nobody gets more than a share, and no innocent pays."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.core.sequencing.filter_budget import (
    FILTER_S,
    FILTER_SHARE,
    LEAST_S,
    TENANT_S,
    TENANT_SHARE,
    WORTH_S,
    FilterTime,
    most_s,
)

A = ("t", "@.a == 1")


def test_a_filter_that_takes_more_than_it_earns_is_stopped() -> None:
    time = FilterTime()
    now = 0.0
    for _ in range(1000):
        now += 1.0
        time.charge((None, "fine"), FILTER_SHARE * 0.9, 0.0, now)
        assert time.over(now) == []
    time.charge((None, "dear"), FILTER_S + 0.01, 0.0, now)
    assert time.over(now) == [(None, "dear")]
    assert time.over(now) == []


def test_a_tenants_filters_pay_together_and_the_dearest_goes() -> None:
    time = FilterTime()
    for n in range(5):
        time.charge(("t", f"{n}"), 0.1 + n / 20, 0.0, 0.0)
    time.charge(("u", "other"), 0.4, 0.0, 0.0)
    assert time.over(0.0) == []
    time.charge(("t", "cheap"), 0.001, 0.0, 0.0)
    assert time.over(0.0) == [("t", "4")]


def test_what_a_tenant_has_used_stays_though_it_changes_its_filters() -> None:
    time = FilterTime()
    for n in range(3):
        time.charge(("t", f"{n}"), 0.4, 0.0, 0.0)
    assert time.over(0.0) == [("t", "0")]
    time.keep([("t", "new"), ("u", "new")])
    assert time.limit_s(("t", "new"), 10, 0.0) == LEAST_S
    assert time.limit_s(("u", "new"), 10, 0.0) == most_s(10)
    assert time.limit_s(("t", "new"), 10, TENANT_S / TENANT_SHARE) == most_s(10)


def test_what_a_slow_database_costs_is_not_charged() -> None:
    time = FilterTime()
    for _ in range(100):
        time.charge(A, 1.0, 0.6, 0.0)
    assert time.over(0.0) == []


def test_who_took_little_is_never_stopped_for_others() -> None:
    time = FilterTime()
    for n in range(1000):
        time.charge((None, f"{n}"), WORTH_S / 2, 0.0, 0.0)
    assert time.over(0.0) == []


@settings(max_examples=100)
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
def test_no_filter_takes_more_than_its_share(
    charges: list[tuple[str | None, int, float, float]],
) -> None:
    time = FilterTime()
    now = 0.0
    stopped: set[tuple[str | None, str]] = set()
    took: dict[tuple[str | None, str], float] = {}
    for tenant, n, took_s, passes_s in charges:
        now += passes_s
        asked = (tenant, str(n))
        if asked in stopped:
            continue
        took_s = min(took_s, time.limit_s(asked, 10, now))
        time.charge(asked, took_s, 0.0, now)
        took[asked] = took.get(asked, 0.0) + took_s
        stopped.update(time.over(now))
    for total_s in took.values():
        assert total_s <= FILTER_S + FILTER_SHARE * now + LEAST_S + 1e-9
    for name in ("t", "u"):
        its = sum(total_s for (tenant, _), total_s in took.items() if tenant == name)
        # And LEAST_S for each that it was asked although nothing was left.
        assert its <= TENANT_S + TENANT_SHARE * now + len(charges) * LEAST_S + 1e-9
