"""The metric name parser finds the names in an expression, and any typo in them."""

from __future__ import annotations

import pytest

from tests.support.promql import used
from tests.telemetry.alerts.names import exported, wrong


def test_names_are_distinguished_from_words_and_values() -> None:
    names = used(
        'sum by (job, le) (rate(a_total{x="b{c}", y!~"d"}[5m] offset 1h)) / on (job) f:g:h > 1e3 '
        "and (up == 0 or time() - start < bool 90) unless ignoring (z) min_over_time(k[1d])"
    )
    assert names.metrics == {"a_total", "f:g:h", "up", "start", "k"}
    assert names.matchers == [("a_total", "x", "b{c}"), ("a_total", "y", "d")]
    assert names.grouped == {"job", "le", "z"}


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("sum(rate(outbox_delivery_total[5m]))", "no metric outbox_delivery_total"),
        ("outbox_delivery_latency_seconds > 5", "no metric outbox_delivery_latency_seconds"),
        ('outbox_backlog{endpont="shop"}', "outbox_backlog has no label endpont"),
        ('outbox_backlog{le="5"}', "outbox_backlog has no label le"),
        ('outbox_lanes{state="blockd"}', "outbox_lanes never has state=blockd"),
        ('outbox_deliveries_total{outcome=~"backlog|retry"}', "never has outcome=backlog|retry"),
        ("sum by (endpont) (outbox_backlog)", "has a label endpont"),
        ("max by (endpoint) (outbox_dead_letters)", "has a label endpoint"),
        ("outbox_gap_age_seconds and on (jop) outbox_replica_leads", "has a label jop"),
    ],
)
def test_a_typo_is_found(expression: str, says: str) -> None:
    (found,) = wrong(expression, exported())
    assert says in found
