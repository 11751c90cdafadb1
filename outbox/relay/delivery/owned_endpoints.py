"""What a replica owns: endpoints with their health, and their lanes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from outbox.core.admission.endpoint_queue import Turn
from outbox.core.delivery.batch import prepare_batch
from outbox.core.delivery.circuit_breaker import Health
from outbox.core.delivery.commands import Gate
from outbox.core.delivery.lane import Lane
from outbox.core.delivery.lane_generations import Generations
from outbox.core.delivery.message import prepare
from outbox.destinations.http.request import addressed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from outbox.core.admission.endpoint_queue import Line
    from outbox.core.delivery.commands import Send
    from outbox.core.delivery.message import Prepared
    from outbox.core.delivery.signature import SigningKey
    from outbox.destinations.interface import Request
    from outbox.store.endpoints import Endpoint
    from outbox.store.lanes import LoadedLane
    from outbox.telemetry.meters import EndpointMeters

T = TypeVar("T")


def later(delay_s: float, call: Callable[[T], object], what: T) -> asyncio.TimerHandle:
    """Have something done after some seconds; at once if there are none left."""
    return asyncio.get_running_loop().call_later(max(delay_s, 0.0), call, what)


class Ahead(NamedTuple):
    """The first attempt of a delivery, built while the one before it is out."""

    send: Send
    prepared: Prepared
    at_s: int
    """Signed for this second."""
    keys: list[SigningKey]
    request: Request

    def serves(self, send: Send) -> bool:
        """Whether that is what is sent now: nobody has tried to send it before."""
        was = self.send
        return (
            was.delivery is send.delivery
            and was.previous_seq == send.previous_seq
            and was.lane_ends == send.lane_ends
        )


class OwnedLane:
    """A lane: its state, and the task that works for it."""

    __slots__ = (
        "ahead",
        "home",
        "loaded",
        "machine",
        "payload_bytes",
        "prepared",
        "task",
        "timer",
        "turn",
    )

    def __init__(self, home: OwnedEndpoint, loaded: LoadedLane, sent_through_batch: int) -> None:
        self.home = home
        self.loaded = loaded
        self.machine = Lane(
            loaded.id,
            loaded.progress,
            loaded.tail,
            loaded.last_seq,
            sent_through_batch,
            owed_since=loaded.owed_since,
            blocked=loaded.blocked,
            ended=loaded.ended,
            batch_max=home.endpoint.batch_max,
        )
        self.turn = Turn(home.line)
        # What a payload takes of those that were read last.
        self.payload_bytes = 1
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        # Body and headers of the head, kept over its attempts; not those of several together.
        self.prepared: tuple[int, bool, Prepared] | None = None
        # For when the head is delivered.
        self.ahead: Ahead | None = None

    def gate(self, now: float) -> Gate:
        """What generations and health allow it."""
        if not self.home.generations.may_send(self.loaded.generation):
            return Gate.SHUT
        return self.home.health.ask(self.loaded.id, now)

    @property
    def runs_dry(self) -> bool:
        """It can be sent what it is given, and has nothing left to read."""
        return self.machine.runs_dry and self.home.endpoint.usable

    def request(self, send: Send, started_at: float) -> Request:
        """What an attempt sends, signed for the time at which it starts."""
        endpoint, delivery = self.home.endpoint, send.delivery
        keys = endpoint.secrets_at(started_at)
        known, ahead, self.ahead = self.prepared, self.ahead, None
        if ahead is not None and ahead.serves(send):
            known = self.prepared = delivery.seq, send.lane_ends, ahead.prepared
            if ahead.at_s == int(started_at) and ahead.keys == keys:
                return ahead.request
        if known is None or known[0] != delivery.seq or known[1] != send.lane_ends:
            known = delivery.seq, send.lane_ends, self._prepare(send)
            self.prepared = known if len(send.batch) <= 1 else None
        return addressed(endpoint, known[2], send.attempt, int(started_at), keys)

    def look_ahead(self, now: float) -> None:
        """Build what follows, while a request is out and there is time."""
        send = self.machine.ahead()
        if send is None or self.ahead is not None:
            return
        endpoint, prepared, at_s = self.home.endpoint, self._prepare(send), int(now)
        keys = endpoint.secrets_at(now)
        request = addressed(endpoint, prepared, send.attempt, at_s, keys)
        self.ahead = Ahead(send, prepared, at_s, keys, request)

    def _prepare(self, send: Send) -> Prepared:
        headers, ends = self.home.endpoint.headers, send.lane_ends
        before = send.previous_seq
        if send.batch:
            return prepare_batch(send.batch, before, lane_ends=ends, endpoint_headers=headers)
        return prepare(send.delivery, before, lane_ends=ends, endpoint_headers=headers)

    def clear_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class OwnedEndpoint:
    """An endpoint: its settings, its health and its lanes, all generations together."""

    __slots__ = (
        "endpoint",
        "epoch",
        "generations",
        "health",
        "lanes",
        "line",
        "meters",
        "stopped",
        "timer",
        "told",
        "written",
    )

    def __init__(
        self, endpoint: Endpoint, epoch: int, now: float, meters: EndpointMeters, line: Line
    ) -> None:
        self.endpoint = endpoint
        # Its lanes wait for their turns here.
        self.line = line
        self.meters = meters
        self.epoch = epoch
        self.health = Health(endpoint.health)
        self.health.hold_to(now)
        if endpoint.resumes != endpoint.obeyed:
            self.health.resume(now)
        if endpoint.state == "paused":
            self.health.pause()
        # What operational events tell of it.
        self.told = endpoint.told.hold_to(now)
        # Both as they are on disk.
        self.written = (endpoint.health, endpoint.told)
        self.generations = Generations()
        self.lanes: dict[int, OwnedLane] = {}
        self.stopped = False
        self.timer: asyncio.TimerHandle | None = None

    def add(
        self, loaded: Iterable[LoadedLane], sent_through_batch: int, now: float
    ) -> list[OwnedLane]:
        """Take lanes in, or what was read anew of those that are there."""
        touched: list[OwnedLane] = []
        for each in loaded:
            lane = self.lanes.get(each.id)
            if lane is None:
                lane = self.lanes[each.id] = OwnedLane(self, each, sent_through_batch)
                lane.machine.hold_to(self.endpoint.retry, now)
            elif each.ended:
                # Its counter was read after the change: nothing is added to it.
                lane.machine.end()
                lane.loaded = each
            touched.append(lane)
        self.generations = Generations(
            (lane.loaded.id, lane.loaded.generation)
            for lane in self.lanes.values()
            if lane.loaded.ended and not lane.machine.drained
        )
        return touched

    def change(self, endpoint: Endpoint, now: float) -> None:
        """The settings were changed, or an operator paused or resumed it."""
        was, self.endpoint = self.endpoint, endpoint
        for lane in self.lanes.values():
            lane.prepared = lane.ahead = None
            lane.machine.batch_up_to(endpoint.batch_max)
        if endpoint.state == "paused":
            self.health.pause()
        elif was.resumes != endpoint.resumes:
            self.health.resume(now)

    def hold_to(self, now: float) -> None:
        """The clock was set, maybe back."""
        self.health.hold_to(now)
        self.told = self.told.hold_to(now)
        for lane in self.lanes.values():
            lane.machine.hold_to(self.endpoint.retry, now)

    def clear_timers(self) -> None:
        for lane in self.lanes.values():
            lane.clear_timer()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
