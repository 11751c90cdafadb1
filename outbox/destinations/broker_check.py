"""Examinations of brokers: for `outbox doctor`, and as the test of an endpoint.

Nothing is written to a stream, because a consumer would take it for an event.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outbox.core.model.response import Failure, one_line
from outbox.core.model.stored_response import STORED_VERSION
from outbox.destinations.broker_address import broker_address
from outbox.destinations.brokers import Brokers
from outbox.destinations.endpoint_test import EndpointTestFinding, EndpointTestResult
from outbox.errors import UsageError

if TYPE_CHECKING:
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.destinations.broker import BrokerFinding
    from outbox.network.egress import EgressPolicy


async def examine_broker(endpoint: Endpoint, policy: EgressPolicy) -> list[BrokerFinding]:
    """Examine the broker of an endpoint, from this process.

    Raises:
        UsageError: its credentials have a wrong form.
    """
    address = broker_address(endpoint)
    if address is None:
        raise UsageError("url: it does not name a broker")
    brokers = Brokers(policy)
    try:
        broker = brokers.connect(address)
        try:
            return await broker.check(endpoint.lane_names)
        finally:
            await broker.aclose()
    finally:
        await brokers.aclose()


async def run_broker_test(endpoint: Endpoint, policy: EgressPolicy) -> EndpointTestResult:
    """Examine the broker of an endpoint, as the result of a test."""
    began_at = time.monotonic()
    findings = await examine_broker(endpoint, policy)
    errors = [each for each in findings if each.is_error]
    shown = errors or findings
    detail = "; ".join(f"{each.what} ({each.what_to_do})" for each in shown)
    is_away = any(each.is_away for each in errors)
    failure = Failure.UNAVAILABLE if is_away else Failure.MISCONFIGURED
    response = {
        "version": STORED_VERSION,
        **({"failure": failure.value} if errors else {}),
        **({"detail": one_line(detail)} if shown else {}),
        "elapsed_ms": round((time.monotonic() - began_at) * 1000, 1),
    }
    outcome, meaning = ("retried", "deliveries would wait") if errors else ("delivered", "usable")
    return EndpointTestResult(
        endpoint.name,
        "CHECK",
        endpoint.url,
        response,
        outcome,
        meaning,
        tuple(EndpointTestFinding(*each[:3]) for each in findings),
    )
