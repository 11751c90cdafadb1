"""`AsyncReceiver`: the request pipeline on asyncio; see `outbox.receiver.pipeline`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from outbox.drivers.blocking import resolve
from outbox.drivers.databases import async_transactions
from outbox.receiver.decisions import HELD_MAX, HOLD_S, Gaps
from outbox.receiver.errors import Busy
from outbox.receiver.pipeline import NOT_FETCHABLE_YET, ReceiverBase
from outbox.receiver.processing import NotRecorded
from outbox.receiver.reorder_buffer import ReorderBuffer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox.receiver.catch_up import CatchUpResult
    from outbox.receiver.fetch import DeliverySource, LanePage, LaneProgress, PageItem
    from outbox.receiver.inbox.process import DeliveryResult
    from outbox.receiver.message import Message
    from outbox.receiver.requests import Request, Response

HELD_POLL_S = 0.25
"""Poll interval of a held request: another process may have received the missing one."""


class AsyncReceiver(ReceiverBase):
    """Receiver for asyncio: idempotent, ordered processing of deliveries.

    Args:
        secrets: the endpoint's secret, `whsec_…`; a list while one is being rotated.
        database: the database of the effects: a pool of asyncpg or psycopg, an engine,
            sessionmaker or scoped session of SQLAlchemy, `MemoryDatabase()`, or a function.
            The function is called for each transaction: it returns one of these, or an async
            context manager which opens a transaction, yields its connection and commits.
        inbox: table prefix and retention; see `Inbox`.
        fetch: where missing deliveries are fetched; required by `Gaps.CATCH_UP` and
            `catch_up`.
        gaps: policy for a delivery when deliveries before it are missing.
        hold_s: how long a request is held with `Gaps.HOLD`, in seconds.
        held_max: requests held at once; more get 503.
        log_requests: insert each signed request into the inbox's `request` table.
        tolerance_s: maximum age of a signature, in seconds.
        header_prefix: prefix of the endpoint's header names, if it is not `X-`; several while
            the endpoint's prefix is being changed.
        formats: the endpoint's format in a list, several while it is being changed; None: any.
        parse: parses the JSON text of a payload when `Message.data` is read; None: orjson, without
            rounding numbers.
        unhandled: what happens to an event whose type has no handler: `refuse` responds 422, and
            the event is a dead letter; `ignore` records it, and it is never processed.
        body_bytes_max: larger bodies get 413.
        in_flight_max: requests processed at once; more get 503.
        on_delivery: called after the commit with each `Message` and its `DeliveryResult`.
        meter_provider: OpenTelemetry MeterProvider; None selects the global one.

    Raises:
        UsageError: an argument is out of range, or the database of an unsupported type.
    """

    def __init__(
        self,
        secrets: str | Sequence[str],
        database: Any,
        *,
        hold_s: float = HOLD_S,
        held_max: int = HELD_MAX,
        **options: Any,
    ) -> None:
        creation_lock = asyncio.Lock()
        super().__init__(secrets, async_transactions(database), lambda: creation_lock, **options)
        self._hold_s = hold_s
        self._reorder_buffer = ReorderBuffer(held_max)

    async def start(self) -> None:
        """Create the missing tables; otherwise the first request does so."""
        await self._create_tables()

    async def handle(self, request: Request) -> Response:
        """Process a request and return its response; never raises for a bad request."""
        return await self._handle(request)

    async def catch_up(self, lane: str | None = None) -> list[CatchUpResult]:
        """Fetch and process the missing deliveries of one lane, or of all lanes.

        Call it when a receiver starts, especially after a restore from a backup.  Fetched
        deliveries are processed in order and once, also while new ones arrive.  It does
        nothing for a receiver whose inbox is empty.

        Args:
            lane: the lane's name; None selects all lanes that are behind.

        Returns:
            One result per lane that was behind.

        Raises:
            CannotFetch: the relay cannot be reached, or rejected the request.
            UsageError: the receiver was created without `fetch=`.
        """
        return await self._catch_up(lane)

    async def fetch_payload(self, message: Message) -> Any:
        """Fetch the payload of a thin message, also while its handler runs.

        Raises:
            CannotFetch: the relay cannot be reached, rejected the request, or has erased the
                event.
            UsageError: the receiver was created without `fetch=`.
        """
        return await self._fetch_payload(message)

    async def _delivery(self, fetch: DeliverySource, lane: str, sequence: int) -> PageItem:
        return await fetch.delivery_async(lane, sequence)

    async def _call(self, handler: Callable[..., Any], *arguments: Any) -> None:
        await resolve(handler(*arguments))

    async def _lanes(self, fetch: DeliverySource) -> list[LaneProgress]:
        return [progress async for progress in fetch.lanes_async()]

    async def _page(self, fetch: DeliverySource, lane: str, after: int) -> LanePage:
        return await fetch.page_async(lane, after)

    def _committed(self, message: Message) -> None:
        self._reorder_buffer.received(message.lane, message.sequence)

    async def _receive(self, message: Message) -> DeliveryResult:
        """Process a delivery; hold its request while the policy requires missing ones before it."""
        if self._gaps is Gaps.REPORT:
            return await self._process(message, gaps=True)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._hold_s
        while True:
            with self._reorder_buffer.hold(message.lane, message.previous_sequence) as wait_until:
                try:
                    too_late = self._gaps is Gaps.HOLD and loop.time() >= ends_at
                    return await self._process(message, gaps=too_late)
                except NotRecorded:
                    if self._gaps is Gaps.CATCH_UP:
                        if await self._catch_up_before(message):
                            return await self._process(message, gaps=True)
                        if loop.time() >= ends_at:
                            raise Busy(NOT_FETCHABLE_YET) from None
                    with self._rules.not_in_flight():
                        await wait_until(min(ends_at, loop.time() + HELD_POLL_S))
