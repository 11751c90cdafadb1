"""The table of routes: everything that the API can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.admin import (
    dead_letters,
    declaration,
    endpoints,
    erase,
    events,
    journal,
    live,
    once,
    overview,
    replays,
    schedules,
    tokens,
)

if TYPE_CHECKING:
    from outbox.admin.routing import Route

ROUTES: tuple[Route, ...] = (
    *overview.ROUTES,
    *live.ROUTES,
    *endpoints.ROUTES,
    *declaration.ROUTES,
    *events.ROUTES,
    *dead_letters.ROUTES,
    *replays.ROUTES,
    *schedules.ROUTES,
    *once.ROUTES,
    *erase.ROUTES,
    *journal.ROUTES,
    *tokens.ROUTES,
)
