"""One delivery to an endpoint, outside of all lanes: does it work?"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

import orjson

from outbox.core.delivery.batch import accepted_through, prepare_batch
from outbox.core.delivery.message import Delivery, prepare
from outbox.core.model import duration
from outbox.core.model import retry_policy as retry
from outbox.core.model.http_status import GONE
from outbox.core.model.response import Verdict, classify, retry_after_s, summary, without
from outbox.destinations.http.request import Destination, addressed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from outbox.core.delivery.signature import SigningKey
    from outbox.core.model.response import Answer, Headers
    from outbox.core.model.retry_policy import RetryPolicy
    from outbox.destinations.interface import Request, Transport

TYPE = "outbox.test"


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it."""

    endpoint: str
    method: str
    url: str
    answer: Answer
    outcome: str
    """What the relay would make of the answer: delivered, retried, dead_letter or disabled."""
    meaning: str
    """The same as a sentence."""

    @property
    def summary(self) -> dict[str, Any]:
        """What is kept of the answer."""
        return summary(self.answer)

    def as_json(self, answer: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """As programs are told.

        Args:
            answer: what they are told of the answer; the summary, if it is not said.
        """
        told = {"endpoint": self.endpoint, "url": self.url, "outcome": self.outcome}
        return told | dict(self.summary if answer is None else answer)


class Tried(Destination, Protocol):
    """What has to be known of an endpoint to send to it, and to judge its answer."""

    @property
    def id(self) -> UUID: ...
    @property
    def name(self) -> str: ...
    @property
    def headers(self) -> Headers: ...
    @property
    def batch_max(self) -> int | None: ...
    @property
    def retry(self) -> RetryPolicy: ...
    @property
    def retryable(self) -> frozenset[int]: ...
    @property
    def credentials(self) -> Sequence[str]: ...
    def secrets_at(self, now: float) -> Sequence[SigningKey]:
        """What to sign with."""
        ...


async def attempt(transport: Transport, endpoint: Tried, *, total_s_max: float = math.inf) -> Trial:
    """Send one signed delivery of the type `outbox.test`, now and from here.

    Args:
        total_s_max: it is given up after so long, whatever the endpoint's time-out is.
    """
    request = _request(endpoint)
    total_s = min(request.total_timeout_s, total_s_max)
    answer = await transport.send(request._replace(total_timeout_s=total_s))
    answer = without(answer, endpoint.credentials)
    said = _outcome(answer, endpoint)
    return Trial(endpoint.name, endpoint.method, endpoint.url, answer, *said)


def _request(endpoint: Tried) -> Request:
    """A delivery like any other, but for its lane."""
    now = time.time()
    delivery = Delivery(
        endpoint_id=endpoint.id,
        lane=f"{endpoint.id.hex[:12]}-test-{secrets.token_hex(4)}",
        seq=1,
        batch=0,
        # No event has such an id, so no delivery has its X-Delivery.
        outbox_id=-secrets.randbits(62),
        event_id=uuid4(),
        type=TYPE,
        tenant=None,
        key=None,
        published_at=datetime.fromtimestamp(now, UTC),
        expires_at=None,
        payload=orjson.dumps({"test": True, "endpoint": endpoint.name}),
        headers=None,
    )
    if endpoint.batch_max is None:
        prepared = prepare(delivery, 0, lane_ends=True, endpoint_headers=endpoint.headers)
    else:
        prepared = prepare_batch([delivery], 0, lane_ends=True, endpoint_headers=endpoint.headers)
    return addressed(endpoint, prepared, 1, int(now), endpoint.secrets_at(now))


def _outcome(answer: Answer, endpoint: Tried) -> tuple[str, str]:
    """What the relay would make of it: in a word, and as a sentence."""
    verdict = classify(answer, maybe_sent_before=False, retryable=endpoint.retryable)
    in_array = endpoint.batch_max is not None
    # Of the one delivery, which has number 1, it may say that it is not accepted.
    if verdict is Verdict.DELIVERED and in_array and accepted_through(answer.headers, 1, 1) == 0:
        verdict = Verdict.RETRY
    if verdict is Verdict.DELIVERED:
        return "delivered", "delivered"
    if verdict is Verdict.REFUSED:
        if answer.status == GONE:
            return "disabled", "a dead letter, and the endpoint would be disabled"
        return "dead_letter", "a dead letter at once"
    lo, hi = (duration.rounded(s) for s in endpoint.retry.delay_bounds_s(1))
    wait = hi if lo == hi else f"{lo} to {hi}"
    text = f"tried again after {wait} ({retry.describe(endpoint.retry)})"
    held_s: Any = retry_after_s(answer.headers, time.time())
    if held_s:
        text += f"; it asks to be left alone for {duration.rounded(held_s)}"
    return "retried", text
