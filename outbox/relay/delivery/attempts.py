"""A completed attempt, and its consequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from outbox.core.brokers.port import Appended
    from outbox.core.delivery.commands import End, Open, Record, RunResults, Send
    from outbox.core.model.response import AttemptResult
    from outbox.core.model.response_policy import AttemptOutcome
    from outbox.telemetry.tracing import AttemptSpan


class Attempt(NamedTuple):
    """A completed attempt."""

    send: Send | Open | End
    """What was sent; after a delivery run, its last request.  An Open has failed."""
    started_at: float
    """Epoch seconds."""
    response: AttemptResult
    """The response, without the secrets that the endpoint's own headers carry."""
    preempted: bool
    """The request was cancelled to free its slot; the response is not the receiver's."""
    span: AttemptSpan | None
    appended: Appended | None = None
    """What a broker stored; None: an HTTP request, or an Open."""


class BreakerEffect(NamedTuple):
    """What a result changed about an endpoint's circuit breaker."""

    state_changed: bool = False
    """All lanes of the endpoint decide again."""
    probes_changed: bool = False
    """The time of the next probe may have changed."""
    must_be_stored: bool = False
    """The endpoint's next owner must know of it."""


class Settlement(NamedTuple):
    """The consequences of an attempt."""

    outcome: AttemptOutcome
    """The outcome of the delivery, or of a batch's last one."""
    accepted: RunResults | None
    """Deliveries of a batch that were accepted, to be written first."""
    record: Record | None
    """The record of the delivery, or of the first one of a batch that was not accepted."""
    breaker: BreakerEffect
