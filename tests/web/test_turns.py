"""Turns: one piece of work per iteration of the event loop."""

from __future__ import annotations

import asyncio

from outbox.web.turns import Turns
from tests.support.iterations import Iterations

COUNT = 20


async def test_one_turn_is_given_per_iteration_in_the_order_of_asking() -> None:
    turns, taken = Turns(asyncio.get_running_loop()), []

    async def take(n: int) -> None:
        await turns.take()
        taken.append((iterations.count, n))

    async with Iterations() as iterations, asyncio.TaskGroup() as group:
        for n in range(COUNT):
            group.create_task(take(n))
    assert [n for _, n in taken] == list(range(COUNT))
    assert len({at for at, _ in taken}) == COUNT


async def test_a_cancelled_task_takes_no_turn() -> None:
    turns, taken = Turns(asyncio.get_running_loop()), []

    async def take(n: int) -> None:
        await turns.take()
        taken.append(n)

    tasks = [asyncio.ensure_future(take(n)) for n in range(COUNT)]
    await asyncio.sleep(0)
    for task in tasks[1:-1]:
        task.cancel()
    await asyncio.wait(tasks)
    assert taken == [0, COUNT - 1]
    # The next iteration has a turn again.
    await asyncio.wait_for(turns.take(), 10)
