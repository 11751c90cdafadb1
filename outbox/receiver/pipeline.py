"""What `AsyncReceiver` and `Receiver` have in common: from a request to its answer.

1. verify the signature, and that headers and body agree;
2. open a transaction, and take the delivery: its lane is locked, its number and its
   `X-Delivery` are looked up and written down;
3. if it is fresh, let the handlers do their work in the same transaction;
4. commit, and only then answer 2xx.

Whatever fails before the commit leaves nothing behind, and the sender tries again.

Those of a batch are taken in one transaction.  When one of them fails, all of it is undone,
and each is taken in a transaction of its own, up to the one that fails; the answer says how
far that came.  So is each when one of them stands for a number of another lane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.pattern import parse as parse_pattern
from outbox.errors import UsageError
from outbox.receiver.decisions import Gaps, ReceiverTotals, Rules, choice
from outbox.receiver.inbox.inbox import Inbox
from outbox.receiver.requests import Answer, Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    from outbox.receiver.fetch import Source
    from outbox.receiver.inbox.process import Compared
    from outbox.receiver.message import Message

    Handler = TypeVar("Handler", bound=Callable[..., Any])


NOT_FINISHED = Answer(Ended.FAILED, 500, "the request was called off")
EXPIRE_STEPS_MAX = 20
NO_FETCH = "what is missing before it cannot be fetched just now"
NOT_YET = "what was acknowledged a moment ago cannot be fetched yet"


class Early(Exception):
    """Rolls back: what should come before is not here yet."""


def go_together(messages: Sequence[Message]) -> bool:
    """Whether one transaction may take all of them.

    Not with a replay from another lane: that lane is locked, too, and in the same order by
    everybody only if nothing is locked before.
    """
    of_other_lanes = (m for m in messages if m.replay_of and m.replay_of[0] != m.lane)
    return len(messages) > 1 and next(of_other_lanes, None) is None


class Apart(Exception):
    """Rolls back: one of a batch needs more than to be processed."""


class Common:
    def __init__(
        self,
        secrets: str | Sequence[str],
        *,
        inbox: Inbox | None = None,
        fetch: Source | None = None,
        gaps: Gaps = Gaps.TELL,
        log_requests: bool = False,
        **rules: Any,
    ) -> None:
        gaps = choice(gaps)
        if gaps is Gaps.CATCH_UP and fetch is None:
            raise UsageError("fetch: to catch up a receiver has to know where, and its token")
        self.inbox = inbox or Inbox()
        self._fetch = fetch
        self._gaps = gaps
        self._rules = Rules(secrets, **rules)
        self._log_requests = log_requests
        self._is_ready = False
        # Lanes that a checkpoint made it catch up with, which can take longer than a sender waits.
        self._fetching: set[str] = set()

    @property
    def totals(self) -> ReceiverTotals:
        """What came since this receiver began."""
        return self._rules.totals

    @property
    def body_bytes_max(self) -> int:
        """An adapter need not read more."""
        return self._rules.body_bytes_max

    def _to_fetch(self, compared: Compared) -> Iterator[str]:
        """Lanes to catch up with because of a checkpoint; not while that is under way."""
        if self._gaps is Gaps.CATCH_UP:
            for lane in compared.missing:
                if lane not in self._fetching:
                    self._fetching.add(lane)
                    yield lane

    def _where_to_fetch(self) -> Source:
        if self._fetch is None:
            raise UsageError("fetch: this receiver does not know where to fetch what is missing")
        return self._fetch

    def on(self, pattern: str) -> Callable[[Handler], Handler]:
        """Let a function process what the pattern stands for: `order.paid`, `order.*`, `**`.

        It is called with the `Message` and the connection, in whose transaction the
        delivery is taken.  What it raises rolls both back: `Refuse` for ever, `Busy`
        for a moment, anything else to be tried again later.

        Raises:
            UsageError: the pattern is none.
        """
        wanted = parse_pattern(pattern)

        def add(handler: Handler) -> Handler:
            self._require_fit(handler)
            self._rules.handlers.add(wanted, handler)
            return handler

        return add

    def on_foreign(self, handler: Handler) -> Handler:
        """Let a function process requests of other Standard Webhooks senders.

        It is called with the `Verified` request, its body and the connection.  They have
        no lanes, so only copies are told.
        """
        self._require_fit(handler)
        self._rules.foreign = handler
        return handler

    def _require_fit(self, handler: Callable[..., Any]) -> None:
        """Whether this receiver can call it."""
