"""Coroutines without an event loop: publishing, the request pipeline and the inbox in a thread.

They are written once, as coroutines.  On a blocking connection nothing that they await
suspends, so a thread runs them to their end in one step.  On asyncio they are awaited.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar, cast

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Coroutine

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends; returns its result.

    Raises:
        UsageError: it suspended, because it waits for an asyncio driver.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast("T", end.value)
    coroutine.close()
    raise UsageError("connection: it needs asyncio; use AsyncReceiver, or a method …_async")


async def resolve(value: T | Awaitable[T]) -> T:
    """Return a value, after awaiting it if it is awaitable."""
    # Much faster than `inspect.isawaitable`, which also recognizes generator-based coroutines.
    return cast("T", await value if hasattr(value, "__await__") else value)


@contextlib.asynccontextmanager
async def as_async(manager: contextlib.AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter a context manager that does not suspend, in a coroutine."""
    with manager as value:
        yield value
