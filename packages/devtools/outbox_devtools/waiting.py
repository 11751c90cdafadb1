"""Polling for a condition; tests sleep nowhere else."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

LIVENESS_S = 60.0
"""Time-out of what happens soon: only a failure, or a machine that stands still, takes longer."""
_POLL_S = 0.01
_PAUSE_MAX_S = 0.1
"""The longest pause after a short poll; after a longer poll, a pause is as long as the poll."""
_PAUSE_SHARE = 1 / 8
"""A pause is at least this share of the time waited so far."""
_PAUSE_FACTOR = 4
"""Pauses are this many times as long as polls: the code under test needs the processor, too."""
_ITERATIONS = 1000
"""Iterations of the event loop in which a task ends after its last timer, at the latest."""


@overload
async def until(
    condition: Callable[[], Awaitable[T]],
    timeout_s: float = LIVENESS_S,
    what: str = "the condition",
) -> T: ...
@overload
async def until(
    condition: Callable[[], T], timeout_s: float = LIVENESS_S, what: str = "the condition"
) -> T: ...
async def until(
    condition: Callable[[], Any], timeout_s: float = LIVENESS_S, what: str = "the condition"
) -> Any:
    """Poll until the condition is true, and return its result.

    `condition` may be a coroutine function. Raises AssertionError with `what` and the last result
    when `timeout_s` have passed.
    """
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    response: object = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                requested_at = loop.time()
                asked = condition()
                response = await asked if inspect.isawaitable(asked) else asked
                if response:
                    return response
                now = loop.time()
                took_s = now - requested_at
                pause_s = max(_POLL_S, _PAUSE_SHARE * (now - began_at), _PAUSE_FACTOR * took_s)
                await asyncio.sleep(max(took_s, min(_PAUSE_MAX_S, pause_s)))
    except TimeoutError:
        raise AssertionError(_too_long(what, timeout_s, response)) from None


def until_sync(
    condition: Callable[[], T],
    timeout_s: float = LIVENESS_S,
    what: str = "the condition",
) -> T:
    """Poll as `until` does, without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not (response := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(_too_long(what, timeout_s, response))
        time.sleep(_POLL_S)
    return response


async def ends_by(task: asyncio.Task[Any], at_s: float) -> bool:
    """Whether a task ends by a time of the event loop's clock, however slow the machine is.

    A loop that was suspended runs its overdue timers in the order of their times. So a task whose
    time-out ends before `at_s` needs only some more iterations.
    """
    loop = asyncio.get_running_loop()
    await asyncio.wait([task], timeout=max(0.0, at_s - loop.time()))
    for _ in range(_ITERATIONS):
        if task.done():
            break
        await asyncio.sleep(0)
    return task.done()


def _too_long(what: str, timeout_s: float, response: object) -> str:
    return f"waited {timeout_s:g} s for {what}; the last result was {response!r}"
