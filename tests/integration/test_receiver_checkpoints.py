"""Who wants checkpoints is told the last number of each lane, so that a lost tail shows."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from outbox.core.delivery.circuit_breaker import State
from outbox.core.delivery.receiver_checkpoint import LANES_MAX, Mark, parse
from outbox.core.model.response import Answer, Failure
from outbox.operations import endpoint_changes, endpoint_states
from outbox.receiver import AsyncReceiver, Gaps, MemoryDatabase, Request, verify
from outbox.relay.delivery.receiver_checkpoints import MARKS_MAX, READ_MAX, SENDING_MAX, Checkpoints
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


class Told(Network):
    """Keeps checkpoints apart."""

    def __init__(self, script: Any = lambda _: OK) -> None:
        super().__init__(script)
        self.checkpoints: list[Any] = []
        self.status = 200

    async def send(self, request: Any) -> Answer:
        if parse(request.body) is None:
            return await super().send(request)
        self.checkpoints.append(request)
        return Answer.of(self.status, 0.001)

    def last(self) -> dict[str, int]:
        marks = parse(self.checkpoints[-1].body) if self.checkpoints else ()
        return {mark.lane.partition("-")[2]: mark.sequence for mark in marks or ()}

    def told(self, url: str) -> int:
        return sum(request.url == url for request in self.checkpoints)


async def test_it_names_the_last_number_that_was_delivered_of_every_lane(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database, lanes=1, checkpoint_every_s=1.0)
    network = Told(lambda sent: REFUSED if sent.body.get("data") == "bad" else OK)
    async with running(database, network):
        await publish(database, 1, 2, "bad", key="k")
        await until(lambda: network.last() == {"1-0": 2}, 20, "the first lane")
        await ranges.change_lanes(db, made.id, 2)
        await publish(database, 3, 4, key="k")
        await all_ended(database)
        # The lane that ended is told, too: what was lost there shows by nothing else.
        await until(lambda: sorted(network.last().values()) == [2, 2], 20, "both")
        assert sorted(network.last()) in (["1-0", "2-0"], ["1-0", "2-1"])
    sent = network.checkpoints[-1]
    verified = verify(sent.headers, sent.body, made.secret)
    assert not verified.messages
    assert verified.checkpoint == parse(sent.body)
    assert len({each.body for each in network.checkpoints}) == len(network.checkpoints)
    assert await exceptions(database) == {}


async def test_nobody_is_told_who_did_not_ask_or_is_to_be_left_alone(
    database: Database, db: Connection[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c", "never"):
        every_s = None if name == "never" else 1.0
        url = f"https://{name}.example/"
        await add_endpoint(database, name, url=url, checkpoint_every_s=every_s)
    network = Told()
    a, b, c, never = (f"https://{name}.example/" for name in ("a", "b", "c", "never"))
    async with running(database, network):
        await publish(database, 1)
        await until(lambda: all(map(network.told, (a, b, c))), 20, "three that asked")
        await endpoint_states.pause(db, "relay", ["a"], actor="test")
        await endpoint_changes.update(db, "relay", "b", without_checkpoints, actor="test")
        await until(lambda: "endpoint is paused" in capsys.readouterr().out, 20, "the pause")
        network.checkpoints.clear()
        await until(lambda: network.told(c) >= 3, 20, "three more")
    # One may have been on its way.
    assert network.told(a) + network.told(b) + network.told(never) <= 1


def without_checkpoints(settings: Any) -> Any:
    return replace(settings, checkpoint_every_s=None)


async def test_numbers_that_were_given_up_are_named(
    database: Database, db: Connection[Any]
) -> None:
    made = await add_endpoint(database, checkpoint_every_s=1.0)
    network = Told(lambda sent: REFUSED if sent.seq in (2, 3, 6) else OK)
    async with running(database, network):
        await publish(database, *range(1, 7), key="k")
        await all_ended(database)
        await until(lambda: network.last() == {"1-0": 5}, 20, "a checkpoint")
    (mark,) = parse(network.checkpoints[-1].body) or ()
    assert mark == Mark(f"{made.id.hex[:12]}-1-0", 1, 5, ((2, 2), (3, 3)))


class Many(Network):
    """Receivers of checkpoints on virtual time; those called `stuck-…` never answer."""

    def __init__(self, lanes: int = 1) -> None:
        super().__init__()
        self.lanes = lanes
        # How many were asked for at a time.
        self.read: list[int] = []
        # When each was told something.
        self.told: dict[str, list[float]] = {}
        self.open = self.most = 0

    async def send(self, request: Any) -> Answer:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            clock = asyncio.get_running_loop().time
            self.told.setdefault(request.url, []).append(clock())
            never = "stuck" in request.url
            await asyncio.sleep(request.total_timeout_s if never else 0.02)
            return Answer.failed(Failure.TIMEOUT, "late", 10.0) if never else OK
        finally:
            self.open -= 1

    async def marks(self, ids: Any) -> dict[Any, list[Mark]]:
        self.read.append(len(ids))
        return {i: [Mark("a-1-0", 1, 1)] * self.lanes for i in ids}


def looking(network: Many, seconds: float, owned: Callable[[float], list[Any]]) -> Checkpoints:
    """So many seconds of it, with these endpoints at each time."""

    async def run() -> Checkpoints:
        sender = Checkpoints(network, network, lambda: 0.0)  # type: ignore[arg-type]
        clock = asyncio.get_running_loop().time
        sending = asyncio.ensure_future(sender.run())
        while clock() < seconds:
            await sender.look(owned(clock()))
            await asyncio.sleep(min(sender.look_at - clock(), 1.0))
        # The last ones end.
        await sender.look([])
        await asyncio.sleep(60)
        sending.cancel()
        await asyncio.wait([sending])
        return sender

    return run_virtual(run())


def gaps_s(network: Many, seconds: float) -> list[float]:
    """How long each receiver that answers heard nothing, at the most."""
    return [
        max(b - a for a, b in pairwise([0.0, *times, seconds]))
        for url, times in network.told.items()
        if "stuck" not in url
    ]


def test_who_never_answers_keeps_checkpoints_from_nobody_else() -> None:
    """Whether the many that never do are a tenant's or nobody's."""
    for tenant in ("mallory", None):
        network = Many()
        stuck = [wanting(n, f"stuck-{n}", 1.0, tenant) for n in range(400)]
        good = [wanting(10_000 + n, f"good-{n}", 10.0, f"tenant-{n % 3}") for n in range(30)]
        sender = looking(network, 120, lambda _, owned=[*stuck, *good]: owned)  # type: ignore[misc]
        gaps = gaps_s(network, 120)
        assert len(gaps) == len(good), tenant
        assert max(gaps) < 20, tenant
        assert network.most <= SENDING_MAX
        assert sender._queueing.turns.open == sender._queueing.turns.waiting == 0
        assert not sender._queueing.turns._tenants


def test_an_endpoint_that_is_gone_does_not_keep_its_turn() -> None:
    network = Many()
    stuck = [wanting(n, f"stuck-{n}", 1.0) for n in range(100)]
    looking(network, 30, lambda at: stuck if at < 5 else [])
    assert max(max(times) for times in network.told.values()) < 6


@pytest.mark.parametrize("tenant", ["mallory", None])
def test_few_of_those_that_wait_are_in_memory_and_others_have_room(tenant: str | None) -> None:
    lanes = LANES_MAX // 2
    network = Many(lanes)
    stuck = [wanting(n, f"stuck-{n}", 1.0, tenant) for n in range(200)]
    good = wanting(1000, "good", 10.0, "acme")
    looking(network, 60, lambda _: [*stuck, good])
    begun = sum(map(len, network.told.values()))
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
        headers=(),
        state="active",
        usable=True,
        checkpoint_every_s=every_s,
        connect_timeout_s=5.0,
        total_timeout_s=15.0,
        networks=(),
        ca=None,
        identity=None,
        secrets_at=lambda _: [bytes(32)],
    )
    health = SimpleNamespace(state=State.HEALTHY)
    return SimpleNamespace(endpoint=endpoint, stopped=False, health=health)


async def test_one_that_is_not_taken_is_said_once_and_harms_nobody(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    await add_endpoint(database, checkpoint_every_s=1.0)
    network = Told()
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
    said = capsys.readouterr().out
    assert said.count("a checkpoint was not taken") == 1
    assert said.count("checkpoints are taken again") == 1
    assert await exceptions(database) == {}


@pytest.mark.parametrize("gaps", [Gaps.TELL, Gaps.CATCH_UP])
async def test_a_lost_tail_shows_and_is_fetched_if_that_is_wanted(
    database: Database, gaps: Gaps, caplog: pytest.LogCaptureFixture
) -> None:
    made = await add_endpoint(database, checkpoint_every_s=1.0)
    came: list[int] = []
    async with fetchable(database) as fetch:
        receiver = AsyncReceiver(made.secret, MemoryDatabase(), fetch=fetch, gaps=gaps)

        @receiver.on("a.b")
        def take(message: Any, _: Any) -> None:
            came.append(message.data)

        class Losing(Wire):
            async def send(self, request: Any) -> Answer:
                if parse(request.body) is None:
                    return await super().send(request)
                answer = await receiver.handle(Request("POST", request.headers, request.body))
                return Answer.of(answer.status, 0.001)

        wire = Losing(receiver)
        wire.lost = {3, 4}
        with caplog.at_level(logging.WARNING, "outbox.receiver"):
            async with running(database, wire):
                await publish(database, 1, 2, 3, 4, key="k")
                await until(lambda: receiver.totals.gaps, 20, "a checkpoint")
                if gaps is Gaps.TELL:
                    assert came == [1, 2]
                    await receiver.catch_up()
                await until(lambda: len(came) == 4, 20, "what was lost")
    assert came == [1, 2, 3, 4]
    assert "acknowledged, and not here: 3 to 4" in caplog.text
