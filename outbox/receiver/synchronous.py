"""`Receiver`: the request pipeline in threads; see `outbox.receiver.pipeline`."""

from __future__ import annotations

import inspect
import threading
from typing import TYPE_CHECKING, Any

from outbox.drivers.blocking import as_async, run
from outbox.drivers.databases import transactions
from outbox.errors import UsageError
from outbox.receiver.decisions import Gaps
from outbox.receiver.handlers import is_coroutine_function
from outbox.receiver.pipeline import ReceiverBase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox.receiver.catch_up import CatchUpResult
    from outbox.receiver.fetch import DeliverySource, LanePage, LaneProgress, PageItem
    from outbox.receiver.message import Message
    from outbox.receiver.requests import Request, Response


class Receiver(ReceiverBase):
    """Receiver for threads: for Flask, Django, or SQLite.

    Args:
        secrets: the endpoint's secret, `whsec_…`; a list while one is being rotated.
        database: the database of the effects: a `ConnectionPool` of psycopg_pool, a
            `ThreadedConnectionPool` of psycopg2, an engine, sessionmaker or scoped session of
            SQLAlchemy, `django.db.connection`, the path of a SQLite file, `MemoryDatabase()`,
            or a function.  The function is called for each transaction: it returns one of
            these, or a context manager which opens a transaction, yields its connection and
            commits.
        options: those of `AsyncReceiver` except `hold_s`, `held_max` and `Gaps.HOLD`,
            because a held request would block a thread.

    Raises:
        UsageError: an argument is out of range, or the database of an unsupported type.
    """

    def __init__(self, secrets: str | Sequence[str], database: Any, **options: Any) -> None:
        creation_lock = threading.Lock()
        begin = transactions(database)
        super().__init__(
            secrets, lambda: as_async(begin()), lambda: as_async(creation_lock), **options
        )
        if self._gaps is Gaps.HOLD:
            raise UsageError("gaps: HOLD would block a thread; use AsyncReceiver, or CATCH_UP")

    def start(self) -> None:
        """Create the missing tables; otherwise the first request does so."""
        run(self._create_tables())

    def handle(self, request: Request) -> Response:
        """Process a request and return its response; never raises for a bad request."""
        return run(self._handle(request))

    def catch_up(self, lane: str | None = None) -> list[CatchUpResult]:
        """Fetch and process missing deliveries; see `AsyncReceiver.catch_up`.

        Raises:
            CannotFetch: the relay cannot be reached, or rejected the request.
            UsageError: the receiver was created without `fetch=`.
        """
        return run(self._catch_up(lane))

    def fetch_payload(self, message: Message) -> Any:
        """Fetch the payload of a thin message; see `AsyncReceiver.fetch_payload`.

        Raises:
            CannotFetch: the relay cannot be reached, rejected the request, or has erased the
                event.
            UsageError: the receiver was created without `fetch=`.
        """
        return run(self._fetch_payload(message))

    async def _delivery(self, fetch: DeliverySource, lane: str, sequence: int) -> PageItem:
        return fetch.delivery(lane, sequence)

    def _check_handler(self, handler: Callable[..., Any], parameters: Sequence[str]) -> None:
        super()._check_handler(handler, parameters)
        if is_coroutine_function(handler):
            raise UsageError("the handler is a coroutine function: use AsyncReceiver")

    async def _call(self, handler: Callable[..., Any], *arguments: Any) -> None:
        done = handler(*arguments)
        if inspect.isawaitable(done):
            if inspect.iscoroutine(done):
                done.close()
            raise UsageError("a handler returned a coroutine: use AsyncReceiver")

    async def _lanes(self, fetch: DeliverySource) -> list[LaneProgress]:
        return list(fetch.lanes())

    async def _page(self, fetch: DeliverySource, lane: str, after: int) -> LanePage:
        return fetch.page(lane, after)
