"""A broker's server holds a call for a minute at most."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.destinations.endpoint_validation import check_reachable
from outbox.errors import UsageError
from outbox.network.egress import EgressPolicy

POLICY = EgressPolicy(["127.0.0.0/8"])
REDIS = EndpointSettings(name="a", url="redis://127.0.0.1/events")


@pytest.mark.parametrize("name", ["timeout_s", "connect_timeout_s"])
def test_time_outs_of_a_broker_are_at_most_a_minute(name: str) -> None:
    check_reachable(replace(REDIS, **{name: 60.0}), POLICY)
    long = replace(REDIS, **{name: 61.0})
    with pytest.raises(UsageError, match="at most 60 s for a broker"):
        check_reachable(long, POLICY)
    # A receiver may have longer ones, and an endpoint of an earlier version can be changed.
    http = replace(long, url="http://127.0.0.1/")
    check_reachable(http, POLICY)
    check_reachable(replace(long, lanes=2), POLICY, long)
    with pytest.raises(UsageError, match="at most 60 s"):
        check_reachable(long, POLICY, http)
