"""Turns: one piece of work per iteration of the event loop."""

from __future__ import annotations

import asyncio

from outbox.web.turns import Turns
from tests.support.iterations import Iterations

COUNT = 20


async def test_one_turn_is_given_per_iteration_in_the_order_of_asking() -> None:
    turns, given = Turns(asyncio.get_running_loop()), []

    async def wait(n: int) -> None:
        await turns.wait()
        given.append((iterations.count, n))

    async with Iterations() as iterations, asyncio.TaskGroup() as group:
        for n in range(COUNT):
            group.create_task(wait(n))
    assert [n for _, n in given] == list(range(COUNT))
    assert len({at for at, _ in given}) == COUNT


async def test_a_cancelled_task_is_given_no_turn() -> None:
    turns, given = Turns(asyncio.get_running_loop()), []

    async def wait(n: int) -> None:
        await turns.wait()
        given.append(n)

    tasks = [asyncio.ensure_future(wait(n)) for n in range(COUNT)]
    await asyncio.sleep(0)
    for task in tasks[1:-1]:
        task.cancel()
    await asyncio.wait(tasks)
    assert given == [0, COUNT - 1]
    # The next iteration has a turn again.
    await asyncio.wait_for(turns.wait(), 10)
