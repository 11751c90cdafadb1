"""Waiting for something to become true; the one place in the tests that sleeps."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

_POLL_S = 0.01


@overload
async def until(
    condition: Callable[[], Awaitable[T]], timeout_s: float = 10, what: str = "the condition"
) -> T: ...
@overload
async def until(
    condition: Callable[[], T], timeout_s: float = 10, what: str = "the condition"
) -> T: ...
async def until(
    condition: Callable[[], Any], timeout_s: float = 10, what: str = "the condition"
) -> Any:
    """Ask until the answer is true, and return it.

    `condition` may be a coroutine function.  Raises AssertionError, naming
    `what` and the last answer, when `timeout_s` have passed.
    """
    loop = asyncio.get_running_loop()
    answer: object = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                asked_at = loop.time()
                asked = condition()
                answer = await asked if inspect.isawaitable(asked) else asked
                if answer:
                    return answer
                # What is waited for needs the processor, too: half of the time is its.
                await asyncio.sleep(max(_POLL_S, loop.time() - asked_at))
    except TimeoutError:
        raise AssertionError(_too_long(what, timeout_s, answer)) from None


def until_sync(
    condition: Callable[[], T],
    timeout_s: float = 10,
    what: str = "the condition",
) -> T:
    """The same, without an event loop."""
    give_up_at = time.monotonic() + timeout_s
    while not (answer := condition()):
        if time.monotonic() > give_up_at:
            raise AssertionError(_too_long(what, timeout_s, answer))
        time.sleep(_POLL_S)
    return answer


def _too_long(what: str, timeout_s: float, answer: object) -> str:
    return f"waited {timeout_s:g} s for {what}; the last answer was {answer!r}"
