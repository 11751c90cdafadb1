"""Feels how late the event loop is, for `outbox.core.admission.adaptive_scheduler`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.core.admission.adaptive_scheduler import PacedTurns

BUSY_EVERY_S, IDLE_EVERY_S = 0.05, 0.5
"""Between two looks, while somebody waits for a turn or many have theirs, and otherwise."""
MANY = 8


async def feel(turns: PacedTurns) -> None:
    """Tell these turns how late the loop is, until cancelled."""
    clock = asyncio.get_running_loop().time
    told_at = clock()
    while True:
        busy = turns.waiting or turns.open > MANY
        due_at = clock() + (BUSY_EVERY_S if busy else IDLE_EVERY_S)
        await asyncio.sleep(due_at - clock())
        now = clock()
        turns.felt(now - due_at, now - told_at)
        told_at = now
