"""Samples event-loop lag for `outbox.core.admission.adaptive_scheduler`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox.core.admission.adaptive_scheduler import AdaptiveRequestScheduler

BUSY_EVERY_S, IDLE_EVERY_S = 0.05, 0.5
"""Sampling intervals: while requests wait or many are open, and otherwise."""
MANY = 8


async def sample_loop_lag(scheduler: AdaptiveRequestScheduler) -> None:
    """Report to the scheduler how late the loop is, until cancelled."""
    clock = asyncio.get_running_loop().time
    sampled_at = clock()
    while True:
        busy = scheduler.waiting or scheduler.open > MANY
        due_at = clock() + (BUSY_EVERY_S if busy else IDLE_EVERY_S)
        await asyncio.sleep(due_at - clock())
        now = clock()
        scheduler.observe_lag(now - due_at, now - sampled_at)
        sampled_at = now
