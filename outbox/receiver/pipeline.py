"""Request pipeline shared by `AsyncReceiver` and `Receiver`.

1. verify the signature, and that headers and body agree;
2. open a transaction and record the delivery: lock its lane, look up and insert its
   sequence number and its `X-Delivery`;
3. if it is new, run the handlers in the same transaction;
4. commit, and only then respond 2xx.

An error before the commit rolls everything back, and the sender retries.

The deliveries of a batch are processed in one transaction.  If one fails, the transaction is
rolled back and each delivery is processed in its own transaction, up to the one that fails;
X-Accepted-Through reports how far that got.  A batch that contains a replay from another
lane is always processed one by one, because of the lock order (`can_share_transaction`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.pattern import parse as parse_pattern
from outbox.errors import UsageError
from outbox.receiver.decisions import Gaps, ReceiverRules, ReceiverTotals, parse_gaps
from outbox.receiver.inbox.inbox import Inbox
from outbox.receiver.requests import RequestOutcome, Response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    from outbox.receiver.fetch import DeliverySource
    from outbox.receiver.inbox.process import CheckpointComparison
    from outbox.receiver.message import Message

    Handler = TypeVar("Handler", bound=Callable[..., Any])


CANCELLED_RESPONSE = Response(RequestOutcome.FAILED, 500, "the request was cancelled")
EXPIRE_STEPS_MAX = 20
FETCH_UNAVAILABLE = "the missing deliveries before it cannot be fetched now"
NOT_FETCHABLE_YET = "deliveries acknowledged a moment ago cannot be fetched yet"


class EarlyDelivery(Exception):
    """Rolls back a delivery because deliveries before it are missing."""


def can_share_transaction(messages: Sequence[Message]) -> bool:
    """Whether a batch may be processed in one transaction.

    Not with a replay from another lane: it also locks that lane, and the global lock order
    (lanes by name) holds only if the transaction has no lock yet.
    """
    of_other_lanes = (m for m in messages if m.replay_of and m.replay_of[0] != m.lane)
    return len(messages) > 1 and next(of_other_lanes, None) is None


class BatchSplit(Exception):
    """Rolls back a batch that has to be processed one delivery at a time."""


class ReceiverBase:
    """Configuration and registration common to both receivers."""

    def __init__(
        self,
        secrets: str | Sequence[str],
        *,
        inbox: Inbox | None = None,
        fetch: DeliverySource | None = None,
        gaps: Gaps = Gaps.REPORT,
        log_requests: bool = False,
        **rules: Any,
    ) -> None:
        gaps = parse_gaps(gaps)
        if gaps is Gaps.CATCH_UP and fetch is None:
            raise UsageError("fetch: Gaps.CATCH_UP needs fetch=FetchClient(url, token)")
        self.inbox = inbox or Inbox()
        self._fetch = fetch
        self._gaps = gaps
        self._rules = ReceiverRules(secrets, **rules)
        self._log_requests = log_requests
        self._is_ready = False
        # Lanes being caught up because of a checkpoint; it can outlast the sender's time-out.
        self._fetching: set[str] = set()

    @property
    def totals(self) -> ReceiverTotals:
        """Counters since the receiver was created."""
        return self._rules.totals

    @property
    def body_bytes_max(self) -> int:
        """Largest request body accepted, in bytes."""
        return self._rules.body_bytes_max

    def _lanes_to_fetch(self, compared: CheckpointComparison) -> Iterator[str]:
        """Yield the lanes to catch up after a checkpoint, unless a catch-up is running."""
        if self._gaps is Gaps.CATCH_UP:
            for lane in compared.missing:
                if lane not in self._fetching:
                    self._fetching.add(lane)
                    yield lane

    def _require_fetch_client(self) -> DeliverySource:
        if self._fetch is None:
            raise UsageError("fetch: catching up needs fetch=FetchClient(url, token)")
        return self._fetch

    def on(self, pattern: str) -> Callable[[Handler], Handler]:
        """Register a handler for event types: `order.paid`, `order.*`, `**`.

        The handler is called with the `Message` and the connection whose transaction
        records the delivery.  An exception rolls back both: `Refuse` makes the event a
        dead letter (422), `Busy` postpones it (503), any other is retried (500).

        Args:
            pattern: dot-separated; `*` is one segment, a last `**` one or more.

        Raises:
            UsageError: the pattern is invalid, or the handler does not fit this receiver.
        """
        types = parse_pattern(pattern)

        def add(handler: Handler) -> Handler:
            self._check_handler(handler)
            self._rules.handlers.add(types, handler)
            return handler

        return add

    def on_foreign(self, handler: Handler) -> Handler:
        """Register a handler for requests of other Standard Webhooks senders.

        It is called with the `Verified` request, its body and the connection.  These
        requests have no lanes, so they are deduplicated but not checked for order.
        """
        self._check_handler(handler)
        self._rules.foreign = handler
        return handler

    def _check_handler(self, handler: Callable[..., Any]) -> None:
        """Raise UsageError if this receiver cannot call the handler."""
