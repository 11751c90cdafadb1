"""The demo: set-up, publishing, a killed relay, and the checks."""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.devtools.demo.application import Shop
from outbox.devtools.demo.checker import DemoChecks, check_demo
from outbox.devtools.demo.environment import DemoEnvironment, open_environment
from outbox.devtools.demo.live_view import read_lanes, render
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rich.live import Live

PER_S_MIN = 200.0
PUBLISHING_S = 12.0
"""Upper bound of the publishing time, in seconds; the rate rises with the events."""
KILL_AT = 0.4
"""Share of committed events at which the relay is killed."""
PICTURE_EVERY_S = 0.1
SETTLE_S_MIN, SETTLE_PER_EVENT_S = 60.0, 0.02

ALL_OWNED = "SELECT NOT EXISTS (SELECT FROM ownership WHERE replica_id IS NULL)"
START_TIMEOUT_S = 60.0

# No event to sequence, and no delivery pending.
ALL_ENDED = """
SELECT (SELECT coalesce(max(id), 0) FROM outbox)
       <= (SELECT high FROM batch ORDER BY batch DESC LIMIT 1)
   AND (SELECT coalesce(sum(last_seq), 0) FROM lane_counter)
       = (SELECT count(DISTINCT (lane_id, seq)) FROM attempt WHERE outcome = 'delivered')
         + (SELECT coalesce(sum(to_seq - seq + 1), 0) FROM dead_letter)
"""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Report of the demo."""

    checks: DemoChecks
    kills: int
    seed: int
    seconds: float
    postgres: str


async def run_demo(
    events: int,
    seed: int,
    major: int | None,
    *,
    live: bool,
    log: Callable[[str], None],
) -> DemoReport:
    """Run the demo.

    Args:
        events: number of events to commit.
        seed: of the random choices.
        major: major version of PostgreSQL; None: the newest.
        live: show a live view on the terminal.
        log: called with a line of progress, without a live view.

    Raises:
        CannotRun: the database does not start, or nothing is delivered.
    """
    loop = asyncio.get_running_loop()
    async with open_environment(seed, major) as environment:
        shop = Shop(events, max(PER_S_MIN, events / PUBLISHING_S), random.Random(seed))  # noqa: S311
        await shop.set_up(environment.control)
        await _wait_for_relay(environment)
        started = loop.time()
        with _screen(live) as screen:
            monitor = DemoMonitor(environment, shop, screen, log)
            publishing = asyncio.create_task(shop.run(environment.connect))
            try:
                await monitor.watch(publishing)
            finally:
                publishing.cancel()
                await asyncio.gather(publishing, return_exceptions=True)
        seconds = loop.time() - started
        await environment.relay.stop()
        proof = await check_demo(environment.control, shop.ledger, environment.destinations)
        return DemoReport(
            proof, environment.relay.kills, seed, round(seconds, 1), environment.postgres_version
        )


async def _wait_for_relay(environment: DemoEnvironment) -> None:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await environment.control.fetchval(ALL_OWNED):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(PICTURE_EVERY_S)
    except TimeoutError:
        line = environment.relay.last_log_line()
        raise CannotRun(f"the relay did not start; its last log line: {line}") from None


class DemoMonitor:
    """Shows the progress, kills the relay once, and waits for the end."""

    def __init__(
        self,
        environment: DemoEnvironment,
        shop: Shop,
        screen: Live | None,
        log: Callable[[str], None],
    ) -> None:
        self._environment = environment
        self._shop = shop
        self._screen = screen
        self._log = log
        self._moment = ""

    async def watch(self, publishing: asyncio.Task[None]) -> None:
        """Wait until all deliveries ended.

        Raises:
            CannotRun: they did not end within the time-out.
        """
        clock = asyncio.get_running_loop().time
        ledger, relay = self._shop.ledger, self._environment.relay
        deadline = clock() + SETTLE_S_MIN + ledger.planned * SETTLE_PER_EVENT_S
        self._report(f"relay running, process {relay.pid}")
        restarted_at = None
        while True:
            await self._draw()
            if publishing.done():
                publishing.result()
            if not relay.kills and ledger.done >= ledger.planned * KILL_AT and self._delivered():
                await relay.kill()
                self._report("relay killed with kill -9; restarting it")
                await relay.start()
                restarted_at = self._delivered()
            elif restarted_at is not None and self._delivered() > restarted_at + 20:
                self._report(f"relay running again, process {relay.pid}, after a kill -9")
                restarted_at = None
            if publishing.done() and await self._environment.control.fetchval(ALL_ENDED):
                await self._draw()
                return
            if clock() > deadline:
                raise CannotRun(
                    f"the demo timed out; the relay's last log line: {relay.last_log_line()}"
                )
            await asyncio.sleep(PICTURE_EVERY_S)

    def _delivered(self) -> int:
        return sum(len(d.processed) for d in self._environment.destinations)

    def _report(self, moment: str) -> None:
        self._moment = moment
        if self._screen is None:
            self._log(f"{moment} ({self._shop.ledger.done} published)")

    async def _draw(self) -> None:
        if self._screen is not None:
            lanes = await read_lanes(self._environment)
            self._screen.update(
                render(self._environment, self._shop.ledger, lanes, self._moment), refresh=True
            )


def _screen(live: bool) -> AbstractContextManager[Any]:
    if not live:
        return nullcontext()
    from rich.live import Live

    return Live(auto_refresh=False)
