"""The demo from the first event to the proof."""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.devtools.demo.application import Shop
from outbox.devtools.demo.checker import Proof, prove
from outbox.devtools.demo.environment import Stage, stage
from outbox.devtools.demo.live_view import look, picture
from outbox.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rich.live import Live

PER_S_MIN = 200.0
PUBLISHING_S = 12.0
"""However many events, publishing takes about this long or less."""
KILL_AT = 0.4
"""The relay is killed when this share of the events is committed."""
PICTURE_EVERY_S = 0.1
SETTLE_S_MIN, SETTLE_PER_EVENT_S = 60.0, 0.02

ALL_OWNED = "SELECT NOT EXISTS (SELECT FROM ownership WHERE replica_id IS NULL)"
START_TIMEOUT_S = 60.0

# Nothing to sequence and nothing owed.
ALL_ENDED = """
SELECT (SELECT coalesce(max(id), 0) FROM outbox)
       <= (SELECT high FROM batch ORDER BY batch DESC LIMIT 1)
   AND (SELECT coalesce(sum(last_seq), 0) FROM lane_counter)
       = (SELECT count(DISTINCT (lane_id, seq)) FROM attempt WHERE outcome = 'delivered')
         + (SELECT coalesce(sum(to_seq - seq + 1), 0) FROM dead_letter)
"""


@dataclass(frozen=True, slots=True)
class Result:
    """What the demo found."""

    proof: Proof
    kills: int
    seed: int
    seconds: float
    postgres: str


async def run(
    events: int,
    seed: int,
    major: int | None,
    *,
    live: bool,
    tell: Callable[[str], None],
) -> Result:
    """Run the demo.

    Args:
        events: how many to commit.
        live: draw a picture that moves.
        tell: takes a line of progress, when nothing is drawn.

    Raises:
        CannotRun: the database does not start, or nothing is delivered.
    """
    loop = asyncio.get_running_loop()
    async with stage(seed, major) as set_up:
        shop = Shop(events, max(PER_S_MIN, events / PUBLISHING_S), random.Random(seed))  # noqa: S311
        await shop.set_up(set_up.control)
        await _wait_for_the_relay(set_up)
        started = loop.time()
        with _screen(live) as screen:
            story = Story(set_up, shop, screen, tell)
            trading = asyncio.create_task(shop.trade(set_up.connect))
            try:
                await story.follow(trading)
            finally:
                trading.cancel()
                await asyncio.gather(trading, return_exceptions=True)
        seconds = loop.time() - started
        await set_up.relay.stop()
        proof = await prove(set_up.control, shop.books, set_up.destinations)
        return Result(proof, set_up.relay.kills, seed, round(seconds, 1), set_up.postgres_version)


async def _wait_for_the_relay(set_up: Stage) -> None:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not await set_up.control.fetchval(ALL_OWNED):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(PICTURE_EVERY_S)
    except TimeoutError:
        words = set_up.relay.last_words()
        raise CannotRun(f"the relay did not start; its log ends: {words}") from None


class Story:
    """Follows the run: draws, kills the relay once, waits for the end."""

    def __init__(
        self, set_up: Stage, shop: Shop, screen: Live | None, tell: Callable[[str], None]
    ) -> None:
        self._stage = set_up
        self._shop = shop
        self._screen = screen
        self._tell = tell
        self._moment = ""

    async def follow(self, trading: asyncio.Task[None]) -> None:
        """Until everything was delivered or given up.

        Raises:
            CannotRun: it takes far too long.
        """
        clock = asyncio.get_running_loop().time
        books, relay = self._shop.books, self._stage.relay
        give_up_at = clock() + SETTLE_S_MIN + books.planned * SETTLE_PER_EVENT_S
        self._say(f"relay running, process {relay.pid}")
        restarted_at = None
        while True:
            await self._draw()
            if trading.done():
                trading.result()
            if not relay.kills and books.done >= books.planned * KILL_AT and self._delivered():
                await relay.kill()
                self._say("relay killed with kill -9; starting it again")
                await relay.start()
                restarted_at = self._delivered()
            elif restarted_at is not None and self._delivered() > restarted_at + 20:
                self._say(f"relay running again, process {relay.pid}, after a kill -9")
                restarted_at = None
            if trading.done() and await self._stage.control.fetchval(ALL_ENDED):
                await self._draw()
                return
            if clock() > give_up_at:
                raise CannotRun(f"the demo got stuck; the relay's log ends: {relay.last_words()}")
            await asyncio.sleep(PICTURE_EVERY_S)

    def _delivered(self) -> int:
        return sum(len(d.processed) for d in self._stage.destinations)

    def _say(self, moment: str) -> None:
        self._moment = moment
        if self._screen is None:
            self._tell(f"{moment} ({self._shop.books.done} published)")

    async def _draw(self) -> None:
        if self._screen is not None:
            lanes = await look(self._stage)
            self._screen.update(
                picture(self._stage, self._shop.books, lanes, self._moment), refresh=True
            )


def _screen(live: bool) -> AbstractContextManager[Any]:
    if not live:
        return nullcontext()
    from rich.live import Live

    return Live(auto_refresh=False)
