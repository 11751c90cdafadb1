"""Cases of one test that mostly wait, run concurrently: each on a database and with logs of its
own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.testing import capture_logs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from tests.support.postgres import Database, Server

    Logs = list[MutableMapping[str, Any]]


async def run_concurrently(
    server: Server, cases: Iterable[str], run: Callable[[str, Database, Logs], Awaitable[None]]
) -> None:
    """Run each case on a database of its own; a failure names its case and ends the others.

    Tasks inherit the context of the task that starts them, so every log line is that of one case.
    """
    logs: dict[str, Logs] = defaultdict(list)

    def record(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        logs[event.pop("case")].append(event)
        return event

    async def run_case(case: str, database: Database) -> None:
        try:
            with bound_contextvars(case=case):
                await run(case, database, logs[case])
        except Exception as error:
            error.add_note(f"in the case {case!r}")
            raise

    async with AsyncExitStack() as stack:
        databases = {each: await stack.enter_async_context(server.database()) for each in cases}
        stack.enter_context(capture_logs(processors=[merge_contextvars, record]))
        async with asyncio.TaskGroup() as running:
            for each, database in databases.items():
                running.create_task(run_case(each, database))
