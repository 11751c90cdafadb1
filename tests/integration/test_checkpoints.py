"""Who wants checkpoints is told the last number of each lane, so that a lost tail shows."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from outbox.core.answer import Answer
from outbox.core.checkpoint import Mark, parse
from outbox.core.health import State
from outbox.receiver import AsyncReceiver, Gaps, MemoryDatabase, Request, verify
from outbox.relay.checkpoints import SENDING_MAX, Checkpoints
from outbox.store import endpoint_changes, endpoint_states
from tests.integration.test_catching_up import Wire, fetchable
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
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

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
    assert verified.message is None
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


async def test_many_that_are_due_at_once_have_their_turn_one_after_the_other() -> None:
    """More of them than are sent at a time, of which some never answer."""
    owned = [wanting(n) for n in range(150)]
    answered: list[str] = []
    stuck = {f"https://{n}.example/" for n in range(8)}
    at_once = most = 0

    class Slow(Network):
        async def send(self, request: Any) -> Answer:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            try:
                if request.url in stuck:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
            finally:
                at_once -= 1
            answered.append(request.url)
            return Answer.of(200, 0.001)

    class Store:
        async def marks(self, ids: Any) -> dict[Any, list[Mark]]:
            return {i: [Mark("a-1-0", 1, 1)] for i in ids}

    sender = Checkpoints(Store(), Slow(), lambda: 0.0)  # type: ignore[arg-type]
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(sender.run())
        await sender.look(owned)
        # As if nobody had looked for a long time: all of them are due.
        sender._due = {each.endpoint.id: (0.0, 1e6) for each in owned}
        for _ in range(100):
            await sender.look(owned)
            for _ in range(5):
                await asyncio.sleep(0)
        assert sender.look_at < asyncio.get_running_loop().time() + 2e6
        sending.cancel()
    assert len(answered) == len(set(answered)) == 142
    assert most == SENDING_MAX


def wanting(n: int) -> Any:
    endpoint = SimpleNamespace(
        id=UUID(int=n),
        name=str(n),
        url=f"https://{n}.example/",
        method="POST",
        headers=(),
        state="active",
        usable=True,
        checkpoint_every_s=1e6,
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
