"""Conformance cases: requests to a receiver, and the responses expected to each.

A case has its own lane and consists of steps; each step is one request and the expected
response:

    taken       2xx: the event was accepted
    refused     4xx that a relay does not retry: the request had no effect
    stale       the same, or 503: a valid signature whose time is not tolerated
    cut         as refused, or the connection is closed before the whole request was sent
    either      any response in time
    eventually  2xx, or 409, 429 or 5xx at first, and 2xx on a retry

Whether an event was *processed* once is visible from outside only if the receiver reports
it (`outbox conform --processed`), so each case lists the events to process.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from uuid import uuid5

from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.core.model.message_format import UNBATCHED
from outbox.errors import UsageError
from outbox_devtools.conformance.altered_cases import (
    add_bodies,
    add_contradictions,
    add_malformed_bodies,
    add_metadata,
    add_signatures,
)
from outbox_devtools.conformance.batch_cases import add_batches
from outbox_devtools.conformance.suite import Suite
from outbox_devtools.conformance.valid_cases import (
    add_binary_payloads,
    add_copies,
    add_deliveries,
    add_order,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from outbox.core.model.message_format import FormatName
    from outbox_devtools.conformance.suite import ConformanceCase


def cases(
    secret: str,
    endpoint_id: UUID,
    clock: Callable[[], float],
    *,
    other_secret: str,
    batches: bool = False,
    binary: bool = False,
    header_prefix: str = DEFAULT_PREFIX,
    format_name: FormatName = "envelope",
) -> tuple[ConformanceCase, ...]:
    """Build all cases for a receiver.

    Args:
        secret: the receiver's secret.
        endpoint_id: seed of unique lane names and event ids.
        clock: returns epoch seconds.
        other_secret: a secret that the receiver does not have.
        batches: include the cases for batches.
        binary: include the case for payloads that are not JSON.
        header_prefix: begins the names of the headers that describe a delivery.
        format_name: the endpoint's format.

    Raises:
        UsageError: a secret is invalid, or the format has no batches.
    """
    if batches and format_name in UNBATCHED:
        raise UsageError(f"--batches: the format {format_name} has one delivery per request")
    ids = (uuid5(endpoint_id, str(n)) for n in count())
    suite = Suite(secret, other_secret, endpoint_id, clock, ids, header_prefix, format_name)
    for add_cases in (
        add_deliveries,
        add_copies,
        add_order,
        add_signatures,
        add_contradictions,
        add_bodies,
    ):
        add_cases(suite)
    if suite.is_metadata_in_body:
        add_malformed_bodies(suite)
    else:
        add_metadata(suite)
    if binary:
        add_binary_payloads(suite)
    if batches:
        add_batches(suite)
    return tuple(suite.cases)
