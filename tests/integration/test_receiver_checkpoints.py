"""Receiver checkpoints: the last sequence number of each lane, so that a receiver detects a lost
tail.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.delivery.receiver_checkpoint import LANES_MAX, LaneMark, parse
from outbox.core.model.headers import NO_HEADERS
from outbox.core.model.response import AttemptResult, Failure
from outbox.operations import endpoint_changes, endpoint_states
from outbox.receiver import AsyncReceiver, Gaps, MemoryDatabase, Request, verify
from outbox.relay.delivery.receiver_checkpoints import (
    MARKS_MAX,
    READ_MAX,
    SENDING_MAX,
    CheckpointSender,
)
from tests.integration.test_catch_up import Wire, fetchable
from tests.support import ranges
from tests.support.relay import (
    OK,
    REFUSED,
    Network,
    add_endpoint,
    all_ended,
    exceptions,
    publish,
    running,
)
from tests.support.virtual_time import run_virtual
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major


@pytest.fixture
async def db(database: Database) -> AsyncIterator[Connection[Any]]:
    async with database.connection(server_settings={"search_path": "relay"}) as connection:
        yield connection


class CheckpointNetwork(Network):
    """A network that records checkpoints separately."""

    def __init__(self, script: Any = lambda _: OK) -> None:
        super().__init__(script)
        self.checkpoints: list[Any] = []
        self.status = 200

    async def _send(self, request: Any) -> AttemptResult:
        if parse(request.body) is None:
            return await super()._send(request)
        self.checkpoints.append(request)
        return AttemptResult.completed(self.status, 0.001)

    def last(self) -> dict[str, int]:
        marks = parse(self.checkpoints[-1].body) if self.checkpoints else ()
        return {mark.lane.partition("-")[2]: mark.sequence for mark in marks or ()}

    def checkpoints_of(self, url: str) -> int:
        return sum(request.recipient.url == url for request in self.checkpoints)


async def test_a_checkpoint_names_the_last_delivered_sequence_number_of_every_lane(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database, lanes=1, checkpoint_every_s=1.0)
    network = CheckpointNetwork(lambda sent: REFUSED if sent.body.get("data") == "bad" else OK)
    async with running(database, network):
        await publish(database, 1, 2, "bad", key="k")
        await until(lambda: network.last() == {"1-0": 2}, 20, "the first lane")
        await ranges.change_lanes(db, made.id, 2)
        await publish(database, 3, 4, key="k")
        await all_ended(database)
        # The ended lane is included: nothing else reveals a loss there.
        await until(lambda: sorted(network.last().values()) == [2, 2], 20, "both")
        assert sorted(network.last()) in (["1-0", "2-0"], ["1-0", "2-1"])
    sent = network.checkpoints[-1]
    verified = verify(sent.headers, sent.body, made.secret)
    assert not verified.messages
    assert verified.checkpoint == parse(sent.body)
    assert len({each.body for each in network.checkpoints}) == len(network.checkpoints)
    assert await exceptions(database) == {}


async def test_checkpoints_go_only_to_active_endpoints_that_enable_them(
    database: Database, db: Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c", "never"):
        every_s = None if name == "never" else 1.0
        url = f"https://{name}.example/"
        await add_endpoint(database, name, url=url, checkpoint_every_s=every_s)
    network = CheckpointNetwork()
    a, b, c, never = (f"https://{name}.example/" for name in ("a", "b", "c", "never"))
    async with running(database, network):
        await publish(database, 1)
        await until(lambda: all(map(network.checkpoints_of, (a, b, c))), 20, "three that asked")
        await endpoint_states.pause_endpoints(db, "relay", ["a"], actor="test")
        await endpoint_changes.update_endpoint(db, "relay", "b", without_checkpoints, actor="test")
        await until(lambda: "endpoint is paused" in capsys.readouterr().out, 20, "the pause")
        network.checkpoints.clear()
        await until(lambda: network.checkpoints_of(c) >= 2, 20, "two more")
    # One request may have been in flight.
    assert (
        network.checkpoints_of(a) + network.checkpoints_of(b) + network.checkpoints_of(never) <= 1
    )


def without_checkpoints(settings: Any) -> Any:
    return replace(settings, checkpoint_every_s=None)


async def test_a_checkpoint_names_dead_lettered_sequence_numbers(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database, checkpoint_every_s=1.0)
    network = CheckpointNetwork(lambda sent: REFUSED if sent.seq in (2, 3, 6) else OK)
    async with running(database, network):
        await publish(database, *range(1, 7), key="k")
        await all_ended(database)
        await until(lambda: network.last() == {"1-0": 5}, 20, "a checkpoint")
    (mark,) = parse(network.checkpoints[-1].body) or ()
    assert mark == LaneMark(f"{made.id.hex[:12]}-1-0", 1, 5, ((2, 2), (3, 3)))


class ManyReceivers(Network):
    """Receivers of checkpoints in virtual time; those named `stuck-…` never respond."""

    def __init__(self, lanes: int = 1) -> None:
        super().__init__()
        self.lanes = lanes
        # The largest number of concurrent requests.
        self.read: list[int] = []
        # The times of the checkpoints of each receiver.
        self.checkpoint_times: dict[str, list[float]] = {}
        self.open = self.most = 0

    async def send(self, request: Any, following: object = None) -> AttemptResult:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            clock = asyncio.get_running_loop().time
            self.checkpoint_times.setdefault(request.recipient.url, []).append(clock())
            never = "stuck" in request.recipient.url
            await asyncio.sleep(request.recipient.timeout_s if never else 0.02)
            return AttemptResult.failed(Failure.TIMEOUT, "late", 10.0) if never else OK
        finally:
            self.open -= 1

    async def marks(self, ids: Any) -> dict[Any, list[LaneMark]]:
        self.read.append(len(ids))
        return {i: [LaneMark("a-1-0", 1, 1)] * self.lanes for i in ids}


def run_for(
    network: ManyReceivers, seconds: float, owned: Callable[[float], list[Any]]
) -> CheckpointSender:
    """Run for some seconds with the endpoints owned at each time."""

    async def run() -> CheckpointSender:
        sender = CheckpointSender(network, network, lambda: 0.0)  # type: ignore[arg-type]
        clock = asyncio.get_running_loop().time
        sending = asyncio.ensure_future(sender.run())
        while clock() < seconds:
            await sender.send_due(owned(clock()))
            await asyncio.sleep(min(sender.next_due_at - clock(), 1.0))
        # Let the last requests end.
        await sender.send_due([])
        await asyncio.sleep(60)
        sending.cancel()
        await asyncio.wait([sending])
        return sender

    return run_virtual(run())


def gaps_s(network: ManyReceivers, seconds: float) -> list[float]:
    """The longest gap between checkpoints of each responding receiver, in seconds."""
    return [
        max(b - a for a, b in pairwise([0.0, *times, seconds]))
        for url, times in network.checkpoint_times.items()
        if "stuck" not in url
    ]


def test_a_hanging_receiver_does_not_delay_the_checkpoints_of_others() -> None:
    """The hanging receivers may belong to one tenant or to none."""
    for tenant in ("mallory", None):
        network = ManyReceivers()
        stuck = [wanting(n, f"stuck-{n}", 1.0, tenant) for n in range(400)]
        good = [wanting(10_000 + n, f"good-{n}", 10.0, f"tenant-{n % 3}") for n in range(30)]
        sender = run_for(network, 120, lambda _, owned=[*stuck, *good]: owned)  # type: ignore[misc]
        gaps = gaps_s(network, 120)
        assert len(gaps) == len(good), tenant
        assert max(gaps) < 20, tenant
        assert network.most <= SENDING_MAX
        assert sender._admission.scheduler.open == sender._admission.scheduler.waiting == 0
        assert not sender._admission.scheduler._tenants


def test_a_removed_endpoint_leaves_the_checkpoint_queue() -> None:
    network = ManyReceivers()
    stuck = [wanting(n, f"stuck-{n}", 1.0) for n in range(100)]
    run_for(network, 30, lambda at: stuck if at < 5 else [])
    assert max(max(times) for times in network.checkpoint_times.values()) < 6


@pytest.mark.parametrize("tenant", ["mallory", None])
def test_few_waiting_checkpoints_are_held_in_memory(tenant: str | None) -> None:
    lanes = LANES_MAX // 2
    network = ManyReceivers(lanes)
    stuck = [wanting(n, f"stuck-{n}", 1.0, tenant) for n in range(200)]
    good = wanting(1000, "good", 10.0, "acme")
    run_for(network, 60, lambda _: [*stuck, good])
    begun = sum(map(len, network.checkpoint_times.values()))
    assert max(network.read) <= READ_MAX
    waiting = sum(network.read) - begun
    assert begun > 100
    assert waiting * lanes <= MARKS_MAX + READ_MAX * lanes
    assert max(gaps_s(network, 60)) < 20


def wanting(n: int, name: str, every_s: float, tenant: str | None = None) -> Any:
    endpoint = SimpleNamespace(
        id=UUID(int=n),
        name=name,
        tenant=tenant,
        url=f"https://{name}.example/",
        method="POST",
        headers=NO_HEADERS,
        state="active",
        usable=True,
        checkpoint_every_s=every_s,
        connect_timeout_s=5.0,
        timeout_s=15.0,
        networks=(),
        ca=None,
        identity=None,
        secrets_at=lambda _: [bytes(32)],
    )
    breaker = SimpleNamespace(state=BreakerState.HEALTHY)
    return SimpleNamespace(endpoint=endpoint, stopped=False, breaker=breaker)


async def test_a_rejected_checkpoint_is_logged_once_and_affects_no_delivery(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    await add_endpoint(database, checkpoint_every_s=1.0)
    network = CheckpointNetwork()
    network.status = 500
    async with running(database, network):
        await publish(database, 1)
        await until(lambda: len(network.checkpoints) >= 2, 20, "two of them")
        await publish(database, 2)
        await all_ended(database)
        network.status = 200
        before = len(network.checkpoints)
        await until(lambda: len(network.checkpoints) >= before + 2, 20, "two more")
    assert network.data() == [1, 2]
    output = capsys.readouterr().out
    assert output.count("receiver rejected a checkpoint") == 1
    assert output.count("receiver accepts checkpoints again") == 1
    assert await exceptions(database) == {}


@pytest.mark.parametrize("gaps", [Gaps.REPORT, Gaps.CATCH_UP])
async def test_a_checkpoint_reveals_a_lost_tail_and_can_trigger_a_fetch(
    database: Database, gaps: Gaps, caplog: pytest.LogCaptureFixture
) -> None:
    made = await add_endpoint(database, checkpoint_every_s=1.0, header_prefix="Acme-")
    received: list[int] = []
    async with fetchable(database) as fetch:
        receiver = AsyncReceiver(
            made.secret, MemoryDatabase(), fetch=fetch, gaps=gaps, header_prefix="Acme-"
        )

        @receiver.on("a.b")
        def receive(message: Any, _: Any) -> None:
            received.append(message.data)

        class LossyNetwork(Wire):
            async def _send(self, request: Any) -> AttemptResult:
                if parse(request.body) is None:
                    return await super()._send(request)
                response = await receiver.handle(Request("POST", request.headers, request.body))
                return AttemptResult.completed(response.status, 0.001)

        wire = LossyNetwork(receiver)
        wire.lost = {3, 4}
        with caplog.at_level(logging.WARNING, "outbox.receiver"):
            async with running(database, wire):
                await publish(database, 1, 2, 3, 4, key="k")
                await until(lambda: receiver.totals.gaps, 20, "a checkpoint")
                if gaps is Gaps.REPORT:
                    assert received == [1, 2]
                    await receiver.catch_up()
                await until(lambda: len(received) == 4, 20, "what was lost")
    assert received == [1, 2, 3, 4]
    assert "acknowledged, not received: 3 to 4" in caplog.text
