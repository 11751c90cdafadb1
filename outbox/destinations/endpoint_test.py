"""Test delivery: one signed request to an endpoint, outside of all lanes."""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson

from outbox.core.messages.batch import accepted_through, prepare_request
from outbox.core.model import duration
from outbox.core.model import retry_policy as retry
from outbox.core.model.delivery import Delivery
from outbox.core.model.redaction import redact
from outbox.core.model.response_policy import (
    AttemptOutcome,
    classify,
    disables_endpoint,
    retry_after_s,
)
from outbox.core.model.stored_response import stored_response
from outbox.destinations.http.request import recipient_of, signed_request

if TYPE_CHECKING:
    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.model.response import AttemptResult
    from outbox.destinations.interface import Request, Transport

TYPE = "outbox.test"


@dataclass(frozen=True, slots=True)
class EndpointTestFinding:
    """One thing about a broker that is wrong, or weakens its guarantees."""

    is_error: bool
    """Whether deliveries would wait; otherwise a warning."""
    finding: str
    action: str


@dataclass(frozen=True, slots=True)
class EndpointTestResult:
    """Result of a test delivery."""

    endpoint: str
    method: str
    url: str
    response: dict[str, Any]
    """The response in the stored form."""
    outcome: str
    """How the relay would classify it: delivered, retried, dead_letter or disabled."""
    meaning: str | None
    """The outcome as a phrase; null for callers that may not read responses."""
    findings: tuple[EndpointTestFinding, ...] = ()
    """About a broker; empty for callers that may not read responses."""


async def send_test_delivery(
    transport: Transport, endpoint: Endpoint, *, total_s_max: float = math.inf
) -> EndpointTestResult:
    """Send one signed delivery of the type `outbox.test`, immediately.

    Args:
        total_s_max: upper bound of the endpoint's time-out.
    """
    response = await transport.send(_request(endpoint, total_s_max))
    response = redact(response, endpoint.credentials)
    stored, outcome = stored_response(response), _classify(response, endpoint)
    return EndpointTestResult(endpoint.name, endpoint.method, endpoint.url, stored, *outcome)


def _request(endpoint: Endpoint, total_s_max: float) -> Request:
    """Build the request like that of a real delivery, on a lane of its own."""
    now = time.time()
    delivery = Delivery(
        endpoint_id=endpoint.id,
        lane=f"{endpoint.id.hex[:12]}-test-{secrets.token_hex(4)}",
        seq=1,
        batch=0,
        # A negative id: no event has it, so X-Delivery cannot collide.
        outbox_id=-secrets.randbits(62),
        event_id=uuid4(),
        type=TYPE,
        tenant=None,
        key=None,
        published_at=now,
        expires_at=None,
        payload=orjson.dumps({"test": True, "endpoint": endpoint.name}),
        headers=None,
    )
    prepared = prepare_request(
        endpoint, [delivery], 0, lane_ends=True, in_array=endpoint.batch_max is not None
    )
    recipient = recipient_of(endpoint)
    recipient = replace(recipient, timeout_s=min(recipient.timeout_s, total_s_max))
    return signed_request(recipient, prepared, 1, int(now), endpoint.secrets_at(now))


def _classify(response: AttemptResult, endpoint: Endpoint) -> tuple[str, str]:
    """Classify a response like the relay; returns outcome and phrase."""
    outcome = classify(response, maybe_sent_before=False, retryable=endpoint.retryable)
    in_array = endpoint.batch_max is not None
    # X-Accepted-Through: 0 rejects the only delivery, which has sequence number 1.
    if (
        outcome is AttemptOutcome.DELIVERED
        and in_array
        and accepted_through(response.headers, 1, 1) == 0
    ):
        outcome = AttemptOutcome.RETRY
    if outcome is AttemptOutcome.DELIVERED:
        return "delivered", "delivered"
    if outcome is AttemptOutcome.REFUSED:
        if disables_endpoint(response):
            return "disabled", "dead-lettered, and the endpoint would be disabled"
        return "dead_letter", "dead-lettered immediately"
    lo, hi = (duration.rounded(s) for s in endpoint.retry.delay_bounds_s(1))
    wait = hi if lo == hi else f"{lo} to {hi}"
    text = f"retried after {wait} ({retry.describe(endpoint.retry)})"
    held_s: Any = retry_after_s(response.headers, time.time())
    if held_s:
        text += f"; the receiver requests a hold-off of {duration.rounded(held_s)}"
    return "retried", text
