"""The dispatcher: moves deliveries out of the lanes that this replica owns.

A lane that has something to do is *active*: one task asks it what to do next
and does it, until it has to wait for rows, for a time, or for news.  All
reading goes through one reader, so that a thousand lanes that run dry together
cost a few queries.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import structlog

from outbox.core.answer import Verdict, classify, retry_after_s
from outbox.core.lane import Lane
from outbox.core.request import Delivery, prepare
from outbox.core.steps import Fetch, Record, Send, Wait
from outbox.store.records import Fenced
from outbox.transport.port import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from uuid import UUID

    from outbox.core.answer import Answer
    from outbox.core.request import Prepared
    from outbox.core.steps import Gone
    from outbox.relay.recorder import Recorder
    from outbox.store.lanes import Endpoint, LaneStore, LoadedLane
    from outbox.transport.port import Transport

log = structlog.get_logger("outbox.dispatcher")

ROWS_PER_LANE = 32
BYTES_PER_LANE = 512 << 10
LANES_PER_READ = 64


class OwnedLane:
    """A lane in this replica's hands: its state, and how to reach its endpoint."""

    __slots__ = ("endpoint", "epoch", "loaded", "machine", "prepared", "stopped", "task", "timer")

    def __init__(self, loaded: LoadedLane, machine: Lane, endpoint: Endpoint, epoch: int) -> None:
        self.loaded = loaded
        self.machine = machine
        self.endpoint = endpoint
        self.epoch = epoch
        self.stopped = False
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        # Body and headers of the head, kept over its attempts.
        self.prepared: tuple[int, Prepared] | None = None

    def clear_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Dispatcher:
    """Delivers what the lanes that it was given owe.

    Args:
        store: for the reader alone.
        lease_left_s: how long this replica may still send.
        in_flight_max: requests at one time, over all lanes.
        on_quiet: called when a lane that was stopped has nothing in flight
            any more.
        now: epoch seconds.
        rng: for the jitter of retries.
    """

    def __init__(
        self,
        store: LaneStore,
        recorder: Recorder,
        transport: Transport,
        lease_left_s: Callable[[], float],
        in_flight_max: int,
        on_quiet: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._recorder = recorder
        self._transport = transport
        self._lease_left_s = lease_left_s
        self._slots = asyncio.Semaphore(in_flight_max)
        self._on_quiet = on_quiet
        self._now = now
        self._rng = rng or random.Random()  # noqa: S311 (jitter needs no secrecy)
        self._lanes: dict[int, OwnedLane] = {}
        self._of_endpoint: dict[UUID, list[OwnedLane]] = {}
        self._dry: dict[OwnedLane, Fetch] = {}
        self._dry_event = asyncio.Event()
        # None before it runs, and as soon as it is ending.
        self._tasks: asyncio.TaskGroup | None = None

    # ---------------------------------------------------------- what is owned

    def lanes(self) -> Iterator[tuple[Lane, int]]:
        """Every owned lane with its epoch."""
        for lane in self._lanes.values():
            yield lane.machine, lane.epoch

    def endpoints(self) -> list[Endpoint]:
        """Every owned endpoint."""
        return [lanes[0].endpoint for lanes in self._of_endpoint.values()]

    def owned(self, lane_ids: Iterable[int]) -> list[int]:
        """Those of the lanes that this replica owns."""
        return [lane_id for lane_id in lane_ids if lane_id in self._lanes]

    def adopt(
        self,
        loaded: Iterable[LoadedLane],
        endpoints: Mapping[UUID, Endpoint],
        epochs: Mapping[UUID, int],
        sent_through_batch: int,
    ) -> None:
        """Begin with lanes that were just claimed.

        Args:
            sent_through_batch: deliveries up to this batch may have been sent
                by the last owner.
        """
        for lane in loaded:
            machine = Lane(lane.id, lane.progress, lane.tail, lane.last_seq, sent_through_batch)
            owned = OwnedLane(lane, machine, endpoints[lane.endpoint_id], epochs[lane.endpoint_id])
            self._lanes[lane.id] = owned
            self._of_endpoint.setdefault(lane.endpoint_id, []).append(owned)
            if machine.owed:
                self._activate(owned)

    def update(self, endpoints: Iterable[Endpoint]) -> None:
        """The endpoints' settings were changed; one that was unusable may go on."""
        for endpoint in endpoints:
            for lane in self._of_endpoint.get(endpoint.id, ()):
                lane.endpoint = endpoint
                if lane.machine.owed:
                    self._activate(lane)

    def stop(self, endpoint_ids: Iterable[UUID]) -> None:
        """Send nothing more to the endpoints; what is in flight still ends."""
        for lane in self._lanes_of(endpoint_ids):
            lane.stopped = True
            lane.machine.stop()
            lane.clear_timer()

    def is_quiet(self, endpoint_id: UUID) -> bool:
        """Whether nothing of a stopped endpoint is in flight any more."""
        return all(lane.task is None for lane in self._lanes_of([endpoint_id]))

    async def quiet(self, endpoint_ids: Iterable[UUID]) -> None:
        """Wait until nothing of stopped endpoints is in flight any more."""
        tasks = [lane.task for lane in self._lanes_of(endpoint_ids) if lane.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def drop(self, endpoint_ids: Iterable[UUID]) -> list[Lane]:
        """Forget endpoints whose lanes are quiet; returns their lanes."""
        dropped: list[Lane] = []
        for endpoint_id in endpoint_ids:
            for lane in self._of_endpoint.pop(endpoint_id, ()):
                del self._lanes[lane.loaded.id]
                dropped.append(lane.machine)
        return dropped

    def _lanes_of(self, endpoint_ids: Iterable[UUID]) -> list[OwnedLane]:
        return [lane for e in endpoint_ids for lane in self._of_endpoint.get(e, ())]

    def offer(self, last_seqs: Mapping[int, int]) -> None:
        """Lanes were given deliveries up to these numbers."""
        for lane_id, last_seq in last_seqs.items():
            lane = self._lanes.get(lane_id)
            if lane is not None:
                lane.machine.offered(last_seq)
                self._activate(lane)

    # ------------------------------------------------------------- delivering

    async def run(self) -> None:
        """Deliver until cancelled, which closes what is in flight.

        Raises:
            Fenced: the lease ran out, or another replica took over.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for lane in self._lanes.values():
                    self._activate(lane)
                try:
                    await self._read()
                finally:
                    self._tasks = None
        finally:
            for lane in self._lanes.values():
                lane.clear_timer()

    def _activate(self, lane: OwnedLane) -> None:
        may = lane.endpoint.usable and not lane.stopped
        if may and lane.task is None and self._tasks is not None:
            lane.clear_timer()
            lane.task = self._tasks.create_task(self._work(lane))

    async def _work(self, lane: OwnedLane) -> None:
        """Do what the lane says until it has to wait."""
        try:
            while lane.endpoint.usable:
                match lane.machine.next(self._now()):
                    case Send() as send:
                        await self._send(lane, send)
                    case Record() as record:
                        await self._recorder.write(lane.machine, lane.epoch, record)
                        self._tell_given_up(lane, record)
                    case Fetch() as fetch:
                        self._want(lane, fetch)
                        return
                    case Wait(until=until):
                        delay_s = max(until - self._now(), 0.0)
                        loop = asyncio.get_running_loop()
                        lane.timer = loop.call_later(delay_s, self._activate, lane)
                        return
                    case None:
                        return
        except BaseException:
            # The group is ending, and takes no more tasks: news is for nobody.
            self._tasks = None
            raise
        finally:
            lane.task = None
            if lane.stopped:
                self._on_quiet()

    async def _send(self, lane: OwnedLane, send: Send) -> None:
        """One attempt, and what follows from its answer."""
        more = lane.machine.fetch()
        if more is not None:
            self._want(lane, more)
        async with self._slots:
            if self._lease_left_s() <= 0:
                raise Fenced
            started_at = self._now()
            answer = await self._transport.send(self._request(lane, send, started_at))
        now = self._now()
        verdict = classify(answer, maybe_sent_before=send.maybe_sent_before)
        record = lane.machine.answered(
            verdict,
            answer,
            lane.endpoint.retry,
            started_at=started_at,
            now=now,
            u=self._rng.random(),
            retry_after_s=retry_after_s(answer.headers, now),
        )
        if not record.urgent:
            self._recorder.add(lane.machine, lane.epoch, record)
            return
        await self._recorder.write(lane.machine, lane.epoch, record)
        if record.dead is None:
            self._tell_failed(lane, send, verdict, answer, record)
        else:
            self._tell_given_up(lane, record)

    def _request(self, lane: OwnedLane, send: Send, started_at: float) -> Request:
        endpoint = lane.endpoint
        if lane.prepared is None or lane.prepared[0] != send.delivery.seq:
            lane.prepared = (send.delivery.seq, prepare(send.delivery, send.previous_seq))
        prepared = lane.prepared[1]
        return Request(
            url=endpoint.url,
            headers=prepared.attempt(send.attempt, int(started_at), endpoint.secrets),
            body=prepared.body,
            connect_timeout_s=endpoint.connect_timeout_s,
            total_timeout_s=endpoint.total_timeout_s,
        )

    # ---------------------------------------------------------------- reading

    def _want(self, lane: OwnedLane, fetch: Fetch) -> None:
        self._dry[lane] = fetch
        self._dry_event.set()

    async def _read(self) -> None:
        while True:
            await self._dry_event.wait()
            wanted = [(lane, self._dry.pop(lane)) for lane in list(self._dry)[:LANES_PER_READ]]
            if not self._dry:
                self._dry_event.clear()
            rows = await self._store.deliveries(
                [lane.loaded for lane, _ in wanted],
                [fetch.floor_batch for _, fetch in wanted],
                [fetch.after_seq for _, fetch in wanted],
                ROWS_PER_LANE,
                BYTES_PER_LANE,
            )
            for lane, fetch in wanted:
                following = _following(fetch.after_seq, rows[lane.loaded.id])
                lane.machine.fetched(following)
                if following:
                    self._activate(lane)
                elif not lane.stopped:
                    log.error(
                        "a lane owes numbers that are not there; run outbox verify",
                        lane=lane.loaded.name,
                        after=fetch.after_seq,
                    )

    # ---------------------------------------------------------------- telling

    def _tell_failed(
        self, lane: OwnedLane, send: Send, verdict: Verdict, answer: Answer, record: Record
    ) -> None:
        progress = record.progress
        next_at = progress.next_attempt_at if progress is not None else None
        log.warning(
            "attempt failed",
            **self._where(lane, send.delivery.seq),
            attempt=send.attempt,
            status=answer.status,
            failure=answer.failure and answer.failure.value,
            detail=answer.detail or None,
            verdict=verdict.name.lower(),
            retry_in_s=None if next_at is None else round(max(next_at - self._now(), 0.0), 3),
        )

    def _tell_given_up(self, lane: OwnedLane, record: Record) -> None:
        dead = record.dead
        if dead is None:
            return
        delivery = dead.delivery
        log.error(
            "delivery given up",
            **self._where(lane, record.seq),
            reason=dead.reason,
            attempts=dead.attempts,
            event_id=str(delivery.event_id) if isinstance(delivery, Delivery) else None,
        )

    @staticmethod
    def _where(lane: OwnedLane, seq: int) -> dict[str, Any]:
        return {"endpoint": lane.endpoint.name, "lane": lane.loaded.name, "sequence": seq}


def _following(seq: int, rows: Iterable[Delivery | Gone]) -> list[Delivery | Gone]:
    """The rows up to the first hole: what lies behind it must not be sent before it."""
    following: list[Delivery | Gone] = []
    for row in rows:
        if row.seq != seq + len(following) + 1:
            break
        following.append(row)
    return following
