"""A relay in a FastAPI or Starlette application, which needs neither of them at import.

app = FastAPI(lifespan=outbox.fastapi.lifespan("postgresql://localhost/app"))
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from outbox.extras import RELAY, needs_extra

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager


def lifespan(
    dsn: Any = None,
    *,
    around: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None,
    **settings: Any,
) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    """Return a lifespan that runs a relay as long as the application runs.

    The relay is `app.state.outbox_relay`.  It is made when the application starts, so modules can
    be imported without its settings, and each worker process makes its own.

    Args:
        dsn: see `outbox.Relay`.
        around: the application's own lifespan.  It begins before the relay, ends after the relay
            has drained, and its state is passed on.
        settings: see `outbox.Relay`.

    Raises:
        MissingExtra: `[relay]` is not installed.
    """
    with needs_extra(RELAY, "outbox.fastapi.lifespan"):
        from outbox.hosting.in_process import Relay

    @asynccontextmanager
    async def run(app: Any) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            state = None if around is None else await stack.enter_async_context(around(app))
            app.state.outbox_relay = await stack.enter_async_context(Relay(dsn, **settings))
            yield state

    return run
