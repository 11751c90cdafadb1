"""Commands of operators are interrupted at any message, and hang until the run ends."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest

from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.endpoints.changes import add_endpoint
from outbox.store.connection import dsn
from outbox_devtools.chaos import operators
from outbox_devtools.chaos.operators import OperatorCommand, Operators
from tests.support.processes import command_line, family, running
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

CHANGE_WITHIN_S = 20.0
SETTINGS = EndpointSettings(name="e0", url="http://127.0.0.1:9/hooks", lanes=2)


class LastPiece(random.Random):
    """Interrupts a command in the message that changes something."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__(1)
        self._draws = iter((0.0, 0.0) if whole else (0.0, 1.0, 0.5))

    def random(self) -> float:
        return next(self._draws)


@pytest.fixture
async def run(database: Database, tmp_path: Path) -> AsyncIterator[Operators]:
    async with database.at_hand() as connection:
        await add_endpoint(connection, database.schema, SETTINGS, actor="test")
    address = dsn.parse(database.dsn, source="test", env={})
    run = Operators(address, database.schema, tmp_path)
    yield run
    await run.close()


def commands() -> list[psutil.Process]:
    """Return the running commands of this process."""
    return [each for each in running(family(os.getpid())) if "endpoint" in command_line(each)]


@pytest.mark.parametrize("whole", [False, True], ids=["half", "whole"])
@pytest.mark.parametrize("command", sampled(["pause", "resume", "change_lanes", "apply"]))
async def test_a_change_is_made_by_the_whole_message_and_not_by_half_of_it(
    run: Operators, database: Database, tmp_path: Path, command: str, whole: bool
) -> None:
    changed = replace(SETTINGS, lanes=3)
    built: dict[str, OperatorCommand] = {
        "pause": operators.pause("e0"),
        "resume": operators.resume("e0"),
        "change_lanes": operators.change_lanes("e0", 3),
        "apply": operators.apply_file(tmp_path / "endpoints.json", [changed]),
    }
    count = "SELECT (SELECT count(*) FROM journal) + (SELECT sum(resumes) FROM endpoint)"
    async with database.at_hand() as connection:
        before = await connection.fetchval(count)
        assert await run.interrupt(built[command], "half-command", LastPiece(whole=whole))

        async def is_changed() -> bool:
            return await connection.fetchval(count) > before

        if whole:
            await until(is_changed, what="the change")
        else:
            assert not await is_changed()


async def test_a_replay_sends_all_the_messages_at_which_it_may_be_interrupted(
    run: Operators,
) -> None:
    command = operators.replay_dead_letters()
    assert await run.interrupt(command, "kill-command", LastPiece(whole=True))


@pytest.mark.parametrize("way", sampled(["half-command", "freeze-command", "kill-command"]))
async def test_an_interrupted_command_does_not_stop_another_change(
    run: Operators, database: Database, way: str
) -> None:
    assert await run.interrupt(operators.pause("e0"), way, LastPiece(whole=False))
    left = commands()
    assert len(left) == (way != "kill-command")
    assert [each.status() == psutil.STATUS_STOPPED for each in left] == (
        [way == "freeze-command"] if left else []
    )
    async with database.at_hand() as connection, asyncio.timeout(CHANGE_WITHIN_S):
        await endpoint_states.pause_endpoints(connection, database.schema, ["e0"], actor="test")
    await run.close()
    assert running(left) == []


@pytest.mark.full
async def test_a_further_command_ends_the_oldest_that_hangs(
    run: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "HUNG_COMMANDS_MAX", 1)
    assert await run.interrupt(operators.pause("e0"), "freeze-command", LastPiece(whole=False))
    first = commands()
    assert await run.interrupt(operators.pause("e0"), "freeze-command", LastPiece(whole=False))
    assert running(first) == []
    assert len(commands()) == 1


@pytest.mark.full
async def test_a_command_that_ends_before_is_not_interrupted(run: Operators) -> None:
    command = OperatorCommand(("endpoint", "pause", "e0"), pieces=1000)
    assert await run.interrupt(command, "half-command", LastPiece(whole=False)) is None
    assert commands() == []
